"""Hints: what the towers are taught directly about each token. Without them they learn far later to see and to hear.

Vision: four patches to a token; of each what lies there, in which colour, how large it is, and whether a thing has its middle there in
the first and in the last frame of the temporal patch. Sound: whether it is silent, a tone or noise, the pitch, and whether something
begins. The heads that say so are not part of the checkpoint.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..demo_data import COLOURS, SHAPES, Placed, Sound

IGNORED = -100
LABELS = ("nothing", *SHAPES, *"0123456789")
INKS = ("nothing", *COLOURS)
EXTENTS = (0.1, 0.16, 0.24, 0.33, 0.45, 0.6)  # borders between classes, as shares of a square as large as the picture
SEEN = {"label": len(LABELS), "ink": len(INKS), "extent": 1 + len(EXTENTS), "first": 2, "last": 2}
TOKEN_S = 0.04
LOWEST_HZ, PER_OCTAVE, NUM_PITCHES = 120.0, 5, 24
HEARD = {"state": 3, "pitch": NUM_PITCHES, "onset": 2}
_SILENT, _TONE, _NOISE = range(3)
_NOTHING_WEIGHT = 0.3  # of the first class: most of a picture is empty


class HintHead(nn.Module):
    """Tokens [n, hidden] -> loss against hints [n, parts, questions], each a class of ``classes``."""

    def __init__(self, hidden: int, parts: int, classes: Sequence[int]) -> None:
        super().__init__()
        self.parts, self.classes = parts, tuple(classes)
        self.say = nn.Linear(hidden, parts * sum(classes))
        self._weights = nn.Buffer(torch.tensor([_NOTHING_WEIGHT] + [1.0] * (max(classes) - 1)), persistent=False)

    def forward(self, tokens: Tensor, hints: Tensor) -> Tensor:
        said = self.say(tokens).float().view(-1, sum(self.classes)).split(self.classes, -1)
        losses = [
            F.cross_entropy(logits, hint, self._weights[: logits.shape[-1]], ignore_index=IGNORED)
            for logits, hint in zip(said, hints.flatten(0, 1).unbind(-1), strict=True)
            if (hint != IGNORED).any()
        ]
        return torch.stack(losses).sum() if losses else said[0].sum() * 0


def vision_heads(hidden: int) -> HintHead:
    return HintHead(hidden, 4, tuple(SEEN.values()))


def sound_heads(hidden: int) -> HintHead:
    return HintHead(hidden, 1, tuple(HEARD.values()))


class PlaceHead(nn.Module):
    """States of the language model's media tokens [n, hidden] -> loss against the third of height and of width that each lies in."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.say = nn.Linear(hidden, 6)

    def forward(self, states: Tensor, thirds: Tensor) -> Tensor:
        said = self.say(F.rms_norm(states.float(), states.shape[-1:]))
        return F.cross_entropy(said[:, :3], thirds[:, 0]) + F.cross_entropy(said[:, 3:], thirds[:, 1])


def seen(frames: Sequence[tuple[Placed, ...]], grid: tuple[int, int, int]) -> Tensor:
    """int64 [tokens, 4, 5] of what is in each frame of an item. grid: temporal patches, patches down, patches across."""
    groups, h, w = grid
    size = -(-len(frames) // groups)
    hints = np.zeros((groups, h, w, len(SEEN)), np.int64)
    hints[..., 2] = IGNORED
    for group in range(groups):
        mine = frames[group * size : (group + 1) * size] or frames[-1:]
        for placed in (placed for frame in mine for placed in frame):
            _mark(hints[group], placed)
        for column, frame in ((3, mine[0]), (4, mine[-1])):
            for placed in frame:
                row, across = _patch(placed.centre, h, w)
                hints[group, row, across, column] = 1
    blocks = hints.reshape(groups, h // 2, 2, w // 2, 2, -1).transpose(0, 1, 3, 2, 4, 5)
    return torch.from_numpy(np.ascontiguousarray(blocks).reshape(-1, 4, len(SEEN)))


def _patch(centre: tuple[float, float], h: int, w: int) -> tuple[int, int]:
    x, y = centre
    return min(max(int(y * h), 0), h - 1), min(max(int(x * w), 0), w - 1)


def _mark(hints: npt.NDArray[np.int64], placed: Placed) -> None:
    """The patches whose middle lies in the box, and the one in which the box has its middle; digit by digit."""
    h, w = hints.shape[:2]
    parts = placed.label if placed.label.isdigit() else (placed.label,)
    x0, y0, x1, y1 = placed.box
    width = (x1 - x0) / len(parts)
    extent = math.sqrt((x1 - x0) * (y1 - y0) / len(parts))
    ys, xs = (np.arange(h) + 0.5) / h, (np.arange(w) + 0.5) / w
    for number, label in enumerate(parts):
        left, right = x0 + number * width, x0 + (number + 1) * width
        inside = ((ys > y0) & (ys < y1))[:, None] & ((xs > left) & (xs < right))[None]
        inside[_patch(((left + right) / 2, (y0 + y1) / 2), h, w)] = True
        hints[inside, :3] = LABELS.index(label), INKS.index(placed.colour), int(np.searchsorted(EXTENTS, extent))


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
