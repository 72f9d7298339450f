"""prefill loads saved pages: real files, a real pool and a real table."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.actors.host import page_loader
from mmrt.actors.host.page_loader import PageLoader
from mmrt.runtime.bus.messages import Loaded
from mmrt.runtime.bus.plans import Load, LoadChunk
from mmrt.runtime.process.saved_pages import SavedPages, write_saved_pages
from mmrt.shm.page_file import PageFile
from mmrt.shm.pool import PagePool
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable

SECRET = b"s" * 32
KEYS = [bytes([number]) * 16 for number in range(5)]


class Run:
    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory.create(path / "run", {})
        self.kv = PagePool.create(self.directory, "kv", 8, 32)
        self.table = SequenceTable.create(self.directory, 1, 128, 8, max_spec_bytes=64, max_state_bytes=64)
        self.table.append_pages(0, 0, [7, 2, 5, 3, 6])
        self.path = path / "pages"
        self.file = PageFile.open(self.path, SECRET, 32, 1 << 16)
        self.loader = PageLoader(self.directory, self.kv, self.table)

    def load(self, first: int, keys: list[bytes]) -> int:
        return self.result(first, keys).ends[0]

    def result(self, first: int, keys: list[bytes]) -> Loaded:
        chunk = LoadChunk(0, int(self.table.generation[0]), 0, 16 * first, 16 * (first + len(keys)), keys)
        return self.loader.execute(Load([chunk]))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.file.close()
    for part in (run.kv, run.table):
        part.close()
    run.directory.destroy()


def test_pages_up_to_the_first_that_the_file_lacks(run: Run) -> None:
    write_saved_pages(run.directory.path, SavedPages(str(run.path), SECRET, 32))
    for number in (0, 1, 2, 4):
        run.file.write(KEYS[number], bytes([number + 65]) * 32)
    assert run.result(1, KEYS[1:]) == Loaded([16 * 3]), "pages 1 and 2 of the row"
    assert [bytes(run.kv.page(page))[:1] for page in (7, 2, 5, 3, 6)] == [b"\0", b"B", b"C", b"\0", b"\0"]


def test_without_files_nothing_is_loaded(run: Run) -> None:
    assert run.load(0, KEYS) == 0


def test_a_file_that_cannot_be_read_has_nothing(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    write_saved_pages(run.directory.path, SavedPages(str(run.path), b"t" * 32, 32))
    run.file.write(KEYS[0], bytes(32))
    assert run.load(0, KEYS) == 0 and "has not the pages of this run" in caplog.text
    write_saved_pages(run.directory.path, SavedPages(str(run.path.parent / "gone"), SECRET, 32))
    assert run.load(0, KEYS) == 0 and "No such file" in caplog.text


def test_a_page_that_was_damaged_ends_it(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    write_saved_pages(run.directory.path, SavedPages(str(run.path), SECRET, 32))
    for number in range(5):
        run.file.write(KEYS[number], bytes([number + 65]) * 32)
    data = bytearray(run.path.read_bytes())
    data[data.index(b"C" * 32)] ^= 1
    run.path.write_bytes(data)
    with caplog.at_level(logging.INFO):
        assert run.load(0, KEYS) == 32
    assert run.file.read(KEYS[2]) is None


def test_a_slow_disk_does_not_hold_up_other_prompts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_saved_pages(run.directory.path, SavedPages(str(run.path), SECRET, 32))
    for key in KEYS:
        run.file.write(key, bytes(32))
    times = iter(0.1 * number for number in range(100))
    monkeypatch.setattr(page_loader.time, "monotonic", lambda: next(times))
    assert run.result(0, KEYS) == Loaded([16 * 4], more=True), "after 0.5 s, of a page each 0.1 s"
    assert run.result(4, KEYS[4:]) == Loaded([16 * 5], more=True), "all that was asked for was there"
    monkeypatch.setattr(page_loader, "LOAD_S", 0.35)
    assert run.result(0, KEYS) == Loaded([16 * 3]), "a slow disk is asked for no more"
