"""Entries of Anthropic's Messages."""

from typing import Any

from ..field_rules import Kinds, Place, only, refused, without_effect
from ..harmless import EMPTY, FLAG, OBJECT, TEXT, Harmless, number, one_of
from ..thinking import FIELDS as THINKING
from .chat import GENERATION
from .common import CACHED, EXAMPLES, FOREIGN_THOUGHTS, WORK

_FORGETTING = "clear_thinking_20251015"  # an edit of the beta context-management-2025-06-27
_EDIT = {"type": "object", "properties": {"type": {"const": _FORGETTING}}, "required": ["type"]}


def _forgets_thoughts_alone(value: Any) -> bool:
    edits = value.get("edits", []) if isinstance(value, dict) and value.keys() <= {"edits"} else None
    return isinstance(edits, list) and all(isinstance(edit, dict) and edit.get("type") == _FORGETTING for edit in edits)


_FORGOTTEN = Harmless(
    _forgets_thoughts_alone,
    f'{{"edits":[{{"type":"{_FORGETTING}"}}]}}',
    {"type": "object", "properties": {"edits": {"type": "array", "items": _EDIT}}, "additionalProperties": False},
    is_done=False,
)
_SENT = {"cache_control": without_effect(CACHED, OBJECT)}

REQUEST = Place(
    "Messages",
    (
        *(name for name in GENERATION if name not in ("return_token_ids", "stream_options")), "max_tokens", "stop_sequences",
        "messages", "system", "tools", "tool_choice", "output_config", "mm_processor_kwargs",
        *THINKING,
    ),
    {
        **{name: rule for name, rule in WORK.items() if name not in ("audio", "verbosity", "stop_sequences")},
        "return_token_ids": only(one_of(False), "chat completions have them"),
        "stream_options": only(EMPTY, "the last event has the usage"),
        **dict.fromkeys(("stop", "stop_strings"), only(EMPTY, "give stop_sequences")),
        "instructions": only(EMPTY, "give system"),
        "input": refused("give messages"),
        "context_management": only(_FORGOTTEN, "nothing is taken out of the prompt; send the conversation as the model is to see it"),
        "service_tier": without_effect("there is one", one_of("auto", "standard_only", is_done=False)),
        "speed": without_effect("there is one", one_of("standard")),
        "inference_geo": without_effect("there is one server", TEXT),
        "mcp_servers": only(EMPTY, "this server calls no others; offer tools that the client runs"),
        "container": only(EMPTY, "this server runs no code; offer tools that the client runs"),
        "thread": refused("send the whole conversation"),
        "output_format": only(EMPTY, "give output_config.format"),
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), refused("give max_tokens")),
        "prompt": only(EMPTY, "give messages"),
        "n": only(number(1), "there is one answer"),
        "parallel_tool_calls": only(one_of(True), "give tool_choice.disable_parallel_tool_use"),
        "logprobs": only(one_of(False), "chat completions have them"),
        "prompt_logprobs": refused("chat completions have them"),
    },
)  # fmt: skip
OUTPUT_CONFIG = Place(
    "`output_config` of Messages",
    ("format",),
    {
        "effort": without_effect("thinking turns thoughts on and off", one_of("low", "medium", "high", "xhigh", "max", is_done=False)),
        "task_budget": without_effect("no served model knows it"),
    },
)
FORMAT = Place("`output_config.format` of Messages", ("type", "schema"), {"name": without_effect("nothing reads it")})
ROLES = Kinds("roles in Messages", ("user", "assistant", "system"), refused={"tool": "give a block of type tool_result"})
TURN = Place(
    "messages in Messages",
    ("role", "content"),
    {
        **dict.fromkeys(
            ("id", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container", "name"),
            without_effect("nothing reads it"),
        ),
        **_SENT,
    },
)
_FOUND = "give what it found as text"
BLOCKS = Kinds(
    "blocks in Messages",
    ("text", "image", "video", "audio", "thinking", "tool_use", "tool_result"),
    {"thinking": "the model thinks in its own turns", "redacted_thinking": FOREIGN_THOUGHTS},
    {
        "document": "send its text as a block of type text, or its pages as image",
        "search_result": _FOUND,
        "container_upload": "this server runs no code; send its text",
        "compaction": "give the summary as text",
        **dict.fromkeys(
            (
                "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
                "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result",
                "mcp_tool_use", "mcp_tool_result",
            ),
            _FOUND,
        ),
    },
)  # fmt: skip
BLOCK = Place(
    "blocks of text",
    ("type", "text"),
    {**_SENT, "citations": without_effect("the text has what they are about", EMPTY), "id": without_effect("nothing reads it")},
)
THOUGHTS = Place("`thinking`", ("type", "thinking"), {**_SENT, "signature": without_effect("nobody checks it", TEXT)})
_CALLER = without_effect("calls come from the model alone", one_of({"type": "direct"}))
CALL = Place("`tool_use`", ("type", "id", "name", "input"), {**_SENT, "caller": _CALLER})
RESULT = Place(
    "`tool_result`",
    ("type", "tool_use_id", "content"),
    {
        **_SENT,
        "is_error": without_effect("the model's chat template has no place for it", FLAG),
        "name": without_effect("its call has the name"),
        "id": without_effect("nothing reads it"),
    },
)
_SHOWN = "all tools are shown at once"
TOOL_KINDS = Kinds(
    "tools in Messages",
    ("custom",),
    dict.fromkeys(
        (
            "tool_search_tool_regex", "tool_search_tool_regex_20251119", "tool_search_tool_bm25", "tool_search_tool_bm25_20251119",
        ),
        _SHOWN,
    ),
    {
        **dict.fromkeys(
            (
                "web_search_20250305", "web_fetch_20250910", "code_execution_20250522", "code_execution_20250825", "mcp_toolset",
            ),
            "this server runs no tools; offer one that the client runs, with name and input_schema",
        ),
        **dict.fromkeys(
            (
                "bash_20250124", "text_editor_20250124", "text_editor_20250429", "text_editor_20250728", "computer_20250124",
                "computer_20251124", "memory_20250818",
            ),
            "describe it with name and input_schema",
        ),
    },
)  # fmt: skip
TOOL = Place(
    "tools in Messages",
    ("type", "name", "description", "input_schema", "strict"),
    {
        **_SENT,
        "allowed_callers": only(one_of(["direct"]), "calls come from the model alone"),
        "defer_loading": without_effect(_SHOWN, one_of(False, is_done=False)),
        "eager_input_streaming": without_effect("arguments are always passed on as they come", FLAG),
        "input_examples": EXAMPLES,
    },
)
CHOICE = Place("`tool_choice` of Messages", ("type", "disable_parallel_tool_use"))
