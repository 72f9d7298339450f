"""Head partition, and tiles and warps by head size and type. Pure."""

from ..launch import Launch

PARTS = {16: (16, 0), 32: (32, 0), 64: (64, 0), 80: (64, 16), 128: (128, 0)}  # head size: its two parts, powers of two
HEAD_DIMS = tuple(PARTS)
MAX_WINDOW = 64  # tokens of a sequence that a program takes at once
_MIN_BLOCK = 16  # rows of a product


def sequences_launch(head_dim: int, itemsize: int, architecture: int = 90) -> Launch:
    """``itemsize``: bytes of an element; float32 has no tensor cores and takes small tiles. Two parts in three stages spill on
    sm_100."""
    first, second = PARTS[head_dim]
    tiles = {"D0": first, "D1": second}
    if itemsize == 4:
        return Launch({**tiles, "BLOCK_M": 16, "TILE": 16}, num_warps=8, num_stages=1)
    num_stages = 2 if second and architecture >= 100 else 3
    return Launch({**tiles, "BLOCK_M": 128, "TILE": 64}, num_warps=4 if head_dim <= 32 else 8, num_stages=num_stages)


def windows_launch(head_dim: int, itemsize: int, max_length: int) -> Launch:
    """``max_length`` up to ``MAX_WINDOW``."""
    first, second = PARTS[head_dim]
    block = max(_MIN_BLOCK, 1 << (max_length - 1).bit_length())
    return Launch({"D0": first, "D1": second, "BLOCK_M": block}, num_warps=8 if itemsize == 4 else 4, num_stages=1)


def rotation_launch(num_heads: int, head_dim: int) -> Launch:
    """Up to 16 heads of a token, a half of them padded to a power of two; 8 elements of each half a thread."""
    heads, half = (1 << (size - 1).bit_length() for size in (min(num_heads, 16), head_dim // 2))
    return Launch({"BLOCK_HEADS": heads, "BLOCK_HALF": half}, num_warps=max(1, heads * half // 256), num_stages=1)
