"""Media intake: content parts that carry an image, a video or a sound become bytes. Only data: URLs and inline base64 are taken.

Pure. What the bytes hold is for the video actor to find out; here only their declared type, their number and their size count.
"""

import binascii
import re
from typing import NamedTuple

from ...runtime.config import MediaSection
from ...runtime.errors import RequestError
from ...runtime.messages import MediaKind
from .fields import Fields, refuse, show

AUDIO_FORMATS = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "ogg": "audio/ogg",
    "opus": "audio/opus",
    "m4a": "audio/mp4",
    "aac": "audio/aac",
    "webm": "audio/webm",
}
VIDEO_FORMATS = {
    "mp4": "video/mp4",
    "webm": "video/webm",
    "mov": "video/quicktime",
    "mkv": "video/x-matroska",
    "avi": "video/x-msvideo",
}
URL_PARTS: dict[str, MediaKind] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
INLINE_PARTS: dict[str, tuple[MediaKind, dict[str, str]]] = {
    "input_audio": ("audio", AUDIO_FORMATS),
    "input_video": ("video", VIDEO_FORMATS),
}

_DATA_URL = re.compile(r"data:(?P<mime>[^;,]{0,100})(?P<parameters>(?:;[^;,]{0,100}){0,8}),", re.IGNORECASE)
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,20}(?=:)")
# Decoding in slices lets the event loop's thread have its turn in between; a multiple of 4 characters.
_SLICE_CHARS = 1 << 20


class Medium(NamedTuple):
    """One medium of a request, as received."""

    kind: MediaKind
    mime: str
    data: bytes


def read_media_part(kind_of_part: str, fields: Fields, limits: MediaSection) -> Medium:
    """The medium of a content part. ``fields`` are the part's.

    Raises:
        RequestError: 400 for anything that is no plain data: URL or base64 of the right type, 413 when it is too large.
    """
    inner = Fields(fields.take_required(kind_of_part), fields.path(kind_of_part))
    if kind_of_part in URL_PARTS:
        medium = _from_url(URL_PARTS[kind_of_part], inner, limits)
        detail = inner.take("detail")
        if detail not in (None, "auto"):
            raise refuse(inner.path("detail"), f"only 'auto' is supported, got {show(detail)}")
    else:
        kind, formats = INLINE_PARTS[kind_of_part]
        medium = _from_base64(kind, formats, inner, limits)
    inner.refuse_leftover()
    return medium


def _from_url(kind: MediaKind, fields: Fields, limits: MediaSection) -> Medium:
    path = fields.path("url")
    url = fields.take_required("url")
    if not isinstance(url, str):
        raise refuse(path, f"expected a data: URL, got {show(url)}")
    found = _DATA_URL.match(url)
    if found is None:
        raise _bad_url(path, url)
    mime = found["mime"].strip().lower()
    if ";base64" not in found["parameters"].lower():
        raise refuse(path, f"a data: URL must be base64-encoded (data:{kind}/…;base64,…), got {show(url)}")
    if mime.partition("/")[0] != kind:
        raise refuse(path, f"has type {show(mime)}, expected {kind}/…")
    return Medium(kind, mime, _decode(url, found.end(), path, limits))


def _bad_url(path: str, url: str) -> RequestError:
    scheme = _SCHEME.match(url)
    name = scheme.group().lower() if scheme else ""
    if name in ("http", "https"):
        return refuse(path, f"remote media is off on this server; send a data: URL instead of {show(url)}")
    if name == "file":
        return refuse(path, "file: URLs are not read; send a data: URL")
    return refuse(path, f"expected a data: URL, got {show(url)}")


def _from_base64(kind: MediaKind, formats: dict[str, str], fields: Fields, limits: MediaSection) -> Medium:
    name = fields.take_required("format")
    mime = formats.get(name) if isinstance(name, str) else None
    if mime is None:
        raise refuse(fields.path("format"), f"is {show(name)}, allowed are {', '.join(formats)}")
    data = fields.take_required("data")
    if not isinstance(data, str):
        raise refuse(fields.path("data"), f"expected base64 text, got {show(data)}")
    return Medium(kind, mime, _decode(data, 0, fields.path("data"), limits))


def _decode(text: str, start: int, path: str, limits: MediaSection) -> bytes:
    """Strict base64 of ``text[start:]``: no line breaks, no missing padding, nothing behind it."""
    max_bytes = limits.max_item_mib << 20
    num_chars = len(text) - start
    if num_chars // 4 * 3 > max_bytes + 2:
        raise refuse(path, f"has about {num_chars // 4 * 3} bytes, the limit is {max_bytes} (media.max_item_mib)", status=413)
    parts = []
    for at in range(start, len(text), _SLICE_CHARS):
        try:
            part = binascii.a2b_base64(text[at : at + _SLICE_CHARS], strict_mode=True)
        except ValueError as error:  # binascii.Error, or a character outside ASCII
            raise refuse(path, f"is not valid base64 ({str(error)[:80]})") from None
        if len(part) != _SLICE_CHARS // 4 * 3 and at + _SLICE_CHARS < len(text):
            raise refuse(path, "is not valid base64 (padding before the end)")
        parts.append(part)
    data = b"".join(parts)
    if not data:
        raise refuse(path, "is empty")
    if len(data) > max_bytes:
        raise refuse(path, f"has {len(data)} bytes, the limit is {max_bytes} (media.max_item_mib)", status=413)
    return data
