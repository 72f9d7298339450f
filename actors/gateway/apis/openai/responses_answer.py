"""Answers of OpenAI's Responses API: a response or its events. Only ``keep`` has effects, once all is known."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from .....models.text.tool_calls import CallPiece, whole_calls
from .....runtime.errors import RequestError
from ...answers.answer_format import COMMENT
from ...answers.choices import Ending, Piece, Usage
from ...reading.content import Message
from ...reading.tool_messages import Call, arguments_of
from ...reading.validation import Generation
from .answers import error_body

ID_PREFIX = "resp_"
_encode = msgspec.json.Encoder().encode


class Item(NamedTuple):
    """An item of the output: a message, thoughts, or a call where ``call`` is its beginning. ``number``: of the message or of the call,
    from 0. ``texts``: its text, or that of its arguments, in pieces."""

    number: int
    call: CallPiece | None
    texts: list[str]
    is_thoughts: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_message(self) -> bool:
        return self.call is None and not self.is_thoughts

    @property
    def part_type(self) -> str:
        """Of the text of a message or of thoughts."""
        return "reasoning_text" if self.is_thoughts else "output_text"


def items_of(piece: Piece) -> list[Item]:
    """Return the items of a whole answer: its thoughts, its text, unless it is others alone, and its calls."""
    calls = [Item(call.number, call, [call.arguments]) for call in whole_calls(piece.calls)]
    thoughts = [Item(0, None, [piece.thoughts], is_thoughts=True)] if piece.thoughts else []
    return [*thoughts, *([Item(0, None, [piece.text])] if piece.text or not (calls or thoughts) else []), *calls]


class Ended(NamedTuple):
    """A response that has ended, without its usage, and the message that it adds to the conversation."""

    object: dict[str, Any]
    message: Message


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]


_decode_output = msgspec.json.Decoder(_Output).decode


def output_of(body: bytes) -> dict[str, dict[str, Any]]:
    """Return the items of a response's JSON by their ids."""
    return {item["id"]: item for item in _decode_output(body).output}


def response_of(item_id: str) -> str:
    """Return the id of the response whose item would have this id."""
    return ID_PREFIX + item_id.partition("_")[2].partition("_")[0]


class Response:
    """One response. The ids of its items end as its own."""

    def __init__(
        self,
        id: str,
        shown: Mapping[str, Any],
        keep: Callable[[str, Message, bytes], None],
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        """``shown``: its fields that are known from the beginning. ``keep`` is called with its id, message and JSON at its end.
        ``namespaces``: namespace and name of functions by the name that the model knows."""
        self.id = id
        self.content_type = "application/json"
        self._suffix = id.removeprefix(ID_PREFIX)
        self._shown = {**shown, "text": shown["text"] or {"format": {"type": "text"}}}
        self._keep = keep
        self._namespaces = namespaces

    def choice(self, index: int, piece: Piece, ending: Ending, with_ids: bool) -> dict[str, Any]:
        return {"ended": self.ended(items_of(piece), ending)}

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage, more: dict[str, Any]) -> bytes:
        return self.finished(choices[0]["ended"], usage)

    def chunks(self, generation: Generation) -> "ResponseEvents":
        return ResponseEvents(self)

    def finished(self, ended: Ended, usage: Usage) -> bytes:
        """Return the JSON of a response that has ended, and keep it."""
        body = _encode({**ended.object, "usage": _usage(usage)})
        self._keep(self.id, ended.message, body)
        return body

    def ended(self, items: Sequence[Item], ending: Ending) -> Ended:
        """Return the response that ends with these items."""
        text = "".join(item.text for item in items if item.is_message)
        calls = [Call(self.call_id(item), item.call.name or "", arguments_of(item.text)) for item in items if item.call is not None]
        status = status_of(ending)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        output = [self.item(item, "completed") for item in items[:-1]] + [self.item(items[-1], status)]
        thoughts = "".join(item.text for item in items if item.is_thoughts)
        message = Message("assistant", text, calls=tuple(calls), thoughts=thoughts)
        return Ended({**self.object(status, output), "incomplete_details": details}, message)

    def object(self, status: str, output: Sequence[dict[str, Any]], error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return a response with this output."""
        constant = {"object": "response", "truncation": "disabled"}
        fields = {"status": status, "error": error, "incomplete_details": None, "output": output, "usage": None}
        return {"id": self.id, **constant, **self._shown, **fields}

    def failed(self, error: RequestError) -> dict[str, Any]:
        """Return the response that ends with an error."""
        return self.object("failed", [], problem_of(error))

    def item(self, item: Item, status: str) -> dict[str, Any]:
        """Return the form of an item, which is empty while it is in progress."""
        is_begun = status == "in_progress"
        if item.call is None:
            content = [] if is_begun else [part(item)]
            more: dict[str, Any] = {"summary": []} if item.is_thoughts else {"role": "assistant"}
            kind = "reasoning" if item.is_thoughts else "message"
            return {"type": kind, "id": self.item_id(item), "status": status, **more, "content": content}
        called = {"call_id": self.call_id(item), **self.called(item.call), "arguments": "" if is_begun else item.text}
        return {"type": "function_call", "id": self.item_id(item), "status": status, **called}

    def called(self, call: CallPiece) -> dict[str, Any]:
        """Return the name of a called function, and its namespace if it has one."""
        if (found := self._namespaces.get(call.name or "")) is None:
            return {"name": call.name}
        namespace, name = found
        return {"name": name, "namespace": namespace}

    def item_id(self, item: Item) -> str:
        """Return the id of an item, which no other has."""
        if item.call is not None:
            return f"fc_{self._suffix}_{item.number}"
        return ("rs_" if item.is_thoughts else "msg_") + self._suffix + (f"_{item.number}" if item.number else "")

    def call_id(self, item: Item) -> str:
        """Return the id by which the result of a call names it."""
        return f"call_{self._suffix}_{item.number}"


class ResponseEvents:
    """The events of its stream: see ``Chunks``. Text behind a call is another message."""

    content_type = "text/event-stream; charset=utf-8"
    keep_alive = COMMENT

    def __init__(self, response: Response, first_shown: int = 0) -> None:
        """``first_shown``: the number of the first event that is not left out."""
        self._response = response
        self._first_shown = first_shown
        self.num_events = 0
        self._is_created = False
        self._items: list[Item] = []
        self._ended: Ended | None = None

    def role(self, index: int, usage: Usage) -> bytes:
        return self._created()

    def _created(self) -> bytes:
        self._is_created = True
        response = self._response.object("in_progress", [])
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def queued(self) -> bytes:
        """Return the events of a response in the background that waits."""
        self._is_created = True
        response = self._response.object("queued", [])
        return self._event("response.created", response=response) + self._event("response.queued", response=response)

    def started(self) -> bytes:
        """Return the event of one in the background that begins."""
        return self._event("response.in_progress", response=self._response.object("in_progress", []))

    def last(self, status: str, body: bytes, error: RequestError | None) -> bytes:
        """Return the events of the end of one in the background, whose JSON is ``body``."""
        last = self._event(f"response.{status}", response=msgspec.Raw(body))
        return last if error is None else last + self._problem(error)

    @property
    def ended(self) -> Ended:
        """Return the response, once its items have ended."""
        assert self._ended is not None
        return self._ended

    def text(self, index: int, piece: Piece, usage: Usage) -> bytes:
        rest, begun = piece.calls_around
        events = [self._arguments(call.arguments) for call in rest]  # of the call that is open
        if piece.thoughts:
            events += [self._open(Item(0, None, [], is_thoughts=True)), self._delta(piece.thoughts)]
        if piece.text:
            events += [self._message(), self._delta(piece.text)]
        for call in begun:
            events.append(self._arguments(call.arguments) if call.name is None else self._begin(Item(call.number, call, [])))
        return b"".join(events)

    def finish(self, index: int, ending: Ending, piece: Piece, usage: Usage) -> bytes:
        events = [] if self._items else [self._message()]
        self._ended = self._response.ended(self._items, ending)
        return b"".join([*events, self._end_item(status_of(ending))])

    def end(self, usage: Usage) -> bytes:
        assert self._ended is not None
        status, body = self._ended.object["status"], self._response.finished(self._ended, usage)
        return self._event(f"response.{status}", response=msgspec.Raw(body))

    def error(self, error: RequestError) -> bytes:
        """``response.failed``, and an ``error`` at which OpenAI's clients raise. They take neither from a response not yet created."""
        created = b"" if self._is_created else self._created()
        failed = self._event("response.failed", response=self._response.failed(error))
        return created + failed + self._problem(error)

    def _problem(self, error: RequestError) -> bytes:
        return self._event("error", **problem_of(error), param=error.param, **msgspec.json.decode(error_body(error)))

    def _message(self) -> bytes:
        return self._open(Item(sum(item.is_message for item in self._items), None, []))

    def _open(self, item: Item) -> bytes:
        """Begin a message or thoughts unless some are open."""
        last = self._items[-1] if self._items else None
        if last is not None and last.call is None and last.is_thoughts == item.is_thoughts:
            return b""
        return self._begin(item)

    def _begin(self, item: Item) -> bytes:
        """Begin an item behind the last one, which ends."""
        end = self._end_item("completed") if self._items else b""
        self._items.append(item)
        shown = self._response.item(item, "in_progress")
        begin = end + self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)
        return begin + (self._event("response.content_part.added", **self._part_place, part=part(item)) if item.call is None else b"")

    def _end_item(self, status: str) -> bytes:
        item = self._items[-1]
        if item.call is None:
            done = self._event(f"response.{item.part_type}.done", **self._part_place, text=item.text, **_logprobs(item))
            done += self._event("response.content_part.done", **self._part_place, part=part(item))
        else:
            more = {"name": self._response.called(item.call)["name"], "arguments": item.text}
            done = self._event("response.function_call_arguments.done", **self._place, **more)
        shown = self._response.item(item, status)
        return done + self._event("response.output_item.done", output_index=len(self._items) - 1, item=shown)

    def _delta(self, text: str) -> bytes:
        item = self._items[-1]
        item.texts.append(text)
        return self._event(f"response.{item.part_type}.delta", **self._part_place, delta=text, **_logprobs(item))

    def _arguments(self, text: str) -> bytes:
        self._items[-1].texts.append(text)
        return self._event("response.function_call_arguments.delta", **self._place, delta=text)

    @property
    def _place(self) -> dict[str, Any]:
        """The place of the last item."""
        return {"item_id": self._response.item_id(self._items[-1]), "output_index": len(self._items) - 1}

    @property
    def _part_place(self) -> dict[str, Any]:
        """The place of the last item's text."""
        return {**self._place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self.num_events = self.num_events, self.num_events + 1
        if number < self._first_shown:
            return b""
        data = _encode({"type": kind, "sequence_number": number, **fields})
        return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


def problem_of(error: RequestError) -> dict[str, Any]:
    """Return an error as a response has it."""
    return {"code": error.code or "server_error", "message": error.message}


def part(item: Item) -> dict[str, Any]:
    """Return the content of a message or of thoughts."""
    return {"type": item.part_type, "text": item.text, **({} if item.is_thoughts else {"annotations": []}), **_logprobs(item)}


def _logprobs(item: Item) -> dict[str, Any]:
    """Return the field, which messages alone have."""
    return {} if item.is_thoughts else {"logprobs": []}


def status_of(ending: Ending) -> str:
    """Return "completed", or "incomplete" where the answer was cut."""
    return "incomplete" if ending.reason == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0, **usage.of_media},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
