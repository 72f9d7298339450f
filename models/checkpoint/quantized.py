"""Matrices of integers as AWQ, GPTQ and compressed-tensors store them: their tensors in the files, checked, and their integers.

``weights`` calls it, in the memory actor, and writes the integers as they are where the model's format of weights holds them, and
their values otherwise. Shapes: N rows, K columns, G groups; a file's 32-bit words hold several integers, the first in the lowest bits.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...schema.quantization import IntegerQuantization
from ...schema.weight_layout import INT4_MIDDLE, INT8_MOST, PACKED_ROWS
from . import int4, int8g
from .narrowing import narrow
from .parts import find_part
from .safetensors_files import StoredTensor
from .values import Order, reordered
from .weight_specs import Shape, Source

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # places in a word of rows 0 to 7
_FLOATS = ("F16", "BF16", "F32")
_WORD_BITS = 32


class _Part(NamedTuple):
    """A tensor of a quantized matrix, by the end of its name. ``required``: without it the matrix is not quantized."""

    ending: str
    dtypes: tuple[str, ...]
    shape: Shape
    required: bool = True


class StoredIntegers(NamedTuple):
    """A quantized matrix [N, K] in the files; ``parts`` by the roles "codes", "scales", "zeros" and "groups"."""

    name: str
    shape: Shape
    parts: Mapping[str, StoredTensor]

    @property
    def file(self) -> Path:
        return self.parts["codes"].file


def find_integers(source: Source, stored: Mapping[str, StoredTensor], how: IntegerQuantization) -> StoredIntegers | None:
    """The tensors of a matrix if the checkpoint has it quantized. Raises: CheckpointError for missing tensors and wrong shapes."""
    module = source.name.removesuffix(".weight")
    if module == source.name or len(source.shape) != 2:
        return None
    expected = _parts(source, how)
    codes = stored.get(module + expected["codes"].ending)
    if codes is None or codes.dtype not in expected["codes"].dtypes:
        return None
    found: dict[str, StoredTensor] = {}
    for role, part in expected.items():
        if part.required or module + part.ending in stored:
            found[role] = find_part(module + part.ending, stored, part.dtypes, (part.shape,), codes.file)
    return StoredIntegers(source.name, source.shape, found)


def _parts(source: Source, how: IntegerQuantization) -> dict[str, _Part]:
    rows, columns = source.shape
    row_words, column_words = (_num_words(number, how.bits) for number in source.shape)
    groups = -(-columns // (how.group_size or columns))
    needs_order = not how.in_order and how.group_size > 0
    if how.packing == "awq":
        return {
            "codes": _Part(".qweight", ("I32",), (columns, row_words)),
            "zeros": _Part(".qzeros", ("I32",), (groups, row_words)),
            "scales": _Part(".scales", _FLOATS, (groups, rows)),
        }
    if how.packing in ("gptq", "gptq_v2"):
        return {
            "codes": _Part(".qweight", ("I32",), (column_words, rows)),
            "zeros": _Part(".qzeros", ("I32",), (groups, row_words)),
            "scales": _Part(".scales", _FLOATS, (groups, rows)),
            "groups": _Part(".g_idx", ("I32",), (columns,), required=needs_order),
        }
    packed = how.packing == "pack-quantized"
    parts = {
        "codes": _Part(".weight_packed", ("I32",), (rows, column_words)) if packed else _Part(".weight", ("I8",), (rows, columns)),
        "scales": _Part(".weight_scale", _FLOATS, (rows, groups)),
        "groups": _Part(".weight_g_idx", ("I32",), (columns,), required=needs_order),
    }
    if not how.symmetric:
        zeros = (("I32",), (row_words, groups)) if packed else (("I8",), (rows, groups))
        parts["zeros"] = _Part(".weight_zero_point", *zeros)
    return parts


def _num_words(num_integers: int, bits: int) -> int:
    return -(-num_integers * bits // _WORD_BITS)


class Codes(NamedTuple):
    """Rows of a quantized matrix: values are (codes - zeros) x scales. Codes uint8 [n, K]; zeros and scales float32 [n, G]."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor


class Integers:
    """A quantized matrix of this shape; ``tensors`` by role, as ``StoredIntegers.parts``. With an ``order``, rows are as the model has
    them."""

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor], how: IntegerQuantization) -> None:
        """Raises: ValueError for groups that do not exist."""
        self.shape, self._tensors, self._how = shape, tensors, how
        self.order: Order = ()
        self._num_groups = tensors["scales"].shape[0 if how.packing in ("awq", "gptq", "gptq_v2") else 1]
        self._groups = self._groups_of_columns()

    def _groups_of_columns(self) -> Tensor | None:
        """The group of each column, int64 [K]; None if groups are of neighbours, in order."""
        columns = self.shape[1]
        size = self._how.group_size or columns
        in_order = torch.arange(columns) // min(size, columns)
        groups = self._tensors["groups"].long() if "groups" in self._tensors else in_order
        if self._how.packing in ("pack-quantized", "int-quantized") and -1 in groups:
            groups = in_order  # compressed-tensors' mark of an order that was not set
        if not 0 <= int(groups.min()) <= int(groups.max()) < self._num_groups:
            raise ValueError(f"has columns in groups {int(groups.min())} to {int(groups.max())}, expected 0 to {self._num_groups - 1}")
        return None if torch.equal(groups, in_order) and (self._num_groups == 1 or columns % size == 0) else groups

    def values(self, rows: slice) -> Tensor:
        """Float32 [n, K]. Raises: ValueError for scales that are not finite; the other methods do so as well."""
        codes, zeros, scales = self.codes(rows)
        if self._groups is not None:
            return (codes.float() - zeros[:, self._groups]).mul_(scales[:, self._groups])
        values = codes.float().view(len(codes), self._num_groups, -1)
        return values.sub_(zeros.unsqueeze(2)).mul_(scales.unsqueeze(2)).flatten(1)

    def write_int4(self, rows: slice, target: Tensor, target_scales: Tensor) -> None:
        """Write the codes as they are, each scale as often as the target's groups need it. Scales are rounded to bfloat16.

        Raises: ValueError if a group's columns are no neighbours.
        """
        if self._groups is not None:
            raise ValueError(
                "has groups of columns that are no neighbours, which int4 cannot hold: set model.weights to another format"
            )
        codes, zeros, scales = self.codes(rows)
        repeats = target_scales.shape[1] // self._num_groups
        shifts = (INT4_MIDDLE - zeros) * scales
        int4.pack(codes, scales.repeat_interleave(repeats, 1), shifts.repeat_interleave(repeats, 1), target, target_scales)

    def write_int8(self, rows: slice, target: Tensor, target_scales: Tensor) -> None:
        """Write the codes of a symmetric matrix with one group as they are."""
        codes, _, scales = self.codes(rows)
        target.copy_((codes ^ 128).view(torch.int8))
        target_scales.copy_(scales[:, 0])

    def write_int8g(self, rows: slice, target: Tensor, target_scales: Tensor) -> None:
        """Write the codes as they are, less their zero points, each scale as often as there are 32 columns in its group; as ``narrow``
        does where these do not divide it, or where a difference takes more than 8 bits."""
        codes, zeros, scales = self.codes(rows)
        repeats, rest = divmod(target_scales.shape[1], self._num_groups)
        if self._groups is None and not rest:
            whole = codes.short().view(len(codes), self._num_groups, -1).sub_(zeros.short().unsqueeze(2))
            if -128 <= int(whole.min()) and int(whole.max()) <= INT8_MOST:
                int8g.pack(whole.flatten(1).to(torch.int8), scales.repeat_interleave(repeats, 1), target, target_scales)
                return
        narrow(self.values(rows), target, target_scales)

    def codes(self, rows: slice) -> Codes:
        """Unpack rows. Raises: ValueError unless the slice's ends are multiples of 32 or the matrix's own: others may lie
        in the middle of a word."""
        if rows.start % PACKED_ROWS or (rows.stop % PACKED_ROWS and rows.stop != self.shape[0]):
            raise ValueError(f"is used from row {rows.start} to {rows.stop}, expected multiples of {PACKED_ROWS}")
        read: Callable[[slice], Codes] = {
            "awq": self._read_awq,
            "gptq": self._read_gptq,
            "gptq_v2": self._read_gptq,
            "pack-quantized": self._read_packed,
            "int-quantized": self._read_bytes,
        }[self._how.packing]
        found = read(rows)
        if not bool(found.scales.isfinite().all()):
            raise ValueError("has a scale that is not finite")
        return Codes(*(reordered(part, self.order) for part in found))

    def _read_awq(self, rows: slice) -> Codes:
        """AutoAWQ's "gemm": words along the rows."""
        num_rows = rows.stop - rows.start
        codes, zeros = (self._unpack_awq(self._tensors[role][:, self._words(rows)])[:num_rows] for role in ("codes", "zeros"))
        return Codes(codes, zeros.float(), self._tensors["scales"][:, rows].t().float())

    def _read_gptq(self, rows: slice) -> Codes:
        """AutoGPTQ's: words along the columns, zero points along the rows; in version 1 less one, where 0 becomes the most."""
        codes = self._unpack(self._tensors["codes"][:, rows].t(), self.shape[1])
        zeros = self._unpack(self._tensors["zeros"][:, self._words(rows)], rows.stop - rows.start).t()
        if self._how.packing == "gptq":
            zeros = zeros + 1 & (1 << self._how.bits) - 1
        return Codes(codes, zeros.float(), self._tensors["scales"][:, rows].t().float())

    def _read_packed(self, rows: slice) -> Codes:
        """compressed-tensors' "pack-quantized": words along the columns, zero points along the rows."""
        scales = self._tensors["scales"][rows].float()
        if self._how.symmetric:
            zeros = torch.full_like(scales, 1 << (self._how.bits - 1))
        else:
            zeros = self._unpack(self._tensors["zeros"][self._words(rows)].t(), rows.stop - rows.start).t().float()
        return Codes(self._unpack(self._tensors["codes"][rows], self.shape[1]), zeros, scales)

    def _read_bytes(self, rows: slice) -> Codes:
        """compressed-tensors' "int-quantized": a byte each, signed."""
        scales = self._tensors["scales"][rows].float()
        zeros = torch.zeros_like(scales) if self._how.symmetric else self._tensors["zeros"][rows].float()
        return Codes(self._tensors["codes"][rows].view(torch.uint8) ^ 128, zeros + 128, scales)

    def _words(self, rows: slice) -> slice:
        per_word = _WORD_BITS // self._how.bits
        return slice(rows.start // per_word, _num_words(rows.stop, self._how.bits))

    @staticmethod
    def _unpack_awq(words: Tensor) -> Tensor:
        """The integers of int32 [A, B]: uint8 [8 B, A]."""
        across = words.t().contiguous()
        found = torch.empty(len(across), len(_AWQ_ORDER), across.shape[1], dtype=torch.uint8)
        for row, place in enumerate(_AWQ_ORDER):
            found[:, row] = across >> 4 * place & 15
        return found.flatten(0, 1)

    def _unpack(self, words: Tensor, length: int) -> Tensor:
        """The integers of int32 [A, B], along the last axis: uint8 [A, length]. The last word may hold more."""
        found = words.contiguous().view(torch.uint8)
        return (found if self._how.bits == 8 else torch.stack((found & 15, found >> 4), -1).flatten(1))[:, :length]
