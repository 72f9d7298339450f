"""Entries of Ollama's API."""

from collections.abc import Mapping

from ..field_rules import Kinds, Place, Rule, only, refused, without_effect
from ..harmless import EMPTY, FLAG, NOTHING, NUMBER, OBJECT, TEXT, WHOLE, number, one_of
from ..thinking import OF_OLLAMA as THINKING
from .common import FOREIGN_THOUGHTS, KEEP_ALIVE, OF_MEMORY

TRUNCATED = without_effect("what does not fit is refused", FLAG)
_ALL: Mapping[str, Rule] = {
    "keep_alive": KEEP_ALIVE,
    "truncate": TRUNCATED,
    "shift": TRUNCATED,
}
_COMMON = ("model", "stream", "options", "format", "logprobs", "top_logprobs", *THINKING)
CHAT = Place("Ollama's `/api/chat`", (*_COMMON, "messages", "tools", "tool_choice", "parallel_tool_calls"), _ALL)
GENERATE = Place(
    "Ollama's `/api/generate`",
    (*_COMMON, "prompt", "system", "images"),
    {
        **_ALL,
        "suffix": only(one_of(""), "the model fills no gaps"),
        "template": only(one_of(""), "the model's own is used"),
        "context": only(NOTHING, "call /api/chat with the conversation"),
        "raw": only(one_of(False), "POST /v1/completions takes a prompt without a template"),
    },
)
SHOW = Place("Ollama's `/api/show`", ("model", "name"), {"verbose": without_effect("all is shown", FLAG)})
_OF_VECTORS: Mapping[str, Rule] = {
    "keep_alive": KEEP_ALIVE,
    "truncate": TRUNCATED,
    "options": without_effect("vectors do not depend on them", OBJECT),
}
EMBED = Place(
    "Ollama's `/api/embed`",
    ("model", "input", "dimensions"),
    {**_OF_VECTORS, "prompt": refused("give input")},
)
EMBEDDINGS = Place(
    "Ollama's `/api/embeddings`", ("model", "prompt"), {**_OF_VECTORS, "input": refused("give prompt, or call /api/embed")}
)
_NO_SAMPLER = "this sampler is not there"
OPTIONS = Place(
    "`options` of Ollama",
    (
        "num_predict", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "repeat_penalty", "repeat_last_n", "penalize_newline",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "bad_words", "logit_bias", "guidance_scale",
        "negative_prompt",
    ),
    {
        **OF_MEMORY,
        **dict.fromkeys(("vocab_only", "embedding_only"), only(one_of(False), "the model answers")),
        **dict.fromkeys(("tfs_z", "typical_p"), only(number(1), _NO_SAMPLER)),
        "mirostat": only(number(0), _NO_SAMPLER),
        **dict.fromkeys(("mirostat_tau", "mirostat_eta"), without_effect("they belong to mirostat", NUMBER)),
        **dict.fromkeys(("rope_frequency_base", "rope_frequency_scale"), only(number(0), "the checkpoint says it")),
    },
)  # fmt: skip
ROLES = Kinds("roles in Ollama's messages", ("system", "user", "assistant", "tool"), refused={"developer": "give system"})
MESSAGE = Place(
    "Ollama's messages",
    ("role", "content", "images", "tool_calls", "tool_name", "name", "tool_call_id", "thinking"),
    {
        "thinking": without_effect(FOREIGN_THOUGHTS, TEXT),
        "tool_calls": only(NOTHING, "only messages of role assistant have them"),
        **dict.fromkeys(("tool_name", "tool_call_id"), without_effect("it is no result", one_of(""))),
        "name": without_effect("it is no result", EMPTY),
    },
)
CALL = Place("`tool_calls` of Ollama's messages", ("id", "function"), {"type": without_effect("all are functions", one_of("function"))})
CALLED = Place(
    "`function` of Ollama's `tool_calls`",
    ("name", "arguments"),
    {"index": without_effect("the order says it", WHOLE), "description": without_effect("tools have it", TEXT)},
)
