"""Recognising a file by its first bytes, for error messages that say what was sent instead. Never decides how to decode."""

from .errors import MediaError
from .limits import Reader

_AV_BRANDS = {b"M4A ": "an M4A audio file", b"M4B ": "an M4A audio file"}
_IMAGE_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1", b"hevc")
_SIGNATURES = (
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"GIF8", "a GIF image"),
    (b"BM", "a BMP image"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (b"ID3", "an MP3 audio file"),
    (b"fLaC", "a FLAC audio file"),
    (b"OggS", "an Ogg file"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
)


def describe(reader: Reader) -> str:
    """What the bytes look like, with an article: 'a PNG image', 'text', 'data of an unknown format'. Leaves the reader at 0."""
    reader.seek(0)
    head = reader.read(64) or b""
    reader.seek(0)
    if head[:4] == b"RIFF":
        known = {b"WEBP": "a WebP image", b"WAVE": "a WAV audio file", b"AVI ": "an AVI video"}
        return known.get(head[8:12], "data of an unknown format")
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        return "an AVIF or HEIC image" if brand in _IMAGE_BRANDS else _AV_BRANDS.get(brand, "an MP4 video")
    for signature, name in _SIGNATURES:
        if head.startswith(signature):
            return name
    if head and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head):
        return "text"
    return "data of an unknown format"


_PARTS = {"image": "image_url", "video": "video_url", "audio": "input_audio or audio_url"}


def refuse(reader: Reader, expected: str, accepted: str) -> MediaError:
    """The error for bytes that no decoder of kind ``expected`` (image, video, audio) takes; ``accepted`` lists the formats."""
    found = describe(reader)
    for kind, part in _PARTS.items():
        if kind in found and kind != expected:
            return MediaError(f"this is {found}, not {_article(expected)}: send it as {part}")
    if expected in found and accepted:
        return MediaError(f"this looks like {found}, but it is broken or not supported (supported: {accepted})")
    return MediaError(f"this is {found}, not {_article(expected)} that can be read (supported: {accepted})")


def _article(kind: str) -> str:
    return f"{'a' if kind == 'video' else 'an'} {kind}"
