"""Memory of 2 MiB pages where Linux has some: a processor reads it up to 1.6 times as fast as memory of 4 KiB pages.

It follows an address to memory in fewer steps, and fetches beyond 4 KiB by itself. Everything here is best effort.
"""

import ctypes
import mmap
import os

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1
_MADV_DONTNEED = 4
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_file(fd: int, num_bytes: int, writable: bool) -> memoryview:
    """Map a file, shared. Huge pages of the file are huge here as well: the mapping begins at a multiple of their size, which Linux
    does not see to by itself where ``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is ``never``."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if num_bytes < HUGE_PAGE_BYTES:
        return memoryview(mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, protection))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    # Addresses, never touched. The file takes the place of a part of them, and goes with the last view of it.
    reserved = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags, protection)
    address = _address(memoryview(reserved))
    shift = -address % HUGE_PAGE_BYTES
    if _libc.mmap(address + shift, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _FAILED:
        raise OSError(code := ctypes.get_errno(), os.strerror(code))
    return memoryview(reserved)[shift : shift + num_bytes]


def use_huge_pages(view: memoryview) -> None:
    """Move a file's space that was reserved (``map_file``, writable) to huge pages. It keeps its bytes."""
    address = _address(view)
    _libc.madvise(address, view.nbytes, _MADV_COLLAPSE)
    _libc.madvise(address, view.nbytes, _MADV_DONTNEED)  # unmaps what was mapped for that: memory counts where it is used


def private_memory(num_bytes: int) -> memoryview:
    """Zeroed memory of this process alone."""
    memory = mmap.mmap(-1, max(1, num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _libc.madvise(_address(memoryview(memory)), num_bytes, mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:num_bytes]


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
