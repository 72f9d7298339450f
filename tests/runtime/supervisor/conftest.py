"""``toy``: a real supervisor over toy actors (toy_supervisor.py, toy_actor.py), and what it has reported."""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrt.runtime.supervisor.control import Reply, Request, RestartReply, RestartRequest, StatusReply, StatusRequest, call
from mmrt.runtime.supervisor.run_report import ActorReport, RunReport

HERE = Path(__file__).parent
ACTORS = ("memory", "controller", "gateway", "decode")
FAST = {"backoff_s": 0.01, "backoff_max_s": 0.05, "drain_s": 0.5, "ready_timeout_s": 10.0, "watchdog_s": 10.0}
TIMEOUT_S = 40.0


class ToyRun:
    """One supervisor process of toy actors, and what it has reported."""

    def __init__(self, root: Path) -> None:
        self.run = root / "run"
        self.toys = root / "toys"
        self.logs = root / "logs"
        self.toys.mkdir()
        self.events: list[dict[str, Any]] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}
        self.inherited: tuple[int, ...] = ()  # descriptors that the supervisor is given
        self._rest = b""

    def behave(self, actor: str, *words: str) -> None:
        (self.toys / actor).write_text(" ".join(words))

    def start(self, *actors: str, **settings: float) -> None:
        command = [sys.executable, str(HERE / "toy_supervisor.py"), str(self.run), str(self.toys), str(self.logs)]
        command += [json.dumps({**FAST, **settings}), *(actors or ACTORS)]
        environment = {**os.environ, **self.environment}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, start_new_session=True, env=environment, pass_fds=self.inherited
        )

    def wait_for(self, kind: str, test: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        """The first event of this kind that passes, among those reported already and those to come."""
        deadline = time.monotonic() + TIMEOUT_S
        seen = 0
        while True:
            for event in self.events[seen:]:
                if event["kind"] == kind and test(event):
                    return event
            seen = len(self.events)
            if not self._read(deadline):
                raise AssertionError(f"no {kind} in {self.events}")

    def _read(self, deadline: float) -> bool:
        assert self.process is not None and self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
            return False
        data = os.read(self.process.stdout.fileno(), 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.events += [json.loads(line) for line in lines]
        return bool(data)

    def wait_for_state(self, actor: str, state: str) -> None:
        self.wait_for("progress", lambda event: event["actor"] == actor and event["state"] == state)

    def wait_for_states(self, actor: str, *states: str) -> None:
        """One after the other; others may come in between."""
        deadline = time.monotonic() + TIMEOUT_S
        left, seen = list(states), 0
        while left:
            for event in self.events[seen:]:
                if left and (event["kind"], event.get("actor"), event.get("state")) == ("progress", actor, left[0]):
                    del left[0]
            seen = len(self.events)
            if left and not self._read(deadline):
                raise AssertionError(f"no {left} of {actor} in {self.events}")

    def forget(self) -> None:
        """Take what has been reported so far out of what ``wait_for`` finds."""
        self.events.clear()

    def end(self) -> int:
        """The supervisor's exit status, after the rest of its events."""
        assert self.process is not None
        while self._read(time.monotonic() + TIMEOUT_S):
            pass
        return self.process.wait(TIMEOUT_S)

    def call(self, request: Request) -> Reply:
        return call(self.run, request, timeout_s=TIMEOUT_S)

    def report(self) -> RunReport:
        reply = self.call(StatusRequest())
        assert isinstance(reply, StatusReply)
        return reply.report

    def actor(self, name: str) -> ActorReport:
        return next(actor for actor in self.report().actors if actor.name == name)

    def pid(self, name: str) -> int:
        pid = self.actor(name).pid
        assert pid is not None
        return pid

    def restart(self, name: str) -> RestartReply:
        reply = self.call(RestartRequest(name))
        assert isinstance(reply, RestartReply)
        return reply

    def history(self) -> list[str]:
        """What the actors themselves have recorded, without their pids."""
        path = self.toys / "events"
        return [line.rpartition(" ")[0] for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self) -> set[int]:
        """Every process that any actor of this run ever was."""
        return {int(line.rpartition(" ")[2]) for line in (self.toys / "events").read_text().splitlines()}

    def wait_until_gone(self) -> None:
        """Wait for every actor process, none of them our child."""
        for pid in self.pids():
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            assert select.select([pidfd], [], [], TIMEOUT_S)[0], f"process {pid} is still there"
            os.close(pidfd)

    def beside(self) -> "ToyRun":
        """Another run in the same directories."""
        other = ToyRun.__new__(ToyRun)
        other.__dict__.update(self.__dict__, events=[], _rest=b"", process=None)
        return other

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def assert_nothing_left(self) -> None:
        assert not self.run.exists()
        assert [pid for pid in self.pids() if _is_running(pid)] == []


def _is_running(pid: int) -> bool:
    """Whether the process is there and not only waits to be reaped by init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def toy() -> Iterator[ToyRun]:
    """On a tmpfs, and short: the path of a socket has 107 bytes at most."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mmrt-toy-", ignore_cleanup_errors=True) as root:
        run = ToyRun(Path(root))
        try:
            yield run
        finally:
            run.close()
            shutil.rmtree(root, ignore_errors=True)
