"""Shape to launch: four warps on 4096 elements of K and as many of V, 16 accesses of 16 bytes a thread at bfloat16."""

from ..launch import Launch

_ELEMENTS = 4096


def launch(head_dim: int) -> Launch:
    """For heads of ``head_dim``."""
    return Launch({"BLOCK_ROWS": _ELEMENTS // head_dim}, num_warps=4, num_stages=1)
