"""Ollama's API: a body of ``/api/chat`` or ``/api/generate`` becomes a ``ChatRequest``. ``answers`` has the answers. Pure."""

from typing import Any

import msgspec

from .....models.architecture import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from .....models.grammar.source import JSON_OBJECT
from .....runtime.bus.sampling import Sampling
from ...reading.content import Conversation, MediaPart, Message, check_messages, is_continued, take_role
from ...reading.field_rules import settle
from ...reading.field_table import ollama as table
from ...reading.fields import OBJECT, Fields, Schema, kind_of, refuse, show
from ...reading.grammar_fields import AskedGrammar, read_schema
from ...reading.ignored import note
from ...reading.json_body import Body, decode_body
from ...reading.media import BASE64, MediaIntake
from ...reading.media_options import OptionReader
from ...reading.output_fields import Output, read_logprobs
from ...reading.sampling_fields import check_min_tokens, read_bad_words, read_sampling
from ...reading.template_fields import TemplateUse
from ...reading.thinking import OF_OLLAMA, read_thinking
from ...reading.tool_fields import read_tools
from ...reading.tool_messages import MAX_ID_CHARS
from ...reading.validation import MAX_TOKENS, ChatRequest, Generation, Limits, check_model, read_stop
from .tools import read_calls

LAST_BY_DEFAULT = 64  # of repeat_last_n; clients send it back without meaning anything by it
TAG = ":latest"  # which Ollama's clients add to names without a tag
_FORMAT: Schema = {"anyOf": [{"enum": ["", "json"]}, OBJECT]}
_IMAGES: Schema = {"type": "array", "items": BASE64}


class NothingAsked(Exception):
    """The request asks for no answer: with it Ollama loads the model, which is always loaded here."""


def read_chat(body: Body, limits: Limits) -> ChatRequest:
    """Validate the body of ``POST /api/chat``. It also takes ``tool_choice`` and ``parallel_tool_calls`` of chat completions.

    Raises:
        RequestError: 400, or 404 for an unknown model, or 413 for a picture that is too large.
        NothingAsked: there are no messages.
    """
    fields = Fields(decode_body(body, limits.body))
    generation = _read_generation(fields, limits)
    tools, grammar = read_tools(fields, generation.grammar, limits.max_tool_bytes)
    generation = msgspec.structs.replace(generation, grammar=grammar)
    given, thinking = fields.take("messages"), read_thinking(fields, OF_OLLAMA)
    settle(fields, table.CHAT)
    if given is None or given == []:
        raise NothingAsked
    intake = MediaIntake(limits.kinds, limits.media, OptionReader(None, limits.kinds, limits.vision_rules), limits.family)
    messages = [_read_message(one, f"messages[{at}]", intake) for at, one in enumerate(check_messages(given, limits.max_context))]
    if len(messages) > 1 and messages[-1].says_nothing and given[-1].get("thinking"):
        del messages[-1]  # thoughts alone
    continues = is_continued(messages[-1], f"messages[{len(messages) - 1}]")
    conversation = Conversation(tuple(messages), tuple(intake.media))
    use = TemplateUse(opens_answer=not continues, continues=continues, thinking=thinking)
    return ChatRequest(generation, conversation, use, tools=tools)


def read_generate(body: Body, limits: Limits) -> ChatRequest:
    """Validate the body of ``POST /api/generate``: one turn of the user, with a system prompt if there is one. Raises: as
    ``read_chat``."""
    fields = Fields(decode_body(body, limits.body))
    generation = _read_generation(fields, limits)
    prompt, system, images = fields.take_str("prompt"), fields.take_str("system"), fields.take("images", _IMAGES)
    use = TemplateUse(thinking=read_thinking(fields, OF_OLLAMA))
    settle(fields, table.GENERATE)
    if not prompt and images in (None, []):
        raise NothingAsked
    if not prompt:
        raise refuse("prompt", "is required beside images, and not empty")
    intake = MediaIntake(limits.kinds, limits.media, OptionReader(None, limits.kinds, limits.vision_rules), limits.family)
    messages = [Message("system", system)] if system else []
    messages.append(Message("user", _with_images(prompt, images, "images", "user", intake)))
    return ChatRequest(generation, Conversation(tuple(messages), tuple(intake.media)), use, messages_field="prompt")


def read_show(body: Body, limits: Limits) -> None:
    """Validate the body of ``POST /api/show``. Raises: RequestError 400, or 404 for an unknown model."""
    fields = Fields(decode_body(body, limits.body))
    for field in ("model", "name"):  # which older clients give
        check_model(fields, limits, limits.model_name + TAG, field=field)
    settle(fields, table.SHOW)


def _read_generation(fields: Fields, limits: Limits) -> Generation:
    """Take the fields and options of both routes. The options include mmrt's own sampling controls."""
    check_model(fields, limits, limits.model_name + TAG)
    value, stream = fields.take("options"), fields.take_flag("stream")
    options = Fields({} if value is None else value, "options")
    sampling = _read_penalties(options, read_sampling(options, limits.sampling, limits.max_context), limits.max_context)
    most = options.take_int("num_predict", -2, MAX_TOKENS)
    if most == 0:
        raise refuse("options.num_predict", "is 0, allowed are -2 and -1 (as many as fit), and 1 and up")
    most = None if most is None or most < 0 else most
    check_min_tokens(sampling.min_tokens, most, "options.num_predict")
    generation = Generation(
        sampling=sampling,
        max_new_tokens=most,
        max_tokens_field="options.num_predict",
        clamp_max_tokens=True,
        stop=read_stop(options),
        ignore_eos=False,
        return_token_ids=False,
        stream=stream is not False,
        include_usage=False,
        continuous_usage=False,
        negative_prompt=options.take_str("negative_prompt") or "",
        bad_words=read_bad_words(options),
        output=Output(logprobs=read_logprobs(fields)),
        grammar=_read_format(fields.take("format", _FORMAT)),
    )
    settle(options, table.OPTIONS)
    return generation


def _read_penalties(options: Fields, sampling: Sampling, max_context: int) -> Sampling:
    """Take Ollama's own options of penalties, which count all tokens here."""
    penalty = options.take_float("repeat_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    last = options.take_int("repeat_last_n", -1, MAX_TOKENS)
    counts_lines = options.take_flag("penalize_newline")
    if penalty is not None:
        sampling = msgspec.structs.replace(sampling, repetition_penalty=penalty)
    if last == 0:
        return msgspec.structs.replace(sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    if sampling.has_penalties and counts_lines is False:
        raise refuse(options.path("penalize_newline"), "is false, only true is supported where there are penalties")
    if sampling.has_penalties and last == LAST_BY_DEFAULT:
        note(options.path("repeat_last_n"), "penalties count all tokens")
    elif sampling.has_penalties and last is not None and 0 < last < max_context:
        problem = f"is {last}, but penalties count all tokens: allowed are -1, 0 (no penalties) and {LAST_BY_DEFAULT}, Ollama's default"
        raise refuse(options.path("repeat_last_n"), problem)
    return sampling


def _read_format(value: Any) -> AskedGrammar | None:
    if value is None or value == "":
        return None
    if value == "json":
        return AskedGrammar(JSON_OBJECT, "format")
    if not isinstance(value, dict):
        raise refuse("format", f'is {show(value)}, allowed are "json" and a JSON schema')
    return read_schema(value, "format")


def _read_message(value: Any, path: str, intake: MediaIntake) -> Message:
    fields = Fields(value, path)
    role = take_role(fields, table.ROLES)
    content, images = fields.take_str("content"), fields.take("images", _IMAGES)
    message = Message(role, "")
    if role == "assistant":
        calls, thoughts = read_calls(fields.take("tool_calls"), f"{path}.tool_calls"), fields.take_str("thinking")
        message = message._replace(calls=calls, thoughts=thoughts or "", thoughts_field=fields.path("thinking") if thoughts else "")
    if role == "tool":
        # Older clients say name.
        name, old_name, call_id = (fields.take_str(field, MAX_ID_CHARS) or "" for field in ("tool_name", "name", "tool_call_id"))
        message = message._replace(name=name or old_name, call_id=call_id)
    settle(fields, table.MESSAGE)
    return message._replace(content=_with_images(content or "", images, f"{path}.images", role, intake))


def _with_images(text: str, images: Any, path: str, role: str, intake: MediaIntake) -> str | tuple[str | MediaPart, ...]:
    """Return content whose pictures come before its text, as with Ollama."""
    if images is None:
        images = []
    if not isinstance(images, list):
        raise refuse(path, f"expected an array of base64 texts, got {kind_of(images)}")
    for at, image in enumerate(images):
        intake.read_picture(image, f"{path}[{at}]", role)
    return (*[MediaPart("image")] * len(images), text) if images else text
