"""Hints: what lies under each token of a picture, which the vision tower is taught directly. Without them it learns far later to see.

Each merged token is given two classes, a label (shape or digit) and a colour. The head that says them is not part of the checkpoint.
"""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.architecture import Item
from ..demo_data import COLOURS, SHAPES, Clip, Picture, Placed

IGNORED = -100
LABELS = ("nothing", *SHAPES, *"0123456789")
INKS = ("nothing", *COLOURS, "black", "white")


class HintHead(nn.Module):
    """Vision tokens [n, hidden] -> loss against hints [n, 2]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.label = nn.Linear(hidden, len(LABELS))
        self.ink = nn.Linear(hidden, len(INKS))

    def forward(self, tokens: Tensor, hints: Tensor) -> Tensor:
        label = F.cross_entropy(self.label(tokens).float(), hints[:, 0], ignore_index=IGNORED)
        ink = F.cross_entropy(self.ink(tokens).float(), hints[:, 1], ignore_index=IGNORED)
        return label + ink


def hints_of(thing: Picture | Clip, item: Item) -> Tensor:
    """int64 [num_tokens, 2]; a clip gives none."""
    _, h, w = item.grid
    if isinstance(thing, Clip):
        return torch.full((item.num_tokens, 2), IGNORED)
    hints = np.zeros((h // 2, w // 2, 2), np.int64)
    for placed in thing.objects:
        parts = placed.label if placed.label.isdigit() else (placed.label,)
        x0, y0, x1, y1 = placed.box
        width = (x1 - x0) / len(parts)
        for number, label in enumerate(parts):
            _mark(hints, Placed(label, placed.colour, (x0 + number * width, y0, x0 + (number + 1) * width, y1)))
    return torch.from_numpy(hints.reshape(-1, 2))


def _mark(hints: npt.NDArray[np.int64], placed: Placed) -> None:
    """The tokens whose middle lies in the box, and the one in which the box has its middle."""
    rows, columns = hints.shape[:2]
    x0, y0, x1, y1 = placed.box
    ys, xs = (np.arange(rows) + 0.5) / rows, (np.arange(columns) + 0.5) / columns
    inside = ((ys > y0) & (ys < y1))[:, None] & ((xs > x0) & (xs < x1))[None]
    x, y = placed.centre
    inside[min(int(y * rows), rows - 1), min(int(x * columns), columns - 1)] = True
    hints[inside] = LABELS.index(placed.label), INKS.index(placed.colour)
