"""Encrypted files, recognised by what their heads say: decoders would make noise of them. Called by ``container``.

MP4: ISO 23001-7 and ISO 14496-12, 8.12. Matroska and WebM: RFC 9559, 5.1.4.1.31. MPEG-TS: ISO 13818-1, 2.4.3.3, and Apple's "MPEG-2
Stream Encryption Format for HTTP Live Streaming". MPEG-PS: ISO 13818-1, 2.4.3.7.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from .errors import MediaError
from .limits import GuardedReader, Reader, TimeBudget

Kind = Literal["video", "audio"]

_MAX_PARTS = 1 << 14  # of a file that are walked
_MAX_ENTRY_BYTES = 1 << 12
_HEAD_BYTES = 1 << 20  # of a stream without a table of contents

_TO_TRACKS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd")
_ENCRYPTED_ENTRIES = {"video": (b"encv", b"drmi"), "audio": (b"enca", b"drms", b"aavd")}
_NAMES_IN_MP4 = {b"drmi": "FairPlay", b"drms": "FairPlay", b"itun": "FairPlay", b"aavd": "Audible"}
_COMMON = (b"cenc", b"cens", b"cbc1", b"cbcs")

_SEGMENT, _TRACKS, _TRACK, _TRACK_TYPE = 0x18538067, 0x1654AE6B, 0xAE, 0x83
_ENCODINGS, _ENCODING, _ENCRYPTION, _ALGORITHM = 0x6D80, 0x6240, 0x5035, 0x47E1
_TRACK_TYPES = {"video": 1, "audio": 2}
_ALGORITHMS = {1: "DES", 2: "3DES", 3: "Twofish", 4: "Blowfish", 5: "AES"}

_SYNC = 0x47
_STRIDES = (188, 192, 204)  # bytes of a packet, with a time stamp before it or a check behind it
_NO_DATA = 0x1FFF
_SAMPLE_AES = {"video": (0xDB,), "audio": (0xCF, 0xC1, 0xC2)}  # types of streams
_PICTURES = b"\0\0\1\xe0"


def check_not_encrypted(reader: Reader, kind: Kind, budget: TimeBudget) -> None:
    """Leaves the reader at 0. Raises: MediaError (422) that names the encryption of the file's video or sound, whichever is meant."""
    guarded = GuardedReader(reader, budget)
    head = guarded.read(12)
    if head[4:8] in (b"ftyp", b"styp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        found = _in_mp4(guarded, kind)
    elif head.startswith(b"\x1aE\xdf\xa3"):
        found = _in_matroska(guarded, kind)
    elif head.startswith(b"\0\0\1\xba"):
        found = _in_program_stream(head + guarded.read(_HEAD_BYTES))
    else:
        found = _in_transport_stream(head + guarded.read(_HEAD_BYTES), kind) if _SYNC in head[:5] else None
    reader.seek(0)
    if found is not None:
        raise MediaError(f"the {kind} is encrypted ({found}): send it decrypted")


def _in_mp4(reader: GuardedReader, kind: Kind) -> str | None:
    for begin, end in _boxes_on(reader, _TO_TRACKS, 0, reader.num_bytes):
        for name, body, entry_end in _boxes(reader, begin + 8, end):
            if name in _ENCRYPTED_ENTRIES[kind]:
                reader.seek(body)
                entry = reader.read(min(entry_end - body, _MAX_ENTRY_BYTES))
                at = entry.find(b"schm")
                scheme = entry[at + 8 : at + 12] if at >= 0 else name
                if scheme in _COMMON:
                    return f"Common Encryption, {scheme.decode()}"
                return _NAMES_IN_MP4.get(scheme, f"scheme {scheme.decode('ascii', 'replace')!a}")
    return None


def _boxes_on(reader: GuardedReader, path: tuple[bytes, ...], start: int, end: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the bodies of all boxes at the end of this path."""
    if not path:
        yield start, end
        return
    for name, body, box_end in _boxes(reader, start, end):
        if name == path[0]:
            yield from _boxes_on(reader, path[1:], body, box_end)


def _boxes(reader: GuardedReader, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(name, start of its body, its end) of each box."""
    for _ in range(_MAX_PARTS):
        reader.seek(start)
        head = reader.read(16)
        size, name, body = int.from_bytes(head[:4]), head[4:8], start + 8
        if size == 1:
            size, body = int.from_bytes(head[8:]), start + 16
        elif size == 0:
            size = end - start
        if len(head) < 8 or start + size > end or size < body - start:
            return
        yield name, body, start + size
        start += size


def _in_matroska(reader: GuardedReader, kind: Kind) -> str | None:
    for begin, end in _elements_on(reader, (_SEGMENT, _TRACKS, _TRACK), 0, reader.num_bytes):
        types = [_number(reader, *place) for place in _elements_on(reader, (_TRACK_TYPE,), begin, end)]
        if types != [_TRACK_TYPES[kind]]:
            continue
        for place in _elements_on(reader, (_ENCODINGS, _ENCODING, _ENCRYPTION), begin, end):
            algorithms = [_number(reader, *number) for number in _elements_on(reader, (_ALGORITHM,), *place)]
            return _ALGORITHMS.get(algorithms[0] if algorithms else 0, "ContentEncryption")
    return None


def _elements_on(reader: GuardedReader, path: tuple[int, ...], start: int, end: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the bodies of all elements at the end of this path. Of ``Tracks`` there is one."""
    if not path:
        yield start, end
        return
    for _ in range(_MAX_PARTS):
        reader.seek(start)
        head = reader.read(12)
        id_bytes = 9 - head[0].bit_length() if head else 9
        size_bytes = 9 - head[id_bytes].bit_length() if id_bytes < len(head) else 9
        body = start + id_bytes + size_bytes
        if id_bytes > 4 or size_bytes > 8 or body > end:
            return
        size = int.from_bytes(head[id_bytes : id_bytes + size_bytes]) & (1 << 7 * size_bytes) - 1
        is_unknown = size == (1 << 7 * size_bytes) - 1
        element_end = end if is_unknown else min(end, body + size)
        if int.from_bytes(head[:id_bytes]) == path[0]:
            yield from _elements_on(reader, path[1:], body, element_end)
            if path[0] == _TRACKS:
                return
        start = element_end


def _number(reader: GuardedReader, begin: int, end: int) -> int:
    reader.seek(begin)
    return int.from_bytes(reader.read(min(8, end - begin)))


def _in_transport_stream(data: bytes, kind: Kind) -> str | None:
    packets = _transport_packets(data)
    if packets is None:
        return None
    pids = (packets[:, 1] & 0x1F).astype(np.int64) << 8 | packets[:, 2]
    numbers, counts = np.unique(pids[pids != _NO_DATA], return_counts=True)
    if len(numbers) and (packets[pids == numbers[counts.argmax()], 3] >= 0x40).mean() > 0.5:
        return "scrambled MPEG-TS"
    programs = [_section(packets[number]) for number in np.flatnonzero(pids == 0)[:1]]
    for at in range(8, len(programs[0]) - 4, 4) if programs else ():
        program = int.from_bytes(programs[0][at + 2 : at + 4]) & 0x1FFF
        for number in np.flatnonzero(pids == program)[:1]:
            if any(stream in _SAMPLE_AES[kind] for stream in _stream_types(_section(packets[number]))):
                return "SAMPLE-AES"
    return None


def _transport_packets(data: bytes) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]] | None":
    """[packets, 188], None if these are none."""
    values = np.frombuffer(data, np.uint8)
    for stride in _STRIDES:
        offset = 4 if stride == 192 else 0
        count = (len(values) - offset) // stride
        packets = values[offset : offset + count * stride].reshape(count, stride)[:, :188]
        if count and (packets[:, 0] == _SYNC).mean() > 0.9:
            return packets
    return None


def _section(packet: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> bytes:
    """The table that begins in this packet, as far as it is there."""
    data = packet.tobytes()
    at = 5 + data[4] if data[3] & 0x20 else 4
    if not data[1] & 0x40 or at >= len(data):
        return b""
    section = data[at + 1 + data[at] :]
    return section[: 3 + (int.from_bytes(section[1:3]) & 0xFFF)]


def _stream_types(section: bytes) -> Iterator[int]:
    at = 12 + (int.from_bytes(section[10:12]) & 0xFFF)
    while at + 5 <= len(section) - 4:
        yield section[at]
        at += 5 + (int.from_bytes(section[at + 3 : at + 5]) & 0xFFF)


def _in_program_stream(data: bytes) -> str | None:
    """Of MPEG-2; the packets of MPEG-1 have no such field."""
    flags = [int.from_bytes(part[2:3]) for part in data.split(_PICTURES)[1:]]
    is_scrambled = [flag & 0x30 != 0 for flag in flags if flag >> 6 == 2]
    return "scrambled MPEG-PS" if is_scrambled.count(True) * 2 > len(is_scrambled) else None
