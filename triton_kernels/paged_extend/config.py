"""Tile sizes of paged extend, by shape. Pure."""

from ..launch import Launch

MAX_BLOCKS = 2**16 - 1  # of a plan: what CUDA allows on a grid's second axis
_SHORT_ROWS = 64


def extend_launch(head_dim: int, group: int, longest_chunk: int, num_bytes: int, architecture: int = 90) -> Launch:
    """``longest_chunk`` tokens times ``group`` query heads of a KV head are the rows of tiles; ``num_bytes`` is a query value's size.

    128 rows and 64 tokens fill Hopper's matrix units with two groups of four warps; with one group they spill. Few rows take half,
    and one group where that does not spill. Ampere's products keep their operands in registers too, which leaves 32 tokens; with heads
    of 256 it also leaves 32 rows. Heads of 512 leave 16 rows everywhere, or those of one token where they are more, which spill.
    """
    of_token = 1 << (group - 1).bit_length()
    if head_dim > 256:
        tile = 32 if num_bytes == 2 and architecture >= 90 else 16
        return Launch({"BLOCK_M": max(16, of_token), "TILE": tile}, num_warps=8, num_stages=5 if num_bytes == 2 else 2)
    if num_bytes == 4:
        return Launch({"BLOCK_M": _SHORT_ROWS, "TILE": 32 if head_dim <= 32 else 16}, num_warps=8, num_stages=2)
    if head_dim > 128:
        rows = _SHORT_ROWS if architecture >= 90 else max(32, of_token)
        return Launch({"BLOCK_M": rows, "TILE": 32}, num_warps=8 if architecture <= 90 else 4, num_stages=5)
    rows = _SHORT_ROWS if longest_chunk * group <= _SHORT_ROWS else 128
    tile = 32 if head_dim == 128 and architecture < 90 else 64
    one_group = architecture == 90 or (architecture > 90 and head_dim == 128)
    return Launch({"BLOCK_M": rows, "TILE": tile}, num_warps=rows // 16 if one_group else 8, num_stages=5)
