"""Entries of OpenAI's chat completions and text completions, of embeddings, transcriptions, and of mmrt's own routes."""

from collections.abc import Mapping

from ..field_rules import Kinds, Place, Rule, only, refused, without_effect
from ..harmless import EMPTY, FLAG, NOTHING, Harmless, one_of
from ..thinking import FIELDS as THINKING
from ..thinking import PLACE_FIELDS, SWITCHES
from .common import CACHED, FOREIGN_THOUGHTS, NOT_RUN, WORK

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "guidance_scale", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "min_tokens", "bad_words", "negative_prompt",
)  # fmt: skip
GENERATION = (
    "model", "stream", "stream_options", *_SAMPLING, "ignore_eos", "return_token_ids", "cache_salt", "stop_token_ids",
    "include_stop_str_in_output", "priority", "response_format", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar",
)  # fmt: skip
_SYSTEM = dict.fromkeys(("instructions", "system"), only(EMPTY, "put it into a message of role system"))
_ELSEWHERE: Mapping[str, Rule] = {
    **_SYSTEM,
    "max_output_tokens": refused("give max_tokens"),
    "input": refused("give messages, or call POST /v1/responses"),
}
_OF_TEMPLATES = Harmless(
    lambda value: isinstance(value, dict) and all(name in SWITCHES and isinstance(value[name], bool) for name in value),
    "an object with nothing but the booleans enable_thinking and thinking",
    {"type": "object", "properties": dict.fromkeys(SWITCHES, {"type": "boolean"}), "additionalProperties": False},
    is_done=False,
)

CHAT = Place(
    "chat completions",
    (
        *GENERATION, "max_tokens", "max_completion_tokens", "stop", "n", "logprobs", "top_logprobs", "prompt_logprobs", "messages",
        "tools", "tool_choice", "parallel_tool_calls", "mm_processor_kwargs", "media_io_kwargs", "add_generation_prompt",
        "continue_final_message", "chat_template_kwargs", *THINKING, *PLACE_FIELDS,
    ),
    {
        **{name: rule for name, rule in WORK.items() if name not in ("top_logprobs", "media_io_kwargs", *PLACE_FIELDS)},
        **_ELSEWHERE,
        "suffix": only(one_of("")),
        "prompt": only(EMPTY, "give messages, or call POST /v1/completions"),
    },
)  # fmt: skip
TEXT = Place(
    "text completions",
    (
        *GENERATION, "max_tokens", "max_completion_tokens", "stop", "n", "best_of", "logprobs", "prompt_logprobs", "echo", "prompt",
        "add_special_tokens",
    ),
    {
        **{name: rule for name, rule in WORK.items() if name not in ("best_of", "echo", "add_special_tokens")},
        **_ELSEWHERE,
        **dict.fromkeys(THINKING, without_effect("there is no template")),
        "suffix": only(one_of(""), "the model fills no gaps"),
        "messages": refused("give prompt, or call POST /v1/chat/completions"),
        "add_generation_prompt": only(one_of(True), "there is no template"),
        "continue_final_message": only(one_of(False), "there is no template"),
        "chat_template_kwargs": only(_OF_TEMPLATES, "there is no template"),
        "mm_processor_kwargs": only(NOTHING, "a text has no media"),
        "tools": only(NOTHING, "call POST /v1/chat/completions"),
        "tool_choice": only(one_of("none", "auto"), "call POST /v1/chat/completions"),
        "parallel_tool_calls": without_effect("there are no tools", FLAG),
        "functions": only(NOTHING, "call POST /v1/chat/completions"),
        "function_call": only(one_of("none", "auto"), "call POST /v1/chat/completions"),
    },
)  # fmt: skip
DETOKENIZE = Place("`/detokenize`", ("model", "tokens"))

ROLES = Kinds(
    "roles in chat completions",
    ("system", "developer", "user", "assistant", "tool"),
    refused={"function": "give the result in a message of role tool"},
)
_OF_ANSWERS: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks", "thinking", "reasoning_text"),
        without_effect(FOREIGN_THOUGHTS, EMPTY),
    ),
    "annotations": without_effect("the text has what they are about", EMPTY),
    "provider_specific_fields": without_effect("only its provider reads it"),
    "audio": without_effect("the text of an answer is its content", EMPTY),
    "function_call": only(EMPTY, "give tool_calls"),
    **dict.fromkeys(("id", "status", "index", "finish_reason", "created_at"), without_effect("nothing reads it")),
    "cache_control": without_effect(CACHED),
}
_NO_FILES = "send its text as a part of type text, or its pages as image_url"
MESSAGE = Place(
    "messages in chat completions",
    ("role", "content", "name", "tool_call_id", "tool_calls", "refusal", "reasoning_content", "reasoning"),
    {
        **_OF_ANSWERS,
        "tool_calls": only(EMPTY, "only messages of role assistant have them"),
        "tool_call_id": without_effect("it is no result", EMPTY),
        "refusal": without_effect("it is no answer", EMPTY),
        "images": only(EMPTY, "give them as parts of type image_url"),
        "prefix": only(one_of(False), "give continue_final_message"),
        **dict.fromkeys(("files", "attachments"), only(EMPTY, _NO_FILES)),
    },
)
PARTS = Kinds(
    "parts in chat completions",
    (
        "text",
        "input_text",
        "output_text",
        "refusal",
        "image_url",
        "video_url",
        "audio_url",
        "input_audio",
        "input_video",
        "image",
        "video",
        "audio",
    ),
    dict.fromkeys(("thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text"), FOREIGN_THOUGHTS),
    {
        **dict.fromkeys(("file", "input_file", "document"), _NO_FILES),
        "input_image": "give image_url",
        "tool_use": "give tool_calls",
        "tool_result": "give a message of role tool",
    },
)
TEXT_PART = Place(
    "parts of text",
    ("type", "text", "refusal"),
    {
        **dict.fromkeys(("annotations", "citations", "logprobs"), without_effect("the text has what they are about", EMPTY)),
        **dict.fromkeys(("cache_control", "prompt_cache_breakpoint"), without_effect(CACHED)),
        "id": without_effect("nothing reads it"),
    },
)
CALL = Place(
    "`tool_calls` of messages",
    ("type", "id", "function", "index"),
    {"extra_content": without_effect("only its provider reads it"), "cache_control": without_effect(CACHED)},
)
CALLED = Place("`function` of `tool_calls`", ("name", "arguments"))
TOOL_KINDS = Kinds(
    "tools in chat completions",
    ("function",),
    refused={
        "custom": "give a function with one argument of type string",
        **dict.fromkeys(("web_search", "web_search_preview", "mcp"), NOT_RUN),
    },
)
TOOL = Place("tools in chat completions", ("type", "function"), {"cache_control": without_effect(CACHED)})
FUNCTION = Place("`function` of tools", ("name", "description", "parameters", "strict"), {"cache_control": without_effect(CACHED)})

_PREFILLED: Mapping[str, Rule] = {
    name: WORK[name]
    for name in (
        "user",
        "metadata",
        "safety_identifier",
        "request_id",
        "service_tier",
        "provider",
        "extra_body",
        "media_io_kwargs",
        "chat_template",
    )
} | _SYSTEM
_NOT_SAMPLED = "nothing is sampled"
EMBEDDINGS = Place(
    "embeddings",
    (
        "model", "priority", "cache_salt", "encoding_format", "pooling", "dimensions", "messages", "input", "mm_processor_kwargs",
        "add_generation_prompt", "chat_template_kwargs",
    ),
    {
        **_PREFILLED,
        "truncate_prompt_tokens": WORK["truncate_prompt_tokens"],
        "truncate": without_effect("what does not fit is refused"),
        "input_type": without_effect("no served model tells queries from documents"),
        "normalize": only(one_of(True), "vectors have length 1"),
        "embed_dtype": only(one_of("float32")),
        "instruction": only(EMPTY, "put it into input"),
    },
)  # fmt: skip
DECISIONS = Place(
    "decisions",
    ("model", "priority", "cache_salt", "messages", "questions", "mm_processor_kwargs", "chat_template_kwargs"),
    {
        **_PREFILLED,
        **dict.fromkeys(_SAMPLING, refused(_NOT_SAMPLED + "; leave it out")),
    },
)
QUESTION = Place(
    "`questions` of decisions",
    ("name", "question", "type", "options", "minimum", "maximum"),
    known="the fields of a question are name, question, type, options, minimum, maximum",
)
NOT_IN_FORMS = (  # of the fields common to requests for work
    "stream_options", "logit_bias", "bad_words", "stop_token_ids", "include_stop_str_in_output", "return_token_ids", "ignore_eos",
    "min_tokens", "guidance_scale", "negative_prompt", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar",
)  # fmt: skip
TRANSCRIPTIONS = Place(
    "transcriptions",
    (
        "file", "model", "language", "prompt", "response_format", "timestamp_granularities", "temperature", "top_p", "top_k", "min_p",
        "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "max_completion_tokens", "priority", "stream",
        "cache_salt", "stop",
    ),
    {
        "user": WORK["user"],
        "chunking_strategy": only(one_of("auto"), "a sound is heard whole"),
        "include": only(one_of([]), "there are no log-probabilities of a transcript"),
        **dict.fromkeys(("known_speaker_names", "known_speaker_references"), only(EMPTY, "the model does not tell speakers apart")),
        **dict.fromkeys(NOT_IN_FORMS, refused("forms have no such field; leave it out")),
        **dict.fromkeys(("keywords", "hotwords"), only(EMPTY, "put them into prompt")),
    },
)  # fmt: skip
