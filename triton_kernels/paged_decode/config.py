"""Tile sizes and grid of paged decode, by shape. Pure."""

from ..launch import Launch

HEAD_DIMS = (16, 32, 64, 128, 256, 512)
MAX_GROUP = 64  # query heads of one KV head
MAX_ROWS = 1024  # of a batch: the plan is made by one program
CHUNK_TOKENS = 64  # what a row is cut into
NO_WINDOW = 2**30  # tokens, more than a row has
REDUCE_ITEMS = 32

PROGRAMS_PER_SM = 3  # that fit beside one another with these tiles: ahead-of-time compilation holds their registers to it
WIDE_PROGRAMS_PER_SM = 2  # with heads of 512, whose queries and sums take as many registers as all else
NUM_WARPS, WIDE_WARPS = 4, 8


def decode_launch(head_dim: int, group: int, kv_bytes: int) -> Launch:
    """``group`` query heads of a KV head are the rows of one tile; ``kv_bytes`` is the size of a value in the cache.

    Page indirection halves the prefetch distance of ``num_stages``: 5 prefetches two tiles, 7 three. Small values need registers for
    their conversion and float32 for its products, so that their tiles are shorter, and more of them are under way.
    """
    values = {1: 4096, 2: 8192, 4: 2048}[kv_bytes]
    tiles = {"BLOCK_H": max(16, 1 << (group - 1).bit_length()), "TILE": min(max(values // head_dim, 16), 128)}
    num_warps = NUM_WARPS if head_dim <= 256 else WIDE_WARPS
    return Launch(tiles, num_warps=num_warps, num_stages={1: 7, 2: 5, 4: 3}[kv_bytes])


def num_items(num_rows: int, num_kv_heads: int, num_sms: int, head_dim: int) -> int:
    """The largest number of items of a batch, at least one per row: a wave of programs for few rows; where rows alone fill the
    device, half a wave more, to cut long rows among short ones."""
    programs_per_sm = PROGRAMS_PER_SM if head_dim <= 256 else WIDE_PROGRAMS_PER_SM
    wave = -(-programs_per_sm * num_sms // num_kv_heads)
    return max(wave, num_rows + wave // 2)
