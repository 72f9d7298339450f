"""Questions without a medium: small talk about mmrt, and media that are missing."""

from . import phrases
from .drawing import COLOURS, SHAPES, Rng
from .facts import FACTS
from .greetings import GREETINGS
from .kinds import NUMBERS, Question, pick

MISSING = {"image": "I see no image.", "video": "I see no video.", "audio": "I hear no sound."}
_ASKED = {
    "image": (
        "shape",
        "colour",
        "describe",
        "size",
        "position",
        "count",
        "count_shape",
        "count_colour",
        "count_both",
        "exists",
        "exists_shape",
        "exists_number",
        "find_colour",
        "find_shape",
        "side",
        "digits",
        "pair_more",
        "pair_colour",
    ),
    "video": ("moving", "video_describe", "direction", "speed", "first", "blinks"),
    "audio": ("pitch", "glide", "beeps", "tone_noise", "sound_describe"),
}


def fact(rng: Rng) -> Question:
    """Something true about mmrt."""
    answer, questions = pick(rng, [*FACTS.items()])
    return Question("talk", pick(rng, questions), answer)


def greeting(rng: Rng) -> Question:
    """Hello, thanks, who are you."""
    answer, questions = pick(rng, [*GREETINGS.items()])
    return Question("talk", pick(rng, questions), answer)


def missing(rng: Rng, present: tuple[str, ...]) -> Question:
    """A question about a medium that is not there. present: of image, video, audio.

    A video is a picture too: with one there nobody asks about images.
    """
    absent = [medium for medium in MISSING if medium not in present and not (medium == "image" and "video" in present)]
    medium = pick(rng, absent)
    return Question("missing", asked_about(rng, medium, least_words=4 if present else 0), MISSING[medium])


def asked_about(rng: Rng, medium: str, least_words: int = 0) -> str:
    """A question about a medium as there are of those that the model knows. least_words: what is short may be about another."""
    shape, colour, other = pick(rng, SHAPES), pick(rng, COLOURS), pick(rng, COLOURS)
    slots = {
        "shape": shape,
        "colour": colour,
        "a": "an" if colour == "orange" else "a",
        "one": f"{colour} {shape}",
        "other": f"{other} {pick(rng, SHAPES)}",
        "nth": pick(rng, ("first", "second")),
        "number": pick(rng, NUMBERS[2:]),
        "group": pick(rng, phrases.groups(shape, colour)),
    }
    asked = [phrase for phrase in phrases.PHRASES[pick(rng, _ASKED[medium])] if len(phrase.split()) >= least_words]
    return phrases.fill(pick(rng, asked), **slots)
