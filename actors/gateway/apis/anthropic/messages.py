"""Anthropic's Messages API (version 2023-06-01): a body becomes a ``ChatRequest``. ``answers`` has the answers. Pure."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from .....schema.media import MediaKind
from ...reading.content import Conversation, MediaPart, Message, check_messages, is_continued, take_role
from ...reading.field_rules import passes_over, settle, settle_first
from ...reading.field_table import messages as table
from ...reading.fields import AT_LEAST_ONE, Fields, kind_of, refuse
from ...reading.grammar_fields import AskedGrammar, take_schema
from ...reading.json_body import Body, decode_body
from ...reading.media import MediaIntake
from ...reading.media_options import FOR_ALL, OptionReader
from ...reading.output_fields import Output
from ...reading.template_fields import TemplateUse
from ...reading.thinking import read_thinking
from ...reading.tool_messages import MAX_CALLS, Call, check_known, read_id
from ...reading.validation import ChatRequest, Limits, check_grammar, read_generation
from .tools import read_call, read_tools

_MEDIA: Mapping[str, MediaKind] = {"image": "image", "video": "video", "audio": "audio"}  # Anthropic's API has the first alone
_CALLING = {"user": "tool_result", "assistant": "tool_use"}  # blocks that messages of one role alone have


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
    settle_first(fields, table.REQUEST, "stream_options", "return_token_ids")
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
    tools, grammar = read_tools(fields, generation.grammar, limits.max_tool_bytes)
    generation = msgspec.structs.replace(generation, grammar=grammar)
    check_grammar(generation)
    system, turns = fields.take("system"), fields.take_required("messages", AT_LEAST_ONE)
    options = OptionReader(fields.take(FOR_ALL), limits.kinds, limits.vision_rules)
    thinking = read_thinking(fields)
    settle(fields, table.REQUEST)
    intake = MediaIntake(limits.kinds, limits.media, options, limits.family)
    reader = _TurnReader(intake)
    messages: list[Message] = []
    for at, turn in enumerate(check_messages(turns, limits.max_context)):
        messages += reader.read(turn, path := f"messages[{at}]")
    if len(messages) > 1 and messages[-1].says_nothing and turns[-1].get("content"):
        del messages[-1]  # thoughts alone
    continues = is_continued(messages[-1], path)
    if system not in (None, "", []):  # an empty one says nothing
        messages[:0] = reader.read_content(system, "system", "system")
    conversation = Conversation(tuple(messages), tuple(intake.media))
    use = TemplateUse(opens_answer=not continues, continues=continues, thinking=thinking)
    return ChatRequest(generation, conversation, use, tools=tools)


def _read_output_config(fields: Fields) -> AskedGrammar | None:
    value = fields.take("output_config")
    config = Fields({} if value is None else value, "output_config")
    form = config.take("format")
    settle(config, table.OUTPUT_CONFIG)
    if form is None:
        return None
    form = Fields(form, config.path("format"))
    form.take_choice("type", ("json_schema",))
    grammar = take_schema(form)
    settle(form, table.FORMAT)
    return grammar


class _Thoughts(NamedTuple):
    """A block of thoughts, and the field that has them."""

    text: str
    field: str


class _TurnReader:
    """Reads the turns of a conversation, one after another."""

    def __init__(self, intake: MediaIntake) -> None:
        self._intake = intake
        self._call_ids = set[str]()

    def read(self, value: Any, path: str) -> list[Message]:
        """Return the messages of a turn. Raises: RequestError."""
        fields = Fields(value, path)
        role, content = take_role(fields, table.ROLES), fields.take("content")
        settle(fields, table.TURN)
        return self.read_content(content, f"{path}.content", role)

    def read_content(self, value: Any, path: str, role: str) -> list[Message]:
        """Return the messages of a role's content: one, but in a turn with results one for each of these as well. Raises:
        RequestError."""
        if value is None or isinstance(value, str):
            return [Message(role, value or "")]
        if not isinstance(value, list):
            raise refuse(path, f"expected a string or an array of content blocks, got {kind_of(value)}")
        read = [self._read_block(block, f"{path}[{at}]", role) for at, block in enumerate(value)]
        blocks_of_thoughts = [block for block in read if isinstance(block, _Thoughts)]
        thoughts = "\n".join(block.text for block in blocks_of_thoughts)
        field = blocks_of_thoughts[0].field if thoughts else ""
        if not (blocks := [block for block in read if block is not None and not isinstance(block, _Thoughts)]):
            return [Message(role, "", thoughts=thoughts, thoughts_field=field)]
        messages: list[Message] = []
        for _, group in groupby(blocks, key=lambda block: isinstance(block, Message)):
            found = list(group)
            results = [block for block in found if isinstance(block, Message)]
            said = tuple(block for block in found if isinstance(block, str | MediaPart))
            calls = tuple(block for block in found if isinstance(block, Call))
            if len(calls) > MAX_CALLS:
                raise refuse(path, f"has {len(calls)} blocks of type tool_use, the limit is {MAX_CALLS}")
            messages += results or [Message(role, said or "", calls=calls, thoughts=thoughts, thoughts_field=field)]
        return messages

    def _read_block(self, value: Any, path: str, role: str) -> "str | MediaPart | Call | Message | _Thoughts | None":
        """Read a block; None if it is passed over."""
        block = Fields(value, path)
        kind, calling = block.take_required("type"), _CALLING.get(role)
        if kind == "thinking" and role == "assistant":
            text = block.take_required_str("thinking")
            settle(block, table.THOUGHTS)
            return _Thoughts(text, block.path("thinking"))
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
        settle(block, table.RESULT)
        if content is None or content == [] or isinstance(content, str):
            return Message("tool", content or "", call_id=id)
        (message,) = self.read_content(content, path, "tool")
        return message._replace(call_id=id)


def _read_part(block: Fields, kind: Any, path: str, role: str, intake: MediaIntake) -> str | MediaPart | None:
    kinds = table.BLOCKS._replace(used=("text", *_MEDIA, *([_CALLING[role]] if role in _CALLING else [])))
    if passes_over(kinds, kind, path):
        return None
    if kind == "text":
        text = block.take_required_str("text")
        settle(block, table.BLOCK)
        return text
    intake.read_source(_MEDIA[kind], block, path, role)
    return MediaPart(_MEDIA[kind])
