"""Responses in the background: what is kept of one while it is under way and afterwards, and its events, made of the cuts of its text.

Pure. Each piece of text is an entry of its log, and makes the same events whenever it is read: so a stream that is asked for again has
the same numbers. ``apis/background`` runs them.
"""

import struct
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from .....models.text.thoughts import ThoughtReader
from .....models.text.tool_calls import CallReader
from .....runtime.bus.messages import FinishReason, RequestSpec
from .....runtime.errors import RequestError
from ...answers.choices import Ending, Piece, Usage
from .input_items import Item
from .responses_answer import Ended, Response, ResponseEvents
from .responses_tools import namespaces_of
from .stored_conversation import StoredConversation

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_LENGTH = struct.Struct("<I")
STARTED = _LENGTH.pack(0)
"""The entry of a log that the model has begun: the text of any other is longer."""
NO_USAGE = Usage(0, 0, 0)


def entry_of(text: str) -> bytes:
    """Return the entry for a piece of text that is not empty."""
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def texts_of(log: bytes) -> Iterator[str]:
    """Yield the texts of the entries; "" for ``STARTED``."""
    at = 0
    while at < len(log):
        (length,) = _LENGTH.unpack_from(log, at)
        at += _LENGTH.size
        yield log[at : at + length].decode()
        at += length


class Form(msgspec.Struct, array_like=True, frozen=True):
    """The fields that a response is rendered from. ``shown``: its fields that are known from the beginning, as JSON. ``tool_names``: of
    functions that may be called; None: of none. ``is_thinking``: its answer begins within thoughts; None: it has none that are told
    apart. ``drops_thoughts``: they are left out."""

    id: str
    shown: bytes
    tool_names: list[str] | None
    is_thinking: bool | None
    drops_thoughts: bool

    def response(self) -> Response:
        """Return its writer, which keeps nothing by itself."""
        shown = _decode_json(self.shown)
        return Response(self.id, shown, lambda *_: None, namespaces_of(shown["tools"]))


class Job(msgspec.Struct, array_like=True, frozen=True):
    """A response under way: whatever another gateway needs to go on with it. ``media``: of the spec's items; None where the
    conversation has the same. ``field_names``: by the controller's. ``client``: the name of the API key, "" without."""

    form: Form
    spec: RequestSpec
    conversation: StoredConversation
    items: tuple[Item, ...]
    media: tuple[bytes | None, ...]
    field_names: dict[str, str]
    client: str


class JobState(msgspec.Struct, array_like=True, frozen=True):
    """The progress of a background answer. ``key``: its own at the controller. ``num_text_bytes``: those in the log. ``strikes``:
    crashes of gateways while it was worked on."""

    key: int
    num_text_bytes: int = 0
    num_thought_tokens: int = 0
    strikes: int = 0


class Problem(msgspec.Struct, array_like=True, frozen=True):
    """An error, as the client gets it."""

    message: str
    status: int
    type: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: RequestError) -> "Problem":
        return cls(error.message, error.status, error.type, error.param, error.code)

    def error(self) -> RequestError:
        return RequestError(self.message, status=self.status, type=self.type, param=self.param, code=self.code)


class Played(msgspec.Struct, array_like=True, frozen=True):
    """A response that has ended, without its JSON: its events can be made again."""

    form: Form
    log: bytes
    status: Status
    reason: FinishReason | None = None
    problem: Problem | None = None

    def end(self, body: bytes) -> "End":
        """Return its end, with its JSON."""
        return End(self.status, body, self.reason, self.problem)


class End(NamedTuple):
    """The end of a response, for those who read its events. ``body``: its JSON. ``reason``: None where it has failed, by ``problem``,
    or was cancelled."""

    status: Status
    body: bytes
    reason: FinishReason | None
    problem: Problem | None


def failed(form: Form, error: RequestError, is_cancelled: bool) -> End:
    """Return the end of a response by an error, or because its client has cancelled it."""
    response = form.response()
    if is_cancelled:
        return End("cancelled", encode_json(response.object("cancelled", [])), None, None)
    return End("failed", encode_json(response.failed(error)), None, Problem.of(error))


class Rendering:
    """The events of one response in order, from its cuts alone. Those before ``first_shown`` are counted and left out."""

    def __init__(self, form: Form, first_shown: int = 0) -> None:
        self._thoughts = None if form.is_thinking is None else ThoughtReader(form.is_thinking)
        self._calls = None if form.tool_names is None else CallReader(form.tool_names)
        self._drops_thoughts = form.drops_thoughts
        self._events = ResponseEvents(form.response(), first_shown)
        self._was_thinking = False

    @property
    def num_events(self) -> int:
        """The number of the next event."""
        return self._events.num_events

    def begin(self) -> bytes:
        """Return the events of a response that waits."""
        return self._events.queued()

    def text(self, text: str) -> bytes:
        """Return the events of an entry: see ``texts_of``."""
        return self._events.text(0, self._read(text, at_end=False), NO_USAGE) if text else self._events.started()

    def flush(self, reason: FinishReason) -> bytes:
        """Return the events with which its items end, once all entries are read."""
        piece, ending = self._read("", at_end=True), Ending(reason)
        return self._events.text(0, piece, NO_USAGE) + self._events.finish(0, ending, piece, NO_USAGE)

    def end(self, end: End) -> bytes:
        """Return the last events."""
        flushed = b"" if end.reason is None else self.flush(end.reason)
        return flushed + self._events.last(end.status, end.body, None if end.problem is None else end.problem.error())

    @property
    def ended(self) -> Ended:
        """Return the response that has ended, once it is flushed."""
        return self._events.ended

    @property
    def is_thinking(self) -> bool:
        """Return whether the last text had a part of thoughts."""
        return self._was_thinking

    def _read(self, text: str, at_end: bool) -> Piece:
        thoughts = ""
        if self._thoughts is not None:
            was_inside = self._thoughts.is_inside
            told = [self._thoughts.push(text), *([self._thoughts.flush()] if at_end else [])]
            text, thoughts = "".join(one.content for one in told), "".join(one.thoughts for one in told)
            self._was_thinking = was_inside or self._thoughts.is_inside or bool(thoughts)
        calls = []
        if self._calls is not None:
            readings = [self._calls.push(text), *([self._calls.flush()] if at_end else [])]
            text, calls = "".join(one.content for one in readings), [call for one in readings for call in one.calls]
        return Piece(text, [], None, calls, "" if self._drops_thoughts else thoughts)


_decode_json: Any = msgspec.json.Decoder(dict[str, Any]).decode
encode_json = msgspec.json.Encoder().encode
encode = msgspec.msgpack.Encoder().encode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_state = msgspec.msgpack.Decoder(JobState).decode
