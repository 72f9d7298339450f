"""The forms of an answer, one for each API that the endpoint speaks: ``apis`` has them.

Completions and streams write every answer through these, so limits, cancellation, metrics and the log are the same for all.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from ....runtime.errors import RequestError
from ..reading.validation import Generation
from .choices import Ending, Piece, Usage

COMMENT = b": keep-alive\n"
"""Keeps a silent stream of events alive. No empty line follows: clients that take each empty line for the end of an event would read
an event without data. So the comment becomes the first line of the next event's block."""


class AnswerFormat(Protocol):
    """The form of a route's answers."""

    @property
    def id_prefix(self) -> str: ...

    def begin(self, id: str, created: int, model: str, fingerprint: str) -> "WrittenAnswer":
        """Return the writer of one answer. ``created``: Unix time in seconds."""
        ...


class WrittenAnswer(Protocol):
    """One answer, as a whole or as a stream."""

    @property
    def id(self) -> str: ...

    @property
    def content_type(self) -> str:
        """Of an answer that is not streamed."""
        ...

    def choice(self, index: int, piece: Piece, ending: Ending, with_ids: bool) -> dict[str, Any]:
        """Return a whole choice."""
        ...

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage, more: dict[str, Any]) -> bytes:
        """Return the body of an answer that is not streamed. ``more``: fields beside the usage."""
        ...

    def chunks(self, generation: Generation) -> "Chunks":
        """Return the encoder of its stream."""
        ...


class Chunks(Protocol):
    """The bytes of a stream. A choice begins with ``role``, goes on with ``text``, and ends with ``finish``; the stream ends with
    ``end`` or ``error``, and never without. ``keep_alive`` may come anywhere. ``num_events``: that were given numbers, where they have
    any."""

    num_events: int

    @property
    def content_type(self) -> str: ...

    @property
    def keep_alive(self) -> bytes: ...

    def role(self, index: int, usage: Usage) -> bytes: ...

    def text(self, index: int, piece: Piece, usage: Usage) -> bytes: ...

    def finish(self, index: int, ending: Ending, piece: Piece, usage: Usage) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...

    def error(self, error: RequestError) -> bytes: ...
