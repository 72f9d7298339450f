"""Tile sizes and warps of the sampling kernels by size of the vocabulary. Pure."""

from ..launch import Launch

MAX_VOCABULARY = 2**18  # masses of so many tokens fit an int64
_SMALL_VOCABULARY = 2**15


def tile_size(vocabulary: int) -> int:
    """Tokens per program of the kernels that run over tiles. Small tiles keep many multiprocessors busy with few rows."""
    return 4096 if vocabulary > _SMALL_VOCABULARY else 1024


def num_tiles(vocabulary: int) -> int:
    return -(-vocabulary // tile_size(vocabulary))


def max_tiles(vocabulary: int) -> int:
    """``num_tiles``, rounded up to a power of two."""
    return max(2, 1 << (num_tiles(vocabulary) - 1).bit_length())


def prepare_launch(vocabulary: int) -> Launch:
    return Launch({"TILE": tile_size(vocabulary)}, num_warps=8, num_stages=1)


def measure_launch(vocabulary: int) -> Launch:
    """Of ``measure_kernel`` and ``gather_kernel``."""
    return Launch({"TILE": tile_size(vocabulary), "MAX_TILES": max_tiles(vocabulary)}, num_warps=8, num_stages=1)


def draw_launch(vocabulary: int) -> Launch:
    tiles = {"TILE": tile_size(vocabulary), "MAX_TILES": max_tiles(vocabulary), "BLOCK": 1024}
    return Launch(tiles, num_warps=8, num_stages=1)


def count_launch() -> Launch:
    return Launch({"BLOCK": 1024}, num_warps=4, num_stages=1)
