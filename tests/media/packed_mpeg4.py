"""MPEG-4 as DivX and Xvid put it into AVI: a *packed* bitstream. A packet holds a P-frame and the first B-frame behind it, the next
B-frames follow, and then a picture that is not coded (N-VOP) where there would be one packet too few.
"""

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

import av

from mmrt.tests.media.conftest import encode_video

DIVX = b"DivX503b1393p"  # user data that say that packets are packed
_B_FRAME = 2
_VOP = b"\0\0\1\xb6"
_USER_DATA = b"\0\0\1\xb2"
_RATE = 24


def packed(num_frames: int, num_b_frames: int = 2, gop: int = 300, container: str = "avi", user_data: bytes = DIVX) -> bytes:
    """A video of ``picture``s. Without ``p`` at its end the user data deny that the packets are packed."""
    options = {"bf": str(num_b_frames), "b_strategy": "0", "qmax": "8"}  # FFmpeg's filter takes 19 bytes for no picture
    source = encode_video("mpeg4", "avi", num_frames=num_frames, gop=gop, options=options)
    buffer = io.BytesIO()
    with av.open(io.BytesIO(source)) as plain, av.open(buffer, "w", format=container) as output:
        coded = [_marked(bytes(packet), user_data) for packet in plain.demux(video=0) if packet.size]
        _mux(output, plain.streams.video[0], _pack(coded))
    return buffer.getvalue()


def _marked(data: bytes, user_data: bytes) -> bytes:
    return re.sub(re.escape(_USER_DATA) + rb"Lavc[0-9.]*", _USER_DATA + user_data, data)


def coding_type(data: bytes) -> int:
    """0: I, 1: P, 2: B."""
    return data[data.index(_VOP) + 4] >> 6


def not_coded(shown: bytes, rate: int = _RATE) -> bytes:
    """A P-VOP at the time of this one that says that it lasts on. Time is counted in parts of a second, ``rate`` of them."""
    at = shown.index(_VOP) + len(_VOP)
    bits = "".join(f"{byte:08b}" for byte in shown[at : at + 8])
    begin = bits.index("0", 2) + 2
    bits = f"0101{bits[begin : begin + max((rate - 1).bit_length(), 1)]}10"
    bits += "0" + "1" * (-(len(bits) + 1) % 8)
    return _VOP + int(bits, 2).to_bytes(len(bits) // 8)


def with_pauses(rate: int, num_b_frames: int) -> bytes:
    """24 pictures in AVI, each of them a packet, and one that is not coded ahead of each I- and P-frame but the first."""
    options = {"bf": str(num_b_frames), "b_strategy": "0"}
    source = encode_video("mpeg4", "avi", num_frames=24, rate=rate, options=options)
    buffer = io.BytesIO()
    with av.open(io.BytesIO(source)) as plain, av.open(buffer, "w", format="avi") as output:
        packets: list[tuple[bytes, bool]] = []
        shown = b""
        for packet in plain.demux(video=0):
            if not packet.size:
                continue
            data = bytes(packet)
            if coding_type(data) != _B_FRAME:
                packets += [(not_coded(shown, rate), False)] if shown else []
                shown = data
            packets.append((data, packet.is_keyframe))
        _mux(output, plain.streams.video[0], packets)
    return buffer.getvalue()


def _mux(output: Any, template: Any, packets: Iterable[tuple[bytes, bool]]) -> None:
    """``packets``: (data, whether it begins with a key frame), numbered as they lie."""
    stream = output.add_stream_from_template(template, opaque=True)
    for number, (data, is_key) in enumerate(packets):
        packet = av.Packet(data)
        packet.stream, packet.time_base, packet.is_keyframe = stream, template.time_base, is_key
        packet.pts = packet.dts = number
        output.mux(packet)


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
            yield not_coded(coded[at]), False
        at += 1 + len(b_frames)
