"""Which questions the exam asks: a held-out seed of the demo data, so many per row of its table, half of them degraded.

A row is a task on its own medium, one of three for media together (a question about one of two media, a question about a medium that
is not the one that is there, and one that nobody can answer from what is there), one of two with wordings that no training has: what
the model can answer, and what strangers ask; or one of three with media of another world, of kinds that no training has.
"""

import base64
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from ..data import MEDIA, TASKS, Clip, Medium, Picture, Question, Sample, encode, sample
from ..data.strange import strange as strange_thing
from .strangers import STRANGE, strange
from .wordings import OTHERWISE, TALK_OTHERWISE, put_otherwise

ONE_OF_TWO, OTHER_MEDIUM, OUT_OF_SCOPE = "one_of_two", "other_medium", "out_of_scope"
_BESIDE: dict[str, tuple[Medium, ...]] = {
    ONE_OF_TWO: ("image_audio", "video_audio"),
    OTHER_MEDIUM: ("image", "two_images", "video", "audio", "image_audio"),
    OUT_OF_SCOPE: ("image", "two_images", "video", "audio", "image_audio", "video_audio"),
}
REWORDED, STRANGER = "reworded", "stranger"
_LEARNED: dict[str, tuple[Medium, ...]] = {**{task: (medium,) for task, medium in TASKS.items()}, **_BESIDE}
STRANGE_MEDIA: dict[str, Medium] = {"strange_image": "image", "strange_video": "video", "strange_sound": "audio"}
ROWS: dict[str, tuple[Medium, ...]] = {
    **_LEARNED,
    REWORDED: MEDIA,
    STRANGER: tuple(STRANGE),
    **{row: (medium,) for row, medium in STRANGE_MEDIA.items()},
}
COMBINED = frozenset(row for row, media in ROWS.items() if {*media} <= {"image_audio", "video_audio"})
SEEN: dict[str, tuple[Medium, ...]] = {"pictures": ("image", "two_images"), "videos": ("video",)}  # which have visual tokens alone
NOT_LEARNED = frozenset({REWORDED, STRANGER, *STRANGE_MEDIA})
T = TypeVar("T")
_TRIES = 200  # samples looked at per question that is wanted


@dataclass(frozen=True, slots=True)
class File:
    """One medium as it is sent. kind: image, video or audio."""

    kind: str
    data: bytes
    mime: str


@dataclass(frozen=True, slots=True)
class Case:
    """One question with its files."""

    row: str
    medium: Medium
    index: int
    degraded: bool
    files: tuple[File, ...]
    question: Question


def select(seed: int, num_per_row: int, rows: Collection[str]) -> list[Case]:
    """At least ``num_per_row`` questions for each of these rows, one per sample at most; every other sample is degraded.

    Strangers have no more than are written down; of reworded questions: ``_reworded``.
    """
    cases = [case for medium in MEDIA for case in _of_medium(seed, medium, num_per_row, rows)]
    if REWORDED in rows:
        cases += _reworded(seed, num_per_row)
    if STRANGER in rows:
        cases += _strangers(seed, num_per_row)
    return cases + [
        case for row, medium in STRANGE_MEDIA.items() if row in rows for case in _strange_media(row, medium, seed, num_per_row)
    ]


def _reworded(seed: int, num: int) -> Iterator[Case]:
    """``num`` questions, rounded up to equally many of each phrase, of pictures as they come; and up to ``num`` of small talk.

    Raises: ValueError if there are too few.
    """
    wanted = Counter(dict.fromkeys(OTHERWISE, math.ceil(num / len(OTHERWISE))))
    for index, medium in itertools.product(range(_TRIES * num), MEDIA):
        degraded = index % 2 == 1
        one = sample(seed, index, medium, degraded)
        rng = np.random.default_rng((seed, index))
        found = [other for question in one.questions if wanted[_phrase(question)] and (other := put_otherwise(rng, question))]
        if found:
            wanted[_phrase(found[0])] -= 1
            yield Case(REWORDED, medium, index, degraded, _files(one, seed, index, medium), found[0])
        if not +wanted:
            break
    else:
        raise ValueError(f"too few questions for {', '.join(sorted(+wanted))} with seed {seed}")
    for index, (answer, text) in enumerate(_spread([*TALK_OTHERWISE.items()], num)):
        yield Case(REWORDED, "text", index, False, (), Question("talk", text, answer))


def _spread(items: Sequence[T], num: int) -> Sequence[T]:
    """So many of them, or all, as far apart as can be."""
    return [items[k * len(items) // num] for k in range(num)] if num < len(items) else items


def _phrase(question: Question) -> str:
    return "" if question.wording is None else question.wording.phrase


def _strangers(seed: int, num: int) -> Iterator[Case]:
    for medium, texts in STRANGE.items():
        for index, text in enumerate(_spread(texts, math.ceil(num / len(STRANGE)))):
            degraded = medium != "text" and index % 2 == 1
            files = _files(sample(seed, index, medium, degraded), seed, index, medium)
            yield Case(STRANGER, medium, index, degraded, files, strange(text, medium))


def _strange_media(row: str, medium: Medium, seed: int, num: int) -> Iterator[Case]:
    """Of held-out kinds; every other question is what there is."""
    for index in range(num):
        rng = np.random.default_rng((seed, index, MEDIA.index(medium), 2))
        thing, questions = strange_thing(rng, medium, held_out=True)
        file = File(_kind(thing), *encode(thing, rng))
        yield Case(row, medium, index, False, (file,), questions[index % len(questions)])


def _of_medium(seed: int, medium: Medium, num_per_row: int, rows: Collection[str]) -> Iterator[Case]:
    """Raises: ValueError if there are too few questions for a row."""
    halves = (False,) if medium == "text" else (False, True)
    wanted = Counter(
        {
            (row, half): math.ceil(num_per_row / len(media) / len(halves))
            for row, media in _LEARNED.items()
            if row in rows and medium in media
            for half in halves
        }
    )
    for index in itertools.count():
        if not wanted:
            return
        if index > _TRIES * max(1, num_per_row) * len(ROWS):
            raise ValueError(f"too few questions for {', '.join(sorted({row for row, _ in wanted}))} with seed {seed}")
        degraded = halves[index % len(halves)]
        if not any(half == degraded for _, half in wanted):
            continue
        one = sample(seed, index, medium, degraded)
        open_questions = [(wanted[row, degraded], row, question) for question in one.questions if (row := row_of(medium, question))]
        missing, row, question = max(open_questions, key=lambda found: found[0], default=(0, "", None))
        if not missing or question is None:
            continue
        wanted[row, degraded] -= 1
        wanted = +wanted
        yield Case(row, medium, index, degraded, _files(one, seed, index, medium), question)


def _files(one: Sample, seed: int, index: int, medium: Medium) -> tuple[File, ...]:
    rng = np.random.default_rng((seed, index, MEDIA.index(medium), 1))
    return tuple(File(_kind(thing), *encode(thing, rng)) for thing in one.media)


def row_of(medium: Medium, question: Question) -> str:
    """The row that a question of a sample of this medium belongs to; empty if none."""
    home = TASKS[question.task]
    if home == medium:
        return question.task
    if home == "text":
        return {"missing": OTHER_MEDIUM, "unknown": OUT_OF_SCOPE}.get(question.task, "")
    return ONE_OF_TWO


def _kind(thing: object) -> str:
    return "image" if isinstance(thing, Picture) else "video" if isinstance(thing, Clip) else "audio"


def body_of(case: Case, model: str, max_tokens: int, more: Mapping[str, Any]) -> bytes:
    """The chat completion request: media first, as they were trained, then the words; greedy."""
    parts: list[dict[str, Any]] = []
    for file in case.files:
        url = f"data:{file.mime};base64,{base64.b64encode(file.data).decode()}"
        parts.append({"type": f"{file.kind}_url", f"{file.kind}_url": {"url": url}})
    parts.append({"type": "text", "text": case.question.text})
    messages = [{"role": "user", "content": parts}]
    return msgspec.json.encode(
        {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens, "return_token_ids": True, **more}
    )
