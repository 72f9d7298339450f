"""``mmrt up -d``: the foreground process returns when the run is ready, or says why it never will be."""

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mmrt.runtime.supervisor.control import DownRequest

if TYPE_CHECKING:
    from ..runtime.supervisor.conftest import ToyRun


@pytest.fixture
def detached(toy: "ToyRun") -> "ToyRun":
    toy.environment["TOY_DETACH"] = "1"
    return toy


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[int]:
    """A descriptor that holds a lock, and that programs inherit: as a shell's `flock 9; mmrt up -d` has one."""
    fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(fd, True)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield fd
    os.close(fd)


def is_locked(path: Path) -> bool:
    with path.open() as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def holders_of(path: Path, pids: set[int]) -> set[int]:
    return {pid for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if os.path.realpath(fd) == str(path)}


def session_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])


def test_it_returns_when_ready_and_the_run_goes_on(detached: "ToyRun") -> None:
    detached.start("memory", "decode")
    assert detached.end() == 0
    assert detached.events[-1]["kind"] == "ready"
    report = detached.report()
    assert report.ready and report.supervisor_pid is not None
    sessions = {session_of(actor.pid) for actor in report.actors if actor.pid} | {session_of(report.supervisor_pid)}
    assert len(sessions) == 1, "one session for the whole run: niceness counts within one"
    assert session_of(os.getpid()) not in sessions
    assert os.readlink(f"/proc/{report.supervisor_pid}/cwd") == "/"
    assert os.readlink(f"/proc/{report.supervisor_pid}/fd/0") == "/dev/null"
    os.kill(report.supervisor_pid, signal.SIGHUP)
    assert detached.report().ready, "a daemon has no terminal to lose"
    detached.call(DownRequest())
    detached.wait_until_gone()
    assert not detached.run.exists()


@pytest.mark.parametrize("zygote", ["", "mmrt.tests.runtime.supervisor.toy_actor:main"])
def test_a_lock_of_the_caller_is_free_when_the_caller_has_gone(detached: "ToyRun", lock: int, tmp_path: Path, zygote: str) -> None:
    detached.inherited = (lock,)
    detached.environment |= {"TOY_ENTRY": zygote} if zygote else {}
    detached.start("memory", "decode")
    assert detached.end() == 0
    os.dup2(0, lock)  # the caller's own end of it has gone
    assert not is_locked(tmp_path / "lock")
    detached.call(DownRequest())
    detached.wait_until_gone()


def test_actors_inherit_nothing_of_the_caller(toy: "ToyRun", lock: int, tmp_path: Path) -> None:
    toy.inherited = (lock,)
    toy.start("memory", "decode")
    toy.wait_for("ready")
    assert holders_of(tmp_path / "lock", toy.pids()) == set()
    toy.call(DownRequest())
    assert toy.end() == 0


def test_a_run_that_fails_says_why(detached: "ToyRun") -> None:
    detached.behave("decode", "crash")
    detached.start("memory", "decode", restart_limit=2)
    assert detached.end() == 1
    tail, failed = detached.events[-2:]
    assert (tail["kind"], tail["actor"], tail["lines"]) == ("lines", "decode", ["decode begins", "Traceback: the toy is broken"])
    assert failed["reason"].startswith("decode failed: exit status 1; 2 failures")
    detached.wait_until_gone()
    assert not detached.run.exists()


def test_a_run_that_is_refused_says_why(detached: "ToyRun") -> None:
    other = detached.beside()
    other.environment = {}
    other.start("memory")
    other.wait_for("ready")
    detached.start("memory")
    assert detached.end() == 1
    assert "a run is already up in" in detached.events[-1]["reason"]
    other.call(DownRequest())
    other.close()


def test_an_interrupt_while_it_starts_ends_the_run(detached: "ToyRun") -> None:
    detached.behave("decode", "mute")
    detached.start("memory", "decode")
    detached.wait_for_state("memory", "active")
    assert detached.process is not None
    detached.process.send_signal(signal.SIGINT)
    assert detached.end() == 130
    detached.wait_until_gone()
    assert not detached.run.exists()
