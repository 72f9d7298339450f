"""Videos that begin in the middle of a group of pictures, and what a plain decoder makes of them."""

import io
from typing import Any

import av
import av.error

from mmrt.tests.media.conftest import Frames


def cut(video: bytes, container: str, first: int) -> bytes:
    """The video's packets from this one on, in decode order, in a container of the same kind.

    Raises: FFmpegError where the container takes no such packets.
    """
    buffer = io.BytesIO()
    with av.open(io.BytesIO(video)) as source, av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream_from_template(source.streams.video[0], opaque=True)
        packets = [packet for packet in source.demux(video=0) if packet.size]
        for packet in packets[first:]:
            packet.stream = stream
            output.mux(packet)
    return buffer.getvalue()


def decode_plainly(data: bytes) -> Frames:
    """Every frame that PyAV delivers when it gets one packet after another, as RGB. Packets that it refuses give none.

    Empty where FFmpeg finds no video.
    """
    frames: Frames = []
    try:
        container = av.open(io.BytesIO(data))
    except av.error.FFmpegError:
        return frames
    with container:
        for stream in container.streams.video[:1]:
            for packet in container.demux(stream):
                try:
                    delivered = stream.codec_context.decode(packet)
                except av.error.FFmpegError:
                    continue
                frames += [frame.to_ndarray(format="rgb24") for frame in delivered]
    return frames
