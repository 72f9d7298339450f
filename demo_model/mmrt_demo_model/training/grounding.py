"""Grounding: some heads of the language model are told where to look. Without that it learns far later to tie words to things.

In the layer WORD_LAYER a word for a shape or a colour looks at the things of that shape or colour, and from an answer two heads look
at such words of its question: each at those of one thing where two are compared, otherwise both at all of them; in a list, at the name
last said. In ANSWER_LAYER two heads look from an answer at the middles of all things that the question is about, at two ends of a
move, at each of two pictures, at what is not yet listed, and at what begins in a sound; while it names something a third looks at
that, at a number digit by digit. What is not there is looked for at the first token, and counted against it: the weight of the first
token tells how many there are. Those numbers, how the two looks compare, and what the things that a question is about have in
common are told to what comes out of that layer. Nothing of this is part of the checkpoint.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .hints import FAST, INKS, LABELS
from .prompts import TokenRow
from .scene import Ints, Scene, Vocabulary

WORD_LAYER, ANSWER_LAYER = 1, 2
# Layer and head of each slot.
SHAPES, COLOURS, OTHER_WORDS, WORDS = ((WORD_LAYER, head) for head in range(4))
THINGS, OTHERS, NAMED = (ANSWER_LAYER, 0), (ANSWER_LAYER, 1), (ANSWER_LAYER, 2)
SLOTS = (SHAPES, COLOURS, WORDS, THINGS, OTHERS, NAMED, OTHER_WORDS)
COMPARED = 4  # words: a question with so many is about two things
MOST_COUNTED, LEAST_MOVE = 6, 0.4  # things that are counted; eighths of the picture
# Of each token of an answer: how many things it looks at first and second, or how many it is about to name; of the second, whether
# they are further up or down, left or right; of two pictures, of a picture and a sound, or of a picture and a number in the question,
# whether the first are more; of two things, whether shape and colour are the same; and the label and ink that all have in common that
# the question is about, first and second; and whether that stands, is slow or is fast.
FACTS = {
    "here": MOST_COUNTED + 1, "there": MOST_COUNTED + 1, "down": 3, "across": 3, "more": 3, "shape": 3, "colour": 3,
    "label_here": len(LABELS), "ink_here": len(INKS), "label_there": len(LABELS), "ink_there": len(INKS),
    "pace": 3,
}  # fmt: skip
_LESS, _NEITHER, _MORE = range(3)
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


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
    number: Ints
    is_digit: Bools
    is_name: Bools
    is_order: Bools
    refers: Bools


class _Group(NamedTuple):
    """What a name in an answer stands for. begins, ends: its tokens, as indices into the answer; at [length, 4]."""

    begins: int
    ends: int
    at: Bools


def looks(row: TokenRow, scenes: Sequence[Scene], words: Vocabulary) -> tuple[list[Look], Ints]:
    """(slot, position, target) for all that one row is told; and of each token of the answers [n, len(FACTS)], their classes.

    scenes: of each answer, ``scenes_of``.
    """
    label, ink = words.label[row.ids], words.ink[row.ids]
    is_digit = label >= LABELS.index("0")
    shape = np.where(is_digit, 0, label)
    said = _Row(shape, ink, words.number[row.ids], is_digit, (shape > 0) | (ink > 0), words.orders[row.ids], words.refers[row.ids])
    found: list[Look] = []
    before = 0
    facts = []
    for answer, scene in zip(row.answers, scenes, strict=True):
        aim = _aim(scene, said, np.arange(before, answer[0]), answer)
        end = int(answer[-1]) + 1
        found += [
            _look(slot, before + int(position), (seen == word[before + position]).any(1))
            for slot, word, seen in ((SHAPES, shape, scene.label), (COLOURS, ink, scene.ink))
            for position in np.flatnonzero(word[before:end])
        ]
        before = end
        groups = _groups(scene, said, answer, aim.meant)
        here = np.tile(aim.here.sum(1), (len(answer), 1))
        there = np.tile(scene.onset if scene.onset.any() else aim.there.sum(1), (len(answer), 1))
        if aim.is_open and groups:
            there = np.array([_unsaid(aim.meant, groups, number) for number in range(len(answer))])
        found += _asked(answer, aim, here[0], there, groups)
        found += _named(scene, said, answer, groups)
        numbers = np.stack((here.sum(1), there.sum(1)), axis=1)
        told = [
            *_moved(scene, aim),
            *_compared(scene, aim, *numbers[0]),
            *_common(scene, aim.here),
            *_common(scene, aim.there),
            _pace(scene, aim),
        ]
        for group in groups:
            if group.begins and not scene.view.any():  # the token that says how many are in one picture
                numbers[group.begins - 1, 0] = group.at.sum()
        facts.append(np.concatenate((np.minimum(numbers, MOST_COUNTED), np.tile(told, (len(answer), 1))), axis=1))
    return found, np.concatenate(facts)


def _unsaid(meant: Bools, groups: Sequence[_Group], number: int) -> Ints:
    """[length]: what the answer has not named before its token ``number``."""
    unsaid = meant.copy()
    for group in groups:
        if group.ends <= number:
            unsaid &= ~group.at
    count: Ints = unsaid.sum(1)
    return count


class _Aim(NamedTuple):
    """What a question is about: its words [n], at one and at another look; middles of things [length, 4], of all and at each look.
    ``is_open``: it names nothing, and all there is is one picture; number: what it asks for, 0 for none."""

    one: Ints
    other: Ints
    meant: Bools
    here: Bools
    there: Bools
    is_open: bool = False
    number: int = 0


def _aim(scene: Scene, said: _Row, asked: Ints, answer: Ints) -> _Aim:
    """Of two things that are compared: each. Of two pictures: what is in each. Of clips: ``_course``."""
    named = asked[said.is_name[asked]]
    meant = _meant(scene, said, named if len(named) else answer)
    if len(named) == COMPARED:
        one, other = named[:2], named[2:]
        if said.refers[asked[asked < named[0]]].any():
            one, other = other, one
        return _Aim(one, other, meant, _meant(scene, said, one), _meant(scene, said, other))
    words = asked[said.is_name[asked] | said.is_order[asked]]
    if scene.is_video:
        here, there = _course(scene, meant)
    else:
        here, there = (meant & (scene.view == view)[:, None] for view in (0, 1))
    is_open = not (len(named) or scene.is_video or scene.view.any() or scene.onset.any())
    return _Aim(words, words, meant, here, there, is_open, int(said.number[asked].max(initial=0)))


def _course(scene: Scene, meant: Bools) -> tuple[Bools, Bools]:
    """Where what moves begins and where it ends, or comes in again; of what does not: wherever it appears, and where it is at last."""
    movers = _movers(scene, meant)
    if movers.any():
        meant = movers
    frames = [
        at
        for view in range(scene.view.max() + 1)
        for there in (scene.first, scene.last)
        if (at := meant & (there > 0) & (scene.view == view)[:, None]).any()
    ]
    if not frames:
        return meant, meant
    if not movers.any():
        return meant & (scene.new > 0)[:, None], frames[-1]
    steps = np.diff([_centre(scene, at) for at in frames], axis=0, prepend=[_centre(scene, frames[0])])
    along = steps[:, np.abs(steps).sum(0).argmax()]
    way = (1 / along[along != 0]).sum()  # it jumps back further than it moves
    back = np.flatnonzero(along * np.sign(way) < -1)
    return frames[0], frames[back[0] - 1 if len(back) else -1]


def _centre(scene: Scene, at: Bools) -> Floats:
    """Down and across, in eighths of the picture; a patch is half of one or more."""
    tokens, patches = np.nonzero(at)
    centre: Floats = (scene.place[tokens] + np.stack((patches // 2, patches % 2), axis=1) / 2).mean(0, dtype=np.float32)
    return centre


def _moved(scene: Scene, aim: _Aim) -> Ints:
    """[2]: whether the second look is 0 further up, 1 neither, 2 further down; and the same for left and right."""
    moved: Floats = np.zeros(2, np.float32)
    if aim.here.any() and aim.there.any() and (scene.is_video or not scene.view.any()):
        moved = _centre(scene, aim.there) - _centre(scene, aim.here)
    return (1 + np.sign(moved) * (np.abs(moved) > LEAST_MOVE)).astype(np.int64)


def _compared(scene: Scene, aim: _Aim, num_here: int, num_there: int) -> tuple[int, int, int]:
    """Whether there are more here than there, or than the number asked for; and whether one thing here has the shape and the colour of
    the one there."""
    two_pictures = scene.view.any() and not scene.is_video
    more = _NEITHER
    if aim.number and scene.first.any() and not (scene.is_video or scene.view.any()):
        more = int(np.sign(num_here - aim.number)) + _NEITHER
    elif two_pictures or (scene.onset.any() and num_here):
        more = int(np.sign(num_here - num_there)) + _NEITHER
    if not two_pictures or aim.here.sum() != 1 or aim.there.sum() != 1:
        return more, _NEITHER, _NEITHER
    same = [seen[aim.here] == seen[aim.there] for seen in (scene.label, scene.ink)]
    return more, _MORE if same[0] else _LESS, _MORE if same[1] else _LESS


def _common(scene: Scene, at: Bools) -> tuple[int, int]:
    """The label and the ink of all that is there; 0 where there is nothing, or where they differ."""
    label, ink = (np.unique(seen[at]) for seen in (scene.label, scene.ink))
    return int(label[0]) if len(label) == 1 else 0, int(ink[0]) if len(ink) == 1 else 0


def _pace(scene: Scene, aim: _Aim) -> int:
    """0 if nothing moves, 1 if it is slow, 2 if it is fast."""
    paces = scene.pace[aim.here | aim.there]
    most = int(paces.max(initial=0)) if scene.is_video else 0
    return (most > 0) + (most >= FAST)


def _asked(answer: Ints, aim: _Aim, here: Ints, there: Ints, groups: Sequence[_Group]) -> list[Look]:
    """From every token of an answer: at words of the question, or in a list at the name last said; and at what it is about, things
    under each token: ``here`` [length], ``there`` [len(answer), length]."""
    listed = groups if aim.is_open else ()

    def words(number: int) -> tuple[Ints, Ints]:
        ended = [group for group in listed if group.ends <= number]
        return (answer[ended[-1].begins : ended[-1].ends],) * 2 if ended else (aim.one, aim.other)

    return [
        look
        for number, position in enumerate((answer - 1).tolist())
        for look in (
            *(_look(slot, position, _among(at, len(here))) for slot, at in zip((WORDS, OTHER_WORDS), words(number), strict=True)),
            _look(THINGS, position, here, counted=True),
            _look(OTHERS, position, there[number], counted=True),
        )
    ]


def _among(at: Ints, length: int) -> Bools:
    """[length]: True at these positions."""
    among = np.zeros(length, np.bool_)
    among[at] = True
    return among


def _groups(scene: Scene, said: _Row, answer: Ints, meant: Bools) -> list[_Group]:
    """The names in an answer, in their order."""
    is_name = said.is_name[answer]
    found = []
    for begins in np.flatnonzero(is_name & ~np.roll(is_name, 1)):
        ends = begins + np.argmin(is_name[begins:])
        found.append(_Group(int(begins), int(ends), meant & _meant(scene, said, answer[begins:ends])))
    return found


def _named(scene: Scene, said: _Row, answer: Ints, groups: Sequence[_Group]) -> list[Look]:
    """While an answer names things and digits; behind the last digit, at the digit that is not there."""
    digits = answer[said.is_digit[answer]].tolist()
    ends = [digits[-1] + 1] if digits else []
    found = [_look(NAMED, position - 1, (scene.digit[:, digit : digit + 1] > 0).sum(1)) for digit, position in enumerate(digits + ends)]
    for group in groups:
        at, name = group.at.sum(1), answer[group.begins : group.ends]
        if group.begins:  # behind an article or how many
            found.append(_look(NAMED, int(name[0]) - 2, at, counted=True))
        found += [_look(NAMED, int(position) - 1, at) for position in name]
    return found


def _meant(scene: Scene, said: _Row, positions: Ints) -> Bools:
    """[length, 4]: middles of the things that the words at these positions name, of all where they name none."""
    meant = (scene.first | scene.last) > 0
    for word, seen in ((said.shape[positions], scene.label), (said.ink[positions], scene.ink)):
        if word.any():
            meant = meant & np.isin(seen, word[word > 0])
    return meant


def _movers(scene: Scene, meant: Bools) -> Bools:
    """[length, 4]: what of it is in more than one place."""
    places: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for token, patch in np.argwhere(meant):
        places[scene.label[token, patch], scene.ink[token, patch]].add((scene.spot[token], patch))
    moving = [(scene.label == label) & (scene.ink == ink) for (label, ink), spots in places.items() if len(spots) > 1]
    return meant & np.any(moving, axis=0) if moving else np.zeros_like(meant)


def _look(slot: tuple[int, int], position: int, at: npt.NDArray[np.generic], counted: bool = False) -> Look:
    """counted: the first token is looked at even where there is something else."""
    target = at.astype(np.float32)
    target[position + 1 :] = 0  # the media may come after the question
    if counted or not target.any():
        target[0] += 1
    return SLOTS.index(slot), position, target / target.sum()


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
