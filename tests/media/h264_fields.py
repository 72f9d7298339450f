"""H.264 of which every frame is two fields that are coded apart (PAFF), as broadcasts are: x264 makes none. 32 x 32 samples, all of
them stored as they are (I_PCM), each field of one grey.
"""

import io
from fractions import Fraction
from typing import Any

import av

_MACROBLOCKS = 2  # of a field
_SLICE, _KEY_SLICE, _SPS, _PPS, _DELIMITER = 0x61, 0x65, 0x67, 0x68, 0x09  # first bytes of NAL units


def field_coded(num_frames: int, container: str, rate: int = 25, gop: int = 10) -> bytes:
    """Both fields of a frame in one packet. Without a container: ``h264``."""
    frames = [_frame(number, gop, rate) for number in range(num_frames)]
    if container == "h264":
        return b"".join(frames)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        stream.codec_context.extradata = _parameter_sets(rate)
        for number, frame in enumerate(frames):
            packet = av.Packet(frame)
            packet.stream, packet.time_base, packet.duration = stream, Fraction(1, rate), 1
            packet.pts = packet.dts = number
            packet.is_keyframe = number % gop == 0
            output.mux(packet)
    return buffer.getvalue()


def _frame(number: int, gop: int, rate: int) -> bytes:
    is_key, grey = number % gop == 0, 16 + 4 * number % 200
    delimiter = _unit(_DELIMITER, "000")
    first, second = (_field(number % gop, is_key and not is_bottom, is_bottom, grey + 2 * is_bottom) for is_bottom in (False, True))
    return delimiter + (_parameter_sets(rate) if is_key else b"") + first + delimiter + second


def _parameter_sets(rate: int) -> bytes:
    """Main profile, no frame shown out of order, ``rate`` frames a second."""
    size = _code(_MACROBLOCKS - 1) + _code(0)
    timing = f"1{1:032b}{2 * rate:032b}1"
    sps = f"{77:08b}{0:08b}{30:08b}" + _code(0) + _code(4) + _code(2) + _code(2) + "0" + size + "00101" + "0000" + timing + "0000"
    pps = _code(0) + _code(0) + "00" + 3 * _code(0) + "000" + 3 * _code(0) + "000"
    return _unit(_SPS, sps) + _unit(_PPS, pps)


def _field(frame_num: int, is_key: bool, is_bottom: bool, grey: int) -> bytes:
    bits = _code(0) + _code(7) + _code(0) + f"{frame_num:08b}1{is_bottom:b}" + (_code(0) + "00" if is_key else "0") + _code(0)
    for _ in range(_MACROBLOCKS):
        bits = _to_bytes(bits + _code(25)) + 256 * f"{grey:08b}" + 128 * f"{128:08b}"
    return _unit(_KEY_SLICE if is_key else _SLICE, bits)


def _code(value: int) -> str:
    """An Exp-Golomb code."""
    bits = f"{value + 1:b}"
    return "0" * (len(bits) - 1) + bits


def _to_bytes(bits: str) -> str:
    """Filled up with zeros to whole bytes."""
    return bits + "0" * (-len(bits) % 8)


def _unit(first_byte: int, bits: str) -> bytes:
    """A NAL unit behind a start code, with none in its own bytes."""
    bits = _to_bytes(bits + "1")
    escaped = bytearray([first_byte])
    for byte in int(bits, 2).to_bytes(len(bits) // 8):
        if escaped[-2:] == b"\0\0" and byte <= 3:
            escaped.append(3)
        escaped.append(byte)
    return b"\0\0\0\1" + escaped
