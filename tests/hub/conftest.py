"""A server that speaks the hub's API, on a real socket, and a cache of its own for each test."""

import asyncio
import hashlib
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from huggingface_hub import constants

from mmrt.hub import client
from mmrt.models.make.checkpoint import make_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_good"
LARGE_BYTES = 100_000  # from here on files are stored by SHA-256
Hook = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if len(data) >= LARGE_BYTES else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(name: str, data: bytes) -> dict[str, object]:
    found: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": digest(data)}
    if len(data) >= LARGE_BYTES:
        found |= {"blobId": "f" * 40, "lfs": {"sha256": digest(data), "size": len(data), "pointerSize": 134}}
    return found


class FakeHub:
    """``repositories``: files by name. ``hook``: answers a request, unless it returns None. ``log``: of requests."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, str] = {}
        self.hook: Hook | None = None
        self.log: list[tuple[str, str, str, str]] = []  # method, path, range, authorization
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # answers that are still stalled
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def ranges(self, name: str) -> list[str]:
        """What was asked of a file."""
        return [asked for method, path, asked, _ in self.log if method == "GET" and path.endswith(f"/{name}")]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.log.append((request.method, request.path, request.headers.get("Range", ""), request.headers.get("Authorization", "")))
        if self.hook is not None and (answer := await self.hook(request)) is not None:
            return answer
        path = request.path
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+)|/tree/.*)?", path):
            return self._info(found[1], path)
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(request, found[1], found[3])
        return web.Response(status=404)

    def _info(self, name: str, path: str) -> web.Response:
        if name not in self.repositories:
            return web.Response(status=404, headers={"X-Error-Code": "RepoNotFound"})
        if path.endswith("/revision/gone"):
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        files = self.repositories[name]
        if "/tree/" in path:
            tree = [{"type": "file", "path": file, "size": len(data), "oid": digest(data)} for file, data in files.items()]
            return web.json_response(tree)
        siblings = [entry(file, data) for file, data in files.items()]
        return web.json_response({"id": name, "sha": self.commits.get(name, COMMIT), "siblings": siblings})

    def _file(self, request: web.Request, name: str, file: str) -> web.Response:
        data = self.repositories.get(name, {}).get(file)
        if data is None:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        tag = digest(data)
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": self.commits.get(name, COMMIT)}
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{tag}"', "Accept-Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")):
            first, last = int(asked[1]), int(asked[2] or len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            return web.Response(status=206, body=data[first : last + 1], headers=headers)
        return web.Response(body=data, headers=headers)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    server.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(client, "PAUSE_S", 0.01)
    monkeypatch.setenv("MMRT_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for variable in ("MMRT_CONFIG", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny checkpoint."""
    path = tmp_path_factory.mktemp("hub") / "qwen3"
    make_checkpoint("tiny", path, "qwen3")
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}
