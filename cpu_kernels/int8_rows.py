"""Activations in int8, for products of integers with a matrix in int8 (W8A8): how many bits they have here, and how they are rounded.

With VNNI or AMX, sums of products are exact for any int8. Without them oneDNN can add 128 to activations, multiply, and add up pairs of
products in 16 bits, where larger sums are cut. With 7 bits no sum is that large: activations are -64 to 64, and 64 is
subtracted from them. So oneDNN has 0 to 128, and a pair of products is at most 2 x 128 x 127 = 32,512. The sums are corrected later.

A matrix must have two rows and columns. Of one row oneDNN exchanges the sides (with AVX512), of one column torch's products are wrong.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..schema.weight_layout import INT8_MOST
from .rounding_kernel import has_kernel, round_to

_MOST_OF_RMS = 16  # an outlier is more than so many times the root mean square of the other numbers of its row
_LEAST = 1e-30  # in a row whose numbers are all smaller, they may be rounded to zero
_TRIED = 64  # rows and columns of the product by which exactness is tried


class Level(NamedTuple):
    """How finely a row is rounded: to whole numbers of steps, from -most to most."""

    most: int
    shift: int  # subtracted from the whole numbers for oneDNN, added for the kernel of few rows (``int8_kernels``)


FULL = Level(INT8_MOST, 0)
PAIRS = Level(64, 64)


class Parts(NamedTuple):
    """Rows of activations. A row is its part's whole numbers x steps, plus those of its second part if it has one."""

    codes: Tensor  # int8 [P, K], whole numbers plus the shift as bytes, P >= M: a part of each row, then the second ones
    steps: Tensor  # float32 [P, 1]
    split: Tensor | None  # int64 [P - M]: the rows that have a second part


def round_rows(x_MK: Tensor, most: int, shift: int) -> Parts:
    """Round each row by itself. Its largest number is ``most`` steps. Where that leaves too few steps for the others, because the
    largest is an outlier, a second part holds what the first leaves, in steps 2 x ``most`` times as fine."""
    x = x_MK.float().contiguous()
    rounding = round_to if has_kernel(x) else _round_to
    # Of the norm of the whole row, the outlier included.
    most_of_norm = _MOST_OF_RMS / (x.shape[1] - 1 + _MOST_OF_RMS**2) ** 0.5
    codes, steps, are_split = rounding(x, most, _LEAST, shift, most_of_norm)
    if not are_split.any():
        return Parts(codes, steps, None)
    split = are_split.nonzero().squeeze(1)
    whole = (codes[split].int() - shift + 128) % 256 - 128
    left = x[split].div_(steps[split]).sub_(whole).mul_(2 * most).round_().add_(shift)
    return Parts(torch.cat([codes, _bytes(left)]), torch.cat([steps, steps[split] / (2 * most)]), split)


def _round_to(x_MK: Tensor, most: int, least: float, shift: int, most_of_norm: float) -> tuple[Tensor, Tensor, Tensor]:
    """``rounding_kernel.round_to`` in torch."""
    largest = x_MK.abs().amax(1, keepdim=True)
    bounds = largest.clamp(min=least)
    scaled = x_MK * (most / bounds)
    norms = torch.linalg.vector_norm(scaled, 2, 1)
    steps = bounds / most
    return _bytes(scaled.round_().add_(shift)), steps, (largest / steps)[:, 0] > norms * most_of_norm


def _bytes(whole: Tensor) -> Tensor:
    """Whole numbers from -128 to 255, as bytes."""
    return whole.int().to(torch.int8)


@cache
def level_of_rows() -> Level:
    """The finest level at which sums are exact. ONEDNN_MAX_CPU_ISA also limits what oneDNN uses, so products are tried.

    Raises: RuntimeError where sums are not exact at any.
    """
    for level in (FULL, PAIRS):
        if _is_exact(level):
            return level
    raise RuntimeError(f"products of int8 are not exact here, not even up to {PAIRS.most}: set model.weights to another format")


def _is_exact(level: Level) -> bool:
    """Try the largest sums, of both signs, with few rows and many."""
    codes = torch.full((_TRIED, _TRIED), level.most - level.shift, dtype=torch.int8)
    values = torch.full((_TRIED, _TRIED), INT8_MOST, dtype=torch.int8)
    values[::2] = -INT8_MOST
    expected = codes.int() @ values.int().t()
    return all(torch.equal(torch._int_mm(codes[:rows], values.t()), expected[:rows]) for rows in (1, _TRIED))
