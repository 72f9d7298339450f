"""Masks over the vocabulary: rows of a step that may draw certain tokens only.

A mask counts after everything else that changes logits, guidance and penalties included: what it forbids is never drawn.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from .interface import Masks, Pairs

# Finite, since guidance takes differences; and so low that a token which a mask allows comes first, whatever forbids it besides.
FORBIDDEN = -3e38


@torch.inference_mode()
def mask(logits: Tensor, masks: Masks) -> None:
    """Set what is forbidden to ``FORBIDDEN`` in logits [L, V], in place."""
    octets = torch.from_numpy(masks.bits.view(np.uint8).reshape(-1))
    row = torch.from_numpy(masks.row)
    if logits.device.type == "cuda":  # without waiting for what has been launched
        octets, row = (host.pin_memory().to(logits.device, non_blocking=True) for host in (octets, row))
    # A lookup of eight tokens each, and a minimum, run at the speed of memory; selecting by single bits is ten times slower.
    bounds = _bounds(logits.device, logits.dtype).index_select(0, octets.int()).view(len(masks.row), -1)[:, : logits.shape[1]]
    if len(masks.row) == len(logits):  # in their order
        torch.minimum(logits, bounds, out=logits)
    else:
        logits.index_copy_(0, row, torch.minimum(logits.index_select(0, row), bounds))


def mask_companions(masks: Masks, pairs: Pairs) -> Masks:
    """Repeat the masks of pairs for their companions' rows, so that guidance over both leaves forbidden what is forbidden."""
    companion_of = dict(zip(pairs.row.tolist(), pairs.companion_row.tolist(), strict=True))
    at = [number for number, row in enumerate(masks.row.tolist()) if row in companion_of]
    theirs = np.array([companion_of[row] for row in masks.row[at].tolist()], np.int64)
    return Masks(np.concatenate((masks.row, theirs)), np.concatenate((masks.bits, masks.bits[at])))


@cache
def _bounds(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256, 8]: of each octet of a mask the upper bounds of the logits of its eight tokens."""
    octets = np.arange(256, dtype=np.uint8)[:, None]
    allowed = torch.from_numpy(np.unpackbits(octets, axis=1, bitorder="little")).bool()
    return torch.where(allowed, torch.inf, FORBIDDEN).to(device, dtype)
