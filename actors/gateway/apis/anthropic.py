"""Anthropic's Messages API (version 2023-06-01): a body becomes a ``ChatRequest``, an answer a message or its events. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ....runtime.errors import RequestError
from ....schema.media import MediaKind
from ..choices import Ending, Piece, Usage
from ..content import Conversation, MediaPart, Message, check_messages, is_continued
from ..fields import Fields, kind_of, refuse, show
from ..grammar_fields import AskedGrammar, read_schema
from ..harmless import NOTHING, OBJECT, TEXT, Harmless, one_of, refuse_others
from ..json_body import decode_body
from ..media import MediaIntake
from ..media_options import FOR_ALL, OptionReader
from ..output_fields import Output
from ..template_fields import TemplateUse
from ..validation import ChatRequest, Generation, Limits, read_generation

ROLES = ("user", "assistant", "system")
_MEDIA: Mapping[str, MediaKind] = {"image": "image", "video": "video", "audio": "audio"}  # Anthropic's API has the first alone
_OPENAI_ONLY = ("stream_options", "return_token_ids")
_IGNORED_FIELDS: Mapping[str, Harmless] = {
    "metadata": OBJECT,
    "cache_control": OBJECT,  # whatever fits is cached
    "thinking": OBJECT,  # no served model thinks
    "service_tier": one_of("auto", "standard_only"),
    "speed": one_of("standard"),
    "inference_geo": TEXT,
    "tools": NOTHING,
    "mcp_servers": NOTHING,
    "tool_choice": Harmless(
        lambda value: isinstance(value, dict) and value.get("type") in ("auto", "none"), '{"type":"auto"} or {"type":"none"}'
    ),
}
_IGNORED_OF_BLOCKS: Mapping[str, Harmless] = {"cache_control": OBJECT, "citations": NOTHING}
_EFFORTS = one_of("low", "medium", "high", "xhigh", "max")
_encode = msgspec.json.Encoder().encode


# ------------------------------------------------------------------------------------------------------------------ request


def read_message(body: bytes | bytearray, limits: Limits) -> ChatRequest:
    """Validate the body of ``POST /v1/messages``. mmrt's own fields of chat completions are taken, too.

    Raises:
        RequestError: 400, or 404 for an unknown model, or 413 for a medium that is too large.
    """
    fields = Fields(decode_body(body, limits.body))
    if fields.leftover.get("max_tokens") is None:
        raise refuse("max_tokens", "is required")
    return _read(fields, limits)


def read_count(body: bytes | bytearray, limits: Limits) -> ChatRequest:
    """Validate the body of ``POST /v1/messages/count_tokens``, which may leave ``max_tokens`` out. Raises: as ``read_message``."""
    return _read(Fields(decode_body(body, limits.body)), limits)


def _read(fields: Fields, limits: Limits) -> ChatRequest:
    for name in _OPENAI_ONLY:
        if fields.leftover.get(name) is not None:
            raise refuse(name, "is not supported")
    grammar = _read_output_config(fields)
    generation = read_generation(
        fields, limits, lambda *_: Output(), grammar, stop_field="stop_sequences", max_tokens_fields=("max_tokens",)
    )
    system, turns = fields.take("system"), fields.take_required("messages")
    options = OptionReader(fields.take(FOR_ALL), limits.kinds, limits.vision_rules)
    refuse_others(fields, _IGNORED_FIELDS)
    intake = MediaIntake(limits.kinds, limits.media, options)
    messages = [_read_turn(turn, f"messages[{at}]", intake) for at, turn in enumerate(check_messages(turns, limits.max_context))]
    continues = is_continued(messages)
    if system is not None:
        messages.insert(0, Message("system", _read_content(system, "system", "system", intake)))
    conversation = Conversation(tuple(messages), tuple(intake.media))
    return ChatRequest(generation, conversation, TemplateUse(opens_answer=not continues, continues=continues))


def _read_output_config(fields: Fields) -> AskedGrammar | None:
    value = fields.take("output_config")
    config = Fields({} if value is None else value, "output_config")
    form = config.take("format")
    refuse_others(config, {"effort": _EFFORTS})
    if form is None:
        return None
    form = Fields(form, config.path("format"))
    form.take_choice("type", ("json_schema",))
    schema = form.take_required("schema")
    form.refuse_leftover()
    return read_schema(schema, form.path("schema"))


def _read_turn(value: Any, path: str, intake: MediaIntake) -> Message:
    fields = Fields(value, path)
    role = fields.take_choice("role", ROLES)
    content = fields.take_required("content")
    fields.refuse_leftover()
    return Message(role, _read_content(content, f"{path}.content", role, intake))


def _read_content(value: Any, path: str, role: str, intake: MediaIntake) -> str | tuple[str | MediaPart, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(path, f"expected a string or an array of content blocks, got {kind_of(value)}")
    if not value:
        raise refuse(path, "is empty, at least one content block is needed")
    return tuple(_read_block(block, f"{path}[{at}]", role, intake) for at, block in enumerate(value))


def _read_block(value: Any, path: str, role: str, intake: MediaIntake) -> str | MediaPart:
    block = Fields(value, path)
    kind = block.take_required("type")
    if kind == "text":
        text = block.take_required("text")
        if not isinstance(text, str):
            raise refuse(f"{path}.text", f"expected a string, got {kind_of(text)}")
        refuse_others(block, _IGNORED_OF_BLOCKS)
        return text
    if not isinstance(kind, str) or kind not in _MEDIA:
        raise refuse(f"{path}.type", f"is {show(kind)}, allowed are text, {', '.join(_MEDIA)}")
    if isinstance(block.leftover.get("cache_control"), dict):
        block.take("cache_control")
    intake.read_source(_MEDIA[kind], block, path, role)
    return MediaPart(_MEDIA[kind])


# ------------------------------------------------------------------------------------------------------------------- answer


class MessageFormat:
    """The form of its answers: see ``AnswerFormat``."""

    id_prefix = "msg_"

    def begin(self, id: str, created: int, model: str, fingerprint: str) -> "MessageAnswer":
        return MessageAnswer(id, model)


class MessageAnswer:
    """One message. An answer has one choice."""

    def __init__(self, id: str, model: str) -> None:
        self.id = id
        self._model = model

    def choice(self, index: int, piece: Piece, ending: Ending, with_ids: bool) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": piece.text}], **_stop_of(ending)}

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage, more: dict[str, Any]) -> bytes:
        return _encode(self.message({**choices[0], "usage": _usage(usage), **more}))

    def chunks(self, generation: Generation) -> "MessageEvents":
        return MessageEvents(self)

    def message(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a message with these fields."""
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model, **fields}


class MessageEvents:
    """The events of its stream: see ``Chunks``."""

    content_type = "text/event-stream; charset=utf-8"
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, answer: MessageAnswer) -> None:
        self._answer = answer

    def role(self, index: int, usage: Usage) -> bytes:
        numbers = _usage(usage._replace(completion_tokens=0))
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": numbers}
        begin = _event({"type": "message_start", "message": self._answer.message(nothing)})
        return begin + _event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})

    def text(self, index: int, piece: Piece, usage: Usage) -> bytes:
        return _event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece.text}})

    def finish(self, index: int, ending: Ending, piece: Piece, usage: Usage) -> bytes:
        end = _event({"type": "content_block_stop", "index": 0})
        return end + _event({"type": "message_delta", "delta": _stop_of(ending), "usage": _usage(usage)})

    def end(self, usage: Usage) -> bytes:
        return _event({"type": "message_stop"})

    def error(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"


def error_body(error: RequestError) -> bytes:
    """``{"type": "error", "error": {"type", "message"}}``. The message names the field at fault."""
    kind = "request_too_large" if error.status == 413 else "api_error" if error.type == "internal_error" else error.type
    return _encode({"type": "error", "error": {"type": kind, "message": error.message}})


def _event(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + _encode(event) + b"\n\n"


def _stop_of(ending: Ending) -> dict[str, str | None]:
    if ending.reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if ending.stop else "end_turn", "stop_sequence": ending.stop or None}


def _usage(usage: Usage) -> dict[str, int]:
    """All tokens of the prompt are ``input_tokens`` and ``cache_read_input_tokens`` together."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
