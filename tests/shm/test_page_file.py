"""A file of pages: it gives back what was written, or nothing."""

import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmrt.shm import page_file
from mmrt.shm.page_file import PageFile, PageFileReader, remove_unused
from mmrt.tests.settings import examples

SECRET, PAGE = b"s" * 32, 40
BLOCKS = 2 * 4096  # the header, and the heads of a group of slots
FIRST_HEAD = 4096


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def contents_of(number: int, version: int = 0) -> bytes:
    return random.Random(1000 * number + version).randbytes(PAGE)


def opened(path: Path, num_slots: int = 4, secret: bytes = SECRET, page_bytes: int = PAGE) -> PageFile:
    return PageFile.open(path, secret, page_bytes, BLOCKS + num_slots * page_bytes + 3)


class Pages(RuleBasedStateMachine):
    """Against an ordered dictionary. The file is closed and opened again at any time; a reader has it open throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="mmrt-test-")
        self.path = Path(self.folder.name) / "pages"
        self.num_slots = 4
        self.file = opened(self.path, self.num_slots)
        self.reader = PageFileReader.open(self.path, SECRET, PAGE)
        self.model: dict[bytes, bytes] = {}
        self.worth: dict[bytes, tuple[int, int]] = {}  # (round, -depth)
        self.round = 0

    @rule(number=st.integers(0, 9), version=st.integers(0, 2), depth=st.integers(0, 3))
    def write(self, number: int, version: int, depth: int) -> None:
        key = key_of(number)
        if key in self.file:
            return
        self.file.write(key, contents_of(number, version), depth)
        gone = [known for known in self.model if known not in self.file]
        assert len(gone) == (len(self.model) == self.num_slots)
        for known in gone:
            assert self.worth[known][0] == min(rounds for rounds, _ in self.worth.values()), "kept longest ago"
            del self.model[known], self.worth[known]
        self.model[key], self.worth[key] = contents_of(number, version), (self.round, -depth)

    @rule()
    def open_again(self) -> None:
        self.file.close()
        self.file = opened(self.path, self.num_slots)
        self.round += 1

    @rule(num_slots=st.integers(1, 6))
    def resize(self, num_slots: int) -> None:
        """It keeps the pages of most worth that have room."""
        self.file.close()
        self.num_slots = num_slots
        self.file = opened(self.path, num_slots)
        self.round += 1
        kept = sorted(self.worth.values())[max(0, len(self.worth) - num_slots) :]
        gone = [key for key in self.model if key not in self.file]
        assert sorted(self.worth[key] for key in self.model if key in self.file) == kept
        for key in gone:
            del self.model[key], self.worth[key]

    @rule(numbers=st.sets(st.integers(0, 9)))
    def keep(self, numbers: set[int]) -> None:
        kept = {key_of(number) for number in numbers} & self.model.keys()
        self.file.keep(kept)
        if not {key for key, (rounds, _) in self.worth.items() if rounds == self.round} <= kept:
            self.round += 1
        self.worth |= {key: (self.round, self.worth[key][1]) for key in kept}

    @precondition(lambda self: self.model)
    @rule(data=st.data(), byte=st.integers(0, 56 + PAGE - 1))
    def damage(self, data: st.DataObject, byte: int) -> None:
        """A byte of a slot changes on disk: at most that page is lost."""
        key = data.draw(st.sampled_from([*self.model]))
        slot = self.file._slot_of[key]
        is_number = 16 <= byte < 24  # of the worth alone: it is not believed to be more
        at = page_file._place(slot, PAGE) + byte - 56 if byte >= 56 else FIRST_HEAD + 56 * slot + (0 if is_number else byte)
        fd = os.open(self.path, os.O_RDWR)
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 0x40]), at)
        os.close(fd)
        assert self.file.read(key) is None and key not in self.file
        del self.model[key], self.worth[key]

    @invariant()
    def holds_what_was_written(self) -> None:
        assert [self.worth[key] for key in self.file.keys()] == sorted(self.worth.values())
        assert all(self.file.depth_of(key) == -depth for key, (_, depth) in self.worth.items())
        assert {key: self.file.read(key) for key in self.model} == dict(self.model)
        assert {key: self.reader.read(key, slot) for key, slot in self.reader.slots().items()} == self.model
        assert self.path.stat().st_size <= BLOCKS + self.num_slots * PAGE

    def teardown(self) -> None:
        self.reader.close()
        self.file.close()
        self.folder.cleanup()


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("secret", "page_bytes"),
    [(b"t" * 32, PAGE), (SECRET, PAGE + 1)],
    ids=["secret", "page"],
)
def test_the_file_of_others_is_emptied(tmp_path: Path, secret: bytes, page_bytes: int) -> None:
    file = opened(tmp_path / "pages")
    file.write(key_of(1), contents_of(1))
    file.close()
    other = opened(tmp_path / "pages", 4, secret, page_bytes)
    assert len(other) == 0 and other.was_foreign and not file.was_foreign
    other.close()


@given(size=st.integers(0, BLOCKS + 3 * PAGE))
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
        found = {key: cut.read(key) for key in cut.keys()}
        whole = max(0, size - BLOCKS) // PAGE
        assert {key: contents for key, contents in found.items() if contents} == {key_of(n): contents_of(n) for n in range(whole)}
        cut.write(key_of(7), contents_of(7))
        assert cut.read(key_of(7)) == contents_of(7)
        cut.close()


@pytest.mark.parametrize("number", [1 << 62, (1 << 64) - 1])
def test_a_number_that_nobody_gave_is_an_empty_slot(tmp_path: Path, number: int) -> None:
    file = opened(tmp_path / "pages")
    file.write(key_of(1), contents_of(1))
    os.pwrite(file._fd, number.to_bytes(8, "little"), FIRST_HEAD + 16)
    file.close()
    again = opened(tmp_path / "pages")
    assert len(again) == 0
    again.write(key_of(2), contents_of(2))
    assert again.read(key_of(2)) == contents_of(2)
    again.close()


@pytest.mark.parametrize(("secret", "page_bytes"), [(b"t" * 32, PAGE), (SECRET, PAGE + 1)], ids=["secret", "page"])
def test_a_reader_refuses_the_file_of_others(tmp_path: Path, secret: bytes, page_bytes: int) -> None:
    opened(tmp_path / "pages").close()
    with pytest.raises(ValueError, match="has not the pages of this run"):
        PageFileReader.open(tmp_path / "pages", secret, page_bytes)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="has not the pages of this run"):
        PageFileReader.open(tmp_path / "empty", SECRET, PAGE)


def test_a_reader_tells_a_page_that_was_overwritten_from_a_damaged_one(tmp_path: Path) -> None:
    file = opened(tmp_path / "pages", num_slots=1)
    reader = PageFileReader.open(tmp_path / "pages", SECRET, PAGE)
    assert reader.slots() == {} and reader.read(key_of(1), 0) is None
    file.write(key_of(1), contents_of(1))
    assert reader.slots() == {key_of(1): 0} and reader.read(key_of(1), 0) == contents_of(1)
    assert reader.read(key_of(1), 1000) is None and reader.read(key_of(2), 0) is None
    file.write(key_of(2), contents_of(2))
    assert reader.slots() == {key_of(2): 0} and reader.read(key_of(1), 0) is None
    os.pwrite(file._fd, b"another", BLOCKS)
    with pytest.raises(ValueError, match="slot 0 is not as it was written"):
        reader.read(key_of(2), 0)
    reader.close()
    file.close()


def test_a_page_is_not_believed_while_it_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path / "pages", num_slots=1)
    reader = PageFileReader.open(tmp_path / "pages", SECRET, PAGE)
    file.write(key_of(1), contents_of(1))
    write, seen = file._write, []

    def watched(data: bytes, offset: int) -> None:
        write(data, offset)
        seen.append((reader.read(key_of(1), 0), reader.read(key_of(2), 0)))

    monkeypatch.setattr(file, "_write", watched)
    file.write(key_of(2), contents_of(2))
    assert seen == [(None, None), (None, None), (None, contents_of(2))], "and it does not look damaged"
    reader.close()
    file.close()


def test_a_file_of_many_groups_can_grow_and_be_cut(tmp_path: Path) -> None:
    file = PageFile.open(tmp_path / "pages", SECRET, PAGE, 3 * 4096 + 100 * PAGE)
    assert file.num_slots == 100
    for number in range(300):
        file.write(key_of(number), contents_of(number), depth=number)
    file.close()
    larger = PageFile.open(tmp_path / "pages", SECRET, PAGE, 1 << 20)
    assert len(larger) == 100 and larger.num_slots > 10_000
    for number in range(300, 700):
        larger.write(key_of(number), contents_of(number))
    larger.close()
    smaller = PageFile.open(tmp_path / "pages", SECRET, PAGE, 3 * 4096 + 120 * PAGE)
    assert {key: smaller.read(key) for key in smaller.keys()} == {key_of(n): contents_of(n) for n in [*range(580, 700)]}
    assert (tmp_path / "pages").stat().st_size <= 3 * 4096 + 120 * PAGE
    smaller.close()
    reader = PageFileReader.open(tmp_path / "pages", SECRET, PAGE)
    assert reader.slots().keys() == {key_of(n) for n in range(580, 700)}
    reader.close()


def test_without_room_for_a_page_nothing_is_kept(tmp_path: Path) -> None:
    none = PageFile.open(tmp_path / "none", SECRET, PAGE, 1)
    none.write(key_of(1), contents_of(1))
    assert len(none) == 0
    none.close()


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o604])
def test_a_file_that_others_can_read_gets_no_pages(tmp_path: Path, mode: int) -> None:
    (tmp_path / "pages").touch()
    (tmp_path / "pages").chmod(mode)
    with pytest.raises(PermissionError, match="no other can read"):
        opened(tmp_path / "pages")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").touch(0o600)
    (tmp_path / "pages").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"):
        opened(tmp_path / "pages")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    file = opened(tmp_path / "pages")
    with pytest.raises(BlockingIOError):
        opened(tmp_path / "pages")
    assert not remove_unused(tmp_path / "pages")
    file.close()
    opened(tmp_path / "pages").close()
    assert remove_unused(tmp_path / "pages") and not (tmp_path / "pages").exists()


def test_of_pages_kept_together_the_deepest_is_overwritten_first(tmp_path: Path) -> None:
    file = opened(tmp_path / "pages")
    for number, depth in ((0, 0), (1, 1), (2, 2), (3, 1)):
        file.write(key_of(number), contents_of(number), depth)
    file.keep([key_of(0), key_of(1), key_of(2)])
    file.write(key_of(4), contents_of(4), 9)
    assert key_of(3) not in file, "it was not kept"
    file.write(key_of(5), contents_of(5), 9)
    file.write(key_of(6), contents_of(6), 9)
    assert [key_of(n) in file for n in (0, 1, 2)].count(True) >= 1 and key_of(0) in file
    file.close()


def test_keeping_the_same_pages_again_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path / "pages")
    for number in range(3):
        file.write(key_of(number), contents_of(number))
    file.keep(map(key_of, range(3)))
    monkeypatch.setattr(file, "_write", pytest.fail)
    file.keep(map(key_of, range(3)))
    file.close()
