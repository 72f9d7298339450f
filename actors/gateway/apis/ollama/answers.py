"""Answers of Ollama's API: lines of JSON, errors, and the model. ``requests`` has the requests. Pure."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from .....models.text.tool_calls import CallPiece, whole_calls
from .....runtime.errors import RequestError
from ...answers.choices import Ending, Piece, Usage
from ...reading.validation import Generation, Limits
from ..openai.answers import rfc3339
from .tools import shown_call

_NEVER = "9999-12-31T23:59:59Z"
_encode = msgspec.json.Encoder().encode


class LineFormat(NamedTuple):
    """The form of a route's answers: see ``AnswerFormat``. ``is_chat``: they hold a message rather than text alone."""

    id_prefix: str
    is_chat: bool

    def begin(self, id: str, created: int, model: str, fingerprint: str) -> "LineAnswer":
        return LineAnswer(id, rfc3339(created), model, self.is_chat)

    def loaded(self, created: int, model: str) -> bytes:
        """Return the answer to a request that asks for nothing but that the model be loaded."""
        return self.begin("", created, model, "").line("", done=True, done_reason="load")


CHAT = LineFormat("chat-", True)
GENERATE = LineFormat("generate-", False)


class LineAnswer:
    """One answer. It has one choice."""

    def __init__(self, id: str, created_at: str, model: str, is_chat: bool) -> None:
        self.id = id
        self.content_type = "application/json"
        self._suffix = id.partition("-")[2]
        self._head = {"model": model, "created_at": created_at}
        self._is_chat = is_chat

    def choice(self, index: int, piece: Piece, ending: Ending, with_ids: bool) -> dict[str, Any]:
        shown = {"text": piece.text, "thoughts": piece.thoughts, "calls": whole_calls(piece.calls)}
        return {"shown": shown, "ending": ending, "logprobs": _logprobs(piece)}

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage, more: dict[str, Any]) -> bytes:
        (choice,) = choices
        return self.line(**choice["shown"], **choice["logprobs"], **_end(choice["ending"], usage), **more)

    def chunks(self, generation: Generation) -> "Lines":
        return Lines(self)

    def line(self, text: str, calls: Sequence[CallPiece] = (), thoughts: str = "", **more: Any) -> bytes:
        """Return a line with this text, these thoughts and these whole calls."""
        shown = [shown_call(call, f"call_{self._suffix}_{call.number}") for call in calls]
        thinking = {"thinking": thoughts} if thoughts else {}
        message = {"role": "assistant", "content": text, **thinking, **({"tool_calls": shown} if shown else {})}
        said = {"message": message} if self._is_chat else {"response": text, **thinking}
        return _encode({**self._head, **said, **more}) + b"\n"


class Lines:
    """The lines of its stream: see ``Chunks``. A call is in one of them, when something follows it."""

    content_type = "application/x-ndjson"
    num_events = 0

    def __init__(self, answer: LineAnswer) -> None:
        self._answer = answer
        self._pieces: list[CallPiece] = []  # of a call
        self.keep_alive = answer.line("", done=False)

    def role(self, index: int, usage: Usage) -> bytes:
        return b""

    def text(self, index: int, piece: Piece, usage: Usage) -> bytes:
        rest, begun = piece.calls_around
        self._pieces += rest
        logprobs = _logprobs(piece)
        lines = []
        if piece.text or piece.thoughts or logprobs:
            lines += [self._call(), self._answer.line(piece.text, thoughts=piece.thoughts, **logprobs, done=False)]
        for call in begun:
            if call.name is not None:
                lines.append(self._call())
            self._pieces.append(call)
        return b"".join(lines)

    def finish(self, index: int, ending: Ending, piece: Piece, usage: Usage) -> bytes:
        return self._call() + self._answer.line("", **_logprobs(piece), **_end(ending, usage))

    def _call(self) -> bytes:
        """Return the line of the call whose pieces have come; empty if there is none."""
        calls, self._pieces = whole_calls(self._pieces), []
        return self._answer.line("", calls, done=False) if calls else b""

    def end(self, usage: Usage) -> bytes:
        return b""

    def error(self, error: RequestError) -> bytes:
        return error_body(error) + b"\n"


def error_body(error: RequestError) -> bytes:
    """``{"error": message}``. The message names the field at fault."""
    return _encode({"error": error.message})


def _logprobs(piece: Piece) -> dict[str, Any]:
    """Return the field ``logprobs`` of the piece's tokens, whose entries are those of chat completions; nothing without any."""
    return {"logprobs": piece.logprobs["content"]} if piece.logprobs and piece.logprobs["content"] else {}


def _end(ending: Ending, usage: Usage) -> dict[str, Any]:
    """Return the fields of the last line. Durations are in nanoseconds, and at least 1: clients divide by them. The model has been
    loaded before."""
    durations = (ending.queue_s, ending.prefill_s, ending.decode_s)
    queue_ns, prefill_ns, decode_ns = (max(1, round(1e9 * seconds)) for seconds in durations)
    return {
        "done": True,
        "done_reason": "stop" if ending.reason == "tool_calls" else ending.reason,
        "total_duration": queue_ns + prefill_ns + decode_ns,
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": prefill_ns,
        "eval_count": usage.completion_tokens,
        "eval_duration": decode_ns,
        **usage.of_media,
    }


def model_entry(limits: Limits, created: int) -> dict[str, Any]:
    """Return the model as ``GET /api/tags`` lists it. Its digest is that of its name and size: clients show the beginning."""
    name, num_bytes = limits.model_name, limits.weight_bytes
    return {
        "name": name,
        "model": name,
        "modified_at": rfc3339(created),
        "size": num_bytes,
        "digest": sha256(f"{name} {num_bytes}".encode()).hexdigest(),
        "details": {"format": "safetensors", "family": limits.family, "families": [limits.family]},
    }


def running_model(limits: Limits, created: int) -> dict[str, Any]:
    """Return the model as ``GET /api/ps`` lists it."""
    return {**model_entry(limits, created), "expires_at": _NEVER, "context_length": limits.max_context}


def model_details(limits: Limits, created: int) -> dict[str, Any]:
    """Return the model as ``POST /api/show`` describes it."""
    kinds = {"image": "vision", "audio": "audio"}
    tools = [name for name, has in (("tools", limits.takes_tools), ("thinking", limits.thinks)) if has]
    capabilities = ["completion", *tools, *(name for kind, name in kinds.items() if kind in limits.kinds)]
    entry = model_entry(limits, created)
    facts = {"general.architecture": limits.family, f"{limits.family}.context_length": limits.max_context}
    return {"modified_at": entry["modified_at"], "details": entry["details"], "model_info": facts, "capabilities": capabilities}
