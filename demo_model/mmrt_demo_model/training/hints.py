"""Hints: what the towers are taught directly about each token, and the language model about its states. Without them they learn far
later to see, to hear and to compare.

Vision: four patches to a token; of each what lies there, in which colour, how large it is, and whether a thing has its middle there
in the first and in the last frame of the temporal patch, and in any of them which thing or digit, in which colour; how far a thing
moves from the first of its frames to the last; and of each token which digit it holds the middle of, apart for the first to the
fourth of a number. Sound: whether it is silent, a tone or noise, the pitch, and whether something begins. The heads that say so are
not part of the checkpoint.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrt.schema.media import ItemShape

from ..data import COLOURS, SHAPES, Placed, Sound

IGNORED = -100
LABELS = ("nothing", *SHAPES, *"0123456789")
INKS = ("nothing", *COLOURS)
EXTENTS = (0.1, 0.16, 0.24, 0.33, 0.45, 0.6)  # borders between classes, as shares of a square as large as the picture
PACES = (0.02, 0.05, 0.09, 0.11, 0.2, 0.3)  # borders between classes, in widths or heights of the picture from frame to frame
# The first class of what is fast: frames are 0.5 to 0.75 s apart, so that slow things go 0.09 at most, fast ones 0.13 or more.
FAST = 1 + PACES.index(0.11)
_JUMP = 0.6  # so far goes only what has left the picture and comes in again
MOST_DIGITS = 4  # of a number: as many as a token has patches, so that part k of "digit" is about the k-th
SEEN = {
    "label": len(LABELS), "ink": len(INKS), "extent": 1 + len(EXTENTS), "first": 2, "last": 2, "middle": len(LABELS), "tint": len(INKS),
    "pace": 1 + len(PACES), "digit": 11,
}  # fmt: skip
MOST_VIEWS, EIGHTHS = 12, 8
# Of a token: eighth of the picture's height and of its width; which temporal patch or which of two pictures; whether a thing is new.
PLACES = {"down": EIGHTHS, "across": EIGHTHS, "view": MOST_VIEWS, "new": 2}
TOKEN_S = 0.04
LOWEST_HZ, PER_OCTAVE, NUM_PITCHES = 120.0, 5, 24
HEARD = {"state": 3, "pitch": NUM_PITCHES, "onset": 2}
_SILENT, _TONE, _NOISE = range(3)
# Of the first class, where it is nothing: most of a picture is empty, and hardly any of it the middle of anything.
_NOTHING_WEIGHTS = {
    "label": 0.3, "ink": 0.3, "first": 0.3, "last": 0.3, "middle": 0.05, "tint": 0.05, "digit": 0.02, "state": 0.3, "onset": 0.3
}  # fmt: skip


class Prepared(NamedTuple):
    """One medium of a sample. rows: uint8 [groups, patches, row bytes], or float32 [frames, bins] of a sound."""

    item: ItemShape
    rows: npt.NDArray[Any]
    hints: Tensor  # [tokens, parts, questions]: ``seen`` or ``heard``
    places: Tensor | None = None  # [tokens, 4]: ``places``; None of a sound


class HintHead(nn.Module):
    """Tokens [n, hidden] -> loss against hints [n, parts, questions]. ``questions``: how many classes each has."""

    def __init__(self, hidden: int, parts: int, questions: Mapping[str, int]) -> None:
        super().__init__()
        self.classes = tuple(questions.values())
        self.say = nn.Linear(hidden, parts * sum(self.classes))
        weights = torch.ones(len(questions), max(self.classes))
        weights[:, 0] = torch.tensor([_NOTHING_WEIGHTS.get(name, 1.0) for name in questions])
        self._weights = nn.Buffer(weights, persistent=False)

    def forward(self, tokens: Tensor, hints: Tensor) -> Tensor:
        said = self.say(tokens).float().view(-1, sum(self.classes)).split(self.classes, -1)
        losses = [
            F.cross_entropy(logits, hint, weights[: logits.shape[-1]], ignore_index=IGNORED)
            for logits, hint, weights in zip(said, hints.flatten(0, 1).unbind(-1), self._weights, strict=True)
            if (hint != IGNORED).any()
        ]
        return torch.stack(losses).sum() if losses else said[0].sum() * 0


def vision_heads(hidden: int) -> HintHead:
    return HintHead(hidden, 4, SEEN)


def sound_heads(hidden: int) -> HintHead:
    return HintHead(hidden, 1, HEARD)


class StateHead(nn.Module):
    """States of the language model [n, hidden] -> loss against classes [n, questions]. ``questions``: how many classes each has."""

    def __init__(self, hidden: int, questions: Mapping[str, int]) -> None:
        super().__init__()
        self.classes = tuple(questions.values())
        self.say = nn.Linear(hidden, sum(self.classes))

    def forward(self, states: Tensor, told: Tensor) -> Tensor:
        said = self.say(F.rms_norm(states.float(), states.shape[-1:])).split(self.classes, -1)
        return torch.stack([F.cross_entropy(logits, answer) for logits, answer in zip(said, told.unbind(-1), strict=True)]).sum()


def seen(frames: Sequence[tuple[Placed, ...]], grid: tuple[int, int, int]) -> Tensor:
    """int64 [tokens, 4, len(SEEN)] of what is in each frame of an item. grid: temporal patches, patches down, patches across."""
    groups, h, w = grid
    size = -(-len(frames) // groups)
    patches = np.zeros((groups, h, w, len(SEEN) - 1), np.int64)
    patches[..., 2], patches[..., 7] = IGNORED, IGNORED
    digits = np.zeros((groups, h // 2, w // 2, MOST_DIGITS), np.int64)
    for group in range(groups):
        mine = frames[group * size : (group + 1) * size] or frames[-1:]
        for placed in (placed for frame in mine for placed in frame):
            _mark(patches[group], digits[group], placed)
        for column, frame in ((3, mine[0]), (4, mine[-1])):
            for placed in frame:
                row, across = _patch(placed.centre, h, w)
                patches[group, row, across, column] = 1
        if len(mine) > 1:
            _mark_paces(patches[group], mine[0], mine[-1])
    blocks = patches.reshape(groups, h // 2, 2, w // 2, 2, -1).transpose(0, 1, 3, 2, 4, 5)
    return torch.from_numpy(np.concatenate((blocks.reshape(-1, 4, len(SEEN) - 1), digits.reshape(-1, 4, 1)), axis=-1))


def places(grid: tuple[int, int, int], hints: Tensor, first_view: int) -> Tensor:
    """int64 [tokens, 4], the classes of PLACES. ``hints`` of the same item: ``seen``; ``first_view``: which of the pictures it is."""
    groups, h, w = grid[0], grid[1] // 2, grid[2] // 2
    down, across = (((torch.arange(n) * 2 + 1) * EIGHTHS) // (2 * n) for n in (h, w))
    assert first_view + groups <= MOST_VIEWS
    view = torch.arange(first_view, first_view + groups)
    middle = hints.view(groups, h * w, 4, -1)[..., 3:5] > 0
    before = torch.cat((torch.zeros_like(middle[:1, ..., 1]), middle[:-1, ..., 1]))
    new = (middle[..., 0] & ~before) | (middle[..., 1] & ~middle[..., 0])
    eighths = torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1).reshape(1, -1, 2).expand(groups, -1, -1)
    return torch.cat((eighths, view[:, None, None].expand(-1, h * w, 1), new.any(-1, keepdim=True).long()), dim=-1).flatten(0, 1)


def _patch(centre: tuple[float, float], h: int, w: int) -> tuple[int, int]:
    x, y = centre
    return min(max(int(y * h), 0), h - 1), min(max(int(x * w), 0), w - 1)


def _mark(patches: npt.NDArray[np.int64], digits: npt.NDArray[np.int64], placed: Placed) -> None:
    """The patches whose middle lies in the box, and the one in which the box has its middle; digit by digit."""
    h, w = patches.shape[:2]
    parts = zip(placed.label, placed.digits, strict=True) if placed.digits else [(placed.label, placed.box)]
    ys, xs = (np.arange(h) + 0.5) / h, (np.arange(w) + 0.5) / w
    for number, (label, (x0, y0, x1, y1)) in enumerate(parts):
        inside = ((ys > y0) & (ys < y1))[:, None] & ((xs > x0) & (xs < x1))[None]
        row, across = _patch(((x0 + x1) / 2, (y0 + y1) / 2), h, w)
        inside[row, across] = True
        extent = math.sqrt((x1 - x0) * (y1 - y0))
        patches[inside, :3] = LABELS.index(label), INKS.index(placed.colour), int(np.searchsorted(EXTENTS, extent))
        patches[row, across, 5:7] = LABELS.index(label), INKS.index(placed.colour)
        if label.isdigit():
            digits[row // 2, across // 2, number] = 1 + int(label)


def _mark_paces(patches: npt.NDArray[np.int64], before: tuple[Placed, ...], after: tuple[Placed, ...]) -> None:
    """How far things have moved, where each has its middle before and after; nothing of what comes in again elsewhere."""
    h, w = patches.shape[:2]
    later = {(placed.label, placed.colour): placed for placed in after}
    for placed in before:
        if (moved := later.get((placed.label, placed.colour))) is None:
            continue
        distance = max(abs(now - then) for now, then in zip(moved.centre, placed.centre, strict=True))
        if distance < _JUMP:
            for centre in (placed.centre, moved.centre):
                patches[(*_patch(centre, h, w), 7)] = int(np.searchsorted(PACES, distance))


def heard(sound: Sound, num_tokens: int) -> Tensor:
    """int64 [tokens, 1, 3]."""
    hints = np.zeros((num_tokens, len(HEARD)), np.int64)
    hints[:, 1] = IGNORED
    for note in sound.notes:
        hints[min(int(note.start_s / TOKEN_S), num_tokens - 1), 2] = 1
        for token in range(num_tokens):
            along = ((token + 0.5) * TOKEN_S - note.start_s) / (note.end_s - note.start_s)
            if not 0 <= along < 1:
                continue
            hints[token, 0] = _TONE if note.hz else _NOISE
            if note.hz:
                pitch = PER_OCTAVE * math.log2(note.hz[int(along * len(note.hz))] / LOWEST_HZ)
                hints[token, 1] = min(max(int(pitch), 0), NUM_PITCHES - 1)
    return torch.from_numpy(hints[:, None])
