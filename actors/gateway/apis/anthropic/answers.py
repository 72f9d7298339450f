"""Answers of Anthropic's API: a message or its events, errors, and the model. ``messages`` has the requests. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from .....models.text.tool_calls import CallPiece, whole_calls
from .....runtime.errors import RequestError
from ...answers.choices import Ending, Piece, Usage
from ...reading.tool_messages import arguments_as_sent
from ...reading.validation import Generation, Limits
from ..openai.answers import rfc3339

_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_TEXT = {"type": "text", "text": ""}
_encode = msgspec.json.Encoder().encode


class MessageFormat:
    """The form of its answers: see ``AnswerFormat``."""

    id_prefix = "msg_"

    def begin(self, id: str, created: int, model: str, fingerprint: str) -> "MessageAnswer":
        return MessageAnswer(id, model)


class MessageAnswer:
    """One message. An answer has one choice."""

    def __init__(self, id: str, model: str) -> None:
        self.id = id
        self.content_type = "application/json"
        self._model = model

    def choice(self, index: int, piece: Piece, ending: Ending, with_ids: bool) -> dict[str, Any]:
        calls = whole_calls(piece.calls)
        texts = [thinking(piece.thoughts)] if piece.thoughts else []
        if piece.text or not (calls or texts):
            texts.append({"type": "text", "text": piece.text})
        uses = [self.tool_use(call, arguments_as_sent(call.arguments)) for call in calls]
        return {"content": [*texts, *uses], **_stop_of(ending)}

    def tool_use(self, call: CallPiece, input: object) -> dict[str, Any]:
        """Return the block of a call, with an id that no other has."""
        id = f"toolu_{self.id.removeprefix(MessageFormat.id_prefix)}_{call.number}"
        return {"type": "tool_use", "id": id, "name": call.name, "input": input}

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage, more: dict[str, Any]) -> bytes:
        return _encode(self.message({**choices[0], "usage": _usage(usage), **more}))

    def chunks(self, generation: Generation) -> "MessageEvents":
        return MessageEvents(self)

    def message(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a message with these fields."""
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model, **fields}


class MessageEvents:
    """The events of its stream: see ``Chunks``. Thoughts, text and each call are a block; text behind a call is another one."""

    content_type = "text/event-stream; charset=utf-8"
    num_events = 0
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, answer: MessageAnswer) -> None:
        self._answer = answer
        self._index = -1  # of the last block
        self._open = ""  # its type while it is open

    def role(self, index: int, usage: Usage) -> bytes:
        numbers = _usage(usage._replace(completion_tokens=0))
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": numbers}
        return _event({"type": "message_start", "message": self._answer.message(nothing)})

    def text(self, index: int, piece: Piece, usage: Usage) -> bytes:
        rest, begun = piece.calls_around
        events = [self._arguments(call) for call in rest]  # of the call that is open
        if piece.thoughts:
            events += [self._block(thinking("")), self._delta({"type": "thinking_delta", "thinking": piece.thoughts})]
        if piece.text:
            events += [self._block(_TEXT), self._delta({"type": "text_delta", "text": piece.text})]
        for call in begun:
            events.append(self._arguments(call) if call.name is None else self._begin(self._answer.tool_use(call, {})))
        return b"".join(events)

    def finish(self, index: int, ending: Ending, piece: Piece, usage: Usage) -> bytes:
        begin = self._block(_TEXT) if self._index < 0 else b""
        return begin + self._stop() + _event({"type": "message_delta", "delta": _stop_of(ending), "usage": _usage(usage)})

    def _block(self, block: dict[str, Any]) -> bytes:
        """Begin a block unless one of its type is open."""
        return b"" if self._open == block["type"] else self._begin(block)

    def _arguments(self, call: CallPiece) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, block: dict[str, Any]) -> bytes:
        """Begin a block behind the last one."""
        stop = self._stop()
        self._index, self._open = self._index + 1, block["type"]
        return stop + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        """End the block that is open. Clients give thoughts back only with the signature that ended them, even an empty one."""
        kind, self._open = self._open, ""
        signature = self._delta({"type": "signature_delta", "signature": ""}) if kind == "thinking" else b""
        return signature + _event({"type": "content_block_stop", "index": self._index}) if kind else b""

    def end(self, usage: Usage) -> bytes:
        return _event({"type": "message_stop"})

    def error(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"


def thinking(thoughts: str) -> dict[str, Any]:
    """Return the block of thoughts. Nobody signs them."""
    return {"type": "thinking", "thinking": thoughts, "signature": ""}


def error_body(error: RequestError) -> bytes:
    """``{"type": "error", "error": {"type", "message"}}``. The message names the field at fault. Without its details Anthropic's tool
    runner would not go on without ``thread``."""
    kind = "request_too_large" if error.status == 413 else "api_error" if error.type == "internal_error" else error.type
    details = {"details": _NO_THREADS} if error.param == "thread" else {}
    return _encode({"type": "error", "error": {"type": kind, "message": error.message, **details}})


def _event(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + _encode(event) + b"\n\n"


def _stop_of(ending: Ending) -> dict[str, str | None]:
    if ending.reason == "length":
        return {"stop_reason": "model_context_window_exceeded" if ending.is_full else "max_tokens", "stop_sequence": None}
    if ending.reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if ending.stop else "end_turn", "stop_sequence": ending.stop or None}


def _usage(usage: Usage) -> dict[str, float]:
    """All tokens of the prompt are ``input_tokens`` and ``cache_read_input_tokens`` together."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **usage.of_media,
    }


def model_info(limits: Limits, created: int) -> dict[str, Any]:
    """Return the model as ``GET /v1/models/NAME`` describes it. ``created``: Unix time in seconds since which it is served."""
    name, most = limits.model_name, limits.max_context
    constant = {"type": "model", "lifecycle": "active"}
    return {"id": name, "display_name": name, **constant, "created_at": rfc3339(created), "max_input_tokens": most, "max_tokens": most}


def model_page(limits: Limits, created: int) -> dict[str, Any]:
    """Return the one page of ``GET /v1/models``."""
    name = limits.model_name
    return {"data": [model_info(limits, created)], "has_more": False, "first_id": name, "last_id": name}
