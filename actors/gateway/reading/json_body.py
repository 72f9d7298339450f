"""Parse a body's bytes into a JSON object, or refuse them before they delay other requests.

Pure. msgspec decodes without letting another thread run, the event loop's included, so its input is bounded beforehand by a scan
that lets others run. Base64 costs next to nothing and is not bounded here; that of a body in a spool stays there (``cut_text``).
"""

import math
import string
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from ....runtime.errors import RequestError
from ....shm.spool import SpooledBytes
from .cut_text import WINDOW_BYTES, Cut, Outliner, with_cuts
from .fields import Example, kind_of


class SpooledBody:
    """A body in a spool. ``cuts``: what was cut out when it was parsed, by their marks."""

    def __init__(self, bytes: SpooledBytes) -> None:
        self.bytes = bytes
        self.cuts: Mapping[str, Cut] = {}

    @property
    def is_used_up(self) -> bool:
        """Return whether all that was cut out has been read as base64. Else a string had a mark for another reader."""
        return all(cut.is_used for cut in self.cuts.values())


Body = bytes | bytearray | SpooledBody | Example  # as received, or an example for the description of the endpoint

_BASE64 = (string.ascii_letters + string.digits + "+/=-_").encode()  # of both alphabets
_BYTES_PER_ESCAPE = 16  # of base64 in lines, at least: with \r\n the shortest that anybody writes have twice as many
_MAX_NUMBER_CHARS = 1000


class BodyLimits(NamedTuple):
    """``elements``: commas and opening brackets, those in strings too. ``text_bytes``: everything except runs of base64."""

    elements: int
    text_bytes: int

    @classmethod
    def of(cls, max_context: int, max_items: int) -> "BodyLimits":
        """Room for a prompt that fills the context, as text with all characters escaped or as ids, and for so many media. The larger
        a body these let through, the longer decoding it keeps the loop: 0.1 s at most with contexts of up to 65536 tokens."""
        return cls(max(1 << 17, 2 * max_context), max(4 << 20, 8 * max_context + 2 * WINDOW_BYTES * max_items))


def decode_body(body: Body, limits: BodyLimits) -> dict[str, Any]:
    """Parse JSON; an example comes parsed. Raises RequestError for anything except an object within the limits: bad syntax, bad UTF-8,
    nesting too deep, NaN, 1e999."""
    if isinstance(body, Example):
        return body
    text: bytes | bytearray
    cuts: Mapping[str, Cut] = {}
    if isinstance(body, SpooledBody):
        text, cuts = _outline(body.bytes, limits)
    else:
        _check_size(body, limits)
        text = body
    if not text or text.isspace():
        raise RequestError("the body is empty, expected a JSON object")
    try:
        if cuts and isinstance(body, SpooledBody):
            body.cuts = cuts
            value = with_cuts(_decode(text), cuts)
        else:
            value = _decode(text)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason}") from None
    except ValueError as error:  # msgspec's DecodeError, and Python's limit on the digits of an integer
        raise RequestError(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {kind_of(value)}")
    return value


class _Count:
    """Counts what is no base64."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._num_bytes = self._num_elements = 0

    def add(self, window: bytes | bytearray) -> bool:
        """Count a window, unless it is a run of base64. Returns whether it is one. Raises: RequestError beyond a limit."""
        others = window.translate(None, _BASE64)
        if not others or (len(others) * _BYTES_PER_ESCAPE <= len(window) and not others.strip(b"\\")):
            return True
        self._num_bytes += len(window)
        self._num_elements += window.count(b",") + window.count(b"[") + window.count(b"{")
        if self._num_bytes > self._limits.text_bytes:
            raise RequestError(f"the body has more than {self._limits.text_bytes} bytes of text outside base64")
        if self._num_elements > self._limits.elements:
            raise RequestError(f"the body has more than {self._limits.elements} elements")
        return False


def _check_size(body: bytes | bytearray, limits: BodyLimits) -> None:
    count = _Count(limits)
    for at in range(0, len(body), WINDOW_BYTES):
        count.add(body[at : at + WINDOW_BYTES])


def _outline(body: SpooledBytes, limits: BodyLimits) -> tuple[bytearray, Mapping[str, Cut]]:
    """Return the text of a body with marks for its runs of base64, and these. Raises: as ``_check_size``."""
    count, outliner = _Count(limits), Outliner(body)
    for window in _windows(body):
        outliner.add(window, count.add(window))
    return outliner.end()


def _windows(body: SpooledBytes) -> Iterator[bytes]:
    for piece in body.pieces():
        for at in range(0, len(piece), WINDOW_BYTES):
            yield piece[at : at + WINDOW_BYTES]


def _read_float(text: str) -> float:
    """Read as msgspec does, which takes ten times as long for numbers of many digits and lets no other thread run meanwhile."""
    if len(text) > _MAX_NUMBER_CHARS:
        raise ValueError(f"a number of {len(text)} characters, the limit is {_MAX_NUMBER_CHARS}")
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number out of range: {text[:40]}")
    return value


_decode = msgspec.json.Decoder(float_hook=_read_float).decode
