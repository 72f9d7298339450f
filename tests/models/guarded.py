"""Memory between pages that no process may touch: a kernel that reads or writes beyond a tensor ends the test's process."""

import ctypes
import mmap

import torch
from torch import Tensor

_PROT_NONE = 0


class Fenced:
    """A contiguous copy, ``values``, of which parts can be forbidden."""

    def __init__(self, values: Tensor) -> None:
        self._memory = mmap.mmap(-1, max(1, values.nbytes))
        self.values = torch.frombuffer(self._memory, dtype=values.dtype, count=values.numel()).view(values.shape).copy_(values)

    def forbid_others(self, first: int, count: int) -> int:
        """Forbid all pages that have nothing of so many rows from ``first`` on. Returns their bytes."""
        row_bytes = self.values.nbytes // len(self.values)
        before = first * row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        after = -(-(first + count) * row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        end = -(-self.values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        for start, stop in ((0, before), (after, end)):
            if start < stop:
                _forbid(self.values.data_ptr() + start, stop - start)
        return before + max(0, end - after)


def _forbid(start: int, num_bytes: int) -> None:
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert protect(start, num_bytes, _PROT_NONE) == 0


def guarded(values: Tensor, *, at_end: bool) -> Tensor:
    """A contiguous copy that ends where a forbidden page begins, or begins where one ends."""
    size = values.numel() * values.element_size()
    inner = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, inner + 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + mmap.PAGESIZE + inner):
        _forbid(page, mmap.PAGESIZE)
    offset = mmap.PAGESIZE + (inner - size if at_end else 0)
    found = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=offset)
    return found.copy_(values.flatten()).view(values.shape)
