"""Hashes of a prompt, block by block (pure). Equal hashes of two requests say that their prompts begin alike, and how far.

The controller records them; ``mmrt record`` numbers them, so that no file holds one.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BLOCK_TOKENS = 512  # as in Mooncake's traces


def block_hashes(root: bytes, ids: Sequence[int], media: Sequence[tuple[int, bytes]]) -> list[int]:
    """Return a number of 64 bits for each block of the expanded prompt ``ids``, the last of which may be short. Each stands for all
    tokens and media up to its block's end, under this ``root``. ``media``: (first token, what names its contents), in order. None is 0.
    """
    hashes: list[int] = []
    before, waiting = root, list(reversed(media))
    for start in range(0, len(ids), BLOCK_TOKENS):
        block = array("i", ids[start : start + BLOCK_TOKENS])
        digest = blake2b(before, digest_size=16)
        digest.update(block.tobytes())
        while waiting and waiting[-1][0] < start + BLOCK_TOKENS:
            digest.update(waiting.pop()[1])
        before = digest.digest()
        hashes.append(int.from_bytes(before[:8]) or 1)
    return hashes
