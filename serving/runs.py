"""The run of one model: started as ``mmrt up`` in a run directory of its own, found again, watched and ended. Runs in the front's loop.

A run does not belong to the front's processes: it goes on when the front dies. ``run.json`` says of which configuration it is.
"""

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..runtime.config.runtime_config import to_toml
from ..runtime.errors import RunError
from ..runtime.process.lifeline import sweep
from ..runtime.process.run import read_run_info
from ..runtime.supervisor.ask_supervisor import ask
from ..runtime.supervisor.control import DownRequest, StatusReply, StatusRequest
from ..shm.controller_stats import ControllerStats
from ..shm.errors import MissingError, ShmError
from ..shm.run_directory import RunDirectory
from .left_runs import mark_of
from .models_file import ServedModel

POLL_S = 0.1
_NOT_FOR_RUNS = ("MMRT_CONFIG", "MMRT_API_KEY", "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "MMRT_LISTEN_FDS")
_READY = ("ready", "degraded")


class ModelRun:
    """A run that may be there. ``url``: of its gateway, once it is ready; ``pid``: of its supervisor."""

    def __init__(self, model: ServedModel, path: Path, environ: Mapping[str, str]) -> None:
        self.path = path
        self.url = ""
        self.pid = 0
        self._model = model
        self._mark = mark_of(path.name.removesuffix(f".{model.run_suffix}"), model.digest)
        self._environ = {name: value for name, value in environ.items() if name not in _NOT_FOR_RUNS} | {"MMRT_RUN_DIR": str(path)}
        self._ended: asyncio.Future[None] | None = None
        self._pidfd = -1

    def is_there(self) -> bool:
        """Return whether some run is up in the directory."""
        return RunDirectory.is_alive(self.path)

    def is_mine(self) -> bool:
        """Return whether it is of this model, as configured now. Raises: RunError if no front has started it."""
        try:
            with RunDirectory.attach(self.path) as run:
                front = read_run_info(run).front
        except MissingError:
            return False
        if not front:
            raise RunError(f"{self.path} has a run that no front has started: end it (MMRT_RUN_DIR={self.path} mmrt down)")
        return front == self._mark

    async def start(self) -> list[str]:
        """Start it and wait until it is ready. Returns what ``mmrt up`` has printed. Raises: RunError with the reason."""
        self.pid = 0
        command = [sys.executable, "-P", "-m", "mmrt", "up", "--detach", "--config", "/dev/stdin", "--of-front", self._mark]
        pipe, stdout = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        with configuration_file(self._model) as file:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=file, stdout=pipe, stderr=stdout, env=self._environ, start_new_session=True
            )
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            process.send_signal(signal.SIGINT)  # it ends the run
            await process.communicate()
            raise
        lines = output.decode(errors="replace").splitlines()
        if process.returncode:
            raise RunError(_reason(lines) or f"mmrt up ended with status {process.returncode}")
        await self._follow()
        return lines

    async def find(self) -> bool:
        """Wait until the run that is there is ready; return False if it ends before."""
        try:
            await self._follow()
        except RunError:
            return False
        while not self.has_ended:
            try:
                reply = await ask(self.path, StatusRequest())
            except RunError:
                await asyncio.sleep(POLL_S)
                continue
            assert isinstance(reply, StatusReply)
            if reply.report.state in _READY:
                return True
            await asyncio.sleep(POLL_S)
        return False

    @property
    def has_ended(self) -> bool:
        """Whether its supervisor has, even if the loop has not noticed yet."""
        if self._ended is None or self._ended.done():
            return True
        look = select.poll()
        look.register(self._pidfd, select.POLLIN)
        return bool(look.poll(0))

    def num_requests(self) -> int:
        """Return how many requests it works on, those in the background included; 0 if it is not to be looked at. Waits for nothing."""
        try:
            with RunDirectory.attach(self.path, timeout_s=0.0) as run, contextlib.closing(ControllerStats.attach(run)) as stats:
                counts = stats.read()
        except (ShmError, OSError):
            return 0
        return counts.waiting + counts.preparing + counts.running

    async def ended(self) -> None:
        """Wait for the end of its supervisor."""
        if self._ended is not None:
            await asyncio.shield(self._ended)

    async def end(self, drain_s: float | None = None) -> None:
        """End it; its requests get ``drain_s`` seconds to finish (None: as configured). Returns when nothing is left of it."""
        try:
            await ask(self.path, DownRequest(drain_s))
        except RunError:
            pass  # it ends already, or has ended
        await self.gone()

    async def gone(self) -> None:
        """Wait until no process of the run is left, and remove its remains."""
        await self.ended()
        while True:
            if not await asyncio.to_thread(RunDirectory.is_alive, self.path):
                break
            await asyncio.sleep(POLL_S)
        await asyncio.to_thread(sweep, str(self.path))

    async def _follow(self) -> None:
        """Learn its address, and notice the end of its supervisor. Raises: RunError if it is gone."""
        loop = asyncio.get_running_loop()
        try:
            info, self.url = await asyncio.to_thread(self._read)
            self.pid = int(info["creator_pid"])
            self._pidfd = os.pidfd_open(self.pid)
        except (MissingError, ProcessLookupError):
            raise RunError("the run ended at once") from None
        self._ended = loop.create_future()
        loop.add_reader(self._pidfd, self._on_end)

    def _read(self) -> tuple[dict[str, Any], str]:
        with RunDirectory.attach(self.path) as run:
            return run.info, read_run_info(run).endpoint

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        assert self._ended is not None
        self._ended.set_result(None)


@contextlib.contextmanager
def configuration_file(model: ServedModel) -> Iterator[int]:
    """The configuration of a model's run as a file without a name, which may hold keys: a child has it as /dev/stdin."""
    file = os.memfd_create("mmrt-configuration")
    try:
        os.write(file, to_toml(model.config).encode())
        yield file
    finally:
        os.close(file)


def _reason(lines: list[str]) -> str:
    """Return why ``mmrt up`` has failed, from what it has printed."""
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return errors[-1] if errors else "; ".join(lines[-2:])
