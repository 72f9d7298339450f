"""Launch shape: two warps on 1024 columns, two 16-byte accesses of bfloat16 a thread and operand."""

from ..launch import Launch


def launch(size: int) -> Launch:
    """The launch for ``size`` columns of output."""
    block = min(1024, 1 << (size - 1).bit_length())
    return Launch({"BLOCK": block}, num_warps=max(1, block // 512), num_stages=1)
