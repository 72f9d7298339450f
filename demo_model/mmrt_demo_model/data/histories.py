"""Long prompts: conversations of many turns, each with a medium of its own or none, and long sounds.

Positions and lengths that a model has never seen make it stammer; these have some thousand tokens.
"""

from dataclasses import replace

import numpy as np

from . import sounds, talk, unknowns
from .drawing import Rng
from .habits import typed
from .kinds import Medium, Question, Sample, Shares, Thing, chance, pick
from .samples import MEDIA, made
from .strange import between, strange

_STREAM = len(MEDIA) + 1  # of random numbers: those below belong to media and crowds
_TURNS, _LONG_S = (2, 16), (5.0, 45.0)
_KINDS: tuple[Medium, ...] = ("image", "image", "image", "image", "audio", "video")
_PRESENT = {"image": ("image",), "audio": ("audio",), "video": ("image", "video")}  # a video is a picture, too


def history(seed: int, index: int, shares: Shares) -> Sample:
    """Sample ``index`` of ``seed``. shares.strange: of its media, and of the long sounds."""
    rng = np.random.default_rng((seed, index, _STREAM))
    hard = chance(rng, shares.degraded)
    if chance(rng, 0.3):
        one = _long_sound(rng, hard, shares)
    else:
        one = _conversation(rng, hard, shares)
    return replace(one, questions=tuple(replace(question, text=typed(rng, question.text)) for question in one.questions))


def _long_sound(rng: Rng, hard: bool, shares: Shares) -> Sample:
    seconds = between(rng, *_LONG_S)
    thing: Thing
    if chance(rng, shares.strange):
        thing, questions = strange(rng, "audio", seconds=seconds)
    elif chance(rng, 0.5):
        thing = sounds.noise(rng, hard, seconds)
        questions = sounds.sound_questions(rng, thing, "")
    else:
        pitch = pick(rng, ("low", "high"))
        thing = sounds.tone(rng, hard, pitch, seconds)
        questions = sounds.sound_questions(rng, thing, pitch)
    questions += [unknowns.unknown(rng, "audio"), talk.missing(rng, ("audio",)), talk.fact(rng)]
    asked = [questions[k] for k in rng.permutation(len(questions))[:4]]
    return Sample((thing,), tuple(asked), hard, (0,))


def _conversation(rng: Rng, hard: bool, shares: Shares) -> Sample:
    """Each medium with a question about it; in between questions about none."""
    media: list[Thing] = []
    questions: list[Question] = []
    turns: list[int] = []
    present: set[str] = set()
    for _ in range(round(between(rng, *_TURNS))):
        kind = pick(rng, _KINDS)
        if present and chance(rng, 0.35):
            questions.append(_aside(rng, present))
            continue
        things, about = made(rng, kind, hard, shares)
        turns += [len(questions)] * len(things)
        media += things
        present.update(_PRESENT[kind])
        questions.append(pick(rng, about) if chance(rng, 0.85) else _aside(rng, present))
    if not media:
        return _conversation(rng, hard, shares)
    return Sample(tuple(media), tuple(questions), hard, tuple(turns))


def _aside(rng: Rng, present: set[str]) -> Question:
    """A question about none of the media that are there."""
    kind = rng.random()
    if kind < 0.3:
        return talk.fact(rng)
    if kind < 0.5:
        return talk.greeting(rng)
    if kind < 0.65 and len(present) < len(talk.MISSING):
        return talk.missing(rng, tuple(sorted(present)))
    return unknowns.unknown(rng, "text")
