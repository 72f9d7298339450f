"""GGUF's types of tensors, and the values of their blocks in torch. Facts of the types: ggml's ``ggml-common.h``.

A row is cut into blocks of so many values, each with scales of its own. Each function takes blocks uint8 [n, bytes] and returns float32
[n, values].
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...cpu_kernels import block_kernels

TYPE_NAMES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}
BLOCKS = {  # values and bytes of a block
    **{"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "F64": (1, 8), "I8": (1, 1), "I16": (1, 2), "I32": (1, 4), "I64": (1, 8)},
    **{"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)},
    **{"Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q8_K": (256, 292)},
    **{"IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ3_XXS": (256, 98), "IQ1_S": (256, 50), "IQ4_NL": (32, 18)},
    **{"IQ3_S": (256, 110), "IQ2_S": (256, 82), "IQ4_XS": (256, 136), "IQ1_M": (256, 56), "TQ1_0": (256, 54), "TQ2_0": (256, 66)},
    "MXFP4": (32, 17),
}

_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
TWICE_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def _half(block: Tensor) -> Tensor:
    return block.contiguous().view(torch.float16).float()


def _signed(block: Tensor) -> Tensor:
    return block.contiguous().view(torch.int8).float()


def _nibbles(block: Tensor) -> Tensor:
    """The low halves of all bytes, then the high ones."""
    return torch.cat([block & 15, block >> 4], -1)


def _fifth_bits(block: Tensor) -> Tensor:
    """Bits of 32-bit words, as bit 4 of 32 codes."""
    words = block.contiguous().view(torch.int32)
    return ((words >> torch.arange(32, dtype=torch.int32)) & 1).to(torch.uint8) << 4


class WholeNumbers(NamedTuple):
    """Rows of a matrix in groups of 32 columns: values are codes x scales. Codes int8 [n, K]; scales float32 [n, G]."""

    codes: Tensor
    scales: Tensor


def _less(codes: Tensor, middle: int) -> Tensor:
    """Codes below 128, less ``middle``, with a sign."""
    return codes.view(torch.int8) - middle


def _whole_4_0(block: Tensor) -> WholeNumbers:
    return WholeNumbers(_less(_nibbles(block[:, 2:]), 8), _half(block[:, :2]))


def _whole_5_0(block: Tensor) -> WholeNumbers:
    return WholeNumbers(_less(_nibbles(block[:, 6:]) | _fifth_bits(block[:, 2:6]), 16), _half(block[:, :2]))


def _whole_8_0(block: Tensor) -> WholeNumbers:
    return WholeNumbers(block[:, 2:].view(torch.int8), _half(block[:, :2]))


def _whole_iq4_nl(block: Tensor) -> WholeNumbers:
    return WholeNumbers(_IQ4[_nibbles(block[:, 2:]).int()], _half(block[:, :2]))


def _whole_iq4_xs(block: Tensor) -> WholeNumbers:
    high, low = block[:, 2:4].contiguous().view(torch.int16).int(), block[:, 4:8].int()
    groups = [low[:, i // 2] >> 4 * (i % 2) & 15 | (high[:, 0] >> 2 * i & 3) << 4 for i in range(8)]
    codes = _IQ4[_nibbles(block[:, 8:].reshape(-1, 8, 16)).int()]
    return WholeNumbers(codes.flatten(1), _half(block[:, :2]) * (torch.stack(groups, 1) - 32).float())


def _whole_mxfp4(block: Tensor) -> WholeNumbers:
    exponents = block[:, :1].int()  # of twice the scale: the table has half of it
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return WholeNumbers(TWICE_E2M1[_nibbles(block[:, 1:]).int()], bits.view(torch.float32))


def _values_of(whole: Callable[[Tensor], WholeNumbers]) -> Callable[[Tensor], Tensor]:
    def values(block: Tensor) -> Tensor:
        codes, scales = whole(block)
        return (codes.float().view(*scales.shape, -1) * scales.unsqueeze(2)).flatten(1)

    return values


def _pairs_of_bits(block: Tensor) -> Tensor:
    """The codes of [n, 64] bytes, of 2 bits each: [n, 16, 16]. 32 bytes have the lowest bits of 32 codes, then of the next 32."""
    halves = block.reshape(-1, 2, 32)
    return torch.stack([halves >> shift & 3 for shift in (0, 2, 4, 6)], 2).view(-1, 16, 16)


def _q2_k(block: Tensor) -> Tensor:
    both, halves = block[:, :16], block[:, 80:84]
    scales, minima = _half(halves[:, :2]) * (both & 15).float(), _half(halves[:, 2:]) * (both >> 4).float()
    return (_pairs_of_bits(block[:, 16:80]).float() * scales.unsqueeze(2) - minima.unsqueeze(2)).flatten(1)


def _q3_k(block: Tensor) -> Tensor:
    third = torch.stack([block[:, :32] >> bit & 1 for bit in range(8)], 1).view(-1, 16, 16)
    codes = (_pairs_of_bits(block[:, 32:96]) | third << 2).float() - 4
    low, high = _nibbles(block[:, 96:104]), torch.cat([block[:, 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], 1)
    scales = _half(block[:, 108:110]) * ((low | high << 4).float() - 32)
    return (codes * scales.unsqueeze(2)).flatten(1)


def _q4_1(block: Tensor) -> Tensor:
    return _nibbles(block[:, 4:]).float() * _half(block[:, :2]) + _half(block[:, 2:4])


def _q5_1(block: Tensor) -> Tensor:
    codes = _nibbles(block[:, 8:]) | _fifth_bits(block[:, 4:8])
    return codes.float() * _half(block[:, :2]) + _half(block[:, 2:4])


def _scales_and_minima(block: Tensor) -> tuple[Tensor, Tensor]:
    """Of the eight groups of 32 of a Q4_K or Q5_K block [n, 8]: 6 bits each, in 12 bytes, times the block's two halves."""
    low, middle, high = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], -1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], -1)
    return _half(block[:, :2]) * scales.float(), _half(block[:, 2:4]) * minima.float()


def _groups_of_32(block: Tensor) -> Tensor:
    """The codes of [n, 128] bytes by groups: [n, 8, 32]. A pair of groups shares 32 bytes."""
    pairs = block.reshape(-1, 4, 32)
    return torch.stack([pairs & 15, pairs >> 4], 2).view(-1, 8, 32)


def _q4_k(block: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(block)
    return (_groups_of_32(block[:, 16:]).float() * scales.unsqueeze(2) - minima.unsqueeze(2)).flatten(1)


class Codes(NamedTuple):
    """Rows of a matrix in groups of 32 columns: values are (codes - 8) x scales + shifts. Codes uint8 [n, K]; the others float32 [n,
    G]."""

    codes: Tensor
    scales: Tensor
    shifts: Tensor


def _codes_4_0(block: Tensor) -> Codes:
    scales = _half(block[:, :2])
    return Codes(_nibbles(block[:, 2:]), scales, torch.zeros_like(scales))


def _codes_4_1(block: Tensor) -> Codes:
    scales = _half(block[:, :2])
    return Codes(_nibbles(block[:, 4:]), scales, 8 * scales + _half(block[:, 2:4]))


def _codes_4_k(block: Tensor) -> Codes:
    scales, minima = _scales_and_minima(block)
    return Codes(_groups_of_32(block[:, 16:]).flatten(1), scales, 8 * scales - minima)


def _q5_k(block: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(block)
    fifth = torch.stack([(block[:, 16:48] >> bit & 1) << 4 for bit in range(8)], 1)
    return ((_groups_of_32(block[:, 48:]) | fifth).float() * scales.unsqueeze(2) - minima.unsqueeze(2)).flatten(1)


def _q6_k(block: Tensor) -> Tensor:
    low, high = block[:, :128].reshape(-1, 2, 64), block[:, 128:192].reshape(-1, 2, 32)
    first, second = low[:, :, :32], low[:, :, 32:]
    parts = [(first & 15, 0), (second & 15, 2), (first >> 4, 4), (second >> 4, 6)]
    codes = torch.stack([part | (high >> shift & 3) << 4 for part, shift in parts], 2)
    scales = _signed(block[:, 192:208]) * _half(block[:, 208:210])
    return ((codes.float() - 32).view(-1, 16, 16) * scales.unsqueeze(2)).flatten(1)


_WHOLE: dict[str, Callable[[Tensor], WholeNumbers]] = {
    **{"Q4_0": _whole_4_0, "Q5_0": _whole_5_0, "Q8_0": _whole_8_0},
    **{"IQ4_NL": _whole_iq4_nl, "IQ4_XS": _whole_iq4_xs, "MXFP4": _whole_mxfp4},
}
INT8G_TYPES = tuple(_WHOLE)

_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda block: block.contiguous().view(torch.float32),
    "F16": _half,
    "BF16": lambda block: block.contiguous().view(torch.bfloat16).float(),
    **{"Q4_1": _q4_1, "Q5_1": _q5_1},
    **{"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
    **{kind: _values_of(whole) for kind, whole in _WHOLE.items()},
}
READ_TYPES = tuple(_VALUES)


_CODES: dict[str, Callable[[Tensor], Codes]] = {"Q4_0": _codes_4_0, "Q4_1": _codes_4_1, "Q4_K": _codes_4_k}
INT4_TYPES = tuple(_CODES)
NARROW_TYPES = (*INT4_TYPES, "Q2_K", "Q3_K")
"""Of up to 4 bits: int4 holds their codes as they are, or rounds their values, which adds a tenth of their own error at most."""


def block_codes(blocks: Tensor, kind: str) -> Codes:
    """The codes of rows of a matrix of one of ``INT4_TYPES``: uint8 [rows, bytes of a row]."""
    codes, scales, shifts = _CODES[kind](blocks.reshape(-1, BLOCKS[kind][1]))
    num_rows = len(blocks)
    return Codes(codes.reshape(num_rows, -1), scales.reshape(num_rows, -1), shifts.reshape(num_rows, -1))


def whole_numbers(blocks: Tensor, kind: str) -> WholeNumbers:
    """Those of rows of a matrix of one of ``INT8G_TYPES``: uint8 [rows, bytes of a row]."""
    codes, scales = _WHOLE[kind](blocks.reshape(-1, BLOCKS[kind][1]))
    return WholeNumbers(codes.reshape(len(blocks), -1), scales.reshape(len(blocks), -1))


def block_values(blocks: Tensor, kind: str) -> Tensor:
    """The values of rows of a matrix of type ``kind``: uint8 [rows, bytes of a row] to float32 [rows, columns]."""
    num_values, num_bytes = BLOCKS[kind]
    apart = blocks.reshape(-1, num_bytes)
    values = block_kernels.values(apart, kind) if block_kernels.has_kernel(apart, kind) else _VALUES[kind](apart)
    return values.reshape(len(blocks), blocks.shape[1] // num_bytes * num_values)
