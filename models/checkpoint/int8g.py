"""Matrices in int8, in groups of 32 columns: their values, and the order of the codes in memory.

A value is code x scale, with codes of -128 to 127, and a scale in bfloat16 for each row and group. ``narrowing``, ``quantized`` and
``gguf_matrices`` write such matrices, ``lm.matrices`` multiplies them.

Blocks of 32 rows follow one another. The codes of a block are in the order [column / 4, row, column % 4], as in ``int4``, its scales in
the order [group, row]. Shapes: N rows, K columns, G groups.
"""

import torch
from torch import Tensor

from ...cpu_kernels import packing_kernel
from ...schema.weight_layout import INT8_MOST, INT8G_COLUMNS, PACKED_COLUMNS, PACKED_ROWS


def pack(codes_NK: Tensor, scales_NG: Tensor, target: Tensor, target_scales: Tensor) -> None:
    """Write codes int8 [N, K] and float32 scales to ``target`` int8 [N, K] and ``target_scales`` bfloat16 [N, G]. N and K are multiples
    of 32."""
    words = codes_NK.contiguous().view(torch.int32).view(-1, PACKED_ROWS, codes_NK.shape[1] // PACKED_COLUMNS)
    _words(target).copy_(words.transpose(1, 2))
    _scales(target_scales).copy_(scales_NG.view(-1, PACKED_ROWS, scales_NG.shape[1]).transpose(1, 2))


def quantize(values_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales for ``pack`` of float32 values, which are overwritten: the largest of a group becomes 127 or -127."""
    groups = values_NK.view(values_NK.shape[0], -1, INT8G_COLUMNS)
    scales = (torch.maximum(groups.amax(2), -groups.amin(2)) / INT8_MOST).bfloat16().float()
    # Groups of zeros, and of numbers too small to be divided by their scale, are zeros.
    inverse = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales.reciprocal())
    return groups.mul_(inverse.unsqueeze(2)).round_().to(torch.int8).flatten(1), scales


def write(values_NK: Tensor, target: Tensor, target_scales: Tensor) -> None:
    """``pack`` what ``quantize`` makes of float32 values. Scales are not finite where a value is not."""
    if packing_kernel.has_kernel(values_NK) and target.is_contiguous() and target_scales.is_contiguous():
        packing_kernel.pack(values_NK, target, target_scales)
    else:
        pack(*quantize(values_NK.clone()), target, target_scales)


def unpack(packed: Tensor, scales: Tensor, out_NK: Tensor) -> None:
    """Write the values of a packed matrix [N, K] with scales [N, G] to ``out_NK``, of any floating dtype."""
    codes = _words(packed).transpose(1, 2).contiguous().view(torch.int8).view(*scales.shape, INT8G_COLUMNS)
    steps = _scales(scales).transpose(1, 2).reshape(*scales.shape, 1)
    torch.mul(codes.to(out_NK.dtype), steps.to(out_NK.dtype), out=out_NK.view(*scales.shape, INT8G_COLUMNS))


def unpack_rows(packed: Tensor, scales: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of some rows int64 [...] of a packed matrix, [..., K]."""
    blocks, places = rows.flatten() // PACKED_ROWS, rows.flatten() % PACKED_ROWS
    codes = _words(packed)[blocks, :, places].view(torch.int8).view(-1, scales.shape[1], INT8G_COLUMNS)
    values = codes.to(dtype).mul_(_scales(scales)[blocks, :, places].unsqueeze(2))
    return values.view(*rows.shape, packed.shape[1])


def _words(packed: Tensor) -> Tensor:
    """Of four codes: int32 [blocks, K / 4, rows of a block]."""
    return packed.view(torch.int32).view(-1, packed.shape[1] // PACKED_COLUMNS, PACKED_ROWS)


def _scales(scales: Tensor) -> Tensor:
    """[blocks, G, rows of a block]"""
    return scales.view(-1, scales.shape[1], PACKED_ROWS)
