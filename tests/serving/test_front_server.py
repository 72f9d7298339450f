"""The process of a front: how it ends, and what it leaves."""

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mmrt.runtime.errors import ConfigError, RunError
from mmrt.runtime.process.run import RunInfo, create_run, running
from mmrt.runtime.supervisor.ask_key import server_key
from mmrt.runtime.supervisor.ask_supervisor import ask
from mmrt.runtime.supervisor.control import DownRequest
from mmrt.serving import fleet, server
from mmrt.serving.card import Card
from mmrt.serving.left_runs import mark_of, runs_beside
from mmrt.serving.models_file import ServedModel, load_models
from mmrt.serving.server import FrontServer, FrontSetup
from mmrt.tests.serving.conftest import Run


class Quiet:
    """A reporter."""

    def __init__(self) -> None:
        self.is_ready = asyncio.Event()

    def message(self, text: str) -> None:
        pass

    def ready(self, endpoint: str, page: str, seconds: float) -> None:
        self.is_ready.set()


class Draining(Run):
    """Ends at once only if it is told to."""

    drains: list[float | None] = []
    is_asked = asyncio.Event()

    async def end(self, drain_s: float | None = None) -> None:
        self.drains.append(drain_s)
        self.is_asked.set()
        if drain_s == 0.0:
            await self.die()
        await self.ended()


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FrontSetup]:
    async def look_at(model: ServedModel, memory_bytes: int) -> Card:
        return Card(family="qwen3", needs_bytes=1 << 20)

    monkeypatch.setattr(fleet, "ModelRun", Draining)
    monkeypatch.setattr(fleet, "look_at", look_at)
    monkeypatch.setattr(fleet, "TICK_S", 0.01)
    file = tmp_path / "models.toml"
    file.write_text('[server]\nport = 0\n[front]\nmemory = "1 GiB"\n[[model]]\nname = "a"\npinned = true\n')
    handlers = logging.root.handlers[:]
    yield FrontSetup(path=tmp_path / "front", file=load_models(file, {}), log_directory=tmp_path / "logs")
    logging.root.handlers[:] = handlers


def test_a_second_down_may_have_less_patience(setup: FrontSetup) -> None:
    Draining.drains.clear()

    async def test() -> None:
        reporter = Quiet()
        front = asyncio.create_task(FrontServer(setup, reporter).serve())  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            await reporter.is_ready.wait()
            patient = asyncio.create_task(ask(setup.path, DownRequest()))
            await Draining.is_asked.wait()
            await ask(setup.path, DownRequest(0.0))
            await patient
            assert await front == 0 and None in Draining.drains

    asyncio.run(test())
    assert not setup.path.exists()


def test_commands_ask_a_front_for_its_key_which_no_file_has(setup: FrontSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keyed.toml"
    file.write_text((tmp_path / "models.toml").read_text().replace("port = 0\n", 'port = 0\napi_key = "s3cret"\n'))
    setup = msgspec.structs.replace(setup, file=load_models(file, {}))

    async def test() -> None:
        reporter = Quiet()
        front = asyncio.create_task(FrontServer(setup, reporter).serve())  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            await reporter.is_ready.wait()
            info = running(setup.path)
            assert (info.config.server.api_key, await asyncio.to_thread(server_key, setup.path, info)) == ("", "s3cret")
            assert not [one for one in setup.path.rglob("*") if one.is_file() and b"s3cret" in one.read_bytes()]
            monkeypatch.setattr(server, "is_confined", lambda pid: pid == os.getpid())
            with pytest.raises(RunError, match="is the front of several models"):
                await asyncio.to_thread(server_key, setup.path, info)
            await ask(setup.path, DownRequest(0.0))
            assert await front == 0

    asyncio.run(test())


def test_a_front_that_cannot_serve_leaves_nothing(setup: FrontSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("server.tls_cert: is gone")

    monkeypatch.setattr(server, "Certificate", refuse)
    with pytest.raises(ConfigError, match="is gone"):
        asyncio.run(FrontServer(setup, Quiet()).serve())  # type: ignore[arg-type]
    assert not setup.path.exists()


def test_a_front_knows_its_runs_from_those_of_a_front_whose_name_begins_alike(tmp_path: Path) -> None:
    mine, others = tmp_path / "a.m", tmp_path / "a.b.m"
    with create_run(mine, RunInfo(front=mark_of("a", "1"))), create_run(others, RunInfo(front=mark_of("a.b", "1"))):
        assert runs_beside(tmp_path / "a") == [mine] and runs_beside(tmp_path / "a.b") == [others]
