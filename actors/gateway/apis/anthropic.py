"""Anthropic's Messages API (version 2023-06-01): a body becomes a ``ChatRequest``. ``anthropic_answer`` has the answers. Pure."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import msgspec

from ....schema.media import MediaKind
from ..content import Conversation, MediaPart, Message, check_messages, is_continued
from ..fields import AT_LEAST_ONE, Fields, Schema, kind_of, refuse, show
from ..grammar_fields import AskedGrammar, take_schema
from ..harmless import FLAG, NOTHING, OBJECT, TEXT, Harmless, one_of, refuse_others
from ..json_body import Body, decode_body
from ..media import MediaIntake
from ..media_options import FOR_ALL, OptionReader
from ..output_fields import Output
from ..template_fields import TemplateUse
from ..tool_messages import MAX_CALLS, Call, check_known, read_id
from ..validation import ChatRequest, Limits, check_grammar, read_generation
from .anthropic_tools import read_call, read_tools

ROLES = ("user", "assistant", "system")
_MEDIA: Mapping[str, MediaKind] = {"image": "image", "video": "video", "audio": "audio"}  # Anthropic's API has the first alone
_OPENAI_ONLY = ("stream_options", "return_token_ids")
_FORGETTING = "clear_thinking_20251015"  # an edit of the beta context-management-2025-06-27


_FORGETTING_EDIT: Schema = {"type": "object", "properties": {"type": {"const": _FORGETTING}}, "required": ["type"]}
_FORGETTING_THOUGHTS: Schema = {
    "type": "object",
    "properties": {"edits": {"type": "array", "items": _FORGETTING_EDIT}},
    "additionalProperties": False,
}


def _forgets_thoughts_alone(value: Any) -> bool:
    edits = value.get("edits", []) if isinstance(value, dict) and value.keys() <= {"edits"} else None
    return isinstance(edits, list) and all(isinstance(edit, dict) and edit.get("type") == _FORGETTING for edit in edits)


_IGNORED_FIELDS: Mapping[str, Harmless] = {
    "metadata": OBJECT,
    "cache_control": OBJECT,  # whatever fits is cached
    "thinking": OBJECT,  # no served model thinks
    "context_management": Harmless(_forgets_thoughts_alone, f'{{"edits":[{{"type":"{_FORGETTING}"}}]}}', _FORGETTING_THOUGHTS),
    "service_tier": one_of("auto", "standard_only"),
    "speed": one_of("standard"),
    "inference_geo": TEXT,
    "mcp_servers": NOTHING,
}
_IGNORED_OF_BLOCKS: Mapping[str, Harmless] = {"cache_control": OBJECT, "citations": NOTHING}
_IGNORED_OF_RESULTS: Mapping[str, Harmless] = {"cache_control": OBJECT, "is_error": FLAG}  # the template has no place for the latter
_CALLING = {"user": "tool_result", "assistant": "tool_use"}  # blocks that messages of one role alone have
_EFFORTS = one_of("low", "medium", "high", "xhigh", "max")


def read_message(body: Body, limits: Limits) -> ChatRequest:
    """Validate the body of ``POST /v1/messages``. It also takes mmrt's own fields of chat completions.

    Raises:
        RequestError: 400, or 404 for an unknown model, or 413 for a medium that is too large.
    """
    fields = Fields(decode_body(body, limits.body))
    fields.require("max_tokens")
    return _read(fields, limits)


def read_count(body: Body, limits: Limits) -> ChatRequest:
    """Validate the body of ``POST /v1/messages/count_tokens``, which may leave ``max_tokens`` out. Raises: as ``read_message``."""
    return _read(Fields(decode_body(body, limits.body)), limits)


def _read(fields: Fields, limits: Limits) -> ChatRequest:
    for name in _OPENAI_ONLY:
        fields.forbid(name)
    grammar = _read_output_config(fields)
    generation = read_generation(
        fields,
        limits,
        lambda *_: Output(),
        grammar,
        stop_field="stop_sequences",
        max_tokens_fields=("max_tokens",),
        clamp_max_tokens=True,
    )
    tools, grammar = read_tools(fields, generation.grammar)
    generation = msgspec.structs.replace(generation, grammar=grammar)
    check_grammar(generation)
    system, turns = fields.take("system"), fields.take_required("messages", AT_LEAST_ONE)
    options = OptionReader(fields.take(FOR_ALL), limits.kinds, limits.vision_rules)
    refuse_others(fields, _IGNORED_FIELDS)
    intake = MediaIntake(limits.kinds, limits.media, options)
    reader = _TurnReader(intake)
    messages: list[Message] = []
    for at, turn in enumerate(check_messages(turns, limits.max_context)):
        messages += reader.read(turn, path := f"messages[{at}]")
    continues = is_continued(messages[-1], path)
    if system is not None:
        messages[:0] = reader.read_content(system, "system", "system")
    conversation = Conversation(tuple(messages), tuple(intake.media))
    return ChatRequest(generation, conversation, TemplateUse(opens_answer=not continues, continues=continues), tools=tools)


def _read_output_config(fields: Fields) -> AskedGrammar | None:
    value = fields.take("output_config")
    config = Fields({} if value is None else value, "output_config")
    form = config.take("format")
    refuse_others(config, {"effort": _EFFORTS})
    if form is None:
        return None
    form = Fields(form, config.path("format"))
    form.take_choice("type", ("json_schema",))
    grammar = take_schema(form)
    form.refuse_leftover()
    return grammar


class _TurnReader:
    """Reads the turns of a conversation, one after another."""

    def __init__(self, intake: MediaIntake) -> None:
        self._intake = intake
        self._call_ids = set[str]()

    def read(self, value: Any, path: str) -> list[Message]:
        """Return the messages of a turn. Raises: RequestError."""
        fields = Fields(value, path)
        role = fields.take_choice("role", ROLES)
        content = fields.take_required("content", AT_LEAST_ONE)
        fields.refuse_leftover()
        return self.read_content(content, f"{path}.content", role)

    def read_content(self, value: Any, path: str, role: str) -> list[Message]:
        """Return the messages of a role's content: one, but in a turn with results one for each of these as well. Raises:
        RequestError."""
        if isinstance(value, str):
            return [Message(role, value)]
        if not isinstance(value, list):
            raise refuse(path, f"expected a string or an array of content blocks, got {kind_of(value)}")
        if not value:
            raise refuse(path, "is empty, at least one content block is needed")
        blocks = [self._read_block(block, f"{path}[{at}]", role) for at, block in enumerate(value)]
        messages: list[Message] = []
        for _, group in groupby(blocks, key=lambda block: isinstance(block, Message)):
            found = list(group)
            results = [block for block in found if isinstance(block, Message)]
            said = tuple(block for block in found if isinstance(block, str | MediaPart))
            calls = tuple(block for block in found if isinstance(block, Call))
            if len(calls) > MAX_CALLS:
                raise refuse(path, f"has {len(calls)} blocks of type tool_use, the limit is {MAX_CALLS}")
            messages += results or [Message(role, said or "", calls=calls)]
        return messages

    def _read_block(self, value: Any, path: str, role: str) -> str | MediaPart | Call | Message:
        block = Fields(value, path)
        kind, calling = block.take_required("type"), _CALLING.get(role)
        if kind != calling:
            return _read_part(block, kind, path, role, self._intake)
        if kind == "tool_result":
            return self._read_result(block)
        call = read_call(block)
        self._call_ids.add(call.id)
        return call

    def _read_result(self, block: Fields) -> Message:
        """Read the result of a call: text and media."""
        id, content, path = read_id(block, "tool_use_id"), block.take("content"), block.path("content")
        check_known(id, self._call_ids, block.path("tool_use_id"))
        refuse_others(block, _IGNORED_OF_RESULTS)
        if content is None or content == [] or isinstance(content, str):
            return Message("tool", content or "", call_id=id)
        (message,) = self.read_content(content, path, "tool")
        return message._replace(call_id=id)


def _read_part(block: Fields, kind: Any, path: str, role: str, intake: MediaIntake) -> str | MediaPart:
    if kind == "text":
        text = block.take_required_str("text")
        refuse_others(block, _IGNORED_OF_BLOCKS)
        return text
    if not isinstance(kind, str) or kind not in _MEDIA:
        allowed = ["text", *_MEDIA, *([_CALLING[role]] if role in _CALLING else [])]
        raise refuse(f"{path}.type", f"is {show(kind)}, allowed are {', '.join(allowed)}")
    if isinstance(block.leftover.get("cache_control"), dict):
        block.take("cache_control")
    intake.read_source(_MEDIA[kind], block, path, role)
    return MediaPart(_MEDIA[kind])
