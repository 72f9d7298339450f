"""Grounding: some heads of the language model are told where to look. Without that it learns far later to tie words to things.

In the layer WORD_LAYER a word for a shape or a colour looks at the things of that shape or colour, and where an answer begins one
head looks at such words of its question. In ANSWER_LAYER a head looks from there at the middles of all things that the question is
about, another at everything that begins in a sound, and while an answer names something a third looks at that. What is not there is
looked for at the first token, and counted against it: the weight of the first token tells how many there are. Nothing of this is part
of the checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...models.architecture import ModelConfig
from ...models.tokenizer import Tokenizer
from ..demo_data.phrases import plural
from .hints import INKS, LABELS
from .prompts import TokenRow

WORD_LAYER, ANSWER_LAYER = 1, 2
# Layer and head of each slot.
SHAPES, COLOURS, WORDS = (WORD_LAYER, 0), (WORD_LAYER, 1), (WORD_LAYER, 3)
THINGS, SOUNDS, NAMED = (ANSWER_LAYER, 0), (ANSWER_LAYER, 1), (ANSWER_LAYER, 2)
SLOTS = (SHAPES, COLOURS, WORDS, THINGS, SOUNDS, NAMED)
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Vocabulary:
    """Which token names what: class of shape or digit, and of colour; 0 for nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        words = [text.decode(errors="replace").strip().lower() for text in tokenizer.token_bytes]
        labels = {form: number for number, name in enumerate(LABELS) for form in (name, plural(name))}
        inks = {name: number for number, name in enumerate(INKS)}
        self.label = np.array([labels.get(word, 0) for word in words])
        self.ink = np.array([inks.get(word, 0) for word in words])


class Places(NamedTuple):
    """What lies under each token of a row, 0 where it is no medium: [length, 4] per patch, and what begins there, [length]."""

    label: Ints
    ink: Ints
    middle: Ints
    onset: Ints


@dataclass(frozen=True, slots=True)
class Looks:
    """From where to look at what: slot [n], row [n] of the batch, position [n] in it; target [n, length], each of sum 1."""

    slot: Tensor
    row: Tensor
    position: Tensor
    target: Tensor


def looks(row: TokenRow, places: Places, words: Vocabulary) -> list[tuple[int, int, Floats]]:
    """(slot, position, target) for all that one row is told."""
    found: list[tuple[int, int, Floats]] = []
    label, ink = words.label[row.ids], words.ink[row.ids]
    is_digit = label >= LABELS.index("0")
    shape = np.where(is_digit, 0, label)
    for slot, word, seen in ((SHAPES, shape, places.label), (COLOURS, ink, places.ink)):
        for position in np.flatnonzero(word):
            found.append(_look(slot, int(position), (seen == word[position]).any(1), always_first=False))
    before = 0
    for answer in row.answers:
        first = int(answer[0])
        begin = int(np.flatnonzero(row.block == row.block[first])[0])
        asked = np.zeros(len(row.ids), bool)
        asked[max(begin, before) : first] = True
        before = int(answer[-1]) + 1
        shapes, colours = shape * asked, ink * asked
        meant = places.middle > 0
        if shapes.any():
            meant = meant & np.isin(places.label, shapes[shapes > 0])
        if colours.any():
            meant = meant & np.isin(places.ink, colours[colours > 0])
        found.append(_look(WORDS, first - 1, (shapes > 0) | (colours > 0), always_first=False))
        found.append(_look(THINGS, first - 1, meant.sum(1), always_first=True))
        found.append(_look(SOUNDS, first - 1, places.onset, always_first=True))
        for position in answer:
            named = meant & (places.label == shape[position]) & (shape[position] > 0)
            named |= meant & (places.ink == ink[position]) & (ink[position] > 0)
            if is_digit[position]:
                named = places.label == label[position]
            if named.any():
                found.append(_look(NAMED, int(position) - 1, named.sum(1), always_first=False))
    return found


def _look(slot: tuple[int, int], position: int, at: npt.NDArray[np.generic], always_first: bool) -> tuple[int, int, Floats]:
    target = at.astype(np.float32)
    if always_first or not target.any():
        target[0] += 1
    return SLOTS.index(slot), int(position), target / target.sum()


def places_of(ids: Ints, config: ModelConfig, vision: Tensor | None, audio: Tensor | None) -> Places:
    """Of one row, from the hints of its media (hints.py), in the order of their tokens."""
    label, ink, middle = (np.zeros((len(ids), 4), np.int64) for _ in range(3))
    onset = np.zeros(len(ids), np.int64)
    if vision is not None:
        hints = vision.numpy()
        where = (ids == config.image_token_id) | (ids == config.video_token_id)
        label[where], ink[where] = hints[..., 0], hints[..., 1]
        middle[where] = hints[..., 3] | hints[..., 4]
    if audio is not None:
        onset[ids == config.audio_token_id] = audio.numpy()[:, 0, 2]
    return Places(label, ink, middle, onset)


def missed(looks: Looks, attention: Sequence[Tensor]) -> Tensor:
    """How far the heads look elsewhere: the divergence from the targets in nats, averaged per slot, summed over slots.

    attention: of each layer float [batch, heads, length, length].
    """
    total = looks.target.new_zeros(())
    for number, (layer, head) in enumerate(SLOTS):
        mine = looks.slot == number
        if not mine.any():
            continue
        target = looks.target[mine]
        weights = attention[layer][looks.row[mine], head, looks.position[mine]].float()
        total = total + (target * ((target + 1e-9).log() - (weights + 1e-6).log())).sum(-1).mean()
    return total
