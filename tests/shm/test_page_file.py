"""A file of pages: it gives back what was written, or nothing."""

import os
import random
import tempfile
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmrt.shm.page_file import HEADER_BYTES, PageFile

SECRET, PAGE = b"s" * 32, 40
STRIDE = 56 + PAGE


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def contents_of(number: int, version: int = 0) -> bytes:
    return random.Random(1000 * number + version).randbytes(PAGE)


def opened(path: Path, num_slots: int = 4, secret: bytes = SECRET, page_bytes: int = PAGE) -> PageFile:
    return PageFile.open(path, secret, page_bytes, HEADER_BYTES + num_slots * (56 + page_bytes) + 3)


class Pages(RuleBasedStateMachine):
    """Against an ordered dictionary. The file is closed and opened again at any time, also with fewer or more slots."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="mmrt-test-")
        self.path = Path(self.folder.name) / "pages"
        self.num_slots = 4
        self.file = opened(self.path, self.num_slots)
        self.model: OrderedDict[bytes, bytes] = OrderedDict()

    @rule(number=st.integers(0, 9), version=st.integers(0, 2))
    def write(self, number: int, version: int) -> None:
        if key_of(number) in self.file:
            return
        self.file.write(key_of(number), contents_of(number, version))
        self.model[key_of(number)] = contents_of(number, version)
        if len(self.model) > self.num_slots:
            self.model.popitem(last=False)

    @rule()
    def open_again(self) -> None:
        self.file.close()
        self.file = opened(self.path, self.num_slots)

    @rule(num_slots=st.integers(4, 7))
    def grow(self, num_slots: int) -> None:
        self.num_slots = max(self.num_slots, num_slots)
        self.open_again()

    @precondition(lambda self: self.model)
    @rule(data=st.data(), byte=st.integers(0, STRIDE - 1))
    def damage(self, data: st.DataObject, byte: int) -> None:
        """A byte of a slot changes on disk: at most that page is lost."""
        key = data.draw(st.sampled_from([*self.model]))
        at = self.file._offset(self.file._slot_of[key]) + byte
        fd = os.open(self.path, os.O_RDWR)
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 0x40]), at)
        os.close(fd)
        assert self.file.read(key) is None and key not in self.file
        del self.model[key]

    @invariant()
    def holds_what_was_written(self) -> None:
        assert list(self.file.newest_first()) == [*reversed(self.model)]
        assert {key: self.file.read(key) for key in self.model} == dict(self.model)
        assert self.path.stat().st_size <= HEADER_BYTES + self.num_slots * STRIDE

    def teardown(self) -> None:
        self.file.close()
        self.folder.cleanup()


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("secret", "page_bytes"), [(b"t" * 32, PAGE), (SECRET, PAGE + 1)])
def test_the_file_of_others_is_emptied(tmp_path: Path, secret: bytes, page_bytes: int) -> None:
    file = opened(tmp_path / "pages")
    file.write(key_of(1), contents_of(1))
    file.close()
    other = opened(tmp_path / "pages", secret=secret, page_bytes=page_bytes)
    assert len(other) == 0 and (tmp_path / "pages").stat().st_size <= HEADER_BYTES
    other.close()


@given(size=st.integers(0, HEADER_BYTES + 3 * STRIDE))
@settings(deadline=None)
def test_a_file_that_was_cut_gives_whole_pages_or_none(size: int) -> None:
    with tempfile.TemporaryDirectory(prefix="mmrt-test-") as folder:
        path = Path(folder) / "pages"
        file = opened(path)
        for number in range(3):
            file.write(key_of(number), contents_of(number))
        file.close()
        os.truncate(path, size)
        cut = opened(path)
        whole = max(0, size - HEADER_BYTES) // STRIDE
        assert {key: cut.read(key) for key in cut.newest_first()} == {key_of(n): contents_of(n) for n in range(whole)}
        cut.write(key_of(7), contents_of(7))
        assert cut.read(key_of(7)) == contents_of(7)
        cut.close()


def test_a_smaller_bound_cuts_the_file(tmp_path: Path) -> None:
    file = opened(tmp_path / "pages", num_slots=8)
    for number in range(8):
        file.write(key_of(number), contents_of(number))
    file.close()
    small = opened(tmp_path / "pages", num_slots=3)
    assert len(small) == 3 and (tmp_path / "pages").stat().st_size == HEADER_BYTES + 3 * STRIDE
    none = PageFile.open(tmp_path / "none", SECRET, PAGE, 1)
    none.write(key_of(1), contents_of(1))
    assert len(none) == 0
    small.close()
    none.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    file = opened(tmp_path / "pages")
    with pytest.raises(BlockingIOError):
        opened(tmp_path / "pages")
    file.close()
    opened(tmp_path / "pages").close()
