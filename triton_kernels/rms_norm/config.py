"""Launch shape: 16 bytes of bfloat16 a thread and access, at most 16 elements a thread up to a hidden size of 8192."""

from ..launch import Launch

LARGEST_SIZE = 16384  # what one program's registers hold without spilling


def launch(size: int) -> Launch:
    """The launch for rows of ``size`` elements."""
    block = 1 << (size - 1).bit_length()
    return Launch({"BLOCK": block}, num_warps=min(16, max(1, block // 512)), num_stages=1)
