"""OpenAI's ``POST /v1/audio/transcriptions``: a form with a sound becomes a ``ChatRequest`` for its text, of models that hear."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from .....runtime.errors import RequestError
from ...answers.answer_format import COMMENT
from ...answers.choices import Ending, Piece, Usage
from ...reading.content import Conversation, MediaPart, Message
from ...reading.field_rules import settle, settle_first
from ...reading.field_table.chat import NOT_IN_FORMS, TRANSCRIPTIONS
from ...reading.fields import NULL, STRING, Example, Fields, Schema, refuse, show
from ...reading.forms import Form, FormFile
from ...reading.media import MediaIntake
from ...reading.media_options import OptionReader
from ...reading.output_fields import Output
from ...reading.validation import ChatRequest, Generation, Limits, read_generation
from .answers import error_body

FORMATS = ("json", "text")
TIMED_FORMATS = ("verbose_json", "srt", "vtt", "diarized_json")
SYSTEM = "You are a speech recognition model."
INSTRUCTION = "Transcribe the audio into text."
MAX_PROMPT_CHARS = 16384
_LANGUAGE = re.compile(r"[A-Za-z][A-Za-z -]{1,31}", re.ASCII)
_NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "max_completion_tokens", "priority",
)  # fmt: skip
_FLAGS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}
_NO_TIMES = "the model tells what is said, not when"
_BINARY: Schema = {**STRING, "format": "binary"}
_encode = msgspec.json.Encoder().encode
_decode_number: Callable[[str], int | float] = msgspec.json.Decoder(int | float).decode


def read_transcription(form: Form | Example, limits: Limits) -> tuple[ChatRequest, bool]:
    """Validate the form of ``POST /v1/audio/transcriptions``, and return also whether its answer is plain text. It takes the sampling
    controls of chat completions as well. An example comes with the types of JSON.

    Raises:
        RequestError: 400, or 404 for an unknown model, or 413 for a sound that is too large.
    """
    if "audio" not in limits.kinds:
        raise RequestError(f"the model {limits.model_name} takes no sound: it cannot transcribe any", param="file")
    fields = Fields(form if isinstance(form, Example) else {name: _typed(name, value) for name, value in form.items()})
    file = fields.take_required("file", _BINARY)
    is_text = _read_format(fields) == "text"
    if fields.take("timestamp_granularities", NULL):
        raise refuse("timestamp_granularities", f"is not supported: {_NO_TIMES}")
    settle_first(fields, TRANSCRIPTIONS, *NOT_IN_FORMS)
    fields.leftover.setdefault("temperature", 0)  # as with OpenAI
    generation = read_generation(fields, limits, lambda *_: Output(), max_tokens_fields=("max_completion_tokens",))
    instruction = _read_instruction(fields)
    settle(fields, TRANSCRIPTIONS)
    if not isinstance(file, FormFile):
        raise refuse("file", "expected a file, got a text")
    intake = MediaIntake(limits.kinds, limits.media, OptionReader(None, limits.kinds, limits.vision_rules), limits.family)
    intake.read_file("audio", file.mime, file.data, "file")
    messages = (Message("system", SYSTEM), Message("user", (MediaPart("audio"), instruction)))
    return ChatRequest(generation, Conversation(messages, tuple(intake.media)), messages_field="file"), is_text


class Transcription:
    """One request and its answer: reads the form, and is the ``AnswerFormat`` of what it reads."""

    id_prefix = "transcription-"

    def __init__(self) -> None:
        self._is_text = False

    def read(self, form: Form, limits: Limits) -> ChatRequest:
        """Validate the form. Raises: RequestError, as ``read_transcription``."""
        asked, self._is_text = read_transcription(form, limits)
        return asked

    def begin(self, id: str, created: int, model: str, fingerprint: str) -> "Transcript":
        """See ``AnswerFormat``."""
        return Transcript(id, self._is_text)


class Transcript:
    """One answer."""

    def __init__(self, id: str, is_text: bool) -> None:
        self.id = id
        self.content_type = "text/plain" if is_text else "application/json"
        self._is_text = is_text

    def choice(self, index: int, piece: Piece, ending: Ending, with_ids: bool) -> dict[str, Any]:
        return {"text": piece.text}

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage, more: dict[str, Any]) -> bytes:
        (choice,) = choices
        if self._is_text:
            return f"{choice['text']}\n".encode()
        return _encode({**choice, "usage": _usage(usage), **more})

    def chunks(self, generation: Generation) -> "TranscriptEvents":
        return TranscriptEvents()


class TranscriptEvents:
    """The events of its stream: see ``Chunks``."""

    content_type = "text/event-stream; charset=utf-8"
    keep_alive = COMMENT

    def __init__(self) -> None:
        self._texts: list[str] = []

    def role(self, index: int, usage: Usage) -> bytes:
        return b""

    def text(self, index: int, piece: Piece, usage: Usage) -> bytes:
        self._texts.append(piece.text)
        return _event("transcript.text.delta", delta=piece.text)

    def finish(self, index: int, ending: Ending, piece: Piece, usage: Usage) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        return _event("transcript.text.done", text="".join(self._texts), usage=_usage(usage))

    def error(self, error: RequestError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"


def _event(kind: str, **fields: Any) -> bytes:
    return b"data: " + _encode({"type": kind, **fields}) + b"\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _read_format(fields: Fields) -> str | None:
    wanted: str | None = fields.take("response_format", {"enum": list(FORMATS)})
    if wanted in TIMED_FORMATS:
        raise refuse("response_format", f"is {show(wanted)}, which has times; {_NO_TIMES}. Allowed are {', '.join(FORMATS)}")
    if wanted is not None and wanted not in FORMATS:
        raise refuse("response_format", f"is {show(wanted)}, allowed are {', '.join(FORMATS)}")
    return wanted


def _typed(name: str, value: str | FormFile | list[str]) -> Any:
    """Return a field's value as JSON would have it. Raises: RequestError."""
    if isinstance(value, FormFile):
        if name == "file":
            return value
        raise refuse(name[:60], "is a file, which only the field file may be")
    if name in _NUMBERS and isinstance(value, str):
        try:
            return _decode_number(value)
        except ValueError:
            raise refuse(name, f"expected a number, got {show(value)}") from None
    if name == "stream" and isinstance(value, str):
        if (flag := _FLAGS.get(value.lower())) is None:
            raise refuse(name, f"expected true or false, got {show(value)}")
        return flag
    return value


def _read_instruction(fields: Fields) -> str:
    """Return what is asked of the model: the transcript, in the language and the style that are given."""
    language, prompt = fields.take_str("language"), fields.take_str("prompt", MAX_PROMPT_CHARS)
    sentences = [INSTRUCTION]
    if language:
        if not _LANGUAGE.fullmatch(language):
            raise refuse("language", f"is {show(language)}, expected an ISO 639-1 code or a name of 2 to 32 letters")
        named = f'has the ISO 639-1 code "{language}"' if len(language) < 4 else f"is {language}"
        sentences.append(f"Its language {named}.")
    if prompt:
        sentences.append(f"The text before it, or an example of its style, is: {prompt}")
    return " ".join(sentences)
