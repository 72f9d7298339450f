"""Entries of several APIs: rules for fields that clients send to any of them, and objects that these share."""

from collections.abc import Mapping

from ..field_rules import Place, Rule, only, refused, without_effect
from ..harmless import EMPTY, FLAG, LIST, NOTHING, NUMBER, OBJECT, TEXT, number, of_type, one_of, short_text
from ..thinking import PLACE_FIELDS

CACHED = "whatever fits is cached"
FOREIGN_THOUGHTS = "thoughts of an answer are no part of what it said"
MAX_USER_CHARS = 512
NOT_RUN = "this server runs no tools; offer a function that the client runs"
_UNKEPT = "nothing reads it"
_LOADED = "memory and threads are the run's configuration"
_FAST = "only the speed would change"
_ONE_MODEL = "there is one model, and one server"
_NO_ADAPTERS = "this server has no adapters"
MAX_NAMES = ("n_predict", "num_predict", "max_new_tokens", "max_length", "max_gen_len", "max_tokens_to_sample")

# Of requests for work in all APIs but Ollama's, as far as nothing else is said.
WORK: Mapping[str, Rule] = {
    "user": without_effect(_UNKEPT, short_text(MAX_USER_CHARS)),
    "metadata": without_effect(_UNKEPT, OBJECT),
    "store": without_effect("only Responses are kept", FLAG),
    "safety_identifier": without_effect(_UNKEPT, TEXT),
    "prompt_cache_key": without_effect(CACHED, TEXT),
    "prompt_cache_retention": without_effect(CACHED, TEXT),
    "cache_control": without_effect(CACHED, OBJECT),
    "cache_prompt": without_effect(CACHED),
    "request_id": without_effect("the server makes the id", TEXT),
    "service_tier": without_effect("there is one", one_of("auto", "default", is_done=False)),
    "prediction": without_effect(_FAST),
    "verbosity": without_effect("no served model knows it", one_of("low", "medium", "high", is_done=False)),
    **dict.fromkeys((*PLACE_FIELDS, "stream_reasoning"), without_effect("thoughts are where the API has them")),
    **dict.fromkeys(("thinking_budget", "thinking_token_budget"), without_effect("the model ends its thoughts")),
    **dict.fromkeys(("provider", "models", "route", "transforms", "usage", "session_id", "id_slot"), without_effect(_ONE_MODEL)),
    "spaces_between_special_tokens": without_effect("special tokens are left out of texts", FLAG),
    "add_special_tokens": without_effect("the tokenizer and the template say which there are", FLAG),
    **dict.fromkeys(("guided_decoding_backend", "timings_per_token", "return_progress", "return_timings"), without_effect(_UNKEPT)),
    "best_of": only(number(1), "give n"),
    "use_beam_search": only(one_of(False), "sample instead"),
    "length_penalty": only(number(1), "it belongs to beam search"),
    "early_stopping": only(one_of(False), "it belongs to beam search"),
    "top_logprobs": only(number(0)),
    "return_token_strs": only(one_of(False), "POST /detokenize has them"),
    "skip_special_tokens": only(one_of(True)),
    "truncate_prompt_tokens": only(number(-1), "a prompt is never cut"),
    "modalities": only(one_of(["text"]), "answers are text"),
    "audio": only(EMPTY, "answers are text"),
    "documents": only(NOTHING, "put them into a message"),
    "media_io_kwargs": only(EMPTY, "give mm_processor_kwargs"),
    "web_search_options": refused("this server does not search; offer a function that does, in tools"),
    "plugins": only(EMPTY, "this server has none; offer functions in tools"),
    "chat_template": only(EMPTY, "the model's own is used; chat_template_kwargs gives values to its variables"),
    "safe_prompt": only(one_of(False), "put what it says into a system message"),
    "extra_body": only(EMPTY, "put its fields into the body itself"),
    **dict.fromkeys(("lora", "lora_path", "adapter_id"), only(EMPTY, _NO_ADAPTERS)),
    "prompt_embeds": only(EMPTY, "give text"),
    "do_sample": only(one_of(True), "give temperature 0"),
    "random_seed": refused("give seed"),
    "min_new_tokens": only(number(0), "give min_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_strings"), only(EMPTY, "give stop")),
    "stop_regex": only(EMPTY, "only texts and tokens end an answer"),
    "stop_token": only(EMPTY, "give stop_token_ids"),
    "samplers": only(EMPTY, "their order is fixed; give temperature, top_k, top_p or min_p"),
    "return_tokens_as_token_ids": only(one_of(False), "give return_token_ids"),
    "n_probs": only(number(0), "give logprobs"),
    "functions": only(NOTHING, "give tools"),
    "function_call": only(one_of("none", "auto"), "give tool_choice"),
    "echo": only(one_of(False), "POST /v1/completions has it"),
    "options": only(EMPTY, "put them into the body itself"),
    **dict.fromkeys(("format", "response_schema"), only(EMPTY, "give response_format")),
    "grammar": refused("give structured_outputs.grammar, in Lark's form"),
    "ebnf": refused("give structured_outputs.grammar, in Lark's form"),
    "json_schema": refused("give response_format, or structured_outputs.json"),
    "regex": refused("give structured_outputs.regex"),
    "structural_tag": refused("give tools, or structured_outputs"),
    "allowed_token_ids": only(EMPTY, "give logit_bias, or structured_outputs.choice"),
    "logits_processors": only(EMPTY, "give logit_bias, bad_words or structured_outputs"),
    **dict.fromkeys(MAX_NAMES, only(number(-1), "give max_tokens")),
    **dict.fromkeys(("tfs_z", "typical_p", "typical", "encoder_repetition_penalty"), only(number(1), "this sampler is not there")),
    **dict.fromkeys(
        (
            "top_a", "mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability", "dynatemp_range", "smoothing_factor",
            "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size",
        ),
        only(number(0), "this sampler is not there"),
    ),
    "top_n_sigma": only(number(0, -1), "this sampler is not there"),
    "repeat_penalty": only(number(1), "give repetition_penalty"),
}  # fmt: skip

STREAM_OPTIONS = Place(
    "`stream_options`", ("include_usage", "continuous_usage_stats"), {"include_obfuscation": only(one_of(False), "nothing is padded")}
)
RESPONSE_FORMAT = Place("`response_format`", ("type", "json_schema"))
NAMED_SCHEMA = Place("a named schema", ("name", "schema", "description", "strict", "type"))
STRUCTURED_OUTPUTS = Place(
    "`structured_outputs`",
    ("json", "json_object", "regex", "choice", "grammar"),
    known="there are json, json_object, regex, choice and grammar",
)
CHOICE = Place(
    "`tool_choice`, and what it holds", ("type", "function", "allowed_tools", "name", "mode", "tools", "disable_parallel_tool_use")
)

# Options of memory and threads, which the run's configuration settles.
OF_MEMORY: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "num_gqa", "draft_num_predict"),
        without_effect(_LOADED, NUMBER),
    ),
    **dict.fromkeys(
        ("numa", "low_vram", "f16_kv", "use_mmap", "use_mlock", "logits_all", "flash_attention"), without_effect(_LOADED, FLAG)
    ),
}
KEEP_ALIVE = without_effect("the model always stays", of_type(str | int | float, "a duration", {"type": ["string", "number"]}))
EXAMPLES = without_effect("the model's chat template has no place for them", LIST)
