"""Ollama's API: a body of ``/api/chat`` or ``/api/generate`` becomes a ``ChatRequest``, an answer lines of JSON. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from ....models.architecture import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from ....models.grammar.source import JSON_OBJECT
from ....runtime.errors import RequestError
from ..choices import Ending, Piece, Usage
from ..content import Conversation, MediaPart, Message, check_messages, is_continued
from ..fields import OBJECT, Fields, Schema, kind_of, refuse, show
from ..grammar_fields import AskedGrammar, read_schema
from ..harmless import FLAG, NOTHING, TEXT, Harmless, number, of_type, one_of, refuse_others
from ..json_body import Body, decode_body
from ..media import BASE64, MediaIntake
from ..media_options import OptionReader
from ..sampling_fields import check_min_tokens, read_bad_words, read_sampling
from ..template_fields import TemplateUse
from ..validation import MAX_CLAMPED, ChatRequest, Generation, Limits, check_model, read_stop

ROLES = ("system", "user", "assistant")
_TAG = ":latest"  # which Ollama's clients add to names without a tag
_FORMAT: Schema = {"anyOf": [{"enum": ["", "json"]}, OBJECT]}
_IMAGES: Schema = {"type": "array", "items": BASE64}
_NUMBER = of_type(int | float, "a number", {"type": "number"})
_IGNORED_FIELDS: Mapping[str, Harmless] = {
    "keep_alive": of_type(str | int | float, "a duration", {"type": ["string", "number"]}),  # the model always stays
    "think": one_of(False),
    "tools": NOTHING,
    "logprobs": one_of(False),
    "top_logprobs": number(0),
    "truncate": FLAG,  # what does not fit is refused
    "shift": FLAG,
}
_IGNORED_OF_GENERATE: Mapping[str, Harmless] = {
    **_IGNORED_FIELDS,
    "suffix": one_of(""),
    "template": one_of(""),
    "context": NOTHING,
    "raw": one_of(False),
}
_IGNORED_OF_MESSAGES: Mapping[str, Harmless] = {"thinking": TEXT, "tool_calls": NOTHING, "tool_name": one_of("")}
# Of memory and threads, which the run's configuration settles; then those of samplers that are off.
_IGNORED_OPTIONS: Mapping[str, Harmless] = {
    **dict.fromkeys(("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep"), _NUMBER),
    **dict.fromkeys(("numa", "low_vram", "f16_kv", "use_mmap", "use_mlock", "logits_all"), FLAG),
    "vocab_only": one_of(False),
    "embedding_only": one_of(False),
    "repeat_last_n": number(-1),
    "tfs_z": number(1),
    "typical_p": number(1),
    "mirostat": number(0),
    "mirostat_tau": _NUMBER,
    "mirostat_eta": _NUMBER,
    "penalize_newline": one_of(True),
}
_encode = msgspec.json.Encoder().encode


# ------------------------------------------------------------------------------------------------------------------ request


def read_chat(body: Body, limits: Limits) -> ChatRequest:
    """Validate the body of ``POST /api/chat``.

    Raises:
        RequestError: 400, or 404 for an unknown model, or 413 for a picture that is too large.
    """
    fields = Fields(decode_body(body, limits.body))
    generation = _read_generation(fields, limits)
    given = fields.take_required("messages")
    refuse_others(fields, _IGNORED_FIELDS)
    intake = MediaIntake(limits.kinds, limits.media, OptionReader(None, limits.kinds, limits.vision_rules))
    messages = [_read_message(one, f"messages[{at}]", intake) for at, one in enumerate(check_messages(given, limits.max_context))]
    continues = is_continued(messages[-1], f"messages[{len(messages) - 1}]")
    conversation = Conversation(tuple(messages), tuple(intake.media))
    return ChatRequest(generation, conversation, TemplateUse(opens_answer=not continues, continues=continues))


def read_generate(body: Body, limits: Limits) -> ChatRequest:
    """Validate the body of ``POST /api/generate``: one turn of the user, with a system prompt if there is one. Raises: as
    ``read_chat``."""
    fields = Fields(decode_body(body, limits.body))
    generation = _read_generation(fields, limits)
    fields.require("prompt")
    prompt, system, images = fields.take_str("prompt"), fields.take_str("system"), fields.take("images", _IMAGES)
    refuse_others(fields, _IGNORED_OF_GENERATE)
    if not prompt:
        raise refuse("prompt", "is empty")
    intake = MediaIntake(limits.kinds, limits.media, OptionReader(None, limits.kinds, limits.vision_rules))
    messages = [Message("system", system)] if system else []
    messages.append(_with_images(prompt, images, "images", "user", intake))
    return ChatRequest(generation, Conversation(tuple(messages), tuple(intake.media)), messages_field="prompt")


def read_show(body: Body, limits: Limits) -> None:
    """Validate the body of ``POST /api/show``. Raises: RequestError 400, or 404 for an unknown model."""
    fields = Fields(decode_body(body, limits.body))
    fields.take_str("name")  # the field's name in older versions
    _check_model(fields, limits)
    refuse_others(fields, {"verbose": FLAG})


def _check_model(fields: Fields, limits: Limits) -> None:
    if fields.leftover.get("model") == limits.model_name + _TAG:
        fields.take("model")
    check_model(fields, limits)


def _read_generation(fields: Fields, limits: Limits) -> Generation:
    """Take the fields and options of both routes. The options include mmrt's own sampling controls."""
    _check_model(fields, limits)
    value, stream = fields.take("options"), fields.take_flag("stream")
    options = Fields({} if value is None else value, "options")
    penalty = options.take_float("repeat_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    sampling = read_sampling(options, limits.sampling, limits.max_context)
    if penalty is not None:
        sampling = msgspec.structs.replace(sampling, repetition_penalty=penalty)
    most = options.take_int("num_predict", -2, MAX_CLAMPED)
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
        grammar=_read_format(fields.take("format", _FORMAT)),
    )
    refuse_others(options, _IGNORED_OPTIONS)
    return generation


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
    role = fields.take_choice("role", ROLES)
    fields.require("content")
    content, images = fields.take_str("content"), fields.take("images", _IMAGES)
    refuse_others(fields, _IGNORED_OF_MESSAGES)
    return _with_images(content or "", images, f"{path}.images", role, intake)


def _with_images(text: str, images: Any, path: str, role: str, intake: MediaIntake) -> Message:
    """Return a message whose pictures come before its text, as with Ollama."""
    if images is None:
        images = []
    if not isinstance(images, list):
        raise refuse(path, f"expected an array of base64 texts, got {kind_of(images)}")
    for at, image in enumerate(images):
        intake.read_picture(image, f"{path}[{at}]", role)
    return Message(role, (*[MediaPart("image")] * len(images), text) if images else text)


# ------------------------------------------------------------------------------------------------------------------- answer


class LineFormat(NamedTuple):
    """The form of a route's answers: see ``AnswerFormat``. ``is_chat``: they hold a message rather than text alone."""

    id_prefix: str
    is_chat: bool

    def begin(self, id: str, created: int, model: str, fingerprint: str) -> "LineAnswer":
        return LineAnswer(id, time_of(created), model, self.is_chat)


CHAT = LineFormat("chat-", True)
GENERATE = LineFormat("generate-", False)


class LineAnswer:
    """One answer. It has one choice."""

    def __init__(self, id: str, created_at: str, model: str, is_chat: bool) -> None:
        self.id = id
        self._head = {"model": model, "created_at": created_at}
        self._is_chat = is_chat

    def choice(self, index: int, piece: Piece, ending: Ending, with_ids: bool) -> dict[str, Any]:
        return {"text": piece.text, "ending": ending}

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage, more: dict[str, Any]) -> bytes:
        return self.line(choices[0]["text"], **_end(choices[0]["ending"], usage), **more)

    def chunks(self, generation: Generation) -> "Lines":
        return Lines(self)

    def line(self, text: str, **more: Any) -> bytes:
        """Return a line with this text."""
        content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"response": text}
        return _encode({**self._head, **content, **more}) + b"\n"


class Lines:
    """The lines of its stream: see ``Chunks``."""

    content_type = "application/x-ndjson"

    def __init__(self, answer: LineAnswer) -> None:
        self._answer = answer
        self.keep_alive = answer.line("", done=False)

    def role(self, index: int, usage: Usage) -> bytes:
        return b""

    def text(self, index: int, piece: Piece, usage: Usage) -> bytes:
        return self._answer.line(piece.text, done=False)

    def finish(self, index: int, ending: Ending, piece: Piece, usage: Usage) -> bytes:
        return self._answer.line("", **_end(ending, usage))

    def end(self, usage: Usage) -> bytes:
        return b""

    def error(self, error: RequestError) -> bytes:
        return error_body(error) + b"\n"


def error_body(error: RequestError) -> bytes:
    """``{"error": message}``. The message names the field at fault."""
    return _encode({"error": error.message})


def time_of(created: int) -> str:
    """Return a Unix time in seconds as RFC 3339 has it."""
    return datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")


def _end(ending: Ending, usage: Usage) -> dict[str, Any]:
    """Return the fields of the last line. Durations are in nanoseconds, and at least 1: clients divide by them. The model has been
    loaded before."""
    durations = (ending.queue_s, ending.prefill_s, ending.decode_s)
    queue_ns, prefill_ns, decode_ns = (max(1, round(1e9 * seconds)) for seconds in durations)
    return {
        "done": True,
        "done_reason": ending.reason,
        "total_duration": queue_ns + prefill_ns + decode_ns,
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": prefill_ns,
        "eval_count": usage.completion_tokens,
        "eval_duration": decode_ns,
    }


# -------------------------------------------------------------------------------------------------------------------- model


def model_entry(limits: Limits, created: int) -> dict[str, Any]:
    """Return the model as ``GET /api/tags`` lists it."""
    details = {"format": "safetensors", "family": limits.family, "families": [limits.family]}
    return {"name": limits.model_name, "model": limits.model_name, "modified_at": time_of(created), "details": details}


def model_details(limits: Limits, created: int) -> dict[str, Any]:
    """Return the model as ``POST /api/show`` describes it."""
    capabilities = ["completion", *(name for kind, name in (("image", "vision"), ("audio", "audio")) if kind in limits.kinds)]
    entry = model_entry(limits, created)
    facts = {"general.architecture": limits.family, f"{limits.family}.context_length": limits.max_context}
    return {"modified_at": entry["modified_at"], "details": entry["details"], "model_info": facts, "capabilities": capabilities}
