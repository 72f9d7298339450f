"""Valid bodies of all routes that take one. The first of a route is shown in the description if it is JSON; together they show every
field and every type of object that the route's reader takes (``request_schema``).

Functions of the media that the model takes, since a reader refuses the others.
"""

from collections.abc import Sequence
from typing import Any

from ....schema.media import MediaKind
from ..reading.field_rules import Kinds as Types
from ..reading.field_table import chat as of_chat
from ..reading.field_table import messages as of_messages
from ..reading.field_table import responses as of_responses
from ..reading.forms import FormFile
from ..reading.ignored import is_strict

Body = dict[str, Any]
Kinds = Sequence[MediaKind]

_PIXEL = (  # a picture of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_WEATHER = {"name": "weather", "description": "Look up the weather", "parameters": _SCHEMA}
_ARGUMENTS = '{"city": "Paris"}'
_HELLO = {"role": "user", "content": "Hello!"}
RESPONSE = b'{"output":[{"type":"message","id":"msg_1","role":"assistant","content":"Hello!"}]}'  # that items refer to


def _passed_over(types: Types) -> list[Body]:
    """Return objects of the types that are passed over."""
    return [] if is_strict() else [{"type": kind} for kind in types.without]


def chat(kinds: Kinds) -> list[Body]:
    """Bodies of ``POST /v1/chat/completions``."""
    texts = [{"type": kind, "text": "Hello!"} for kind in ("text", "input_text", "output_text")]
    parts: list[Body] = [*texts, {"type": "refusal", "refusal": "No."}, *_passed_over(of_chat.PARTS)]
    for kind in kinds:
        mime = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}[kind]
        url = f"data:{mime};base64,{_PIXEL}"
        parts += [{"type": f"{kind}_url", f"{kind}_url": value} for value in ({"url": url}, url)]
        parts.append({"type": kind, kind: url})
    if "video" in kinds:
        frames = f"data:video/jpeg;base64,{_PIXEL},{_PIXEL}"
        parts.append({"type": "video_url", "video_url": {"url": frames}, "sample_fps": 1})
        parts.append({"type": "video", "video": [f"data:image/png;base64,{_PIXEL}"], "sample_fps": 1})
    parts += [
        {"type": f"input_{kind}", f"input_{kind}": {"data": _PIXEL, "format": name}}
        for kind, name in (("audio", "wav"), ("video", "mp4"))
        if kind in kinds
    ]
    function = {"name": "weather", "arguments": _ARGUMENTS}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return [
        {"messages": [_HELLO], "max_tokens": 16},
        {
            "messages": [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
                {"role": "tool", "tool_call_id": "call_1", "content": parts},
            ],
            "stream": True,
            "stream_options": {},
            "tools": [{"type": "function", "function": _WEATHER}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "mm_processor_kwargs": {},
            "media_io_kwargs": {"video": {}},
        },
        {
            "messages": [_HELLO],
            "tools": [{"type": "function", "function": _WEATHER}],
            "tool_choice": _allowed({"type": "function", "function": {"name": "weather"}}, "allowed_tools"),
        },
        {"messages": [_HELLO], "functions": [{}], "function_call": "none"},
        *({"messages": [_HELLO], **form} for form in _forms()),
    ]


def _allowed(entry: Body, field: str = "") -> Body:
    """Return a choice among one function, that of ``entry``. ``field``: its name where the choice stands in a field of its own."""
    allowed = {"mode": "auto", "tools": [entry]}
    return {"type": "allowed_tools", **({field: allowed} if field else allowed)}


def text(_: Kinds) -> list[Body]:
    """Bodies of ``POST /v1/completions``."""
    return [
        {"prompt": "Once upon a time", "max_tokens": 16},
        {"prompt": "a", "echo": True, "max_tokens": 0},
        {"prompt": "a", "stream": True, "stream_options": {}},
        *({"prompt": "a", **form} for form in _forms()),
    ]


def _forms() -> list[Body]:
    named = {"name": "place", "schema": _SCHEMA}
    return [
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ]


def tokenize(kinds: Kinds) -> list[Body]:
    """Bodies of ``POST /tokenize``."""
    return [*text(kinds), *chat(kinds)]


def detokenize(_: Kinds) -> list[Body]:
    """Bodies of ``POST /detokenize``."""
    return [{"tokens": [1, 2]}]


def responses(kinds: Kinds) -> list[Body]:
    """Bodies of ``POST /v1/responses``."""
    texts = [{"type": kind, "text": "Hello!"} for kind in ("input_text", "output_text", "text")]
    parts: list[Body] = [*texts, {"type": "refusal", "refusal": "No."}, *_passed_over(of_responses.PARTS)]
    if "image" in kinds:
        url = f"data:image/png;base64,{_PIXEL}"
        parts.append({"type": "input_image", "image_url": url, "prompt_cache_breakpoint": {"mode": "explicit"}})
    parts += [
        {"type": f"input_{kind}", f"input_{kind}": {"data": _PIXEL, "format": name}}
        for kind, name in (("audio", "wav"), ("video", "mp4"))
        if kind in kinds
    ]
    items = [
        {"role": "user", "content": "Hello!"},
        {"role": "user", "content": parts},
        {"type": "message", "role": "user", "content": parts},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "They greet me."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "namespace": "town", "arguments": _ARGUMENTS},
        {"type": "function_call_output", "call_id": "call_1", "output": "Sunny"},
        {"type": "function_call_output", "call_id": "call_1", "output": parts},
        {"type": "item_reference", "id": "msg_1"},
        {"id": "msg_1"},
        *_passed_over(of_responses.ITEMS),
    ]
    formats = [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "name": "place", "schema": _SCHEMA}]
    return [
        {"input": "Hello!", "max_output_tokens": 16},
        {
            "input": items,
            "stream": True,
            "stream_options": {},
            "tools": [{"type": "function", **_WEATHER}],
            "tool_choice": {"type": "function", "name": "weather"},
            "mm_processor_kwargs": {},
        },
        *({"input": "Hello!", "text": {"format": form}} for form in formats),
        {
            "input": "Hello!",
            "tools": [
                {"type": "function", **_WEATHER},
                {"type": "namespace", "name": "town", "description": "Of a town", "tools": [{"type": "function", **_WEATHER}]},
                *({"type": kind} for kind in of_responses.SEARCHES),
                *_passed_over(of_responses.TOOL_KINDS),
            ],
            "tool_choice": _allowed({"type": "function", "name": "weather"}),
        },
        {"input": "Hello!", "structured_outputs": {"choice": ["yes", "no"]}},
        *({"input": "Hello!", **form} for form in _forms()[:-1]),
    ]


def embeddings(kinds: Kinds) -> list[Body]:
    """Bodies of ``POST /v1/embeddings``."""
    return [{"input": ["a red circle", "a blue square"]}, *({**body, "mm_processor_kwargs": {}} for body in _conversations(kinds))]


def decisions(kinds: Kinds) -> list[Body]:
    """Bodies of ``POST /v1/decisions``."""
    questions = [
        {"name": "colour", "question": "What colour is it?", "type": "choice", "options": ["Red.", "Green."]},
        {"question": "Does it move?", "type": "boolean"},
        {"question": "How many are there?", "type": "integer", "minimum": 0, "maximum": 9},
    ]
    others = [{**body, "questions": questions, "mm_processor_kwargs": {}} for body in _conversations(kinds)]
    return [{"messages": [_HELLO], "questions": questions}, *others]


def _conversations(kinds: Kinds) -> list[Body]:
    return [{"messages": body["messages"]} for body in chat(kinds)[:2]]


def transcriptions(kinds: Kinds) -> list[Body]:
    """Forms of ``POST /v1/audio/transcriptions`` and ``translations``: none of models that do not hear."""
    return [{"file": FormFile("a.wav", "audio/wav", b"RIFF")}] if "audio" in kinds else []


def messages(kinds: Kinds) -> list[Body]:
    """Bodies of ``POST /v1/messages``."""
    blocks: list[Body] = [{"type": "text", "text": "Hello!"}, *_passed_over(of_messages.BLOCKS)]
    for kind in kinds:
        mime = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}[kind]
        inline = {"type": "base64", "media_type": mime, "data": _PIXEL}
        by_url = {"type": "url", "url": f"data:{mime};base64,{_PIXEL}"}
        blocks += [{"type": kind, "source": source, "cache_control": {}} for source in (inline, by_url)]
    turns = [
        {"role": "user", "content": "Hello!"},
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sunny"}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": blocks}],
        },
    ]
    base: Body = {"max_tokens": 16, "messages": [_HELLO]}
    tool = {"name": "weather", "input_schema": _SCHEMA}
    tools = [tool, *_passed_over(of_messages.TOOL_KINDS)]
    choices = [{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "weather"}]
    return [
        base,
        {"max_tokens": 16, "messages": turns, "system": "Be brief.", "mm_processor_kwargs": {}},
        {**base, "max_tokens": -1, "system": [{"type": "text", "text": "Be brief."}]},
        {**base, "tools": [{"type": "custom", **tool}]},
        {**base, "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
        *({**base, "tools": tools, "tool_choice": choice} for choice in choices),
        *({**base, **form} for form in _forms()),
    ]


def count_tokens(kinds: Kinds) -> list[Body]:
    """Bodies of ``POST /v1/messages/count_tokens``."""
    return [{"messages": [_HELLO]}, *messages(kinds)]


def ollama_chat(_: Kinds) -> list[Body]:
    """Bodies of ``POST /api/chat``."""
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    turns = [
        _HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call, {"type": "function", **call}]},
        {"role": "tool", "content": "Sunny", "tool_name": "weather"},
    ]
    named = {"type": "function", "function": {"name": "weather"}}
    choices = [named, _allowed(named, "allowed_tools")]
    return [
        {"messages": [_HELLO], "stream": False, "options": {"num_predict": 16}},
        *({"messages": turns, "tools": [{"type": "function", "function": _WEATHER}], "tool_choice": one} for one in choices),
    ]


def ollama_generate(_: Kinds) -> list[Body]:
    """Bodies of ``POST /api/generate``."""
    return [{"prompt": "Hello!", "stream": False, "options": {"num_predict": 16}}]


def ollama_embed(_: Kinds) -> list[Body]:
    """Bodies of ``POST /api/embed``."""
    return [{"input": ["a red circle", "a blue square"]}]


def ollama_embeddings(_: Kinds) -> list[Body]:
    """Bodies of ``POST /api/embeddings``."""
    return [{"prompt": "a red circle"}]


def ollama_show(_: Kinds) -> list[Body]:
    """Bodies of ``POST /api/show``."""
    return [{}]
