"""Answers over HTTP: completion objects, server-sent events and errors, in OpenAI's shapes.

Pure. The constant parts of a stream's chunks are encoded once, so that a chunk costs little more than its text.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from .....models.text.tool_calls import CallPiece, whole_calls
from .....runtime.errors import RequestError
from ...answers.answer_format import COMMENT
from ...answers.choices import NOTHING, Ending, Piece, Usage
from ...reading.validation import Generation

_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def usage(numbers: Usage) -> dict[str, Any]:
    """``completion_tokens`` counts the end-of-sequence token, as vLLM does."""
    return {
        "prompt_tokens": numbers.prompt_tokens,
        "completion_tokens": numbers.completion_tokens,
        "total_tokens": numbers.prompt_tokens + numbers.completion_tokens,
    }


def final_usage(numbers: Usage) -> dict[str, Any]:
    """The usage of a whole answer."""
    of_answers = {"completion_tokens_details": {"reasoning_tokens": numbers.thought_tokens}} if numbers.thought_tokens else {}
    return {**usage(numbers), "prompt_tokens_details": {"cached_tokens": numbers.cached_tokens, **numbers.of_media}, **of_answers}


def json_response(value: object) -> web.Response:
    """Return a response with this value as its body."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def rfc3339(created: int) -> str:
    """Return a Unix time in seconds as other APIs than OpenAI's have it."""
    return datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")


def error_body(error: RequestError) -> bytes:
    """``{"error": {message, type, param, code}}``. ``code`` is OpenAI's where clients look for it, else the status."""
    inner = {"message": error.message, "type": error.type, "param": error.param, "code": error.code or error.status}
    return _encode({"error": inner})


class Answer(NamedTuple):
    """The shape of a route's answers. ``before``, ``after``: the JSON around the text in a chunk's choice; ``role`` opens a stream,
    ``nothing`` is a choice without text."""

    id_prefix: str
    object: str
    chunk: str
    before: bytes
    after: bytes
    role: bytes
    nothing: bytes

    def choice(self, text: str, thoughts: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        if not self.role:
            return {"text": text}
        message = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
        more = {"reasoning_content": thoughts, "tool_calls": calls}
        return {"message": {**message, **{name: value for name, value in more.items() if value}}}

    def begin(self, id: str, created: int, model: str, fingerprint: str) -> "Completion":
        """See ``AnswerFormat``."""
        return Completion(self, id, created, model, fingerprint)


CHAT = Answer(
    "chatcmpl-", "chat.completion", "chat.completion.chunk",
    b'"delta":{"content":', b"}", b'"delta":{"role":"assistant","content":""}', b'"delta":{}',
)  # fmt: skip
TEXT = Answer("cmpl-", "text_completion", "text_completion", b'"text":', b"", b"", b'"text":""')


class Completion:
    """The identity of one answer, and its chunks."""

    def __init__(self, answer: Answer, id: str, created: int, model: str, fingerprint: str) -> None:
        self.answer = answer
        self.id = id
        self.content_type = "application/json"
        self._created = created
        self._model = model
        self._fingerprint = fingerprint

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage, more: dict[str, Any]) -> bytes:
        """The body of an answer that is not streamed. ``choices`` are ``choice``s; ``more``: fields beside ``usage``."""
        return _encode(self._object(self.answer.object, choices, {"usage": final_usage(usage), **more}))

    def choice(self, index: int, piece: Piece, ending: Ending, with_ids: bool) -> dict[str, Any]:
        """A whole choice."""
        calls = [self.call(index, call) for call in whole_calls(piece.calls)]
        choice = {"index": index, **self.answer.choice(piece.text, piece.thoughts, calls)}
        choice |= {"logprobs": piece.logprobs, "finish_reason": ending.reason}
        return {**choice, "token_ids": piece.ids} if with_ids else choice

    def call(self, choice: int, call: CallPiece) -> dict[str, Any]:
        """A call or its beginning, with an id that no other has."""
        id = f"call_{self.id.removeprefix(self.answer.id_prefix)}_{choice}_{call.number}"
        return {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def chunks(self, generation: Generation) -> "ChunkEncoder":
        """The chunks of its stream."""
        return ChunkEncoder(self, generation.include_usage, generation.continuous_usage, generation.return_token_ids)

    def _object(self, kind: str, choices: Sequence[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
            **more,
        }


class ChunkEncoder:
    """Chunks of one stream: of each choice role, text …, finish; then usage. All chunks except the last say ``usage: null`` when usage
    was asked for."""

    content_type = "text/event-stream; charset=utf-8"
    keep_alive = COMMENT
    num_events = 0

    def __init__(self, completion: Completion, include_usage: bool, continuous_usage: bool, token_ids: bool) -> None:
        self._completion = completion
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._token_ids = token_ids
        self._answer = completion.answer
        head = _encode(completion._object(self._answer.chunk, [], {}))
        assert head.endswith(b'"choices":[]}')
        self._head = b"data: " + head.removesuffix(b"]}")

    def role(self, index: int, usage: Usage) -> bytes:
        """The opening chunk of a choice; empty where there are no roles."""
        return self._choice(index) + self._answer.role + self._tail(b"null", NOTHING, usage) if self._answer.role else b""

    def text(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """Chunks of thoughts, of text, and of each piece of a call. Ids and ``logprobs`` are in the first one."""
        deltas = [b'"delta":{"reasoning_content":' + _encode(piece.thoughts) + b"}"] if piece.thoughts else []
        if piece.text or not (piece.calls or piece.thoughts):
            deltas.append(self._answer.before + _encode(piece.text) + self._answer.after)
        deltas += [self._call(index, call) for call in piece.calls]
        pieces = [piece] + [NOTHING] * (len(deltas) - 1)
        return b"".join(
            self._choice(index) + delta + self._tail(b"null", one, usage) for delta, one in zip(deltas, pieces, strict=True)
        )

    def _call(self, index: int, call: CallPiece) -> bytes:
        begun = {"function": {"arguments": call.arguments}} if call.name is None else self._completion.call(index, call)
        return b'"delta":{"tool_calls":[' + _encode({"index": call.number, **begun}) + b"]}"

    def finish(self, index: int, ending: Ending, piece: Piece, usage: Usage) -> bytes:
        """The last chunk of a choice. The text of ``piece`` is empty."""
        return self._choice(index) + self._answer.nothing + self._tail(_encode(ending.reason), piece, usage)

    def end(self, usage: Usage) -> bytes:
        """The usage, if it was asked for, and the end."""
        if not self._include_usage:
            return _DONE
        return self._head + b'],"usage":' + _encode(final_usage(usage)) + b"}\n\n" + _DONE

    def error(self, error: RequestError) -> bytes:
        """An error, and the end."""
        return b"data: " + error_body(error) + b"\n\n" + _DONE

    def _choice(self, index: int) -> bytes:
        return self._head + b'{"index":%d,' % index

    def _tail(self, finish: bytes, piece: Piece, numbers: Usage) -> bytes:
        logprobs = b"null" if piece.logprobs is None else _encode(piece.logprobs)
        ids = b',"token_ids":' + _encode(piece.ids) if self._token_ids else b""
        tail = b',"logprobs":' + logprobs + b',"finish_reason":' + finish + ids + b"}]"
        if self._continuous_usage:
            return tail + b',"usage":' + _encode(usage(numbers)) + b"}\n\n"
        return tail + (b',"usage":null}\n\n' if self._include_usage else b"}\n\n")
