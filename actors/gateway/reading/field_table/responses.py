"""Entries of OpenAI's Responses."""

from collections.abc import Mapping

from ..field_rules import Kinds, Place, Rule, only, refused, without_effect
from ..harmless import EMPTY, OBJECT, TEXT, WHOLE, Harmless, number, one_of
from ..thinking import FIELDS as THINKING
from .chat import GENERATION
from .common import FOREIGN_THOUGHTS, MAX_NAMES, NOT_RUN, WORK

_THOUGHTS = "reasoning.encrypted_content"
_INCLUDED = (
    _THOUGHTS, "message.input_image.image_url", "web_search_call.action.sources", "web_search_call.results",
    "file_search_call.results", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
)  # fmt: skip
_NOTHING_THERE = Harmless(
    lambda value: isinstance(value, list) and all(one in _INCLUDED for one in value),
    f"an array of {', '.join(_INCLUDED)}",
    {"type": "array", "items": {"enum": list(_INCLUDED)}},
    is_done=False,
)

REQUEST = Place(
    "Responses",
    (
        *(name for name in GENERATION if name != "return_token_ids"), "max_output_tokens", "stop", "input", "instructions",
        "previous_response_id", "text", "tools", "tool_choice", "parallel_tool_calls", "store", "background", "metadata",
        "mm_processor_kwargs",
        *THINKING,
    ),
    {
        **{name: rule for name, rule in WORK.items() if name not in ("store", "metadata", "audio")},
        "return_token_ids": only(one_of(False), "chat completions have them"),
        "client_metadata": without_effect("nothing reads it", OBJECT),
        "include": only(_NOTHING_THERE, "an answer has none of it"),
        "max_tool_calls": without_effect("it counts the calls of tools that servers run", WHOLE),
        "truncation": without_effect("what does not fit is refused", one_of("disabled")),
        "conversation": only(EMPTY, "give previous_response_id, or the conversation as input"),
        "prompt": only(EMPTY, "templates of prompts are kept by OpenAI; give input and instructions"),
        "context_management": without_effect("what does not fit is refused"),
        "messages": refused("give input, or call POST /v1/chat/completions"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), refused("give max_output_tokens")),
        **dict.fromkeys(MAX_NAMES, only(number(-1), "give max_output_tokens")),
        "system": only(EMPTY, "give instructions"),
        "n": only(number(1), "there is one answer"),
        "logprobs": only(one_of(False), "chat completions have them"),
        "prompt_logprobs": refused("chat completions have them"),
    },
)  # fmt: skip
STREAM_OPTIONS = Place(
    "`stream_options` of Responses",
    (),
    {
        "include_obfuscation": only(one_of(False), "nothing is padded"),
        **dict.fromkeys(("include_usage", "continuous_usage_stats"), without_effect("the last event always has the usage")),
    },
)
TEXT_CONFIG = Place(
    "`text` of Responses",
    ("format",),
    {"verbosity": without_effect("no served model knows it", one_of("low", "medium", "high", is_done=False))},
)
FORMAT = Place("`text.format` of Responses", ("type",))

ITEMS = Kinds(
    "items of Responses",
    ("message", "reasoning", "function_call", "function_call_output", "item_reference"),
    {
        "web_search_call": "the message after it has what was found",
    },
    {
        **dict.fromkeys(("custom_tool_call", "custom_tool_call_output"), "give function_call and function_call_output"),
        "compaction": "OpenAI's servers alone can read it; give what it was made of, or a summary as a message",
        "additional_tools": "give tools",
        **dict.fromkeys(
            (
                "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call", "computer_call_output",
                "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call",
                "apply_patch_call_output", "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response",
                "tool_search_call", "tool_search_output",
            ),
            "give what it found as a message, or as function_call and function_call_output",
        ),
    },
)  # fmt: skip
_OF_ITEMS: Mapping[str, Rule] = {
    **dict.fromkeys(("id", "status"), without_effect("nothing reads it", TEXT)),
    "internal_chat_message_metadata_passthrough": without_effect("nothing reads it"),
}
ROLES = Kinds("roles in Responses", ("system", "developer", "user", "assistant"), refused={"tool": "give function_call_output"})
MESSAGE = Place("messages in Responses", ("type", "role", "content"), {**_OF_ITEMS, "phase": without_effect("nothing reads it", TEXT)})
REASONING = Place(
    "`reasoning`",
    ("type", "content"),
    {
        **_OF_ITEMS,
        "summary": without_effect(FOREIGN_THOUGHTS, EMPTY),
        "encrypted_content": without_effect("OpenAI's servers alone can read it"),
    },
)
THOUGHT = Place("parts of `reasoning`", ("type", "text"))
_CALLER = without_effect("calls come from the model alone", one_of({"type": "direct"}))
CALL = Place("`function_call`", ("type", "call_id", "name", "arguments", "namespace"), {**_OF_ITEMS, "caller": _CALLER})
RESULT = Place(
    "`function_call_output`",
    ("type", "call_id", "output"),
    {**_OF_ITEMS, "caller": _CALLER, "name": without_effect("its call has the name", TEXT)},
)
PAGE = Place(
    "parameters of `/v1/responses/ID/input_items`", ("limit", "order", "after", "include"), {"before": refused("give order and after")}
)
REFERENCE = Place("`item_reference`", ("type", "id"))
PARTS = Kinds(
    "parts in Responses",
    ("input_text", "output_text", "text", "refusal", "input_image", "input_audio", "input_video"),
    dict.fromkeys(("reasoning_text", "summary_text", "thinking", "redacted_thinking", "reasoning"), FOREIGN_THOUGHTS),
    {
        "input_file": "send its text as input_text, or its pages as input_image",
        "image_url": "give input_image",
        "encrypted_content": "OpenAI's servers alone can read it",
    },
)
SEARCHES = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
TOOL_KINDS = Kinds(
    "tools in Responses",
    ("function", "namespace"),
    {
        **dict.fromkeys(SEARCHES, "this server does not search"),
        "tool_search": "all tools are shown at once",
    },
    {
        "custom": "give a function with one argument of type string",
        **dict.fromkeys(
            (
                "file_search", "code_interpreter", "image_generation", "computer", "computer_use_preview", "mcp", "local_shell",
                "shell", "apply_patch",
            ),
            NOT_RUN,
        ),
    },
)  # fmt: skip
FUNCTION = Place(
    "functions in Responses",
    ("type", "name", "description", "parameters", "strict"),
    {
        "allowed_callers": only(one_of(["direct"]), "calls come from the model alone"),
        "async": only(one_of(False), "the answer waits for no function"),
        "defer_loading": without_effect("all tools are shown at once", one_of(False, is_done=False)),
        "output_schema": without_effect("the model's chat template has no place for it", OBJECT),
    },
)
NAMESPACE = Place("namespaces in Responses", ("type", "name", "description", "tools"))
CHOICE = Place("`tool_choice` of Responses", ("type", "name", "mode", "tools"))
