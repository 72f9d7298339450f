"""Memory between pages that no process may touch: a kernel that reads or writes beyond a tensor ends the test's process."""

import ctypes
import mmap

import torch
from torch import Tensor

_PROT_NONE = 0


def guarded(values: Tensor, *, at_end: bool) -> Tensor:
    """A contiguous copy that ends where a forbidden page begins, or begins where one ends."""
    size = values.numel() * values.element_size()
    inner = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, inner + 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for page in (start, start + mmap.PAGESIZE + inner):
        assert protect(page, mmap.PAGESIZE, _PROT_NONE) == 0
    offset = mmap.PAGESIZE + (inner - size if at_end else 0)
    found = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=offset)
    return found.copy_(values.flatten()).view(values.shape)
