"""Calls of functions in a stream of text, in the form that Qwen's chat templates teach (Hermes'):

    <tool_call>
    {"name": "weather", "arguments": {"city": "Ulm"}}
    </tool_call>

Pure. The gateway has one reader per choice. Calls and content depend on the text alone, not on how it was cut into pieces.
"""

import enum
import re
from collections.abc import Collection, Iterable
from itertools import groupby
from typing import NamedTuple

OPENING, CLOSING = "<tool_call>", "</tool_call>"
NAME = r"[a-zA-Z0-9_.-]{1,128}"  # as MCP has them; Anthropic takes so many characters, OpenAI 64
_BLANKS = " \t\r\n"
_BLANK = r"[ \t\r\n]{0,64}"


class CallPiece(NamedTuple):
    """A piece of a call, counted from 0. The first one has the function's ``name``, the others more text of its arguments."""

    number: int
    name: str | None
    arguments: str


def whole_calls(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """Return the calls that pieces from the beginning of a call on make, each as one piece."""
    calls = [list(call) for _, call in groupby(pieces, key=lambda piece: piece.number)]
    return [call[0]._replace(arguments="".join([piece.arguments for piece in call])) for call in calls]


class Reading(NamedTuple):
    """A piece of an answer: content, and pieces of calls."""

    content: str
    calls: list[CallPiece]


def _whole_and_begun(*atoms: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for a text of all these atoms, and for one that may become such a text."""
    begun = "".join(f"(?:{atom}" for atom in atoms) + ")?" * len(atoms)
    return re.compile("".join(atoms)), re.compile(begun)


def _spaced(*texts: str) -> list[str]:
    """Atoms of texts with blanks between them."""
    return [atom for text in texts for atom in (_BLANK, *map(re.escape, text))]


_HEAD, _HEAD_BEGUN = _whole_and_begun(
    *_spaced("{", '"name"', ":", '"'), f"({NAME})", '"', *_spaced(",", '"arguments"', ":"), _BLANK, r"(?=\{)"
)
# The second one stands behind arguments that broke off.
_TAILS = [_whole_and_begun(*_spaced("}", CLOSING)), _whole_and_begun(*_spaced(CLOSING))]
_BRACE = re.compile(rf"{_BLANK}\}}")
_IN_STRING, _OUTSIDE = re.compile(r'["\\]'), re.compile(r'["{}<]')


class _State(enum.Enum):
    CONTENT = enum.auto()
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()


class CallReader:
    """Tells calls from content.

    A call begins where its name, that of a known function, and the brace of its arguments have come. From there on its arguments are
    passed on as they come, whether or not they are valid JSON in the end: they end with their last brace, or before a ``<``, which
    stands in no JSON outside of strings. Anything else that looks like a call is content. Blanks before a call, and between it and
    another one or the end, are no content.
    """

    def __init__(self, names: Collection[str]) -> None:
        """``names``: of the functions that may be called."""
        self._names = frozenset(names)
        self._held, self._at = "", 0  # the text up to which all is decided
        self._state = _State.CONTENT
        self._is_behind_call = False
        self._num_calls = 0
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._content: list[str] = []
        self._calls: list[CallPiece] = []

    @property
    def has_calls(self) -> bool:
        """Return whether there are calls, all of which have ended."""
        return self._num_calls > 0 and self._state is not _State.ARGUMENTS

    def push(self, text: str) -> Reading:
        """Return what is certain with this text."""
        return self._read(text, at_end=False)

    def flush(self) -> Reading:
        """Return the rest, when nothing more will come."""
        return self._read("", at_end=True)

    def _read(self, text: str, at_end: bool) -> Reading:
        self._held, self._at = self._held[self._at :] + text, 0
        steps = {_State.CONTENT: self._read_content, _State.ARGUMENTS: self._read_arguments, _State.TAIL: self._read_tail}
        while steps[self._state](at_end):
            pass
        reading = Reading("".join(self._content), self._calls)
        self._content, self._calls = [], []
        return reading

    def _read_content(self, at_end: bool) -> bool:
        """Read up to a call. Returns whether there may be more to read."""
        held = self._held
        if (opening := held.find(OPENING, self._at)) < 0:
            self._show(len(held) if at_end else len(held) - _num_begun(held))
            if at_end and not self._is_behind_call:
                self._show(len(held), with_blanks=True)
            return False
        behind = opening + len(OPENING)
        head = _HEAD.match(held, behind)
        if head is not None and head[1] in self._names:
            self._show(opening)
            self._at = head.end()
            self._calls.append(CallPiece(self._num_calls, head[1], ""))
            self._num_calls += 1
            self._state = _State.ARGUMENTS
            return True
        if head is None and not at_end and _HEAD_BEGUN.fullmatch(held, behind):
            self._show(opening)
            return False
        self._show(behind)
        return True

    def _show(self, end: int, with_blanks: bool = False) -> None:
        """Take what is held up to ``end`` as content; without ``with_blanks``, only up to the last character that is no blank."""
        shown = self._held[self._at : end]
        if not with_blanks:
            shown = shown.rstrip(_BLANKS)
        if shown:
            self._content.append(shown)
            self._at += len(shown)
            self._is_behind_call = False

    def _read_arguments(self, at_end: bool) -> bool:
        held, at, is_whole = self._held, self._at, False
        while at < len(held) and not is_whole:
            if self._is_escaped:
                at, self._is_escaped = at + 1, False
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(held, at)
            if found is None:
                at = len(held)
                break
            mark = found[0]
            at = found.start() if mark == "<" else found.end()
            self._is_escaped = mark == "\\"
            self._in_string ^= mark == '"'
            self._depth += (mark == "{") - (mark == "}")
            is_whole = mark == "<" or (mark == "}" and self._depth == 0)
        if at > self._at:
            self._calls.append(CallPiece(self._num_calls - 1, None, held[self._at : at]))
        self._at = at
        if is_whole:
            self._state, self._depth = _State.TAIL, 0
        return is_whole

    def _read_tail(self, at_end: bool) -> bool:
        """Drop what closes a call, as far as it is there."""
        held = self._held
        tail = next((found for whole, _ in _TAILS if (found := whole.match(held, self._at))), None)
        if tail is None and any(begun.fullmatch(held, self._at) for _, begun in _TAILS):
            if not at_end:
                return False
            self._at = len(held)
        elif tail is not None or (tail := _BRACE.match(held, self._at)):
            self._at = tail.end()
        self._state, self._is_behind_call = _State.CONTENT, True
        return True


def _num_begun(text: str) -> int:
    """Length of the longest suffix of ``text`` that begins an opening."""
    return next((length for length in range(len(OPENING) - 1, 0, -1) if text.endswith(OPENING[:length])), 0)
