"""``sample(seed, index, medium)``: the demo data, each sample a function of these three alone."""

from dataclasses import replace
from typing import get_args

import numpy as np

from . import clips, phrases, picture_questions, pictures, sounds, strange, talk, unknowns
from .drawing import Rng
from .habits import typed
from .kinds import NUMBERS, SHARES, Medium, Question, Sample, Shares, Thing, chance, counted, pick

MEDIA: tuple[Medium, ...] = get_args(Medium)
TASKS: dict[str, Medium] = {
    "shape": "image",
    "colour": "image",
    "size": "image",
    "position": "image",
    "count": "image",
    "count_some": "image",
    "exists": "image",
    "exists_number": "image",
    "digits": "image",
    "find_colour": "image",
    "find_shape": "image",
    "find_place": "image",
    "side": "image",
    "describe": "image",
    "list": "image",
    "absent": "image",
    "pair_more": "two_images",
    "pair_count": "two_images",
    "pair_bigger": "two_images",
    "pair_colour": "two_images",
    "pair_shape": "two_images",
    "pair_which": "two_images",
    "moving": "video",
    "direction": "video",
    "speed": "video",
    "first": "video",
    "blinks": "video",
    "video_describe": "video",
    "video_absent": "video",
    "pitch": "audio",
    "glide": "audio",
    "beeps": "audio",
    "tone_noise": "audio",
    "sound_describe": "audio",
    "audio_absent": "audio",
    "match": "image_audio",
    "video_match": "video_audio",
    "talk": "text",
    "missing": "text",
    "unknown": "text",
}
_PRESENT: dict[Medium, tuple[str, ...]] = {
    "image": ("image",),
    "two_images": ("image",),
    "video": ("video",),
    "audio": ("audio",),
    "image_audio": ("image", "audio"),
    "video_audio": ("video", "audio"),
    "text": (),
}


def sample(seed: int, index: int, medium: Medium, degraded: bool | None = None, shares: Shares = SHARES) -> Sample:
    """Sample ``index`` of ``seed``. degraded: whether the media are hard to make out; None draws it, text never is."""
    rng = np.random.default_rng((seed, index, MEDIA.index(medium)))
    drawn = chance(rng, shares.degraded)
    hard = medium != "text" and (drawn if degraded is None else degraded)
    media, questions = made(rng, medium, hard, shares)
    present = _PRESENT[medium]
    if medium == "text":
        questions = [
            talk.fact(rng),
            talk.fact(rng),
            talk.greeting(rng),
            talk.missing(rng, ()),
            talk.missing(rng, ()),
            *(unknowns.unknown(rng, medium) for _ in range(3)),
        ]
    else:
        if medium in ("video", "audio") and shares.strange:
            questions += _openly(rng, questions)
        if chance(rng, 0.5):
            questions.append(unknowns.unknown(rng, medium))
        if chance(rng, 0.5) and medium != "video_audio":
            questions.append(talk.missing(rng, present))
        if chance(rng, 0.1):
            questions.append(talk.greeting(rng) if chance(rng, 0.5) else talk.fact(rng))
    return Sample(media, tuple(replace(question, text=typed(rng, question.text)) for question in questions), hard)


def crowded(seed: int, index: int, degraded: bool | None = None) -> Sample:
    """A picture of many things and numbers, for whoever learns what is where; nobody asks about it in words."""
    rng = np.random.default_rng((seed, index, len(MEDIA)))
    drawn = chance(rng, SHARES.degraded)
    hard = drawn if degraded is None else degraded
    return Sample((pictures.crowd(rng, hard),), (talk.greeting(rng),), hard)


def _openly(rng: Rng, questions: list[Question]) -> list[Question]:
    """What there is, asked in words that fit any medium."""
    said = [question for question in questions if question.task in ("video_describe", "sound_describe")]
    return [Question(question.task, pick(rng, phrases.ANYTHING), question.answer) for question in said if chance(rng, 0.5)]


def made(rng: Rng, medium: Medium, degraded: bool, shares: Shares) -> tuple[tuple[Thing, ...], list[Question]]:
    """Media, and what can be asked about them."""
    if shares.strange and medium in strange.OTHERWISE and chance(rng, shares.strange):
        thing, questions = strange.strange(rng, medium)
        return (thing,), questions
    if medium == "image":
        picture, questions = picture_questions.image(rng, degraded, shares)
        return (picture,), questions
    if medium == "two_images":
        return picture_questions.two_images(rng, degraded, shares)
    if medium == "video":
        clip, questions = clips.video(rng, degraded, shares)
        return (clip,), questions
    if medium == "audio":
        sound, questions = sounds.audio(rng, degraded)
        return (sound,), questions
    if medium == "image_audio":
        return _image_audio(rng, degraded)
    if medium == "video_audio":
        return _video_audio(rng, degraded)
    return (), []


def _image_audio(rng: Rng, degraded: bool) -> tuple[tuple[Thing, ...], list[Question]]:
    """As many beeps as things, or not: one as likely as the other. A third has other sounds, and no such question."""
    ask = phrases.asker(rng)
    if chance(rng, 0.3):
        picture, questions = picture_questions.image(rng, degraded, SHARES)
        sound, heard = sounds.audio(rng, degraded)
        return (picture, sound), questions + heard
    things, beeps = _two_counts(rng, 5)
    picture = pictures.several(rng, degraded, things)
    sound = sounds.beeps(rng, degraded, beeps)
    questions = [
        ask("match", _match_answer(beeps, things, "thing")),
        *picture_questions.several_questions(rng, picture)[:3],
        *sounds.sound_questions(rng, sound, ""),
    ]
    return (picture, sound), questions


def _video_audio(rng: Rng, degraded: bool) -> tuple[tuple[Thing, ...], list[Question]]:
    ask = phrases.asker(rng)
    blinks, beeps = _two_counts(rng, 4)
    clip = clips.blinks(rng, degraded, blinks)
    sound = sounds.beeps(rng, degraded, beeps)
    questions = [
        ask("video_match", _match_answer(beeps, blinks, "blink")),
        *clips.blink_questions(rng, clip),
        *sounds.sound_questions(rng, sound, ""),
    ]
    return (clip, sound), questions


def _two_counts(rng: Rng, most: int) -> tuple[int, int]:
    """Two numbers from one to ``most``, the same in half of all cases."""
    if chance(rng, 0.5):
        number = int(rng.integers(1, most + 1))
        return number, number
    first, second = rng.permutation(most)[:2] + 1
    return int(first), int(second)


def _match_answer(beeps: int, others: int, other: str) -> str:
    if beeps == others:
        return f"Yes, both are {NUMBERS[beeps]}."
    return f"No, there {'is' if beeps == 1 else 'are'} {counted(beeps, 'beep')} and {counted(others, other)}."
