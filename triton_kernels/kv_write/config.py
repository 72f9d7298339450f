"""Launch shape: a warp per 256 pairs, 16 bytes of bfloat16 a thread and access; small, because a decode step has few tokens."""

from ..launch import Launch

_PAIRS = 512


def launch(num_heads: int, num_kv_heads: int, head_dim: int) -> Launch:
    """The launch for tokens of ``num_heads`` query heads (0: none) and ``num_kv_heads``."""
    most_heads = max(num_heads, num_kv_heads)
    block_heads = min(max(1, _PAIRS // (head_dim // 2)), 1 << (most_heads - 1).bit_length())
    return Launch({"BLOCK_HEADS": block_heads}, num_warps=max(1, block_heads * head_dim // 512), num_stages=1)
