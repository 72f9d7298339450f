"""The controller learns which pages files have while another process writes them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.actors.controller import saved_files
from mmrt.actors.controller.saved_files import SavedFiles, Slots
from mmrt.runtime.process.saved_pages import SavedFiles as Named
from mmrt.runtime.process.saved_pages import SavedPages, write_saved_files
from mmrt.shm.page_file import PageFile

SECRET = b"s" * 32
KEYS = [bytes([number]) * 16 for number in range(3)]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[PageFile]:
    file = PageFile.open(tmp_path / "pages", SECRET, 32, 1 << 16)
    yield file
    file.close()


def tell(run: Path, secret: bytes = SECRET) -> None:
    saved = SavedPages(str(run / "pages"), secret, 32)
    write_saved_files(run, Named({"kv": saved, "embedding": saved}, str(run / "era")))


def test_a_look_finds_what_has_changed(tmp_path: Path, file: PageFile) -> None:
    tell(tmp_path)
    file.write(KEYS[0], bytes(32))
    files = SavedFiles(tmp_path, tmp_path)
    assert files.look() == {"kv": {KEYS[0]: 0}, "embedding": {KEYS[0]: 0}}
    assert files.look() == {}
    written_ns = files._readers["kv"].written_ns()
    while files._readers["kv"].written_ns() == written_ns:  # the clock of files is coarse
        file.write(KEYS[1], bytes(32)) if KEYS[1] not in file else file._forget(KEYS[1])
    file.write(KEYS[2], bytes(32))
    assert KEYS[2] in files.look()["kv"]
    files.close()


def test_a_run_without_files_looks_once(tmp_path: Path) -> None:
    files = SavedFiles(tmp_path, tmp_path)
    assert files.look() == {}
    asyncio.run(asyncio.wait_for(files.follow(pytest.fail), 60))


def test_files_of_others_are_not_used(tmp_path: Path, file: PageFile, caplog: pytest.LogCaptureFixture) -> None:
    tell(tmp_path, b"t" * 32)
    assert SavedFiles(tmp_path, tmp_path).look() == {} and "has not the pages of this run" in caplog.text


def test_what_is_written_while_the_run_goes_on(tmp_path: Path, file: PageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_files, "LOOK_S", 0.01)
    tell(tmp_path)
    files = SavedFiles(tmp_path, tmp_path)
    assert files.look() == {"kv": {}, "embedding": {}}

    async def follow() -> Slots:
        found: asyncio.Queue[Slots] = asyncio.Queue()
        following = asyncio.create_task(files.follow(found.put_nowait))
        while not found.qsize() and not following.done():
            file.write(KEYS[0], bytes(32)) if KEYS[0] not in file else file._forget(KEYS[0])
            await asyncio.sleep(0.01)
        following.cancel()
        return await found.get()

    assert asyncio.run(asyncio.wait_for(follow(), 60)).keys() <= {"kv", "embedding"}
    files.close()
