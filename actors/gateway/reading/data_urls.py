"""Bytes of media as clients write them: base64, and ``data:`` URLs (RFC 2397). Pure.

Strict base64 is decoded at once. Only what that refuses is mended and decoded again: line ends and blanks, missing padding, the URL's
alphabet, percent signs. None of these changes a byte.
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import pybase64

MAX_MIME_CHARS = 100
_DATA_URL = re.compile(r"\s*data:(?P<mime>[^;,]{0,100})(?P<parameters>(?:;[^;,]{0,100}){0,8}),", re.IGNORECASE)
BLANKS = " \t\r\n\f\v"
_STANDARD = bytes.maketrans(b"-_", b"+/")


class DataUrl(NamedTuple):
    """The head of a ``data:`` URL. ``start``: where its data begin."""

    mime: str
    is_base64: bool
    start: int


def read_head(text: str) -> DataUrl | None:
    """Return the head of a ``data:`` URL; None for any other text."""
    found = _DATA_URL.match(text)
    if found is None:
        return None
    parameters = [parameter.strip().lower() for parameter in found["parameters"].split(";")]
    return DataUrl(found["mime"].strip().lower(), "base64" in parameters, found.end())


def most_bytes(text: str, start: int) -> int:
    """Return how many bytes ``text[start:]`` is at most, as base64."""
    return 3 * (len(text) - start - sum(text.count(blank, start) for blank in BLANKS)) // 4


def decode_base64(text: str, start: int = 0, end: int | None = None) -> bytes:
    """Decode ``text[start:end]``. Raises: ValueError for anything except base64 in one of the forms above."""
    data = text[start:end]
    try:
        return pybase64.b64decode(data, validate=True)
    except ValueError:
        pass
    raw = data.encode("ascii")
    if b"%" in raw:
        raw = unquote_to_bytes(raw)
    raw = raw.translate(_STANDARD, BLANKS.encode()).rstrip(b"=")
    return pybase64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)


def decode_pieces(pieces: Iterable[bytes], take: Callable[[bytes], object]) -> None:
    """Decode base64 that comes in pieces, without percent signs; ``take`` gets its bytes. Raises: as ``decode_base64``."""
    rest, is_padded = b"", False
    for piece in pieces:
        raw = rest + piece
        if is_padded or b"=" in piece or (decoded := _strictly(raw)) is None:
            raw = raw.translate(_STANDARD, BLANKS.encode())
            unpadded = raw.rstrip(b"=")
            if is_padded and unpadded != rest:
                raise ValueError("base64 goes on behind its end")
            is_padded |= len(unpadded) < len(raw)
            raw = unpadded
            decoded = pybase64.b64decode(raw[: len(raw) // 4 * 4], validate=True)
        take(decoded)
        rest = raw[len(raw) // 4 * 4 :]
    rest = rest.translate(_STANDARD, BLANKS.encode())
    if rest:
        take(pybase64.b64decode(rest + b"=" * (-len(rest) % 4), validate=True))


def _strictly(raw: bytes) -> bytes | None:
    """Return the bytes of all whole groups of four; None if they are in another form."""
    try:
        return pybase64.b64decode(raw[: len(raw) // 4 * 4], validate=True)
    except ValueError:
        return None


def decode_percents(text: str, start: int) -> bytes:
    """Return the bytes of a ``data:`` URL that is not in base64."""
    return unquote_to_bytes(text[start:])
