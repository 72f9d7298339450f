"""Thoughts at the beginning of an answer, in the form of Qwen's and DeepSeek's models:

    <think>
    The user asks for …
    </think>

    The answer.

Pure. The gateway has one reader per choice. What is found depends on the text alone, not on how it was cut into pieces.
"""

import enum
from typing import NamedTuple

OPENING, CLOSING = "<think>", "</think>"
_BLANKS = " \t\r\n"


class Thoughts(NamedTuple):
    """A piece of an answer: thoughts, and what it says."""

    thoughts: str
    content: str


class _State(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    BEHIND = enum.auto()  # before the first character of the content that is no blank
    CONTENT = enum.auto()


class ThoughtReader:
    """Tells thoughts from content. Blanks around thoughts belong to neither. Marks behind the first closing one are content, as is an
    answer that does not begin with an opening one, unless the prompt has ended with it: then it may be repeated."""

    def __init__(self, is_open: bool) -> None:
        """``is_open``: the prompt ended within thoughts."""
        self._state = _State.BEFORE
        self._unmarked = _State.INSIDE if is_open else _State.CONTENT  # what an answer without an opening mark begins with
        self._held = ""
        self._has_begun = False  # thoughts have, other than with blanks

    @property
    def is_inside(self) -> bool:
        """Return whether thoughts have begun and not ended."""
        return (self._unmarked if self._state is _State.BEFORE else self._state) is _State.INSIDE

    def push(self, text: str) -> Thoughts:
        """Return what is certain with this text."""
        return self._read(text, at_end=False)

    def flush(self) -> Thoughts:
        """Return the rest, when nothing more will come."""
        return self._read("", at_end=True)

    def _read(self, text: str, at_end: bool) -> Thoughts:
        self._held += text
        if self._state is _State.BEFORE:
            self._open(at_end)
        thoughts = self._think(at_end) if self._state is _State.INSIDE else ""
        if self._state is _State.BEHIND and (rest := self._held.lstrip(_BLANKS)):
            self._held, self._state = rest, _State.CONTENT
        content = ""
        if self._state is _State.CONTENT:
            content, self._held = self._held, ""
        return Thoughts(thoughts, content)

    def _open(self, at_end: bool) -> None:
        begun = self._held.lstrip(_BLANKS)
        if begun.startswith(OPENING):
            self._held, self._state = begun.removeprefix(OPENING), _State.INSIDE
        elif at_end or not OPENING.startswith(begun):
            self._state = self._unmarked

    def _think(self, at_end: bool) -> str:
        thoughts, closing, rest = self._held.partition(CLOSING)
        if closing:
            self._held, self._state = rest, _State.BEHIND
        elif not at_end:
            thoughts = thoughts[: len(thoughts) - _num_begun(thoughts)]
        shown = thoughts.rstrip(_BLANKS)
        if not closing:
            self._held = self._held[len(shown) :]
        if not self._has_begun:
            shown = shown.lstrip(_BLANKS)
        self._has_begun |= bool(shown)
        return shown


def _num_begun(text: str) -> int:
    """Length of the longest suffix of ``text`` that begins a closing mark."""
    return next((length for length in range(len(CLOSING) - 1, 0, -1) if text.endswith(CLOSING[:length])), 0)
