"""Mappings in which huge pages fit: the file's bytes at an aligned address, and nothing left when the last view goes."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmrt.shm import mapping
from mmrt.shm.mapping import HUGE_PAGE_BYTES, map_file, private_memory, use_huge_pages
from mmrt.shm.segment import HEADER_BYTES, Segment

SIZE = 3 * HUGE_PAGE_BYTES + 4096 + 64


@pytest.fixture
def file(place):
    fd = os.open(place, os.O_TMPFILE | os.O_RDWR)
    os.posix_fallocate(fd, 0, SIZE)
    yield fd
    os.close(fd)


def address_of(view):
    return np.frombuffer(view, np.uint8).ctypes.data


def kibibytes(address, field):
    """A field of the mapping that begins at an address."""
    with open("/proc/self/smaps") as file:
        _, _, after = file.read().partition(f"\n{address:x}-")
    return int(re.search(rf"\n{field}: +(\d+) kB", after).group(1))


def mappings():
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("deleted" in line for line in maps)


def test_views_of_a_file_share_its_bytes(file):
    one, other = map_file(file, SIZE, writable=True), map_file(file, SIZE, writable=False)
    assert one.nbytes == other.nbytes == SIZE
    assert address_of(one) % HUGE_PAGE_BYTES == address_of(other) % HUGE_PAGE_BYTES == 0
    one[0], one[-1] = 3, 5
    assert other[0] == 3 and other[-1] == 5 and os.pread(file, 1, SIZE - 1) == b"\5"
    with pytest.raises(TypeError):
        other[0] = 1


def test_a_small_file_takes_no_more_than_itself(file):
    view = map_file(file, HUGE_PAGE_BYTES - 1, writable=True)
    view[-1] = 9
    assert os.pread(file, 1, HUGE_PAGE_BYTES - 2) == b"\t"


def test_nothing_is_left_of_a_mapping(file):
    before = mappings()
    for _ in range(5):
        view = map_file(file, SIZE, writable=True)
        part = np.frombuffer(view, np.uint8, 100, SIZE - 100)
        del view
        part[:] = 1  # it keeps the mapping
        del part
    assert mappings() == before


def test_a_descriptor_that_cannot_be_mapped_is_an_error():
    reading, writing = os.pipe()
    try:
        with pytest.raises(OSError, match="[Nn]o such device|denied"):
            map_file(reading, SIZE, writable=True)
    finally:
        os.close(reading)
        os.close(writing)


def test_huge_pages_keep_the_bytes_and_are_huge_in_other_mappings(file):
    view = map_file(file, SIZE, writable=True)
    numbers = np.frombuffer(view, np.uint8)
    numbers[::4096] = 7
    asked = []
    assert use_huge_pages(view, lambda: asked.append(True)) in (0, SIZE) and asked == [True]
    assert kibibytes(address_of(view), "Rss") == 0
    other = map_file(file, SIZE, writable=False)
    assert np.frombuffer(other, np.uint8)[::4096].tolist() == [7] * len(numbers[::4096])
    if not (found := kibibytes(address_of(other), "ShmemPmdMapped")):
        pytest.skip("this kernel gave no huge page")
    assert found in (HUGE_PAGE_BYTES >> 10, 2 * HUGE_PAGE_BYTES >> 10, 3 * HUGE_PAGE_BYTES >> 10)


def test_slices_are_moved_one_after_another_and_one_may_end_it(file, monkeypatch):
    monkeypatch.setattr(mapping, "_SLICE_BYTES", HUGE_PAGE_BYTES)
    view, asked = map_file(file, SIZE, writable=True), []
    view[-1] = 9
    moved = use_huge_pages(view, lambda: asked.append(True))
    assert moved == SIZE and len(asked) == 4 or moved == (len(asked) - 1) * HUGE_PAGE_BYTES

    def end():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use_huge_pages(view, end)
    assert view[-1] == 9


def test_a_segment_for_which_there_are_no_addresses_says_so(place):
    """In a process of its own, which may have 64 MiB more than it has."""
    Segment.create(place / "s", 1 << 27).close()
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from mmrt.shm.errors import SegmentError\n"
        "from mmrt.shm.segment import Segment\n"
        "has = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (has + (1 << 26), has + (1 << 26)))\n"
        "try:\n    Segment.attach(Path(sys.argv[1]))\n"
        "except SegmentError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(place / "s")], capture_output=True, text=True, check=True)
    assert re.match(r"segment 's' needs 134217728 bytes of addresses, and a process may have \d+ \(ulimit -v\)", done.stdout)


def test_a_segment_in_huge_pages_can_be_attached(place):
    with Segment.create(place / "s", HEADER_BYTES + SIZE, geometry=(5,)) as segment:
        segment.use_huge_pages(lambda: None)
        segment.array(HEADER_BYTES, SIZE, np.uint8)[-1] = 3
        with Segment.attach(place / "s", writable=False) as again:
            assert again.geometry[0] == 5
            assert again.array(HEADER_BYTES, SIZE, np.uint8)[-1] == 3


@pytest.mark.parametrize("num_bytes", [0, 1, SIZE])
def test_private_memory_is_zero_and_writable(num_bytes):
    memory = private_memory(num_bytes)
    assert memory.nbytes == num_bytes
    numbers = np.frombuffer(memory, np.uint8) if num_bytes else np.empty(0, np.uint8)
    assert not numbers.any()
    numbers[:] = 1
    assert numbers.sum() == num_bytes


@pytest.mark.parametrize("num_bytes", [4096, 4 << 20])
def test_no_descriptor_of_the_file_stays(tmp_path: Path, num_bytes: int) -> None:
    """Who had one could write the whole file, whatever part of it is mapped for writing."""
    path = tmp_path / "file"
    path.write_bytes(bytes(num_bytes))
    with path.open("r+b") as file:
        view = map_file(file.fileno(), num_bytes, writable=True)
    assert str(path) not in [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_exists(fd)]
    view[5] = 7
    assert path.read_bytes()[5] == 7
    del view
    assert str(path) not in Path("/proc/self/maps").read_text()


def fd_exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
