"""Pulls beside others, from mirrors with a password, and of what no model has."""

import asyncio
import fcntl
import os
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from huggingface_hub import constants

from mmrt.cli import fetching
from mmrt.cli.main import run
from mmrt.hub import fetch
from mmrt.hub.cache import PARTIAL, RepositoryCache
from mmrt.hub.errors import HubError
from mmrt.hub.repository import RemoteFile, Repository, safetensors_files
from mmrt.tests.hub.conftest import COMMIT, FakeHub, digest

Files = dict[str, bytes]
Captured = pytest.CaptureFixture[str]
WEIGHTS = "model.safetensors"


@pytest.fixture
def served(hub: FakeHub, checkpoint: Files) -> FakeHub:
    hub.repositories["org/m"] = dict(checkpoint)
    return hub


def blobs(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models--org--m" / "blobs"


def test_a_file_that_another_pull_has_just_fetched_is_taken(
    served: FakeHub, checkpoint: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, flock = RepositoryCache("org/m", tmp_path / "cache"), fcntl.flock

    def lock_after_the_other(stream: Any, operation: int) -> None:
        (file,) = cache.folder.glob(f"blobs/{digest(checkpoint[WEIGHTS])}{PARTIAL}")
        file.write_bytes(checkpoint[WEIGHTS])
        os.replace(file, file.with_name(digest(checkpoint[WEIGHTS])))
        flock(stream, operation)

    assert run(["pull", "org/m"]) == 0
    (blobs(tmp_path) / digest(checkpoint[WEIGHTS])).unlink()
    monkeypatch.setattr(fcntl, "flock", lock_after_the_other)
    served.log.clear()
    assert run(["pull", "org/m"]) == 0
    assert [asked for asked in served.ranges(WEIGHTS) if not asked.startswith("bytes=0-")] == []
    assert not list(blobs(tmp_path).glob(f"*{PARTIAL}"))


def test_models_are_listed_while_a_pull_ends(served: FakeHub, tmp_path: Path, capsys: Captured) -> None:
    assert run(["pull", "org/m"]) == 0
    (blobs(tmp_path) / f"x{PARTIAL}").symlink_to("gone")  # as between two looks at the folder
    assert run(["model", "list"]) == 0
    assert "org/m" in capsys.readouterr().out


def test_the_password_of_a_mirror_is_sent_and_not_told(served: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", served.endpoint.replace("://", "://me:secret@"))
    assert run(["pull", "org/m"]) == 0
    assert {authorization for *_, authorization in served.log} == {f"Basic {b64encode(b'me:secret').decode()}"}

    async def fail(request: web.Request) -> web.StreamResponse:
        return web.Response(status=int(request.path.rpartition("_")[2]))

    served.hook = fail
    for status in (401, 403, 404, 418, 500):
        assert run(["pull", f"org/m_{status}"]) != 0
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert run(["pull", "org/m"]) == 1
    told = capsys.readouterr()
    assert "secret" not in told.out + told.err and "leave one of them out" in told.err


def test_a_model_of_countless_files_is_refused() -> None:
    files = tuple(RemoteFile(f"m-{at}.safetensors", 10, "0" * 40) for at in range(1001))
    with pytest.raises(HubError, match="org/m: the model has 1001 files there, expected at most 1000"):
        safetensors_files(Repository("org/m", COMMIT, files), None)


def test_what_an_earlier_try_has_left_is_read_beside_other_work(
    served: FakeHub, checkpoint: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long beginning must not keep Ctrl-C and other files waiting."""
    monkeypatch.setattr(fetch, "_HASHED_BYTES", 1024)
    weights = checkpoint[WEIGHTS]
    file = RemoteFile(WEIGHTS, len(weights), digest(weights))
    with open(tmp_path / "partial", "w+b") as stream:
        stream.write(weights)
        stream.seek(0)
        download = fetch._Download(None, Repository("org/m", COMMIT, (file,)), file, stream, lambda _: None)  # type: ignore[arg-type]

        async def test() -> int:
            turns, running = 0, asyncio.create_task(download.run())
            while not running.done():
                turns += 1
                await asyncio.sleep(0)
            await running
            return turns

        assert asyncio.run(test()) > len(weights) // 1024


def test_the_rate_is_of_what_comes_not_of_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, told = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    class Reporter:
        def progress(self, place: str, state: str, text: str) -> None:
            told.append(text)

    show = fetching._Show(10_000_000_000, 2_000_000_000, Reporter())  # type: ignore[arg-type]
    for _ in range(8):  # read again at once
        show(1_000_000_000)
    for second in range(1, 4):
        now_s[0] = second + 0.1
        show(100_000_000)
    assert told[-1] == "8.30 GB of 10.00 GB, 96.8 MB/s, 18 s left"
