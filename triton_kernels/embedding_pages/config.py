"""Launch shape: tiles of 16 KiB, eight 16-byte accesses a thread in flight."""

from ..launch import Launch

_TILE_WORDS = 4096
_ROW_WORDS = 512


def launch(num_words: int) -> Launch:
    """The launch for rows of ``num_words`` 32-bit words."""
    block_words = min(_ROW_WORDS, 1 << (num_words - 1).bit_length())
    block_tokens = min(32, _TILE_WORDS // block_words)
    return Launch({"BLOCK_TOKENS": block_tokens, "BLOCK_WORDS": block_words}, num_warps=4, num_stages=1)
