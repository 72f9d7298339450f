"""Matrices in int4, in groups of columns: their values, and the order of the codes in memory.

A value is (code - 8) x scale + zero, with codes of 0 to 15, and a scale and a zero in bfloat16 for each row and group. ``narrowing``
and ``quantized`` write such matrices, ``lm.matrices`` multiplies them.

Blocks of 32 rows follow one another. The codes of a block are in the order [column / 4, row, column % 4], so that a vector has four
neighbouring columns of some rows, as instructions that multiply bytes add them up. A byte has a code of one of the first 16 rows in its
lower half, and in its upper half that of the row 16 further on. Scales and zeros of a block are in the order [group, row, 2].
Shapes: N rows, K columns, G groups.
"""

import torch
from torch import Tensor

from ...schema.weight_layout import INT4_MIDDLE, PACKED_COLUMNS, PACKED_ROWS

_MOST = 15
_HALF = PACKED_ROWS // 2


def pack(codes_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor, target: Tensor, target_scales: Tensor) -> None:
    """Write codes uint8 [N, K] and float32 scales and zeros to ``target`` uint8 [N, K / 2] and ``target_scales`` bfloat16 [N, G, 2].
    N is a multiple of 32, K of 32 G."""
    num_columns, num_groups = codes_NK.shape[1], scales_NG.shape[1]
    low, high = codes_NK.view(-1, 2, _HALF, num_columns).unbind(1)
    words = (high << 4 | low).view(torch.int32)  # of PACKED_COLUMNS codes
    target.view(torch.int32).view(-1, num_columns // PACKED_COLUMNS, _HALF).copy_(words.transpose(1, 2))
    ordered = target_scales.view(-1, num_groups, PACKED_ROWS, 2)
    for index, part in enumerate((scales_NG, zeros_NG)):
        ordered[..., index] = part.view(-1, PACKED_ROWS, num_groups).transpose(1, 2)


def quantize(values_NK: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros for ``pack`` of float32 values, which are overwritten: a group's least and largest become 0 and 15."""
    groups = values_NK.view(values_NK.shape[0], num_groups, -1)
    least, most = groups.amin(2), groups.amax(2)  # both in less time than aminmax
    scales = (most / _MOST - least / _MOST).bfloat16().float()
    zeros = (least + INT4_MIDDLE * scales).bfloat16().float()
    # Groups of equal numbers, and of numbers too small to be divided by their scale, are their zero.
    inverse = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales.reciprocal())
    codes = groups.sub_(zeros.unsqueeze(2)).mul_(inverse.unsqueeze(2)).round_().add_(INT4_MIDDLE).clamp_(0, _MOST)
    return codes.to(torch.int8).view(torch.uint8).flatten(1), scales, zeros  # ten times as fast as to uint8


def unpack(packed: Tensor, scales: Tensor, out_NK: Tensor) -> None:
    """Write the values of a packed matrix [N, K / 2] with scales [N, G, 2] to ``out_NK``, of any floating dtype."""
    num_columns, num_groups = out_NK.shape[1], scales.shape[1]
    codes = packed.view(-1, num_columns // PACKED_COLUMNS, _HALF, PACKED_COLUMNS).transpose(1, 2)
    halves = out_NK.view(-1, 2, _HALF, num_columns // PACKED_COLUMNS, PACKED_COLUMNS)
    halves[:, 0], halves[:, 1] = codes & _MOST, codes >> 4
    groups = out_NK.view(-1, PACKED_ROWS, num_groups, num_columns // num_groups)
    steps, zeros = scales.view(-1, num_groups, PACKED_ROWS, 2).transpose(1, 2).to(out_NK.dtype).unsqueeze(3).unbind(4)
    torch.addcmul(zeros, groups.sub_(INT4_MIDDLE), steps, out=groups)
