"""MPEG-4 as DivX and Xvid put it into AVI: a *packed* bitstream. A packet holds a P-frame and the first B-frame behind it, the next
B-frames follow, and then a picture that is not coded (N-VOP) where there would be one packet too few.
"""

import io
import re
from collections.abc import Iterator
from typing import Any

import av

from mmrt.tests.media.conftest import encode_video

_B_FRAME = 2
_VOP = b"\0\0\1\xb6"
_USER_DATA = b"\0\0\1\xb2"
_TIME_BITS = 5  # of a rate of 24: numbers up to 23


def packed(num_frames: int, num_b_frames: int = 2, gop: int = 300, container: str = "avi", user_data: bytes = b"DivX503b1393p") -> bytes:
    """A video of ``picture``s. Without ``p`` at its end the user data deny that the packets are packed."""
    source = encode_video("mpeg4", "avi", num_frames=num_frames, gop=gop, options={"bf": str(num_b_frames), "b_strategy": "0"})
    buffer = io.BytesIO()
    with av.open(io.BytesIO(source)) as plain, av.open(buffer, "w", format=container) as output:
        coded = [(bytes(packet), packet.is_keyframe) for packet in plain.demux(video=0) if packet.size]
        stream: Any = output.add_stream_from_template(plain.streams.video[0], opaque=True)
        for number, (data, is_key) in enumerate(_pack([_marked(data, user_data) for data, _ in coded])):
            packet = av.Packet(data)
            packet.stream, packet.time_base = stream, plain.streams.video[0].time_base
            packet.pts = packet.dts = number
            packet.is_keyframe = is_key
            output.mux(packet)
    return buffer.getvalue()


def _marked(data: bytes, user_data: bytes) -> bytes:
    return re.sub(re.escape(_USER_DATA) + rb"Lavc[0-9.]*", _USER_DATA + user_data, data)


def coding_type(data: bytes) -> int:
    """0: I, 1: P, 2: B."""
    return data[data.index(_VOP) + 4] >> 6


def not_coded(time: int = 0) -> bytes:
    """A P-VOP of this time, in ticks of the second, that says that it is the one before it."""
    bits = f"010" f"1{time:0{_TIME_BITS}b}10" "0"
    bits += "1" * (-len(bits) % 8)
    return _VOP + int(bits, 2).to_bytes(len(bits) // 8)


def _pack(coded: list[bytes]) -> Iterator[tuple[bytes, bool]]:
    """(packet, whether it begins with a key frame)."""
    at = 0
    while at < len(coded):
        b_frames = []
        while at + 1 + len(b_frames) < len(coded) and coding_type(coded[at + 1 + len(b_frames)]) == _B_FRAME:
            b_frames.append(coded[at + 1 + len(b_frames)])
        yield coded[at] + b"".join(b_frames[:1]), coding_type(coded[at]) == 0
        for data in b_frames[1:]:
            yield data, False
        if b_frames:
            yield not_coded(), False
        at += 1 + len(b_frames)
