"""``mmrt up -d``: the foreground process returns when the run is ready, or says why it never will be."""

import os
import signal
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
