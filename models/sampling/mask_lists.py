"""Masks on the CPU, as lists of tokens. ``CpuSampler`` uses them.

Most masks of grammars allow few tokens, as between the strings of a JSON text, or forbid few, as within these, and those stay the same
from step to step. A row that may draw few tokens is cut down to them; of others the few forbidden ones are overwritten. What is neither
goes through ``masks``. The way depends on a row's own mask alone.

Shapes: R rows cut down to K tokens, V vocabulary, W = ceil(V / 32).
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .interface import Masks
from .masks import FORBIDDEN, mask

FEW, MORE = 1024, 32_768  # tokens that rows are cut down to; to more only where that is at most a quarter of the vocabulary
_WORD_BITS = 32
_MAX_FORBIDDEN = 1 / 8  # of the vocabulary


class Narrow(NamedTuple):
    """Rows that are cut down: their numbers ``row`` int64 [R], the tokens that they may draw, ``ids`` int64 [R, K], rising, and the
    ``logits`` of these, float32 [R, K]. What is left over repeats a row's last token, with ``FORBIDDEN``."""

    row: NDArray[np.int64]
    ids: NDArray[np.int64]
    logits: Tensor

    def tokens(self, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids of what was drawn, int64 [R], of K."""
        return self.ids[np.arange(len(drawn)), drawn]


class _Lists(NamedTuple):
    """A mask's ``bits``, and its allowed or its forbidden tokens where these are few."""

    bits: bytes
    allowed: NDArray[np.int64] | None
    forbidden: NDArray[np.int64] | None


class MaskLists:
    """Remembers the last mask of each row."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, _Lists] = {}

    def forget(self) -> None:
        """Forget all masks: other rows come."""
        self._known.clear()

    def apply(self, logits: Tensor, masks: Masks) -> list[Narrow]:
        """Set what is forbidden to ``FORBIDDEN`` in logits, float32 [L, V], in place, except in the rows that are returned."""
        values = logits.numpy()
        narrow: dict[int, list[tuple[int, NDArray[np.int64]]]] = {FEW: [], MORE: []}
        wide = []
        for number, row in enumerate(masks.row.tolist()):
            lists = self._lists_of(row, masks.bits[number])
            if lists.allowed is not None:
                narrow[FEW if len(lists.allowed) <= FEW else MORE].append((row, lists.allowed))
            elif lists.forbidden is not None:
                values[row][lists.forbidden] = FORBIDDEN
            else:
                wide.append(number)
        if wide:
            mask(logits, Masks(masks.row[wide], masks.bits[wide]))
        return [_cut_down(values, rows, width) for width, rows in narrow.items() if rows]

    def _lists_of(self, row: int, bits: NDArray[np.int32]) -> _Lists:
        known, data = self._known.get(row), bits.tobytes()
        if known is None or known.bits != data:
            known = self._known[row] = _Lists(data, *self._few(bits))
        return known

    def _few(self, bits: NDArray[np.int32]) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
        num_allowed = int(np.bitwise_count(bits.view(np.uint32)).sum())
        if 1 <= num_allowed <= (MORE if 4 * MORE <= self._vocabulary else FEW):
            return _ids(bits), None
        if num_allowed >= (1 - _MAX_FORBIDDEN) * self._vocabulary:
            forbidden = _ids(~bits)
            return None, forbidden[forbidden < self._vocabulary]
        return None, None


def _cut_down(values: NDArray[np.float32], rows: list[tuple[int, NDArray[np.int64]]], width: int) -> Narrow:
    ids = np.empty((len(rows), width), np.int64)
    logits = np.full((len(rows), width), FORBIDDEN, np.float32)
    for number, (row, allowed) in enumerate(rows):
        size = len(allowed)
        ids[number, :size], ids[number, size:] = allowed, allowed[-1]
        logits[number, :size] = values[row][allowed]
    return Narrow(np.array([row for row, _ in rows], np.int64), ids, torch.from_numpy(logits))


def _ids(bits: NDArray[np.int32]) -> NDArray[np.int64]:
    """The tokens whose bits are set, int64, rising."""
    words = np.flatnonzero(bits != 0)
    places = np.flatnonzero(np.unpackbits(bits[words].view(np.uint8), bitorder="little").view(np.bool_))
    return words[places // _WORD_BITS] * _WORD_BITS + places % _WORD_BITS
