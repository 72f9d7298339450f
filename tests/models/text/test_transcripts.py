"""The language in front of a transcript, told from the text in any pieces as transformers tells it from the whole."""

import functools
from importlib import import_module
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from mmrt.models.families.qwen3_asr import SPEECH
from mmrt.models.text.transcripts import TranscriptReader


@functools.cache
def theirs() -> Any:
    return import_module("transformers.models.qwen3_asr.processing_qwen3_asr")


PIECES = st.lists(st.sampled_from(["language ", "lang", "uage English", "None", "<asr_text>", "<asr", "_text>", " ", "\n", "ß", "a b"]))


def read(pieces: list[str], language: str = "") -> tuple[str, str]:
    reader = TranscriptReader(SPEECH, language)
    texts = [*map(reader.push, pieces), reader.flush()]
    return reader.language, "".join(texts)


@given(pieces=PIECES)
@example(["language English<asr_text>", " Hello,", " world. ", " "])
@example(["language None<asr_text>"])
@example(["language Chinese,English<asr_", "text>a"])
@example(["languageless words"])
def test_as_transformers_tells_it(pieces: list[str]) -> None:
    text = "".join(pieces)
    found = theirs()._parse_single_output(text)
    language, transcript = read(pieces)
    if not text.lstrip().startswith("language ") and "<asr_text>" in text:  # a marker behind other words is text here
        assert (language, transcript) == ("", text.strip())
        return
    if (name := text.lstrip().removeprefix("language ").partition("<asr_text>")[0]).strip() in ("", *"\n") or "\n" in name:
        return  # of a language without a name, or in several lines, they make one of their own
    assert (language, transcript) == (found["language"] or "", found["transcription"])


def test_nothing_is_held_longer_than_needed() -> None:
    reader = TranscriptReader(SPEECH)
    assert [reader.push(piece) for piece in ("lan", "guage ", "German<", "asr_text>", " so", " ", "ist", "\n")] == [
        "", "", "", "", "so", "", " ist", "",
    ]  # fmt: skip
    assert (reader.flush(), reader.language) == ("", "German")
    assert TranscriptReader(SPEECH).push("Hello") == "Hello" and TranscriptReader(SPEECH).push("language " + 65 * "a")


def test_where_the_prompt_names_the_language() -> None:
    assert read([" language", " English<asr_text>"], "German") == ("German", "language English<asr_text>")


def test_the_languages_are_transformers() -> None:
    assert dict(SPEECH.languages) == theirs().LANGUAGE_CODE_TO_NAME
