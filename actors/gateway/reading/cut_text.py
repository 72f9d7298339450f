"""Long base64 of a body, left where the body is: JSON around it is parsed with a mark in its place.

Pure. Runs in the threads that parse bodies. ``outline`` cuts runs of base64 out of a body's text; strings that had one become
``CutText``, whose parts are read and decoded in pieces. Who reads such a string as any other gets the mark, and leaves the run unused:
then the body is to be parsed again, whole (``bodies``). So no answer and no error depends on what was cut.
"""

import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from ....shm.spool import PIECE_BYTES, SpooledBytes

WINDOW_BYTES = 1 << 12
LEAST_BYTES = 4 * WINDOW_BYTES  # that are cut
_ESCAPE_BYTES = 6  # of the longest escape in JSON
_LOOK_BYTES = WINDOW_BYTES  # in which there is a place outside of escapes: a run has few of them
_unescape = msgspec.json.Decoder(str).decode


class Cut:
    """A run [start, end) of a body, inside a string."""

    def __init__(self, body: SpooledBytes, start: int, end: int) -> None:
        self.num_bytes = end - start
        self.is_used = False
        self.body = body
        self._start = start
        self._end = end

    def pieces(self) -> Iterator[bytes]:
        """Return its text, escapes of JSON resolved. Raises: ValueError where they are none."""
        self.is_used = True
        at = self._start
        while at < self._end:
            stop = _outside_of_escapes(self.body, min(self._end, at + PIECE_BYTES), self._end)
            piece = self.body.read(at, stop)
            yield piece if b"\\" not in piece else _unescape(b'"%b"' % piece).encode("ascii")
            at = stop


class Outline(NamedTuple):
    """The text of a body with marks, and the runs that these stand for."""

    text: bytearray
    cuts: Mapping[str, Cut]


class CutText(str):
    """A string with marks in it."""

    cuts: Mapping[str, Cut]

    @classmethod
    def of(cls, text: str, cuts: Mapping[str, Cut]) -> "CutText":
        made = cls(text)
        made.cuts = cuts
        return made

    def parts(self, start: int = 0, end: int | None = None) -> Iterator[str | Cut]:
        """Return [start, end) as texts and runs. No mark may lie across its ends."""
        text = self[start:end]
        for at, part in enumerate(_marks_of(self.cuts).split(text)):
            yield self.cuts[part] if at & 1 else part

    def num_bytes(self, start: int = 0) -> int:
        """Return how many bytes of the body it takes from ``start`` on, about."""
        return sum(part.num_bytes if isinstance(part, Cut) else len(part) for part in self.parts(start))

    def num_chars(self, start: int, without: str) -> int:
        """Return how many characters it has from ``start`` on, except those in ``without``."""
        unwanted = without.encode()
        pieces = (piece for part in self.parts(start) for piece in (part.pieces() if isinstance(part, Cut) else (part.encode(),)))
        return sum(len(piece.translate(None, unwanted)) for piece in pieces)


class Outliner:
    """Makes the outline of a body from its windows, which the caller judges one after another."""

    def __init__(self, body: SpooledBytes) -> None:
        self._body = body
        self._nonce = secrets.token_hex(16)
        self._text = bytearray()
        self._cuts: dict[str, Cut] = {}
        self._run_from: int | None = None
        self._at = 0

    def add(self, window: bytes, is_run: bool) -> None:
        """Take the next window. ``is_run``: it is base64 alone."""
        if not is_run:
            self._end_run()
            self._text += window
        elif self._run_from is None:
            self._run_from = self._at
        self._at += len(window)

    def end(self) -> Outline:
        """Return the outline."""
        self._end_run()
        return Outline(self._text, self._cuts)

    def _end_run(self) -> None:
        if self._run_from is None:
            return
        first, last, self._run_from = self._run_from, self._at, None
        start = _outside_of_escapes(self._body, first, last)
        end = _outside_of_escapes(self._body, max(start, last - _LOOK_BYTES), last)
        if end - start < LEAST_BYTES:
            self._text += self._body.read(first, last)
            return
        mark = f"{self._nonce}x{len(self._cuts):08x}"
        self._cuts[mark] = Cut(self._body, start, end)
        self._text += self._body.read(first, start) + mark.encode() + self._body.read(end, last)


def with_cuts(value: Any, cuts: Mapping[str, Cut]) -> Any:
    """Return a value of JSON whose strings with marks are ``CutText``. Changes its arrays and objects. Raises: RecursionError."""
    nonce = next(iter(cuts))[:32]
    return _with_cuts(value, nonce, cuts)


def _with_cuts(value: Any, nonce: str, cuts: Mapping[str, Cut]) -> Any:
    if isinstance(value, str):
        return CutText.of(value, cuts) if nonce in value else value
    if isinstance(value, dict):
        for name, inner in value.items():
            value[name] = _with_cuts(inner, nonce, cuts)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            value[at] = _with_cuts(inner, nonce, cuts)
    return value


def _marks_of(cuts: Mapping[str, Cut]) -> re.Pattern[str]:
    return re.compile(f"({next(iter(cuts))[:32]}x[0-9a-f]{{8}})")


def _outside_of_escapes(body: SpooledBytes, at: int, end: int) -> int:
    """Return the first place from ``at`` on that is surely in the midst of no escape; ``end`` if there is none near."""
    if at >= end:
        return end
    first = max(0, at - _ESCAPE_BYTES)
    near = body.read(first, at + _LOOK_BYTES)
    for place in range(at, min(end, first + len(near))):
        if b"\\" not in near[max(0, place - first - _ESCAPE_BYTES) : place - first]:
            return place
    return end
