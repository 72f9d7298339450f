"""OpenAI's Responses API: a body of ``POST /v1/responses`` becomes a ``ChatRequest``, an answer a response or its events."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from ....models.grammar.source import JSON_OBJECT
from ....runtime.errors import RequestError
from ..choices import Ending, Piece, Usage
from ..content import TEXT_PARTS, Conversation, MediaPart, Message, check_messages
from ..fields import Fields, kind_of, refuse, show
from ..grammar_fields import AskedGrammar, read_named_schema
from ..harmless import FLAG, NOTHING, OBJECT, TEXT, Harmless, number, one_of, refuse_others
from ..json_body import decode_body
from ..media import INLINE_PARTS, MediaIntake
from ..media_options import FOR_ALL, OptionReader
from ..output_fields import Output
from ..responses import error_body
from ..validation import ChatRequest, Generation, Limits, read_generation
from .stored import StoredConversations

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MAX_ID_CHARS = 64
_FORMATS = ("text", "json_object", "json_schema")
_IGNORED_FIELDS: Mapping[str, Harmless] = {
    "background": one_of(False),
    "include": NOTHING,
    "max_tool_calls": Harmless(lambda value: type(value) is int, "an integer"),
    "parallel_tool_calls": FLAG,
    "prompt_cache_key": TEXT,
    "prompt_cache_retention": TEXT,
    "reasoning": OBJECT,  # no served model thinks
    "safety_identifier": TEXT,
    "service_tier": one_of("auto", "default"),
    "tools": NOTHING,
    "tool_choice": one_of("none", "auto"),
    "top_logprobs": number(0),
    "truncation": one_of("disabled"),
}
_IGNORED_OF_ITEMS: Mapping[str, Harmless] = {"type": one_of("message"), "id": TEXT, "status": TEXT, "phase": TEXT}
_IGNORED_OF_TEXTS: Mapping[str, Harmless] = {"annotations": NOTHING, "logprobs": NOTHING}
_encode = msgspec.json.Encoder().encode


class Exchange:
    """One request and its response: reads the body, and is the ``AnswerFormat`` of what it reads."""

    id_prefix = "resp_"

    def __init__(self, stored: StoredConversations, tenant: bytes = b"") -> None:
        """``tenant``: goes on with its own conversations alone."""
        self._stored = stored
        self._tenant = tenant
        self._shown: dict[str, Any] = {}  # fields of the request that its response repeats
        self._conversation = Conversation((), ())  # without the instructions, which are of one response alone

    def read(self, body: bytes | bytearray, limits: Limits) -> ChatRequest:
        """Validate the body. mmrt's own fields of chat completions are taken, too.

        Raises:
            RequestError: 400, or 404 for an unknown model, or 413 for a medium that is too large.
        """
        fields = Fields(decode_body(body, limits.body))
        if fields.leftover.get("return_token_ids") is not None:
            raise refuse("return_token_ids", "is not supported")
        self._shown = {
            name: fields.leftover.get(name) for name in ("instructions", "max_output_tokens", "previous_response_id", "text")
        }
        _take_stream_options(fields)
        grammar = _read_text_format(fields)
        generation = read_generation(fields, limits, lambda *_: Output(), grammar, max_tokens_fields=("max_output_tokens",))
        instructions, store, metadata = fields.take_str("instructions"), fields.take("store"), fields.take("metadata")
        if store is not None and not isinstance(store, bool):
            raise refuse("store", f"expected true or false, got {show(store)}")
        if metadata is not None and not isinstance(metadata, dict):
            raise refuse("metadata", f"expected an object, got {kind_of(metadata)}")
        earlier = self._earlier(fields.take_str("previous_response_id", _MAX_ID_CHARS))
        given, for_all = fields.take_required("input"), fields.take(FOR_ALL)
        refuse_others(fields, _IGNORED_FIELDS)
        intake = MediaIntake(limits.kinds, limits.media, OptionReader(for_all, limits.kinds, limits.vision_rules))
        intake.media.extend(earlier.media)  # which count against the limits of one request
        messages = (*earlier.messages, *_read_input(given, intake, limits.max_context))
        self._conversation = Conversation(messages, tuple(intake.media))
        sampling = generation.sampling
        self._shown |= {
            "store": store is not False,
            "metadata": metadata or {},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        system = (Message("system", instructions),) if instructions else ()
        return ChatRequest(generation, Conversation((*system, *messages), self._conversation.media), messages_field="input")

    def _earlier(self, id: str | None) -> Conversation:
        if id is None:
            return Conversation((), ())
        if (found := self._stored.get(self._tenant, id)) is None:
            kept = f"the latest {self._stored.max_bytes >> 20} MiB of conversations are kept, until the gateway ends"
            raise refuse("previous_response_id", f"{show(id)} is unknown: {kept}")
        return found

    def begin(self, id: str, created: int, model: str, fingerprint: str) -> "Response":
        """See ``AnswerFormat``."""
        return Response(id, {"created_at": created, "model": model, **self._shown}, self._keep)

    def _keep(self, id: str, text: str) -> None:
        """Store the conversation with its answer, unless the request says no."""
        if self._shown["store"]:
            messages = (*self._conversation.messages, Message("assistant", text))
            self._stored.put(self._tenant, id, self._conversation._replace(messages=messages))


def _take_stream_options(fields: Fields) -> None:
    value = fields.take("stream_options")
    options = Fields({} if value is None else value, "stream_options")
    refuse_others(options, {"include_obfuscation": one_of(False)})


def _read_text_format(fields: Fields) -> AskedGrammar | None:
    value = fields.take("text")
    config = Fields({} if value is None else value, "text")
    form = config.take("format")
    refuse_others(config, {"verbosity": one_of("low", "medium", "high")})
    if form is None:
        return None
    form = Fields(form, "text.format")
    kind = form.take_choice("type", _FORMATS)
    if kind == "json_schema":
        return read_named_schema(form)
    form.refuse_leftover()
    return AskedGrammar(JSON_OBJECT, "text.format") if kind == "json_object" else None


def _read_input(value: Any, intake: MediaIntake, max_context: int) -> list[Message]:
    if isinstance(value, str):
        if not value:
            raise refuse("input", "is empty")
        return [Message("user", value)]
    items = check_messages(value, max_context, "input")
    return [_read_item(item, f"input[{at}]", intake) for at, item in enumerate(items)]


def _read_item(value: Any, path: str, intake: MediaIntake) -> Message:
    fields = Fields(value, path)
    if (kind := fields.take("type")) not in (None, "message"):
        raise refuse(f"{path}.type", f'is {show(kind)}, only "message" is supported')
    role, content = ROLES[fields.take_choice("role", ROLES)], fields.take_required("content")
    refuse_others(fields, _IGNORED_OF_ITEMS)
    if isinstance(content, str):
        return Message(role, content)
    if not isinstance(content, list) or not content:
        raise refuse(f"{path}.content", f"is {show(content)}, expected a string or an array of parts")
    return Message(role, tuple(_read_part(part, f"{path}.content[{at}]", role, intake) for at, part in enumerate(content)))


def _read_part(value: Any, path: str, role: str, intake: MediaIntake) -> str | MediaPart:
    part = Fields(value, path)
    kind = part.take_required("type")
    if kind in TEXT_PARTS:
        text = part.take_required("text")
        if not isinstance(text, str):
            raise refuse(f"{path}.text", f"expected a string, got {kind_of(text)}")
        refuse_others(part, _IGNORED_OF_TEXTS)
        return text
    if kind == "input_image":
        intake.read_image_url(part, path, role)
        return MediaPart("image")
    if not isinstance(kind, str) or kind not in INLINE_PARTS:
        raise refuse(f"{path}.type", f"is {show(kind)}, allowed are input_text, output_text, input_image, {', '.join(INLINE_PARTS)}")
    return MediaPart(intake.read(kind, part, path, role))


# ------------------------------------------------------------------------------------------------------------------- answer


class Response:
    """One response. It has one message, whose id ends as the response's."""

    def __init__(self, id: str, shown: Mapping[str, Any], keep: Callable[[str, str], None]) -> None:
        """``shown``: its fields that are known from the beginning. ``keep`` is called with id and text when it has ended."""
        self.id = id
        self.message_id = f"msg_{id.removeprefix(Exchange.id_prefix)}"
        self._shown = {**shown, "text": shown["text"] or {"format": {"type": "text"}}}
        self._keep = keep

    def choice(self, index: int, piece: Piece, ending: Ending, with_ids: bool) -> dict[str, Any]:
        return self.ended(piece.text, ending)

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage, more: dict[str, Any]) -> bytes:
        return _encode({**choices[0], "usage": _usage(usage), **more})

    def chunks(self, generation: Generation) -> "ResponseEvents":
        return ResponseEvents(self)

    def ended(self, text: str, ending: Ending) -> dict[str, Any]:
        """Return the response that ends with this text, and keep it."""
        self._keep(self.id, text)
        status = status_of(ending)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**self.object(status, [self.message(text, status)]), "incomplete_details": details}

    def object(self, status: str, output: Sequence[dict[str, Any]], error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return a response with this output."""
        constant = {"object": "response", "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "truncation": "disabled"}
        fields = {"status": status, "error": error, "incomplete_details": None, "output": output, "usage": None}
        return {"id": self.id, **constant, **self._shown, **fields}

    def message(self, text: str | None, status: str) -> dict[str, Any]:
        """Return the message with this text, None for a message that begins."""
        content = [] if text is None else [part(text)]
        return {"type": "message", "id": self.message_id, "status": status, "role": "assistant", "content": content}


class ResponseEvents:
    """The events of its stream: see ``Chunks``."""

    content_type = "text/event-stream; charset=utf-8"
    keep_alive = b": keep-alive\n\n"

    def __init__(self, response: Response) -> None:
        self._response = response
        self._numbers = count()
        self._texts: list[str] = []
        self._place = {"item_id": response.message_id, "output_index": 0, "content_index": 0}
        self._ended: dict[str, Any] = {}

    def role(self, index: int, usage: Usage) -> bytes:
        response, message = self._response.object("in_progress", []), self._response.message(None, "in_progress")
        return b"".join(
            [
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=message),
                self._event("response.content_part.added", **self._place, part=part("")),
            ]
        )

    def text(self, index: int, piece: Piece, usage: Usage) -> bytes:
        self._texts.append(piece.text)
        return self._event("response.output_text.delta", **self._place, delta=piece.text, logprobs=[])

    def finish(self, index: int, ending: Ending, piece: Piece, usage: Usage) -> bytes:
        text = "".join(self._texts)
        self._ended = self._response.ended(text, ending)
        return b"".join(
            [
                self._event("response.output_text.done", **self._place, text=text, logprobs=[]),
                self._event("response.content_part.done", **self._place, part=part(text)),
                self._event("response.output_item.done", output_index=0, item=self._response.message(text, status_of(ending))),
            ]
        )

    def end(self, usage: Usage) -> bytes:
        return self._event(f"response.{self._ended['status']}", response={**self._ended, "usage": _usage(usage)})

    def error(self, error: RequestError) -> bytes:
        """``response.failed``, and an ``error`` at which OpenAI's clients raise."""
        problem = {"code": "server_error", "message": error.message}
        failed = self._event("response.failed", response=self._response.object("failed", [], problem))
        return failed + self._event("error", **problem, param=error.param, **msgspec.json.decode(error_body(error)))

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = _encode({"type": kind, "sequence_number": next(self._numbers), **fields})
        return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


def part(text: str) -> dict[str, Any]:
    """Return the content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def status_of(ending: Ending) -> str:
    """Return "completed", or "incomplete" where the answer was cut."""
    return "incomplete" if ending.reason == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
