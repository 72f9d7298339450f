"""prefill and encoder load saved pages: real files, real pools and a real table."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.actors.host import page_loader
from mmrt.actors.host.page_loader import PageLoader
from mmrt.runtime.bus.copy_plans import Load, LoadChunk, LoadedState, LoadedWindows, LoadPart, LoadSegments
from mmrt.runtime.bus.messages import Loaded, PageRun
from mmrt.runtime.process.saved_pages import SavedFiles, SavedPages, write_saved_files
from mmrt.shm.errors import StalePage
from mmrt.shm.page_file import PageFile
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable

SECRET = b"s" * 32
KEYS = [bytes([number]) * 16 for number in range(5)]


class Run:
    """The files have page n in slot n."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory.create(path / "run", {})
        self.kv = PagePool.create(self.directory, "kv", 8, 32)
        self.table = SequenceTable.create(self.directory, 1, 128, 8, max_spec_bytes=64, max_state_bytes=64)
        self.table.append_pages(0, 0, [7, 2, 5, 3, 6])
        self.path = path / "pages"
        self.file = PageFile.open(self.path, SECRET, 32, 1 << 16)
        self.states = PagePool.create(self.directory, "state", 4, 64)
        self.state_file = PageFile.open(path / "states", SECRET, 64, 1 << 16)
        self.loader = PageLoader(self.directory, self.kv, path)
        self.loader_of_both = PageLoader(self.directory, self.kv, path, PageLoader(self.directory, self.states, path))

    def tell(self, **changes: object) -> None:
        """Tell the run of the file."""
        fields = {"path": str(self.path), "secret": SECRET, "page_bytes": 32} | changes
        saved = {
            "kv": SavedPages(**fields),  # type: ignore[arg-type]
            "state": SavedPages(str(self.path.with_name("states")), SECRET, 64),
        }
        write_saved_files(self.directory.path, SavedFiles(saved, str(self.path.with_name("era"))))

    def fill(self) -> None:
        self.tell()
        for number, key in enumerate(KEYS):
            self.file.write(key, bytes([number + 65]) * 32)

    def load(self, first: int, numbers: list[int]) -> Loaded:
        keys = [KEYS[number] for number in numbers]
        chunk = LoadChunk(0, int(self.table.generation[0]), 0, 16 * first, 16 * (first + len(keys)), keys, numbers)
        return self.loader.load_chunks(Load([chunk]), self.table)

    def fetch(self, first: int, theirs: list[int]) -> Loaded:
        """From another pool, whose page n holds n."""
        other = PagePool.create(self.directory, "kv.1", 8, 32)
        for page in range(8):
            other.write_bytes([page], bytes([page + 97]) * 32)
        keys = KEYS[: len(theirs)]
        chunk = LoadChunk(0, int(self.table.generation[0]), 0, 16 * first, 16 * (first + len(theirs)), keys, theirs)
        loaded = self.loader.load_chunks(Load([chunk], "kv.1"), self.table)
        other.close()
        return loaded

    def load_with_state(self, numbers: list[int], state: LoadedState, source: str = "") -> Loaded:
        keys = [KEYS[number] for number in numbers]
        chunk = LoadChunk(0, int(self.table.generation[0]), 0, 0, 16 * len(keys), keys, numbers, state)
        return self.loader_of_both.load_chunks(Load([chunk], source), self.table)

    def load_segments(self, *segments: list[int]) -> Loaded:
        """Into the pages with the numbers of their contents."""
        generations = self.kv.generations.tolist()
        parts = [
            LoadPart(0, 1, PageRun(numbers, [generations[n] for n in numbers]), 10 + at, [KEYS[n] for n in numbers], numbers)
            for at, numbers in enumerate(segments)
        ]
        return self.loader.load_segments(LoadSegments(parts))

    def damage(self, number: int) -> None:
        data = bytearray(self.path.read_bytes())
        data[data.index(bytes([number + 65]) * 32)] ^= 1
        self.path.write_bytes(data)

    def contents(self) -> bytes:
        """The first byte of each page."""
        return bytes(self.kv.data[:, 0])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.file.close()
    run.state_file.close()
    for part in (run.kv, run.states, run.table):
        part.close()
    run.directory.destroy()


def test_pages_of_a_row(run: Run) -> None:
    run.fill()
    assert run.load(1, [1, 2, 3]) == Loaded([16 * 4], [True])
    assert run.contents() == b"\0\0BD\0C\0\0", "its pages 1 to 3 are 2, 5 and 3"


def test_up_to_the_first_page_that_the_file_has_no_more(run: Run) -> None:
    run.fill()
    run.file._forget(KEYS[2])
    run.file.write(b"x" * 16, bytes(32))
    assert run.load(0, [0, 1, 2, 3]) == Loaded([32], [False])


def test_without_files_nothing_is_loaded(run: Run) -> None:
    assert run.load(0, [0, 1]) == Loaded([0], [False]) and run.load_segments([0]) == Loaded([0], [False])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"secret": b"t" * 32}, "has not the pages of this run"), ({"path": "/gone"}, "/gone, which is not in cache.dir")],
)
def test_a_file_that_cannot_be_read_has_nothing(
    run: Run, caplog: pytest.LogCaptureFixture, changes: dict[str, object], message: str
) -> None:
    run.fill()
    run.tell(**changes)
    assert run.load(0, [0]) == Loaded([0], [False]) and message in caplog.text


def test_a_damaged_page_ends_it_with_a_line(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.fill()
    run.damage(2)
    assert run.load(0, [0, 1, 2, 3]) == Loaded([32], [False]) and "slot 2 is not as it was written" in caplog.text


def test_a_slow_disk_does_not_hold_up_other_prompts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.fill()
    times = iter(0.1 * number for number in range(100))
    monkeypatch.setattr(page_loader.time, "monotonic", lambda: next(times))
    assert run.load(0, [0, 1, 2, 3, 4]) == Loaded([16 * 4], [True]), "after 0.5 s, of a page each 0.1 s"
    assert run.load(4, [4]) == Loaded([16 * 5], [True]), "all that was asked for was there"
    monkeypatch.setattr(page_loader, "LOAD_S", 0.35)
    assert run.load(0, [0, 1, 2, 3, 4]) == Loaded([16 * 3], [False]), "a slow disk is asked for no more"


def test_a_long_copy_does_not_hold_up_other_prompts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(0.1 * number for number in range(100))
    monkeypatch.setattr(page_loader.time, "monotonic", lambda: next(times))
    assert run.fetch(0, [0, 1, 2, 3, 4]) == Loaded([16 * 4], [True], 4 * 32), "after 0.5 s, of a page each 0.1 s"
    assert run.contents() == b"\0\0bd\0c\0a", "the fifth page stays as it was"


def test_segments_are_loaded_whole_or_not_at_all(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.fill()
    run.damage(2)
    assert run.load_segments([0], [1, 2], [4, 3]) == Loaded([10, 0, 12], [False, False, False])
    assert run.contents()[3:5] == b"DE" and "slot 2 is not as it was written" in caplog.text


def test_a_slow_disk_holds_up_other_media_for_a_segment_at_least(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.fill()
    monkeypatch.setattr(page_loader, "LOAD_S", 0.0)
    assert run.load_segments([0, 1], [2], [3]) == Loaded([10, 0, 0], [False, True, True])


def test_pages_that_were_given_away_are_not_written(run: Run) -> None:
    run.fill()
    run.kv.generations[:] = 1
    with pytest.raises(StalePage):
        run.loader.load_segments(LoadSegments([LoadPart(0, 1, PageRun([3], [2]), 10, KEYS[:1], [0])]))
    assert run.contents() == bytes(8)


def test_pages_of_another_pool_go_where_the_block_table_says(run: Run) -> None:
    assert run.fetch(1, [4, 0, 6]) == Loaded([64], [True], 96)
    assert [run.contents()[page] for page in (2, 5, 3)] == [ord("e"), ord("a"), ord("g")]
    assert run.contents()[7] == 0 == run.contents()[6]


def test_a_state_comes_behind_all_its_pages(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.fill()
    run.state_file.write(KEYS[1], b"s" * 64)
    assert run.load_with_state([0, 1], LoadedState(KEYS[1], 0, 2, 3)) == Loaded([32], [True], 0, [True])
    assert bytes(run.states.data[:, 0]) == b"\0\0ss" and run.contents()[7:8] + run.contents()[2:3] == b"AB"
    run.states.data[:] = 0
    run.file._forget(KEYS[1])
    assert run.load_with_state([0, 1], LoadedState(KEYS[1], 0, 2)) == Loaded([16], [False], 0, [False])
    assert not run.states.data.any(), "without the second page it is of no use"
    assert run.load_with_state([0], LoadedState(KEYS[0], 0, 2)) == Loaded([16], [True], 0, [False]), "the slot has another state"
    data = bytearray(run.path.with_name("states").read_bytes())
    data[data.index(b"s" * 64)] ^= 1
    run.path.with_name("states").write_bytes(data)
    assert run.load_with_state([0], LoadedState(KEYS[1], 0, 2)) == Loaded([16], [True], 0, [False])
    assert "saved state pages cannot be read: the page in slot 0 is not as it was written" in caplog.text
    assert not run.states.data.any()


def test_a_state_of_another_device(run: Run) -> None:
    others = [PagePool.create(run.directory, name, 8, size) for name, size in (("kv.1", 32), ("state.1", 64))]
    others[0].write_bytes([3], b"k" * 32)
    others[1].write_bytes([6], b"t" * 64)
    assert run.load_with_state([3], LoadedState(KEYS[0], 6, 1), "kv.1") == Loaded([16], [True], 32, [True])
    assert bytes(run.states.data[:, 0]) == b"\0t\0\0" and run.contents()[7:8] == b"k"
    for other in others:
        other.close()


def test_pages_of_windows_come_behind_all_others_to_the_last_places(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of three pages of a row the last two, from the file of such pages or from another device."""
    run.fill()
    names = ("window", "window.1", "kv.1")
    windows, others, kv = (PagePool.create(run.directory, name, 8, size) for name, size in zip(names, (64, 64, 32), strict=True))
    run.table.append_window_pages(0, 0, [4, 4, 1, 6])
    file = PageFile.open(tmp_path / "windows", SECRET, 64, 1 << 16)
    for slot, letter in enumerate(b"xyz"):
        file.write(KEYS[slot], bytes([letter]) * 64)
        others.write_bytes([slot], bytes([letter - 32]) * 64)
    saved = {"kv": SavedPages(str(run.path), SECRET, 32), "window": SavedPages(str(tmp_path / "windows"), SECRET, 64)}
    write_saved_files(run.directory.path, SavedFiles(saved, str(tmp_path / "era")))
    loader = PageLoader(run.directory, run.kv, tmp_path, windows=PageLoader(run.directory, windows, tmp_path))

    def load(found: LoadedWindows | None, source: str = "") -> Loaded:
        windows.data[:] = 0
        chunk = LoadChunk(0, int(run.table.generation[0]), 0, 0, 48, KEYS[:3], [0, 1, 2], None, found)
        return loader.load_chunks(Load([chunk], source), run.table)

    last = LoadedWindows(KEYS[1:3], [1, 2])
    assert load(last) == Loaded([48], [True], 0, [True])
    assert bytes(windows.data[:, 0]) == b"\0z\0\0y\0\0\0", "its places 1 and 2 are pages 4 and 1"
    assert load(last, "kv.1") == Loaded([48], [True], 3 * 32 + 2 * 64, [True]) and bytes(windows.data[:, 0]) == b"\0Z\0\0Y\0\0\0"
    assert load(None) == Loaded([48], [True], 0, [False]), "more pages are to come"
    assert load(LoadedWindows(KEYS[1:3], [1, 0])).states == [False], "the slot has another page"
    data = bytearray((tmp_path / "windows").read_bytes())
    data[data.index(b"z" * 64)] ^= 1
    (tmp_path / "windows").write_bytes(data)
    assert load(last) == Loaded([48], [True], 0, [False]) and "saved window pages cannot be read: the page in slot 2" in caplog.text
    run.file._forget(KEYS[2])
    assert load(last) == Loaded([32], [False], 0, [False]) and not windows.data.any(), "without the third page they are of no use"
    file.close()
    for pool in (windows, others, kv):
        pool.close()
