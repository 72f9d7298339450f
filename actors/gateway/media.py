"""Media intake: turn content parts with an image, a video or a sound into bytes: those of data: URLs and inline base64 at once, those
of other URLs, where ``[media.fetch]`` allows them, when they have been fetched (``fill``).

Pure. The video actor inspects the contents; here only the declared type, the number and size of the bytes, and the pixels of
pictures by their headers count.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pybase64

from ...media import header
from ...runtime.bus.messages import MediaItem
from ...runtime.config_sections import MediaSection
from ...runtime.errors import RequestError
from ...schema.media import MediaKind, MediaOptions
from .cache_keys import content_key
from .fetch.rules import FetchError, check_file_url, check_url, is_file_url
from .fields import STRING, Fields, Schema, refuse, show
from .media_options import OptionReader

AUDIO_FORMATS = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "ogg": "audio/ogg",
    "opus": "audio/opus",
    "m4a": "audio/mp4",
    "aac": "audio/aac",
    "aiff": "audio/aiff",
    "caf": "audio/x-caf",
    "ac3": "audio/ac3",
    "eac3": "audio/eac3",
    "webm": "audio/webm",
}
VIDEO_FORMATS = {
    "mp4": "video/mp4",
    "webm": "video/webm",
    "mov": "video/quicktime",
    "mkv": "video/x-matroska",
    "avi": "video/x-msvideo",
    "gif": "image/gif",
    "webp": "image/webp",
    "avif": "image/avif",
}
_ROLES = ("user", "tool")  # whose messages can hold media
_DETAILS = ("auto", "high", "original", "low")  # the last of images alone
LOW_DETAIL_PIXELS = 512 * 512  # as large as OpenAI's models see a picture of low detail
BASE64: Schema = {"type": "string", "contentEncoding": "base64", "minLength": 1}
_ANIMATIONS = ("image/gif", "image/webp", "image/avif")  # videos by content, which have no type of that kind
URL_PARTS: dict[str, MediaKind] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
INLINE_PARTS: dict[str, tuple[MediaKind, dict[str, str]]] = {
    "input_audio": ("audio", AUDIO_FORMATS),
    "input_video": ("video", VIDEO_FORMATS),
}

MAX_MIME_CHARS = 100
_DATA_URL = re.compile(r"data:(?P<mime>[^;,]{0,100})(?P<parameters>(?:;[^;,]{0,100}){0,8}),", re.IGNORECASE)
_REMOTE = re.compile(r"https?:", re.IGNORECASE)
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,20}(?=:)")


class Medium(NamedTuple):
    """One medium of a request, as received. ``path``: the field that its bytes stood in. ``content``, ``num_pixels`` and ``work``: as
    in ``MediaItem``. ``url``: where the bytes are still to be fetched from."""

    kind: MediaKind
    mime: str
    data: bytes
    options: MediaOptions
    path: str
    content: bytes
    num_pixels: int = -1
    work: int = 0
    url: str = ""

    @property
    def item(self) -> MediaItem:
        """The medium as the controller knows it."""
        return MediaItem(self.kind, len(self.data), self.mime, self.options, self.path, self.num_pixels, self.work, self.content)


class MediaIntake:
    """Reads the media of one request; ``media`` are in the order of their parts. ``kinds`` are those that the model takes."""

    def __init__(self, kinds: tuple[MediaKind, ...], limits: MediaSection, options: OptionReader) -> None:
        self.media: list[Medium] = []
        self._kinds = kinds
        self._limits = limits
        self._options = options

    def read(self, kind_of_part: str, part: Fields, path: str, role: str) -> MediaKind:
        """Take the medium of a content part, whose type is one of URL_PARTS or INLINE_PARTS.

        Raises:
            RequestError: 400 for media not allowed here, options beyond their limits, and anything except a plain data: URL or base64
                of the right type; 413 when it is too large.
        """
        kind = URL_PARTS[kind_of_part] if kind_of_part in URL_PARTS else INLINE_PARTS[kind_of_part][0]
        with _blaming(kind):
            self._check(kind, path, role)
            inner = Fields(part.take_required(kind_of_part), part.path(kind_of_part))
            most_pixels = _take_detail(kind, inner) if kind_of_part in URL_PARTS else None
            path = inner.path("url" if kind_of_part in URL_PARTS else "data")
            url = ""
            if kind_of_part in URL_PARTS:
                mime, data, url = self._from_url(kind, inner.take_required("url", STRING), path)
            else:
                mime, data = _from_base64(INLINE_PARTS[kind_of_part][1], inner, self._limits)
            inner.refuse_leftover()
            self._add(Medium(kind, mime, data, self._options.read(kind, part, most_pixels), path, b"", url=url))
        return kind

    def read_image_url(self, part: Fields, path: str, role: str) -> None:
        """Take the picture of a content part as OpenAI's Responses have it, with a URL alone. Raises: RequestError, as ``read``."""
        with _blaming("image"):
            self._check("image", path, role)
            most_pixels, data_path = _take_detail("image", part), part.path("image_url")
            mime, data, url = self._from_url("image", part.take_required("image_url", STRING), data_path)
            self._add(Medium("image", mime, data, self._options.read("image", part, most_pixels), data_path, b"", url=url))

    def read_source(self, kind: MediaKind, part: Fields, path: str, role: str) -> None:
        """Take the medium of a content part as Anthropic's API has it, with a ``source``. Raises: RequestError, as ``read``."""
        with _blaming(kind):
            self._check(kind, path, role)
            source, url = Fields(part.take_required("source"), part.path("source")), ""
            if source.take_choice("type", ("base64", "url")) == "url":
                data_path = source.path("url")
                mime, data, url = self._from_url(kind, source.take_required("url", STRING), data_path)
            else:
                source.require("media_type")
                data_path, mime = source.path("data"), source.take_str("media_type", MAX_MIME_CHARS) or ""
                if not _is_of(kind, mime):
                    raise refuse(source.path("media_type"), f"is {show(mime)}, expected {kind}/…")
                data = _from_text(source.take_required("data", BASE64), data_path, self._limits)
            source.refuse_leftover()
            self._add(Medium(kind, mime, data, self._options.read(kind, part), data_path, b"", url=url))

    def read_picture(self, value: object, path: str, role: str) -> None:
        """Take a picture given as base64 alone, as Ollama's API has it. Raises: RequestError, as ``read``."""
        with _blaming("image"):
            self._check("image", path, role)
            data, options = _from_text(value, path, self._limits), self._options.read("image", Fields({}, path))
            self._add(Medium("image", "", data, options, path, b""))

    def read_file(self, kind: MediaKind, mime: str, data: bytes, path: str) -> None:
        """Take a medium that came as a file. Raises: RequestError, as ``read``."""
        with _blaming(kind):
            self._check(kind, path, "user")
            _check_size(len(data), path, self._limits)
            self._add(Medium(kind, mime, data, self._options.read(kind, Fields({}, path)), path, b""))

    def _check(self, kind: MediaKind, path: str, role: str) -> None:
        """Check that the request may have one more medium, of this kind and in this place."""
        if kind not in self._kinds:
            taken = f"it takes text, {', '.join(self._kinds)}" if self._kinds else "it takes text only"
            raise refuse(path, f"the model does not take {kind}: {taken}")
        if role not in _ROLES:
            raise refuse(path, f"only messages of the user and results of calls can hold media; this message's role is {show(role)}")
        if len(self.media) == self._limits.max_items:
            raise refuse(path, f"more than {self._limits.max_items} media in one request (media.max_items)")

    def _add(self, medium: Medium) -> None:
        self.media.append(medium if medium.url else _measured(medium, self.media, self._limits))

    def _from_url(self, kind: MediaKind, url: object, path: str) -> tuple[str, bytes, str]:
        """Return the type and the bytes in a URL, or the URL if they are to be fetched."""
        if not isinstance(url, str):
            raise refuse(path, f"expected a data: URL, got {show(url)}")
        fetch = self._limits.fetch
        if not (fetch.allowed_roots if is_file_url(url) else fetch.allowed_hosts and _REMOTE.match(url)):
            return *_from_data_url(kind, url, path, self._limits), ""
        if sum(bool(medium.url) for medium in self.media) >= fetch.max_items:
            raise refuse(path, f"more than {fetch.max_items} media to fetch in one request (media.fetch.max_items)")
        try:
            _ = check_file_url(url) if is_file_url(url) else check_url(url, fetch)
        except FetchError as error:
            raise refuse(path, error.message, error.status) from None
        return "", b"", url


def fill(media: Sequence[Medium], fetched: Sequence[bytes], limits: MediaSection) -> tuple[Medium, ...]:
    """Return ``media`` with the bytes ``fetched`` for those with a URL, in their order. Raises: RequestError, as ``read``."""
    filled: list[Medium] = []
    contents = iter(fetched)
    for medium in media:
        if medium.url:
            with _blaming(medium.kind):
                medium = _measured(medium._replace(data=next(contents), url=""), media, limits)
        filled.append(medium)
        media = (*filled, *media[len(filled) :])
    return tuple(filled)


def _measured(medium: Medium, others: Sequence[Medium], limits: MediaSection) -> Medium:
    """Return a medium with its digest, and of a picture its pixels and the work to decode them. Raises: RequestError for more pixels
    than the request may have."""
    content, data = content_key(medium.kind, medium.options, medium.data), medium.data
    if medium.kind != "image":
        return medium._replace(content=content)
    num_pixels = min(header.num_pixels(data), limits.max_pixels)  # more than that is refused when it is decoded
    total = num_pixels + sum(other.num_pixels for other in others if other.kind == "image" and not other.url)
    if total > (limit := limits.max_request_pixels):
        message = f"makes {total} pixels in all pictures of the request, the limit is {limit} (media.max_request_pixels)"
        raise refuse(medium.path, message)
    return medium._replace(content=content, num_pixels=num_pixels, work=header.decoding_work(data))


@contextmanager
def _blaming(kind: MediaKind) -> Iterator[None]:
    """Name the kind of the medium that a request is refused for."""
    try:
        yield
    except RequestError as error:
        error.medium = kind
        raise


def _take_detail(kind: MediaKind, fields: Fields) -> int | None:
    """Take ``detail``, and return the number of pixels at most that it means, None if it means none."""
    details = _DETAILS[: None if kind == "image" else -1]
    detail = fields.take("detail", {"enum": list(details)})
    if detail not in (None, *details):
        raise refuse(fields.path("detail"), f"is {show(detail)}, allowed are {', '.join(details)}")
    return LOW_DETAIL_PIXELS if detail == "low" else None


def _from_data_url(kind: MediaKind, url: str, path: str, limits: MediaSection) -> tuple[str, bytes]:
    found = _DATA_URL.match(url)
    if found is None:
        raise _bad_url(path, url)
    mime = found["mime"].strip().lower()
    if not found["parameters"].lower().endswith(";base64"):
        raise refuse(path, f"a data: URL must be base64-encoded (data:{kind}/…;base64,…), got {show(url)}")
    if not _is_of(kind, mime):
        raise refuse(path, f"has type {show(mime)}, expected {kind}/…")
    return mime, _decode(url, found.end(), path, limits)


def _is_of(kind: MediaKind, mime: str) -> bool:
    return mime.partition("/")[0] == kind or (kind == "video" and mime in _ANIMATIONS)


def _bad_url(path: str, url: str) -> RequestError:
    scheme = _SCHEME.match(url)
    name = scheme.group().lower() if scheme else ""
    if name in ("http", "https"):
        return refuse(path, f"remote media is off on this server (media.fetch.allowed_hosts); send a data: URL instead of {show(url)}")
    if name == "file":
        return refuse(path, "file: URLs are not read on this server (media.fetch.allowed_roots); send a data: URL")
    return refuse(path, f"expected a data: URL, got {show(url)}")


def _from_base64(formats: dict[str, str], fields: Fields, limits: MediaSection) -> tuple[str, bytes]:
    mime = formats[fields.take_choice("format", formats)]
    return mime, _from_text(fields.take_required("data", BASE64), fields.path("data"), limits)


def _from_text(value: object, path: str, limits: MediaSection) -> bytes:
    if not isinstance(value, str):
        raise refuse(path, f"expected base64 text, got {show(value)}")
    return _decode(value, 0, path, limits)


def _decode(text: str, start: int, path: str, limits: MediaSection) -> bytes:
    """Decode ``text[start:]`` as strict base64: no line breaks, no missing padding, nothing behind it."""
    max_bytes = limits.max_item_mib << 20
    num_chars = len(text) - start
    if num_chars // 4 * 3 > max_bytes + 2:
        raise refuse(path, f"has about {num_chars // 4 * 3} bytes, the limit is {max_bytes} (media.max_item_mib)", status=413)
    try:
        data = pybase64.b64decode(text[start:], validate=True)
    except ValueError:
        raise refuse(path, "is not valid base64 (line breaks and other signs, a wrong length or padding)") from None
    _check_size(len(data), path, limits)
    return data


def _check_size(num_bytes: int, path: str, limits: MediaSection) -> None:
    if not num_bytes:
        raise refuse(path, "is empty")
    if num_bytes > (max_bytes := limits.max_item_mib << 20):
        raise refuse(path, f"has {num_bytes} bytes, the limit is {max_bytes} (media.max_item_mib)", status=413)
