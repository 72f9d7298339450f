"""Validate the body of a request for work: return a ``ChatRequest`` or a ``TextRequest``, or raise an error that names the field,
its value and the limit.

Pure. ``field_table`` has the rules for fields that are not used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ....models.architecture import SamplingDefaults
from ....models.media_config import VisionRules
from ....models.text.transcripts import SpeechRules
from ....runtime.bus.sampling import Sampling
from ....runtime.config.sections import MediaSection
from ....runtime.errors import RequestError
from ....schema.media import MediaKind
from .content import Conversation, check_continues, read_messages
from .field_rules import settle
from .field_table import chat as table
from .field_table.common import STREAM_OPTIONS
from .fields import AT_LEAST_ONE, STRING, Fields, Schema, kind_of, refuse, show
from .grammar_fields import AskedGrammar, read_grammar
from .ignored import tolerate
from .json_body import Body, BodyLimits, decode_body
from .media import MediaIntake
from .media_options import FOR_ALL, FOR_READING, OptionReader
from .output_fields import MAX_CHOICES, Output, read_chat_output, read_text_output
from .sampling_fields import check_min_tokens, read_bad_words, read_sampling
from .template_fields import TemplateUse, read_template_use
from .tool_fields import ToolUse, read_tools

MAX_STOPS = 16
MAX_STOP_TOKENS = 128
MAX_STOP_CHARS = 256
MAX_SALT_BYTES = 256
MAX_PRIORITY = 1_000_000
TEXT_TOKENS = 16  # at most that many /v1/completions generates where a request does not say, as OpenAI's
UNLIMITED = -1  # of max_tokens: as many as fit, as in llama.cpp and LM Studio
MAX_TOKENS = (1 << 31) - 1  # of an answer that a client asks for
_STOP: Schema = {**STRING, "maxLength": MAX_STOP_CHARS}
_STOPS: Schema = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}
_IDS: Schema = {"type": "array", "items": {"type": "integer"}}
_PROMPT: Schema = {"anyOf": [{**STRING, "minLength": 1}, {**_IDS, "minItems": 1}]}
_PROMPTS: Schema = {"anyOf": [_PROMPT, {"type": "array", "minItems": 1, "items": _PROMPT}]}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on requests: the model served and the configuration. ``vision_rules`` are the run's (``media_rules``).
    ``takes_tools``: its chat template can show functions; ``thinks``: answers may begin with thoughts. ``max_tool_bytes``:
    of all functions of a request, as JSON. ``weight_bytes``: of the checkpoint's files. ``sound_frame_s``: seconds of one frame of a
    sound; ``speech``: how the model transcribes, if it was trained to."""

    model_name: str
    family: str = ""
    kinds: tuple[MediaKind, ...]
    max_tool_bytes: int = 1 << 20
    takes_tools: bool = True
    thinks: bool = False
    weight_bytes: int = 0
    max_context: int
    max_choices: int = MAX_CHOICES
    hidden_size: int = 0  # of the language model
    sampling: SamplingDefaults = SamplingDefaults()
    media: MediaSection = MediaSection()
    vision_rules: VisionRules | None = None
    sound_frame_s: float = 0.0
    speech: SpeechRules | None = None

    @property
    def body(self) -> BodyLimits:
        return BodyLimits.of(self.max_context, self.media.max_items)


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The generation asked for. ``negative_prompt`` counts when ``sampling.guidance_scale`` is not 1. ``clamp_max_tokens``: where
    ``max_new_tokens`` do not fit, as many as do; otherwise the request is refused."""

    sampling: Sampling
    max_new_tokens: int | None
    max_tokens_field: str
    clamp_max_tokens: bool = False
    stop: list[str]
    ignore_eos: bool
    return_token_ids: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    negative_prompt: str
    cache_salt: str | None = None
    stop_token_ids: list[int] = []
    include_stop: bool = False
    bad_words: list[str] = []
    priority: int = 0
    output: Output = Output()
    grammar: AskedGrammar | None = None


class ChatRequest(msgspec.Struct, frozen=True):
    """A valid request about a conversation. ``messages_field``: its name in the request."""

    generation: Generation
    conversation: Conversation
    template: TemplateUse = TemplateUse()
    messages_field: str = "messages"
    tools: ToolUse | None = None

    @property
    def field_names(self) -> dict[str, str]:
        """Fields whose names in the request differ from those in the controller's errors."""
        return {"max_tokens": self.generation.max_tokens_field, "messages": self.messages_field}


class TextRequest(msgspec.Struct, frozen=True):
    """A valid request to ``/v1/completions``. ``prompt``: text, or token ids; ``more_prompts``: others to be continued as well."""

    generation: Generation
    prompt: str | list[int]
    more_prompts: tuple[str | list[int], ...] = ()
    adds_special_tokens: bool = True  # those that the tokenizer puts around texts

    @property
    def field_names(self) -> dict[str, str]:
        """As ``ChatRequest``'s."""
        return {"max_tokens": self.generation.max_tokens_field, "messages": "prompt"}


def read_chat(body: Body, limits: Limits) -> ChatRequest:
    """Validate the body of a chat request.

    Raises:
        RequestError: 400, or 404 for an unknown model, or 413 for a medium that is too large.
    """
    return _read_chat(Fields(decode_body(body, limits.body)), limits)


def _read_chat(fields: Fields, limits: Limits) -> ChatRequest:
    generation = read_generation(fields, limits, read_chat_output)
    most = _most_with_logprobs(generation, 1, limits.max_context)
    if generation.max_new_tokens is None and most < limits.max_context:
        generation = msgspec.structs.replace(generation, max_new_tokens=most, clamp_max_tokens=True)
    tools, grammar = read_tools(fields, generation.grammar, limits.max_tool_bytes)
    generation = msgspec.structs.replace(generation, grammar=grammar)
    check_grammar(generation)
    messages = fields.take_required("messages", AT_LEAST_ONE)
    options = OptionReader(fields.take(FOR_ALL), limits.kinds, limits.vision_rules, fields.take(FOR_READING))
    template = read_template_use(fields)
    _leave_out(fields)
    settle(fields, table.CHAT)
    intake = MediaIntake(limits.kinds, limits.media, options, limits.family)
    conversation = read_messages(messages, intake, limits.max_context)
    if template.continues:
        check_continues(conversation)
    return ChatRequest(generation, conversation, template, tools=tools)


def read_text(body: Body, limits: Limits) -> TextRequest:
    """Validate the body of a request to continue a text. Raises: RequestError, as ``read_chat``."""
    return _read_text(Fields(decode_body(body, limits.body)), limits)


def _read_text(fields: Fields, limits: Limits) -> TextRequest:
    generation = read_generation(fields, limits, read_text_output)
    prompt, *more = _read_prompts(fields.take_required("prompt", _PROMPTS), limits.max_choices // generation.output.best_of)
    most = _most_with_logprobs(generation, 1 + len(more), limits.max_context)
    if generation.max_new_tokens is None and generation.clamp_max_tokens and most < limits.max_context:
        generation = msgspec.structs.replace(generation, max_new_tokens=most)
    if generation.sampling.guidance_scale != 1 and not generation.negative_prompt:
        raise refuse("negative_prompt", "is required with guidance_scale: without a chat template it is the whole unconditional prompt")
    adds_special_tokens = fields.take_flag("add_special_tokens") is not False
    _leave_out(fields)
    settle(fields, table.TEXT)
    return TextRequest(generation, prompt, tuple(more), adds_special_tokens)


def read_tokenize(body: Body, limits: Limits) -> ChatRequest | TextRequest:
    """Validate the body of a request for the tokens of a prompt, which says ``messages`` or ``prompt``. Raises: as ``read_chat``."""
    fields = Fields(decode_body(body, limits.body))
    if "messages" in fields.leftover:
        return _read_chat(fields, limits)
    asked = _read_text(fields, limits)
    if asked.more_prompts:
        raise refuse("prompt", f"has {1 + len(asked.more_prompts)} prompts, the limit is 1")
    return asked


def read_detokenize(body: Body, limits: Limits) -> list[int]:
    """Validate the body of a request for the text of ``tokens``. Raises: RequestError 400, or 404 for an unknown model."""
    fields = Fields(decode_body(body, limits.body))
    check_model(fields, limits)
    tokens = _read_ids(fields.take_required("tokens", _IDS), "tokens")
    settle(fields, table.DETOKENIZE)
    return tokens


def _read_ids(value: Any, path: str) -> list[int]:
    if not isinstance(value, list):
        raise refuse(path, f"expected an array of token ids, got {kind_of(value)}")
    for id in value:
        if type(id) is not int:
            raise refuse(path, f"expected token ids, got {show(id)}")
    return value


def _read_prompts(value: Any, max_prompts: int) -> list[str | list[int]]:
    """Read text or token ids, or a list of several of these."""
    if not (isinstance(value, list) and value and isinstance(value[0], str | list)):
        return [read_prompt(value, "prompt")]
    if len(value) > max_prompts:
        raise refuse("prompt", f"has {len(value)} prompts, the limit with so many choices of each is {max_prompts}")
    return [read_prompt(one, f"prompt[{at}]" if len(value) > 1 else "prompt") for at, one in enumerate(value)]


def read_prompt(value: Any, path: str) -> str | list[int]:
    """Read a text or token ids, not empty. Raises: RequestError."""
    if not isinstance(value, str | list):
        raise refuse(path, f"expected a string or an array of token ids, got {kind_of(value)}")
    if not value:
        raise refuse(path, "is empty")
    return _read_ids(value, path) if isinstance(value, list) else value


def read_generation(
    fields: Fields,
    limits: Limits,
    read_output: Callable[[Fields, int, bool], Output],
    grammar: AskedGrammar | None = None,
    *,
    stop_field: str = "stop",
    max_tokens_fields: Sequence[str] = ("max_tokens", "max_completion_tokens"),
    clamp_max_tokens: bool = False,
) -> Generation:
    """Take the fields common to all requests for work, and by ``read_output`` those that the routes shape differently. ``grammar``:
    that of a field of the route's own. Fields can have other names. Raises: RequestError."""
    check_model(fields, limits)
    stream = fields.take_bool("stream")
    include_usage, continuous_usage = _read_stream_options(fields, stream)
    output = read_output(fields, limits.max_choices, stream)
    max_new_tokens, max_tokens_field = _read_max_tokens(fields, max_tokens_fields, 0 if output.echo else 1)
    if max_new_tokens == UNLIMITED:
        max_new_tokens, clamp_max_tokens = None, True
    sampling = read_sampling(fields, limits.sampling, limits.max_context)
    check_min_tokens(sampling.min_tokens, max_new_tokens, max_tokens_field)
    generation = Generation(
        negative_prompt=fields.take_str("negative_prompt") or "",
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        max_tokens_field=max_tokens_field,
        clamp_max_tokens=clamp_max_tokens,
        stop=read_stop(fields, stop_field),
        ignore_eos=fields.take_bool("ignore_eos"),
        return_token_ids=fields.take_bool("return_token_ids"),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        cache_salt=_read_cache_salt(fields),
        stop_token_ids=_read_stop_token_ids(fields),
        include_stop=fields.take_bool("include_stop_str_in_output"),
        bad_words=read_bad_words(fields),
        priority=fields.take_int("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0,
        output=output,
        grammar=read_grammar(fields, grammar),
    )
    check_grammar(generation)
    return generation


def _most_with_logprobs(generation: Generation, num_prompts: int, max_context: int) -> int:
    """Return how many tokens each choice may have: an answer that is not streamed must have room for all log-probabilities. Raises:
    RequestError if more are asked for."""
    output, sampling = generation.output, generation.sampling
    most = None if generation.stream else output.most_tokens(num_prompts, max_context)
    if most is None or most >= max_context:
        return max_context
    is_given = generation.max_new_tokens is not None
    asked, field = (generation.max_new_tokens, generation.max_tokens_field) if is_given else (sampling.min_tokens, "min_tokens")
    if asked is not None and asked > most:
        choices = f"{num_prompts * output.best_of} choices with {1 + (output.logprobs or 0)} log-probabilities a token"
        raise refuse(field, f"is {asked}, the limit is {most} for {choices} unless stream is true")
    return most


def read_prefill_fields(fields: Fields, limits: Limits) -> tuple[int, str | None]:
    """Take the fields common to requests that prefill answers, and return ``priority`` and ``cache_salt``. Raises: RequestError."""
    check_model(fields, limits)
    return fields.take_int("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0, _read_cache_salt(fields)


def check_grammar(generation: Generation) -> None:
    """Check that the grammar may say where the answer ends. Raises: RequestError."""
    if generation.grammar is not None and generation.ignore_eos:
        raise refuse("ignore_eos", f"cannot be combined with {generation.grammar.field}, which says where the answer ends")


def _leave_out(fields: Fields) -> None:
    """Leave out tools that must not be called."""
    for choice, tools in (("tool_choice", "tools"), ("function_call", "functions")):
        if fields.leftover.get(choice) == "none" and isinstance(fields.leftover.get(tools), list):
            fields.take(tools)


def check_model(fields: Fields, limits: Limits, *aliases: str, field: str = "model") -> None:
    """Take the name of the model. It must be that of the only model. Raises: RequestError."""
    names = [limits.model_name, *aliases]
    model = fields.take(field, {"enum": names})
    if model is not None and not isinstance(model, str):
        raise refuse(field, f"expected a string, got {kind_of(model)}")
    if model is not None and model not in names:
        raise RequestError(
            f"{field}: {show(model)} does not exist, this server has {show(limits.model_name)}",
            status=404,
            type="not_found_error",
            param=field,
            code="model_not_found",
        )


def _read_stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    value = fields.take("stream_options")
    if value is None:
        return False, False
    if not stream:
        raise refuse("stream_options", "is allowed only when stream is true")
    options = Fields(value, "stream_options")
    include = options.take_bool("include_usage")
    continuous = options.take_bool("continuous_usage_stats")
    settle(options, STREAM_OPTIONS)
    return include, include and continuous


def _read_max_tokens(fields: Fields, names: Sequence[str], least: int) -> tuple[int | None, str]:
    """The number, and its field. 0 is for an echo alone. The controller, which knows the prompt's length, checks that it fits."""
    given = [(value, name) for name in names if (value := _take_max_tokens(fields, name, least)) is not None]
    if len({value for value, _ in given}) > 1:
        (old, first), (new, second) = given
        raise refuse(first, f"is {old}, but {second} is {new}; give one of them")
    return given[-1] if given else (None, names[0])


def _take_max_tokens(fields: Fields, name: str, least: int) -> int | None:
    if (value := fields.leftover.get(name)) in (UNLIMITED, None) and type(value) is not bool:
        schema = {"anyOf": [{"type": "integer", "minimum": least, "maximum": MAX_TOKENS}, {"const": UNLIMITED}]}
        return None if fields.take(name, schema) is None else UNLIMITED
    return fields.take_int(name, least, MAX_TOKENS)


def _read_cache_salt(fields: Fields) -> str | None:
    salt = fields.take_str("cache_salt")
    if salt is not None and not 1 <= (num_bytes := len(salt.encode())) <= MAX_SALT_BYTES:
        raise refuse("cache_salt", f"{show(salt)} has {num_bytes} bytes in UTF-8, allowed are 1 to {MAX_SALT_BYTES}")
    return salt


def _read_stop_token_ids(fields: Fields) -> list[int]:
    value = fields.take("stop_token_ids", {**_IDS, "maxItems": MAX_STOP_TOKENS})
    ids = [] if value is None else _read_ids(value, "stop_token_ids")
    if len(ids) > MAX_STOP_TOKENS:
        raise refuse("stop_token_ids", f"has {len(ids)} entries, the limit is {MAX_STOP_TOKENS}")
    return ids


def read_stop(fields: Fields, name: str = "stop") -> list[str]:
    """Take the stop strings. Empty ones say nothing. Raises: RequestError."""
    value, whole = fields.take(name, _STOPS), fields.path(name)
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise refuse(whole, f"expected a string or an array of strings, got {kind_of(value)}")
    if len(stops) > MAX_STOPS:
        raise refuse(whole, f"has {len(stops)} entries, the limit is {MAX_STOPS}")
    found = list[str]()
    for i, stop in enumerate(stops):
        path = whole if isinstance(value, str) else f"{whole}[{i}]"
        if not isinstance(stop, str):
            raise refuse(path, f"expected a string, got {kind_of(stop)}")
        problem = f"has {len(stop)} characters, allowed are 1 to {MAX_STOP_CHARS}"
        if len(stop) > MAX_STOP_CHARS:
            raise refuse(path, problem)
        if stop:
            found.append(stop)
        else:
            tolerate(path, problem)
    return found
