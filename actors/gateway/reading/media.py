"""Media intake: turn content parts with an image, a video or a sound into bytes: those of data: URLs and inline base64 at once, those
of other URLs, where ``[media.fetch]`` allows them, when they have been fetched (``fill``).

Pure. The bytes decide what a medium is, and the video actor inspects them: types that clients state say nothing. Here only the number
and size of the bytes count, and the pixels of pictures by their headers.
"""

import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from msgspec.structs import replace

from ....media import header
from ....media.frames import MAGIC, frames_head, is_packed
from ....runtime.bus.messages import MediaItem
from ....runtime.config.sections import MediaSection
from ....runtime.errors import RequestError
from ....schema.media import AUTO_SHARE, MediaKind, MediaOptions
from ....shm.spool import AnyBytes, SpooledBytes, beginning_of, pieces_of
from .cache_keys import content_key, key_among_others, key_of_share
from .cut_text import Cut, CutText
from .data_urls import BLANKS, MAX_MIME_CHARS, DataUrl, decode_base64, decode_percents, decode_pieces, most_bytes, read_head
from .field_rules import settle
from .field_table import media as table
from .fields import STRING, Fields, Schema, kind_of, refuse, show
from .media_options import OptionReader
from .url_rules import FetchError, check_file_url, check_url, is_file_url

_ROLES = ("user", "tool")  # whose messages can hold media
_DETAILS = ("auto", "high", "original", "low")  # the last of images alone
LOW_DETAIL_PIXELS = 512 * 512  # as large as OpenAI's models see a picture of low detail
BASE64: Schema = {"type": "string", "contentEncoding": "base64", "minLength": 1}
_URLS: Schema = {"anyOf": [STRING, {"type": "array", "items": STRING, "minItems": 1}]}
URL_PARTS: dict[str, MediaKind] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
INLINE_PARTS: dict[str, MediaKind] = {"input_audio": "audio", "input_video": "video"}
PLAIN_PARTS: dict[str, MediaKind] = {"image": "image", "video": "video", "audio": "audio"}  # a URL alone, as Qwen's guide has it
MEDIA_PARTS = {**URL_PARTS, **INLINE_PARTS, **PLAIN_PARTS}

FRAMES_MIME = "video/jpeg"  # which vLLM gives to pictures behind commas
_JPEG = b"\xff\xd8\xff"
_REMOTE = re.compile(r"https?:", re.IGNORECASE)
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,20}(?=:)")


class Medium(NamedTuple):
    """One medium of a request, as received. ``mime``: as stated, or empty. ``path``: the field that its bytes stood in. ``content``,
    ``num_pixels`` and ``work``: as in ``MediaItem``. ``pieces``: what the bytes are made of, while some are URLs that are still to be
    fetched. ``rate``: of the frames, a second, if the pieces are the frames of a video; else 0."""

    kind: MediaKind
    mime: str
    data: AnyBytes
    options: MediaOptions
    path: str
    content: bytes = b""
    num_pixels: int = -1
    work: int = 0
    pieces: tuple[AnyBytes | str, ...] = ()
    rate: float = 0.0
    num_pictures: int = 1

    @property
    def urls(self) -> tuple[str, ...]:
        """Those that are still to be fetched."""
        return tuple(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def item(self) -> MediaItem:
        """The medium as the controller knows it."""
        return MediaItem(self.kind, len(self.data), self.mime, self.options, self.path, self.num_pixels, self.work, self.content)


class MediaIntake:
    """Reads the media of one request; ``media`` are in the order of their parts. ``kinds`` are those that the model, of this
    ``family``, takes."""

    def __init__(self, kinds: tuple[MediaKind, ...], limits: MediaSection, options: OptionReader, family: str) -> None:
        self.media: list[Medium] = []
        self._kinds = kinds
        self._limits = limits
        self._share = AUTO_SHARE if isinstance(limits.token_share, str) else limits.token_share
        self._options = options
        self._family = family

    def read(self, kind_of_part: str, part: Fields, path: str, role: str) -> MediaKind:
        """Take the medium of a content part, whose type is one of MEDIA_PARTS.

        Raises:
            RequestError: 400 for media not allowed here, options beyond their limits, and anything except data: URLs, base64 and URLs
                that may be fetched; 413 when it is too large.
        """
        kind = MEDIA_PARTS[kind_of_part]
        with _blaming(kind):
            self._check(kind, path, role)
            if kind_of_part in INLINE_PARTS:
                inner = Fields(part.take_required(kind_of_part), part.path(kind_of_part))
                stated = inner.take_str("format", MAX_MIME_CHARS) or ""
                value, place = inner.take_required("data", BASE64), inner.path("data")
                settle(inner, table.INLINE)
                self._add(kind, value, place, part, _mime_of(kind, stated), is_base64=True)
                return kind
            schema = None if kind_of_part in URL_PARTS else _URLS if kind == "video" else STRING
            value, place, most_pixels = part.take_required(kind_of_part, schema), part.path(kind_of_part), _take_detail(kind, part)
            if kind_of_part in URL_PARTS and not isinstance(value, str):
                inner = Fields(value, place)
                most_pixels = _take_detail(kind, inner) or most_pixels
                value, place = inner.take_required("url", STRING), inner.path("url")
                settle(inner, table.URL)
            self._add(kind, value, place, part, most_pixels=most_pixels)
        return kind

    def read_image_url(self, part: Fields, path: str, role: str) -> None:
        """Take the picture of a content part as OpenAI's Responses have it, with a URL alone. Raises: RequestError, as ``read``."""
        with _blaming("image"):
            self._check("image", path, role)
            most_pixels = _take_detail("image", part)
            value = part.take_required("image_url", STRING)
            self._add("image", value, part.path("image_url"), part, most_pixels=most_pixels)

    def read_source(self, kind: MediaKind, part: Fields, path: str, role: str) -> None:
        """Take the medium of a content part as Anthropic's API has it, with a ``source``. Raises: RequestError, as ``read``."""
        with _blaming(kind):
            self._check(kind, path, role)
            source = Fields(part.take_required("source"), part.path("source"))
            is_base64 = source.take_choice("type", ("base64", "url")) == "base64"
            mime = source.take_str("media_type", MAX_MIME_CHARS) if is_base64 else None
            name = "data" if is_base64 else "url"
            value = source.take_required(name, BASE64 if is_base64 else STRING)
            settle(source, table.SOURCE)
            self._add(kind, value, source.path(name), part, (mime or "").strip().lower(), is_base64=is_base64)

    def read_picture(self, value: object, path: str, role: str) -> None:
        """Take a picture given as base64 alone, as Ollama's API has it. Raises: RequestError, as ``read``."""
        with _blaming("image"):
            self._check("image", path, role)
            self._add("image", value, path, Fields({}, path), is_base64=True)

    def read_file(self, kind: MediaKind, mime: str, data: AnyBytes, path: str) -> None:
        """Take a medium that came as a file. Raises: RequestError, as ``read``."""
        with _blaming(kind):
            self._check(kind, path, "user")
            self.media.append(_filled(Medium(kind, mime, data, self._options.read(kind, Fields({}, path)), path), self._limits))

    def _check(self, kind: MediaKind, path: str, role: str) -> None:
        """Check that the request may have one more medium, of this kind and in this place."""
        if kind not in self._kinds:
            taken = f"it takes text, {', '.join(self._kinds)}" if self._kinds else f"a {self._family} model is served as text"
            raise refuse(path, f"the model does not take {kind}: {taken}")
        if role not in _ROLES:
            raise refuse(path, f"only messages of the user and results of calls can hold media; this message's role is {show(role)}")
        self._check_count(1, path)

    def _check_count(self, num_more: int, path: str) -> None:
        if sum(medium.num_pictures for medium in self.media) + num_more > (limit := self._limits.max_items):
            raise refuse(path, f"more than {limit} media in one request, each frame of a list counted (media.max_items)")

    def _add(
        self,
        kind: MediaKind,
        value: object,
        path: str,
        part: Fields,
        mime: str = "",
        *,
        is_base64: bool = False,
        most_pixels: int | None = None,
    ) -> None:
        """Take the medium that ``value`` holds: base64 or a URL, or of a video also the pictures that are its frames. The other fields
        of the part are its options. ``is_base64``: what is no URL is base64."""
        if isinstance(value, list) and kind == "video":
            mime, pieces, is_list = "", self._frames_of(value, path), True
        else:
            mime, pieces, is_list = self._pieces_of(kind, value, path, mime, is_base64)
        self._check_fetched(pieces, path)
        if is_list:
            rate, options = self._options.read_frames(part, self._share)
        else:
            rate, options = 0.0, self._options.read(kind, part, most_pixels, self._share)
        medium = Medium(kind, mime, b"", options, path, pieces=pieces, rate=rate, num_pictures=len(pieces))
        self.media.append(medium if medium.urls else _filled(medium, self._limits))

    def _frames_of(self, values: list[Any], path: str) -> tuple[AnyBytes | str, ...]:
        if not values:
            raise refuse(path, "is empty, at least one frame is needed")
        self._check_count(len(values), path)
        return tuple(self._piece_of(value, f"{path}[{at}]", "", False)[1] for at, value in enumerate(values))

    def _pieces_of(
        self, kind: MediaKind, value: object, path: str, mime: str, is_base64: bool
    ) -> tuple[str, tuple[AnyBytes | str, ...], bool]:
        """Return the stated type, the bytes or the URL, and whether these are frames: base64 of a video has no commas else."""
        head = read_head(value) if kind == "video" and isinstance(value, str) else None
        if head is None or not head.is_base64 or not isinstance(value, str) or (count := 1 + value.count(",", head.start)) == 1:
            mime, piece = self._piece_of(value, path, mime, is_base64)
            return mime, (piece,), mime == FRAMES_MIME and not isinstance(piece, str) and beginning_of(piece, 3) == _JPEG
        self._check_count(count, path)
        _check_text_size(value, head.start, path, self._limits)
        frames: list[AnyBytes | str] = []
        start = head.start
        for at in range(count):
            end = value.find(",", start)
            frames.append(_from_base64(value, start, len(value) if end < 0 else end, f"{path} (frame {at + 1})", path))
            start = end + 1
        return head.mime, tuple(frames), True

    def _piece_of(self, value: object, path: str, mime: str, is_base64: bool) -> tuple[str, AnyBytes | str]:
        """Return the stated type and the bytes of one text, or the URL if they are to be fetched."""
        if not isinstance(value, str):
            expected = "base64 text" if is_base64 else "a data: URL"
            raise refuse(path, f"expected {expected}, got {show(value) if not isinstance(value, list) else kind_of(value)}")
        if (head := read_head(value)) is not None:
            return head.mime or mime, _from_data_url(value, head, path, self._limits)
        if self._may_fetch(value):
            return "", value
        if not is_base64 or _SCHEME.match(value):
            raise _bad_url(path, value)
        _check_text_size(value, 0, path, self._limits)
        return mime, _from_base64(value, 0, len(value), path, path)

    def _may_fetch(self, url: str) -> bool:
        fetch = self._limits.fetch
        return bool(fetch.allowed_roots if is_file_url(url) else fetch.allowed_hosts and _REMOTE.match(url))

    def _check_fetched(self, pieces: Sequence[AnyBytes | str], path: str) -> None:
        """Check the URLs among the pieces, and their number."""
        fetch, urls = self._limits.fetch, [piece for piece in pieces if isinstance(piece, str)]
        if urls and sum(len(medium.urls) for medium in self.media) + len(urls) > fetch.max_items:
            raise refuse(path, f"more than {fetch.max_items} media to fetch in one request (media.fetch.max_items)")
        for url in urls:
            try:
                _ = check_file_url(url) if is_file_url(url) else check_url(url, fetch)
            except FetchError as error:
                raise refuse(path, error.message, error.status) from None


def fill(media: Sequence[Medium], fetched: Sequence[AnyBytes], limits: MediaSection) -> tuple[Medium, ...]:
    """Return ``media`` with the bytes ``fetched`` for their URLs, in order. Raises: RequestError, as ``read``."""
    contents = iter(fetched)
    filled: list[Medium] = []
    for medium in media:
        if medium.urls:
            pieces = tuple(next(contents) if isinstance(piece, str) else piece for piece in medium.pieces)
            with _blaming(medium.kind):
                medium = _filled(medium._replace(pieces=pieces), limits)
        filled.append(medium)
    return tuple(filled)


def among_others(media: Sequence[Medium]) -> tuple[Medium, ...]:
    """Return filled ``media`` for a model that cuts only a picture that is alone into tiles; a conversation's are counted together."""
    if sum(medium.kind == "image" for medium in media) < 2:
        return tuple(media)
    return tuple(
        medium._replace(options=replace(medium.options, is_among_others=True), content=key_among_others(medium.content))
        if medium.kind == "image" and not medium.options.is_among_others
        else medium
        for medium in media
    )


def shared(media: Sequence[Medium], share: float) -> tuple[Medium, ...]:
    """Return filled ``media``, those that leave their number of tokens to the load with this share of it."""
    return tuple(
        medium._replace(options=replace(medium.options, token_share=share), content=key_of_share(medium.content, share))
        if medium.options.token_share == AUTO_SHARE
        else medium
        for medium in media
    )


def _filled(medium: Medium, limits: MediaSection) -> Medium:
    """Return a medium whose bytes are there with its digest, and with the pixels of its pictures and the work to decode them. Raises:
    RequestError if it is empty or too large."""
    pieces = [piece for piece in medium.pieces if not isinstance(piece, str)] or [medium.data]
    for at, piece in enumerate(pieces):
        if not piece:
            raise refuse(medium.path, f"frame {at + 1} is empty" if medium.rate else "is empty")
        if is_packed(beginning_of(piece, len(MAGIC))):
            raise refuse(medium.path, "is a list of frames in this server's own form; send data:video/jpeg;base64,FRAME,FRAME")
    data = _packed(pieces, medium.rate) if medium.rate else pieces[0]
    if len(data) > (max_bytes := limits.max_item_mib << 20):
        raise refuse(medium.path, f"has {len(data)} bytes, the limit is {max_bytes} (media.max_item_mib)", status=413)
    medium = medium._replace(data=data, pieces=(), content=content_key(medium.kind, medium.options, data))
    if medium.kind != "image" and not medium.rate:
        return medium
    num_pixels = work = 0
    for piece in pieces:
        with _seen(piece) as seen:
            num_pixels += min(header.num_pixels(seen), limits.max_pixels)  # if it has more, it is refused when it is decoded
            work += header.decoding_work(seen)
    return medium._replace(num_pixels=num_pixels, work=work)


def _packed(pictures: Sequence[AnyBytes], rate: float) -> AnyBytes:
    """Return one medium of these pictures."""
    head = frames_head(list(map(len, pictures)), rate)
    spooled = next((picture for picture in pictures if isinstance(picture, SpooledBytes)), None)
    if spooled is None:
        return b"".join((head, *(piece for picture in pictures for piece in pieces_of(picture))))
    packed = spooled.beside()
    packed.append(head)
    for picture in pictures:
        for piece in pieces_of(picture):
            packed.append(piece)
    return packed


@contextmanager
def _seen(data: AnyBytes) -> Iterator[bytes | mmap.mmap]:
    """Show bytes in one piece, for a look."""
    if isinstance(data, SpooledBytes):
        with data.mapped() as mapping:
            yield mapping
    else:
        yield data


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


def _mime_of(kind: MediaKind, stated: str) -> str:
    """Return the type that ``format`` means: a name without its kind, or a type."""
    name = stated.strip().lower().removeprefix(".")
    return name if "/" in name or not name else f"{kind}/{name}"


def _from_data_url(url: str, head: DataUrl, path: str, limits: MediaSection) -> AnyBytes:
    if not head.is_base64:
        return decode_percents(url, head.start)  # what was cut out of it stays unused
    _check_text_size(url, head.start, path, limits)
    return _from_base64(url, head.start, len(url), path, path)


def _from_base64(text: str, start: int, end: int, shown: str, path: str) -> AnyBytes:
    """``shown``: what an error calls the text."""
    try:
        return _decode_cut(text, start, end) if isinstance(text, CutText) else decode_base64(text, start, end)
    except ValueError:
        raise RequestError(f"{shown}: is not valid base64 (other signs, or a wrong length)", param=path) from None


def _decode_cut(text: CutText, start: int, end: int) -> AnyBytes:
    parts = list(text.parts(start, end))
    cut = next((part for part in parts if isinstance(part, Cut)), None)
    if cut is None:
        return decode_base64(text, start, end)
    if any("%" in part for part in parts if isinstance(part, str)):
        for part in parts:
            if isinstance(part, Cut):
                part.is_used = False  # for its size alone: so the body is read anew without cuts
        return b""
    decoded = cut.body.beside()
    decode_pieces(
        (piece for part in parts for piece in ((part.encode("ascii"),) if isinstance(part, str) else part.pieces())), decoded.append
    )
    return decoded


def _bad_url(path: str, url: str) -> RequestError:
    scheme = _SCHEME.match(url)
    name = scheme.group().lower() if scheme else ""
    if name in ("http", "https"):
        return refuse(path, f"remote media is off on this server (media.fetch.allowed_hosts); send a data: URL instead of {show(url)}")
    if name == "file":
        return refuse(path, "file: URLs are not read on this server (media.fetch.allowed_roots); send a data: URL")
    return refuse(path, f"expected a data: URL, got {show(url)}")


def _check_text_size(text: str, start: int, path: str, limits: MediaSection) -> None:
    """Check that base64 is not of far more bytes than a medium may have, before it is decoded."""
    max_bytes = limits.max_item_mib << 20
    if isinstance(text, CutText):
        num_chars = text.num_chars(start, BLANKS) if text.num_bytes(start) // 4 * 3 > max_bytes + 2 else 0
        num_bytes = 3 * num_chars // 4
    else:
        num_bytes = most_bytes(text, start) if (len(text) - start) // 4 * 3 > max_bytes + 2 else 0
    if num_bytes > max_bytes + 2:
        raise refuse(path, f"has about {num_bytes} bytes, the limit is {max_bytes} (media.max_item_mib)", status=413)
