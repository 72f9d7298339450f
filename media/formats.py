"""Recognising a file by its first bytes: to name it in errors, and to keep it from decoders that would take it for another kind."""

from .errors import MediaError
from .limits import Reader

UNKNOWN = "data of an unknown format"
AVIF, _HEIC, ICON, GIF = "an AVIF image", "a HEIC image", "an ICO image", "a GIF image"
PICTURES_IN_MP4 = (AVIF, _HEIC)  # FFmpeg opens their parts as videos
_BRANDS = {
    b"M4A ": "an M4A audio file",
    b"M4B ": "an M4A audio file",
    **dict.fromkeys((b"avif", b"avis"), AVIF),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"), _HEIC),
}
_SIGNATURES = (
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"GIF8", GIF),
    (b"BM", "a BMP image"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (b"\0\0\1\xba", "an MPEG video"),
    (b"\0\0\1\xb3", "an MPEG video"),
    (b"ID3", "an MP3 audio file"),
    (b"fLaC", "a FLAC audio file"),
    (b"OggS", "an Ogg file"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "a JPEG 2000 image"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 image"),
    (b"\0\0\1\0", ICON),
    (b"\x0bw", "an AC-3 audio file"),
    (b"caff", "a CAF audio file"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
)
_UNSUPPORTED_SIGNATURES = (
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL image"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"qoif", "a QOI image"),
    (b"8BPS", "a Photoshop image"),
    (b"DDS ", "a DDS image"),
    (b".snd", "an AU audio file"),
    (b"#!AMR", "an AMR audio file"),
    (b"wvpk", "a WavPack audio file"),
    (b"MAC ", "a Monkey's audio file"),
    (b"TTA1", "a TTA audio file"),
    (b"DSD ", "a DSF audio file"),
    (b"\x7f\xfe\x80\x01", "a DTS audio file"),
    (b"0&\xb2u\x8ef\xcf\x11", "a WMA or WMV file"),
)
_UNSUPPORTED = frozenset((_HEIC, *(name for _, name in _UNSUPPORTED_SIGNATURES)))


def describe(reader: Reader) -> str:
    """Describe the bytes, with an article: 'a PNG image', 'text', 'data of an unknown format'. Leaves the reader at 0."""
    reader.seek(0)
    head = reader.read(64) or b""
    reader.seek(0)
    if head[:4] == b"RIFF":
        known = {b"WEBP": "a WebP image", b"WAVE": "a WAV audio file", b"AVI ": "an AVI video"}
        return known.get(head[8:12], UNKNOWN)
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return "an AIFF audio file"
    if head[4:8] == b"ftyp":
        is_avif = head[8:12] in (b"mif1", b"msf1") and any(brand in head[16 : head[3]] for brand in (b"avif", b"avis"))
        return AVIF if is_avif else _BRANDS.get(head[8:12], "an MP4 video")
    if head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace():
        return "a PPM image"
    for signature, name in (*_SIGNATURES, *_UNSUPPORTED_SIGNATURES):
        if head.startswith(signature):
            return name
    if head and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head):
        return "text"
    return UNKNOWN


_PARTS = {"image": "image_url", "video": "video_url", "audio": "input_audio or audio_url"}


def refuse(reader: Reader, expected: str, accepted: str) -> MediaError:
    """The error for bytes that no decoder of kind ``expected`` (image, video, audio) takes; ``accepted`` lists the formats."""
    found = describe(reader)
    if found in _UNSUPPORTED:
        return MediaError(f"this is {found}, which is not supported (supported: {accepted})")
    for kind, part in _PARTS.items():
        if kind in found and kind != expected:
            return MediaError(f"this is {found}, not {_article(expected)}: send it as {part}")
    if expected in found and accepted:
        return MediaError(f"this looks like {found}, but it is broken or not supported (supported: {accepted})")
    return MediaError(f"this is {found}, not {_article(expected)} that can be read (supported: {accepted})")


def _article(kind: str) -> str:
    return f"{'a' if kind == 'video' else 'an'} {kind}"
