"""Actors that share a process: what they say as one, and that each can end it."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mmrt.actors.host.shared_process import ActorNotifier, ProcessNotifier
from mmrt.runtime.process.crash_cause import ExitNote, crashed_in, read_exit_note
from mmrt.runtime.process.notify import Notification, Notifier, NotifyListener
from mmrt.shm.run_directory import NOTES
from mmrt.tests.settings import also_slow

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[NotifyListener]:
    (tmp_path / NOTES).mkdir()
    listener = NotifyListener(tmp_path / "notify")
    yield listener
    listener.close()


@pytest.fixture
def start(tmp_path: Path, listener: NotifyListener) -> Iterator[Start]:
    """Start ``together.py``; whatever is left at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(behaviour: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "mmrt.tests.actors.host.together", behaviour, str(tmp_path / "notify")]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def heard(listener: NotifyListener, until: Callable[[Notification], bool]) -> list[Notification]:
    """What was said, up to the first that is ``until``."""
    found: list[Notification] = []
    while not (found and until(found[-1])):
        assert select.select([listener.fd], [], [], 30)[0], found
        found += listener.drain()
    return found


def turned(process: "subprocess.Popen[str]") -> None:
    """Wait until the process has looked at its actors for longer than its watchdog waits."""
    assert process.stdout is not None and process.stdout.readline() == "turned\n"


def test_they_are_ready_and_serve_when_all_do(listener: NotifyListener, start: Start) -> None:
    process = start("late")
    said = heard(listener, lambda one: one.active)
    assert {one.pid for one in said} == {process.pid} and {one.generation for one in said} == {4}
    assert not next(one for one in said if one.ready).active, "the late one is warm, and does not serve"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert sorted(out.splitlines()) == ["decode ends", "encoder ends", "prefill ends"]


def test_each_is_called_and_as_nice_as_itself(listener: NotifyListener, start: Start) -> None:
    process = start("late")
    heard(listener, lambda one: one.active)
    tasks = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
    nice = {Path(f"/proc/{process.pid}/task/{task}/comm").read_text().strip(): os.getpriority(os.PRIO_PROCESS, task) for task in tasks}
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    for name, wanted in (("encoder", 7), ("prefill", 2), ("decode", 0)):
        assert nice[f"mmrt-{name}"] == min(ours + wanted, 19)


def test_the_process_ends_with_the_one_that_fails(listener: NotifyListener, start: Start) -> None:
    process = start("fail")
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 7 and out == ""
    assert "ERROR encoder: mmrt.actors.host.shared_process: encoder has failed: the process that it shares ends" in errors


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [("fail", True), ("hang", True), ("lose", False), *also_slow(("raise", True), ("exit", True), ("cold", False))],
)
def test_the_others_are_told_that_it_was_not_they_where_that_is_known(start: Start, tmp_path: Path, behaviour: str, told: bool) -> None:
    """A device that is lost is lost to all of them, and whoever waits for it next sees that first; those that have not taken over yet
    leave alone what is noted of the ones before them."""
    process = start(behaviour)
    process.communicate(timeout=30)
    assert process.returncode == {"fail": 7, "cold": 7, "hang": -signal.SIGKILL}.get(behaviour, 1)
    notes = [read_exit_note(tmp_path, name, process.pid) for name in ("prefill", "decode")]
    assert notes == [ExitNote(process.pid, process.returncode, other_actor=True) if told else None] * 2
    own = ExitNote(process.pid, -signal.SIGKILL, hang=True) if behaviour == "hang" else None
    assert read_exit_note(tmp_path, "encoder", process.pid) == own, "else that is for the supervisor to say"


def test_a_crash_names_the_actor_that_it_came_from(start: Start) -> None:
    """Python prints the crash of a thread that does not hold the interpreter's lock."""
    process = start("crash")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGSEGV
    assert crashed_in(["decode", "encoder", "prefill"], errors.splitlines()) == ["encoder"]


def test_one_that_hangs_outside_of_a_step_ends_it(listener: NotifyListener, start: Start) -> None:
    process = start("hang")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert "encoder hangs: no sign of life for 1 s" in errors


def test_a_step_may_take_its_time(listener: NotifyListener, start: Start) -> None:
    process = start("step")
    heard(listener, lambda one: one.active)
    turned(process)
    assert process.poll() is None and any(one.watchdog for one in listener.drain())


def test_with_a_step_that_is_overdue_it_is_silent(listener: NotifyListener, start: Start) -> None:
    """As it would be alone: where deadlines are not watched, systemd's watchdog ends it."""
    process = start("overdue")
    heard(listener, lambda one: one.active)
    listener.drain()
    turned(process)
    assert process.poll() is None and listener.drain() == []


def test_a_voice_sends_nothing_by_itself(listener: NotifyListener, tmp_path: Path) -> None:
    process_notifier = ProcessNotifier(Notifier(str(tmp_path / "notify"), "decode"), ["prefill", "decode"])
    voice = ActorNotifier(process_notifier, "prefill")
    voice.ready()
    voice.watchdog()
    voice.active()
    voice.close()
    assert listener.drain() == []
    process_notifier.notifier.close()
