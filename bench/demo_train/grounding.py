"""Grounding: some heads of the language model are told where to look. Without that it learns far later to tie words to things.

In the layer WORD_LAYER a word for a shape or a colour looks at the things of that shape or colour, and from an answer two heads look
at such words of its question, each at those of one thing. In ANSWER_LAYER two heads look from an answer at the middles of all things
that the question is about, and at what begins in a sound; while it names something a third looks at that, at a number digit by digit.
What is not there is looked for at the first token, and counted against it: the weight of the first token tells how many there are.
Nothing of this is part of the checkpoint.
"""

from collections import defaultdict
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
SHAPES, COLOURS, OTHER_WORDS, WORDS = ((WORD_LAYER, head) for head in range(4))
THINGS, OTHERS, NAMED = (ANSWER_LAYER, 0), (ANSWER_LAYER, 1), (ANSWER_LAYER, 2)
SLOTS = (SHAPES, COLOURS, WORDS, THINGS, OTHERS, NAMED, OTHER_WORDS)
COMPARED = 4  # words: a question with so many is about two things
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


class Vocabulary:
    """Which token names what: class of shape or digit, and of colour; 0 for nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        words = [text.decode(errors="replace").strip().lower() for text in tokenizer.token_bytes]
        labels = {form: number for number, name in enumerate(LABELS) for form in (name, plural(name))}
        inks = {name: number for number, name in enumerate(INKS)}
        self.label = np.array([labels.get(word, 0) for word in words])
        self.ink = np.array([inks.get(word, 0) for word in words])


class Scene(NamedTuple):
    """What lies under each token of a row, 0 where it is no medium.

    label, ink, middle [length, 4] per patch, digit [length, 4] per digit of a number: hints.SEEN; view, new, onset [length]:
    hints.PLACES and HEARD; spot [length]: which token of its view it is.
    """

    label: Ints
    ink: Ints
    middle: Ints
    digit: Ints
    view: Ints
    new: Ints
    spot: Ints
    onset: Ints
    is_video: bool


@dataclass(frozen=True, slots=True)
class Looks:
    """From where to look at what: slot [n], row [n] of the batch, position [n] in it; target [n, length], each of sum 1."""

    slot: Tensor
    row: Tensor
    position: Tensor
    target: Tensor


Look = tuple[int, int, Floats]


class _Row(NamedTuple):
    """What the words of a row name, 0 for nothing: [length]. ``shape`` leaves out digits."""

    shape: Ints
    ink: Ints
    is_digit: Bools
    is_name: Bools


def looks(row: TokenRow, scene: Scene, words: Vocabulary) -> list[Look]:
    """(slot, position, target) for all that one row is told."""
    label, ink = words.label[row.ids], words.ink[row.ids]
    is_digit = label >= LABELS.index("0")
    shape = np.where(is_digit, 0, label)
    said = _Row(shape, ink, is_digit, (shape > 0) | (ink > 0))
    found = [
        _look(slot, int(position), (seen == word[position]).any(1))
        for slot, word, seen in ((SHAPES, shape, scene.label), (COLOURS, ink, scene.ink))
        for position in np.flatnonzero(word)
    ]
    before = 0
    for answer in row.answers:
        begin = int(np.flatnonzero(row.block == row.block[answer[0]])[0])
        asked = np.arange(max(begin, before), answer[0])
        before = int(answer[-1]) + 1
        named = asked[said.is_name[asked]]
        meant = _meant(scene, said, named if len(named) else answer)
        found += _asked(scene, said, answer, named, meant)
        found += _named(scene, said, answer, meant)
    return found


def _asked(scene: Scene, said: _Row, answer: Ints, named: Ints, meant: Bools) -> list[Look]:
    """From every token of an answer: what the question is about. named: positions of the question's words for things."""
    one = other = named
    here, there = _aims(scene, meant)
    if len(named) == COMPARED:
        one, other = named[:2], named[2:]
        here, there = (_meant(scene, said, pair).sum(1) for pair in (one, other))
    everywhere = np.arange(len(said.ink))
    words = ((WORDS, np.isin(everywhere, one)), (OTHER_WORDS, np.isin(everywhere, other)))
    return [
        look
        for position in (answer - 1).tolist()
        for look in (
            *(_look(slot, position, at) for slot, at in words),
            _look(THINGS, position, here, counted=True),
            _look(OTHERS, position, there, counted=True),
        )
    ]


def _named(scene: Scene, said: _Row, answer: Ints, meant: Bools) -> list[Look]:
    """While an answer names things and digits."""
    found = [
        _look(NAMED, int(position) - 1, (scene.digit[:, digit : digit + 1] > 0).sum(1))
        for digit, position in enumerate(answer[said.is_digit[answer]])
    ]
    is_name = said.is_name[answer]
    for begins in np.flatnonzero(is_name & ~np.roll(is_name, 1)):
        name = answer[begins : begins + np.argmin(is_name[begins:])]
        at = (meant & _meant(scene, said, name)).sum(1)
        if begins:  # behind an article or how many
            found.append(_look(NAMED, int(name[0]) - 2, at, counted=True))
        found += [_look(NAMED, int(position) - 1, at) for position in name]
    return found


def _meant(scene: Scene, said: _Row, positions: Ints) -> Bools:
    """[length, 4]: middles of the things that the words at these positions name, of all where they name none."""
    meant = scene.middle > 0
    for word, seen in ((said.shape[positions], scene.label), (said.ink[positions], scene.ink)):
        if word.any():
            meant = meant & np.isin(seen, word[word > 0])
    return meant


def _aims(scene: Scene, meant: Bools) -> tuple[Ints, Ints]:
    """How many of what is meant lies under each token, at the first look and at the second.

    Of two pictures: in each. Of a clip: where it begins and where it ends, or, if it does not move, wherever it appears. What begins
    in a sound is always looked at second.
    """
    here = there = meant.sum(1)
    visible = np.flatnonzero(here)
    if scene.is_video and len(visible):
        there = here * (scene.view == scene.view[visible].max())
        here = here * (scene.view == scene.view[visible].min() if _moves(scene, meant) else scene.new)
    elif scene.view.any():
        here, there = here * (scene.view == 0), here * (scene.view == 1)
    else:
        there = np.zeros_like(here)
    return here, scene.onset if scene.onset.any() else there


def _moves(scene: Scene, meant: Bools) -> bool:
    """Whether something of it is in more than one place."""
    places: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for token, patch in np.argwhere(meant):
        places[scene.label[token, patch], scene.ink[token, patch]].add((scene.spot[token], patch))
    return any(len(spots) > 1 for spots in places.values())


def _look(slot: tuple[int, int], position: int, at: npt.NDArray[np.generic], counted: bool = False) -> Look:
    """counted: the first token is looked at even where there is something else."""
    target = at.astype(np.float32)
    target[position + 1 :] = 0  # the media may come after the question
    if counted or not target.any():
        target[0] += 1
    return SLOTS.index(slot), position, target / target.sum()


def scene_of(ids: Ints, config: ModelConfig, vision: tuple[Tensor, Tensor] | None, audio: Tensor | None) -> Scene:
    """Of one row, from the hints (of pictures and clips: and places) of its media (hints.py), in the order of their tokens."""
    label, ink, middle, digit = (np.zeros((len(ids), 4), np.int64) for _ in range(4))
    view, new, spot, onset = (np.zeros(len(ids), np.int64) for _ in range(4))
    if vision is not None:
        hints, places = (part.numpy() for part in vision)
        where = np.flatnonzero((ids == config.image_token_id) | (ids == config.video_token_id))
        label[where], ink[where] = hints[..., 0], hints[..., 1]
        middle[where], digit[where] = hints[..., 3] | hints[..., 4], hints[..., 5]
        view[where], new[where] = places[:, 2], places[:, 3]
        spot[where] = np.arange(len(where)) - np.searchsorted(places[:, 2], places[:, 2])
    if audio is not None:
        onset[ids == config.audio_token_id] = audio.numpy()[:, 0, 2]
    return Scene(label, ink, middle, digit, view, new, spot, onset, bool((ids == config.video_token_id).any()))


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
