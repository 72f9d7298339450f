"""Rows of a sampling step: the parameters of each row's request, and the numbers of its logits and counts."""

import torch
from torch import Tensor

LONGS = ("seed", "index")
INTS = ("logits_row", "companion_row", "counts_row", "top_k")
FLOATS = ("temperature", "top_p", "min_p", "guidance", "repetition", "presence", "frequency")
_ALIGNMENT = 4  # rows: every column then starts at a multiple of 16 bytes


class SamplingRows:
    """Columns of N rows, all in one ``buffer`` (uint8), so that a step's come to the device by one copy from a twin on the host.

    int64 ``seed`` (the bits of the uint64), ``index`` of the token in its sequence; int32 ``logits_row`` (-1: padding, its token is
    -1), ``companion_row`` of the unconditional logits, ``counts_row`` (-1: none), ``top_k`` (0: off); float32
    ``temperature`` (0: greedy), ``top_p`` in (0, 1] (1: off), ``min_p`` in [0, 1] (0: off), ``guidance`` (read where there is a
    companion), ``repetition`` (1: off), ``presence`` and ``frequency`` (0: off; all three read where there are counts).
    """

    def __init__(self, num_rows: int, device: torch.device | str, pin_memory: bool = False) -> None:
        """All rows are padding. Raises: ValueError for a number of rows below 1."""
        if num_rows < 1:
            raise ValueError(f"rows are {num_rows}, not at least 1")
        self.num_rows = num_rows
        self.stride = -(-num_rows // _ALIGNMENT) * _ALIGNMENT
        sizes = [8 * len(LONGS) * self.stride, 4 * len(INTS) * self.stride, 4 * len(FLOATS) * self.stride]
        self.buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device, pin_memory=pin_memory)
        longs, ints, floats = torch.split(self.buffer, sizes)
        self.longs = longs.view(torch.int64).view(len(LONGS), self.stride)
        self.ints = ints.view(torch.int32).view(len(INTS), self.stride)
        self.floats = floats.view(torch.float32).view(len(FLOATS), self.stride)
        self.seed, self.index = self.longs[:, :num_rows].unbind()
        self.logits_row, self.companion_row, self.counts_row, self.top_k = self.ints[:, :num_rows].unbind()
        columns = self.floats[:, :num_rows].unbind()
        self.temperature, self.top_p, self.min_p, self.guidance, self.repetition, self.presence, self.frequency = columns
        self.clear()

    def clear(self) -> None:
        """Make all rows padding, with everything off."""
        self.buffer.zero_()
        self.ints[: INTS.index("top_k")] = -1
        for column in (self.top_p, self.guidance, self.repetition):
            column.fill_(1.0)

    def copy_(self, other: "SamplingRows") -> None:
        """Take another's rows, asynchronously where its buffer is pinned. Raises: ValueError if their numbers differ."""
        if other.num_rows != self.num_rows:
            raise ValueError(f"rows are {other.num_rows}, not {self.num_rows}")
        self.buffer.copy_(other.buffer, non_blocking=True)

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """The kernels' input: int64 [2, S], int32 [4, S], float32 [7, S] with S = ``stride``, in the order of LONGS, INTS, FLOATS."""
        return self.longs, self.ints, self.floats
