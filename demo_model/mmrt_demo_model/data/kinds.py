"""What a sample of the demo data is made of. Values only; for every module of the package and those that train and evaluate on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Pixels = npt.NDArray[np.uint8]
Medium = Literal["image", "two_images", "video", "audio", "image_audio", "video_audio", "text"]
SOUND_RATE = 16000
NUMBERS = ("no", "one", "two", "three", "four", "five")


class Wording(NamedTuple):
    """How something is asked. phrase: a key of phrases.PHRASES; template: which of them; slots: all that could be filled in."""

    phrase: str
    template: str
    slots: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a sample."""

    task: str
    text: str
    answer: str
    wording: Wording | None = None

    def is_right(self, reply: str) -> bool:
        """Whether a reply is the answer, but for case, spaces and the full stop."""
        return normalised(reply) == normalised(self.answer)


def normalised(text: str) -> str:
    """Lower case, single spaces, no full stop at the end."""
    return " ".join(text.lower().split()).rstrip(".").rstrip()


Box = tuple[float, float, float, float]
"""x0, y0, x1, y1."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A thing in a picture. label: a shape, or a run of digits; box: relative to the picture, 0 to 1; digits: the box of each digit."""

    label: str
    colour: str
    box: Box
    digits: tuple[Box, ...] = ()

    @property
    def centre(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


@dataclass(frozen=True, slots=True)
class Picture:
    """pixels uint8 [H, W, 3]. ground: what the background's colours may be called."""

    pixels: Pixels
    objects: tuple[Placed, ...]
    ground: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Clip:
    """frames uint8 [T, H, W, 3]. The objects stand where they are first seen; scenes: what is in each frame, perhaps in part outside.

    kind: moves, appears or blinks. direction and speed (heights or widths of the picture per second along the way) belong to moves;
    times_s (when each object appears) to appears; count and times_s (starts of phases, the first one lit if ``lit_first``) to blinks.
    """

    frames: Pixels
    fps: float
    kind: str
    objects: tuple[Placed, ...]
    scenes: tuple[tuple[Placed, ...], ...]
    direction: str = ""
    speed: float = 0.0
    count: int = 0
    times_s: tuple[float, ...] = ()
    lit_first: bool = True


@dataclass(frozen=True, slots=True)
class Note:
    """What sounds from one second to another. hz: one frequency per millisecond or so, evenly spaced; none for noise."""

    start_s: float
    end_s: float
    hz: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sound:
    """pcm float32 [samples], mono at 16 kHz, full scale ±1.

    kind: tone, glide, beeps or noise; frequencies_hz: of a tone one, of a glide start and end, of beeps one each; count: beeps.
    """

    pcm: npt.NDArray[np.float32]
    kind: str
    notes: tuple[Note, ...]
    frequencies_hz: tuple[float, ...] = ()
    count: int = 0


Thing = Picture | Clip | Sound


Mix = Literal["same", "few", "mixed"]


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What samples are of, and how many of them are degraded.

    single, several: how many of the pictures that come alone are of one thing and of several; the others are of a number.
    mixes: several things are all the same, of two shapes and two colours at most, or of any. Each entry is as likely as the others.
    counted_pairs: of the pairs of pictures those with things to count; the others have one thing each.
    moving: of the clips that come alone those in which something moves; in as many of the others things appear as blink.
    strange: of the pictures, clips and sounds that come alone those that are of another world (strange.py).
    """

    single: float = 0.25
    several: float = 0.45
    mixes: tuple[Mix, ...] = ("same", "mixed", "mixed", "few")
    counted_pairs: float = 0.45
    moving: float = 0.5
    degraded: float = 0.5
    strange: float = 0.0


SHARES = Shares()


@dataclass(frozen=True, slots=True)
class Sample:
    """Media in the order in which they stand in the prompt, and all questions that make sense for them.

    turns: of a conversation, for each medium the number of the question before which it stands; else empty, and the media come first.
    """

    media: tuple[Thing, ...]
    questions: tuple[Question, ...]
    degraded: bool
    turns: tuple[int, ...] = ()


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    """One of them, all equally likely."""
    return options[int(rng.integers(len(options)))]


def chance(rng: np.random.Generator, probability: float) -> bool:
    return bool(rng.random() < probability)


def sentence(words: str) -> str:
    """With a capital and a full stop."""
    return words[:1].upper() + words[1:] + "."


def counted(number: int, thing: str) -> str:
    """'one beep', 'three beeps'."""
    return f"{NUMBERS[number]} {thing}{'' if number == 1 else 's'}"


def alternatives(table: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """The values split at bars, with single spaces."""
    return {key: tuple(" ".join(one.split()) for one in values.split("|")) for key, values in table.items()}


def lines(text: str) -> tuple[str, ...]:
    return tuple(text.strip().splitlines())
