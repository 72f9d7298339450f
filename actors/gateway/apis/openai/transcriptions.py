"""OpenAI's ``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``: a form with a sound becomes a ``ChatRequest`` for its
text, of models that hear. Those that were trained to write down speech (``SpeechRules``) are asked as they were in training.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from .....models.text.transcripts import SpeechRules, TranscriptReader
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
from ...reading.template_fields import TemplateUse
from ...reading.validation import ChatRequest, Generation, Limits, read_generation
from .answers import error_body

VERBOSE = "verbose_json"
FORMATS = ("json", "text", VERBOSE)
TIMED_FORMATS = ("srt", "vtt", "diarized_json")
SYSTEM = "You are a speech recognition model."
INSTRUCTION = "Transcribe the audio into text."
TRANSLATE = "Translate the audio into English text."
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


class Asked(NamedTuple):
    """A form, read. ``language``: of the text, if form or route say it."""

    request: ChatRequest
    format: str
    language: str


class _Prompt(NamedTuple):
    messages: tuple[Message, ...]
    template: TemplateUse
    language: str


def read_transcription(form: Form | Example, limits: Limits) -> Asked:
    """Validate the form of ``POST /v1/audio/transcriptions``. It takes the sampling controls of chat completions as well. An example
    comes with the types of JSON.

    Raises:
        RequestError: 400, or 404 for an unknown model, or 413 for a sound that is too large.
    """
    speech = limits.speech
    return _read(form, limits, _in_words if speech is None else lambda fields: _as_trained(fields, speech), speech is not None)


def read_translation(form: Form | Example, limits: Limits) -> Asked:
    """As ``read_transcription``, for ``POST /v1/audio/translations``: models that are told in words what to do can do it."""

    def translated(fields: Fields) -> _Prompt:
        if limits.speech is not None and not fields.is_example:
            told = f"the model {limits.model_name} writes down speech in the language that is spoken: it cannot translate"
            raise RequestError(told, param="model")
        return _in_words(fields, TRANSLATE)._replace(language="english")

    return _read(form, limits, translated, has_language=True)


def _read(form: Form | Example, limits: Limits, read_prompt: Callable[[Fields], _Prompt], has_language: bool) -> Asked:
    """``has_language``: that of the text will be known."""
    if "audio" not in limits.kinds:
        raise RequestError(f"the model {limits.model_name} takes no sound: it cannot transcribe any", param="file")
    fields = Fields(form if isinstance(form, Example) else {name: _typed(name, value) for name, value in form.items()})
    file = fields.take_required("file", _BINARY)
    format = _read_format(fields)
    if fields.take("timestamp_granularities", NULL):
        raise refuse("timestamp_granularities", f"is not supported: {_NO_TIMES}")
    settle_first(fields, TRANSCRIPTIONS, *NOT_IN_FORMS)
    fields.leftover.setdefault("temperature", 0)  # as with OpenAI
    generation = read_generation(fields, limits, lambda *_: Output(), max_tokens_fields=("max_completion_tokens",))
    prompt = read_prompt(fields)
    settle(fields, TRANSCRIPTIONS)
    if format == VERBOSE and not (has_language or prompt.language):
        raise refuse("response_format", f"is {show(format)}, which names the language; the model does not tell it: give language")
    if not isinstance(file, FormFile):
        raise refuse("file", "expected a file, got a text")
    intake = MediaIntake(limits.kinds, limits.media, OptionReader(None, limits.kinds, limits.vision_rules), limits.family)
    intake.read_file("audio", file.mime, file.data, "file")
    conversation = Conversation(prompt.messages, tuple(intake.media))
    request = ChatRequest(generation, conversation, prompt.template, messages_field="file")
    return Asked(request, format, prompt.language)


class Transcription:
    """One request and its answer: reads the form, and is the ``AnswerFormat`` of what it reads."""

    def __init__(self, task: str = "transcribe") -> None:
        """``task``: as OpenAI names it in a verbose answer."""
        self.id_prefix = "transcription-" if task == "transcribe" else "translation-"
        self._task = task
        self._format = self._language = ""
        self._frame_s = 0.0
        self._speech: SpeechRules | None = None

    def read(self, form: Form, limits: Limits) -> ChatRequest:
        """Validate the form. Raises: RequestError, as ``read_transcription``."""
        request, self._format, self._language = (read_transcription if self._task == "transcribe" else read_translation)(form, limits)
        self._frame_s, self._speech = limits.sound_frame_s, limits.speech
        return request

    def begin(self, id: str, created: int, model: str, fingerprint: str) -> "Transcript":
        """See ``AnswerFormat``."""
        reader = None if self._speech is None else TranscriptReader(self._speech, self._language)
        return Transcript(id, self._task, self._format, self._language, self._frame_s, reader)


class Transcript:
    """One answer. ``reader`` tells its language from its text; None: all of it is text."""

    def __init__(self, id: str, task: str, format: str, language: str, frame_s: float, reader: TranscriptReader | None) -> None:
        self.id = id
        self.content_type = "text/plain" if format == "text" else "application/json"
        self._task, self._format, self._language, self._frame_s, self._reader = task, format, language, frame_s, reader

    def choice(self, index: int, piece: Piece, ending: Ending, with_ids: bool) -> dict[str, Any]:
        return {"text": piece.text if self._reader is None else self._reader.push(piece.text) + self._reader.flush()}

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage, more: dict[str, Any]) -> bytes:
        (choice,) = choices
        if self._format == "text":
            return f"{choice['text']}\n".encode()
        if self._format != VERBOSE:
            return _encode({**choice, "usage": _usage(usage), **more})
        language = self._language if self._reader is None else self._reader.language
        seconds = round(usage.sound_frames * self._frame_s, 3)
        facts = {"task": self._task, "language": language.lower(), "duration": seconds}
        return _encode({**facts, **choice, "usage": {"type": "duration", "seconds": seconds}, **more})

    def chunks(self, generation: Generation) -> "TranscriptEvents":
        return TranscriptEvents(self._reader)


class TranscriptEvents:
    """The events of its stream: see ``Chunks``."""

    content_type = "text/event-stream; charset=utf-8"
    keep_alive = COMMENT
    num_events = 0

    def __init__(self, reader: TranscriptReader | None) -> None:
        self._reader = reader
        self._texts: list[str] = []

    def role(self, index: int, usage: Usage) -> bytes:
        return b""

    def text(self, index: int, piece: Piece, usage: Usage) -> bytes:
        return self._delta(piece.text if self._reader is None else self._reader.push(piece.text))

    def finish(self, index: int, ending: Ending, piece: Piece, usage: Usage) -> bytes:
        return b"" if self._reader is None else self._delta(self._reader.flush())

    def _delta(self, text: str) -> bytes:
        self._texts.append(text)
        return _event("transcript.text.delta", delta=text) if text else b""

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


def _read_format(fields: Fields) -> str:
    wanted: str | None = fields.take("response_format", {"enum": list(FORMATS)})
    if wanted in TIMED_FORMATS:
        raise refuse("response_format", f"is {show(wanted)}, which has times; {_NO_TIMES}. Allowed are {', '.join(FORMATS)}")
    if wanted is not None and wanted not in FORMATS:
        raise refuse("response_format", f"is {show(wanted)}, allowed are {', '.join(FORMATS)}")
    return wanted or "json"


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


def _in_words(fields: Fields, instruction: str = INSTRUCTION) -> _Prompt:
    """Make the prompt: the task, and the language and the style if they are given."""
    language, prompt = fields.take_str("language"), fields.take_str("prompt", MAX_PROMPT_CHARS)
    sentences = [instruction]
    if language:
        if not _LANGUAGE.fullmatch(language):
            raise refuse("language", f"is {show(language)}, expected an ISO 639-1 code or a name of 2 to 32 letters")
        named = f'has the ISO 639-1 code "{language}"' if len(language) < 4 else f"is {language}"
        sentences.append(f"Its language {named}.")
    if prompt:
        sentences.append(f"The text before it, or an example of its style, is: {prompt}")
    messages = (Message("system", SYSTEM), Message("user", (MediaPart("audio"), " ".join(sentences))))
    return _Prompt(messages, TemplateUse(), language or "")


def _as_trained(fields: Fields, speech: SpeechRules) -> _Prompt:
    """The sound, behind what the model may need to know; in a given language the answer begins with that."""
    language, prompt = fields.take_str("language"), fields.take_str("prompt", MAX_PROMPT_CHARS)
    messages = (*([Message("system", prompt)] if prompt else []), Message("user", (MediaPart("audio"),)))
    if not language:
        return _Prompt(messages, TemplateUse(), "")
    wanted = language.lower()
    name = next((name for code, name in speech.languages if wanted in (code, name.lower())), None)
    if name is None:
        allowed = ", ".join(code for code, _ in speech.languages)
        raise refuse("language", f"is {show(language)}, which the model does not know; allowed are {allowed}, and their English names")
    return _Prompt(messages, TemplateUse(begins_answer=f"{speech.before}{name}{speech.marker}"), name)
