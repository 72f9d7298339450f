"""Bytes in a spool are those that were added, and their memory goes when they do."""

import gc
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmrt.shm.spool import PIECE_BYTES, Spool, beginning_of, pieces_of, whole


def memory_of(spool: Spool) -> int:
    return os.fstat(spool.descriptor).st_blocks * 512


def test_bytes_are_those_that_were_added() -> None:
    luck, spool = random.Random(1), Spool()
    spooled, expected = spool.new(), b""
    for _ in range(20):
        piece = luck.randbytes(luck.choice([0, 1, 4095, 4096, 70_000]))
        spooled.append(piece)
        expected += piece
    assert len(spooled) == len(expected) and whole(spooled) == expected == b"".join(pieces_of(spooled))
    assert {len(piece) for piece in list(spooled.pieces())[:-1]} <= {PIECE_BYTES}
    for _ in range(50):
        start, end = luck.randrange(len(expected) + 10), luck.randrange(len(expected) + 10)
        assert spooled.read(start, end) == expected[start:end] == b"".join(spooled.pieces(start, end))
    with spooled.mapped() as mapping:
        assert mapping[:] == expected
    assert beginning_of(spooled, 3) == expected[:3] and beginning_of(b"abcd", 3) == b"abc"
    assert list(pieces_of(b"")) == [] and list(pieces_of(b"abc")) == [b"abc"] and whole(b"abc") == b"abc"


def test_memory_goes_with_the_bytes() -> None:
    spool = Spool()
    first, second = spool.new(), spool.new()
    for spooled in (first, second):
        spooled.append(bytes([1]) * 3_000_001)
    other = first.beside()
    other.append(b"others")
    assert memory_of(spool) > 6_000_000
    first.close()
    first.close()
    assert len(first) == 0 and first.read() == b"" and memory_of(spool) < 4_000_000
    del second, spooled
    gc.collect()
    assert memory_of(spool) <= 2 * 4096 and other.read() == b"others"


def test_the_file_lasts_as_long_as_bytes_in_it() -> None:
    spooled = Spool().new()
    gc.collect()
    spooled.append(b"abc")
    assert spooled.read() == b"abc"


def test_bytes_that_outlast_their_file_touch_no_other() -> None:
    """As in a cycle that is collected: the file may be closed first, and its number be another's."""
    spool = Spool()
    spooled = spool.new()
    spooled.append(b"abc")
    spool.close()
    other = Spool()
    kept = other.new()
    kept.append(b"kept")
    spooled.close()
    assert kept.read() == b"kept"


def test_threads_do_not_meet() -> None:
    spool = Spool()

    def fill(number: int) -> bool:
        spooled, content = spool.new(), bytes([number]) * 10_000
        for _ in range(20):
            spooled.append(content)
        return spooled.read() == 20 * content

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(fill, range(64)))


def test_bytes_of_nothing_cannot_be_mapped() -> None:
    with pytest.raises(ValueError), Spool().new().mapped():
        pass
