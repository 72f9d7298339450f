"""Matrices in int4, in groups of columns: the layout of torch's kernel for the CPU, ``_weight_int4pack_mm_for_cpu``.

A value is (code - 8) x scale + zero, with codes of 0 to 15, and a scale and a zero in bfloat16 for each row and group. ``narrowing``
and ``quantized`` write such matrices, ``lm.matrices`` multiplies them. The order of the codes in memory depends on the processor's
vectors; the processes of a run agree on it, since they share the machine and ATEN_CPU_CAPABILITY.
Shapes: N rows, K columns, G groups.
"""

import torch
from torch import Tensor

MIDDLE = 8
_MOST = 15


def pack(codes_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor, target: Tensor, target_scales: Tensor) -> None:
    """Write codes uint8 [N, K] and float32 scales and zeros to ``target`` uint8 [N, K / 2] and ``target_scales`` bfloat16 [G, N, 2].
    N is a multiple of 64, K of 32 G. Raises: ValueError on a processor without AVX2."""
    half = _half()
    low, high = codes_NK.view(-1, 2, half, codes_NK.shape[1]).unbind(1)
    target.view(-1, codes_NK.shape[1], half).copy_((high << 4 | low).transpose(1, 2))
    target_scales[..., 0] = scales_NG.t()
    target_scales[..., 1] = zeros_NG.t()


def quantize(values_NK: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros for ``pack`` of float32 values, which are overwritten: a group's least and largest become 0 and 15."""
    groups = values_NK.view(values_NK.shape[0], num_groups, -1)
    least, most = groups.amin(2), groups.amax(2)  # both in less time than aminmax
    scales = (most / _MOST - least / _MOST).bfloat16().float()
    zeros = (least + MIDDLE * scales).bfloat16().float()
    # Groups of equal numbers, and of numbers too small to be divided by their scale, are their zero.
    inverse = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales.reciprocal())
    codes = groups.sub_(zeros.unsqueeze(2)).mul_(inverse.unsqueeze(2)).round_().add_(MIDDLE).clamp_(0, _MOST)
    return codes.to(torch.int8).view(torch.uint8).flatten(1), scales, zeros  # ten times as fast as to uint8


def unpack(packed: Tensor, scales_GN2: Tensor, out_KN: Tensor) -> None:
    """Write the values of a packed matrix [N, K / 2] to ``out_KN``, of any floating dtype."""
    half = _half()
    num_rows, num_columns = packed.shape[0], 2 * packed.shape[1]
    bytes_BKH = packed.view(num_rows // (2 * half), num_columns, half)
    out_KBS = out_KN.view(num_columns, num_rows // (2 * half), 2 * half)
    out_KBS[..., :half] = (bytes_BKH & _MOST).view(torch.int8).sub_(MIDDLE).transpose(0, 1)
    out_KBS[..., half:] = (bytes_BKH >> 4).view(torch.int8).sub_(MIDDLE).transpose(0, 1)
    num_groups = scales_GN2.shape[0]
    values = out_KN.view(num_groups, num_columns // num_groups, num_rows)
    scales, zeros = (part.to(out_KN.dtype).contiguous().unsqueeze(1) for part in scales_GN2.unbind(2))
    torch.addcmul(zeros, values, scales, out=values)


def _half() -> int:
    """Rows in the low halves of a block's bytes: those of a vector of the instructions that torch uses. Raises: ValueError."""
    found = {"AVX512": 32, "AVX2": 16}.get(torch.backends.cpu.get_cpu_capability())
    if found is None:
        raise ValueError("int4 needs a processor with AVX2: set model.weights to another format")
    return found
