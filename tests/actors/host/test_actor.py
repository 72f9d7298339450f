"""What every actor process has: waiting that a signal ends once, and a last word of one that was debugged."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

from mmrt.actors.host.actor import Actor
from mmrt.runtime.bus.transport import ActorSocket
from mmrt.runtime.config import RuntimeConfig
from mmrt.runtime.process.crash_cause import ExitNote, read_exit_note
from mmrt.runtime.process.notify import Notifier
from mmrt.shm.role_lock import next_generation
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.status import ActorState, ActorTable

WAIT_S = 0.2


def test_a_signal_ends_one_wait_and_not_all_that_follow(tmp_path: Path) -> None:
    """Ctrl-C in a debugger, for example: the actor must not spin for the rest of its life."""
    actor = Actor.__new__(Actor)
    actor._signalled, signalling = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    actor._hello_at_s = 1.0
    actor.lifeline = SimpleNamespace(fd=None)  # type: ignore[assignment]
    actor._bus = ActorSocket(tmp_path, "video", 1)
    try:
        os.write(signalling, b"\x02\x02")
        began_s = time.monotonic()
        actor.wait(60.0)
        assert time.monotonic() - began_s < 30.0
        began_s = time.monotonic()
        actor.wait(WAIT_S)
        assert time.monotonic() - began_s > WAIT_S / 2
    finally:
        actor._bus.close()
        os.close(actor._signalled)
        os.close(signalling)


def test_who_acts_has_a_higher_number_than_all_who_acted(tmp_path: Path) -> None:
    """One that is in pdb before ``main`` gets its number long before it acts; the controller believes the highest that it has seen."""
    with RunDirectory.create(tmp_path / "run", {}) as run:
        table = ActorTable.create(run, ["video"])
        early = Actor.__new__(Actor)
        early.name, early.run, early.config = "video", run, RuntimeConfig()
        early.lifeline = SimpleNamespace(fd=None)  # type: ignore[assignment]
        early.generation = next_generation(run, "video")
        early.notifier = Notifier(None, "video", early.generation)
        other = next_generation(run, "video")
        table.writer("video", other).set_state(ActorState.ACTIVE)
        early._take_over(table)
        assert early.generation == early.notifier.generation == table.read("video").generation == other + 1


def test_who_was_debugged_says_so_before_it_gives_the_role_back(tmp_path: Path) -> None:
    """Its interpreter may take longer to end than the successor waits for the supervisor's word."""
    notes: list[ExitNote | None] = []
    actor = Actor.__new__(Actor)
    actor.name, actor._flight, actor._bus, actor._terminated = "video", None, None, False
    actor.run = SimpleNamespace(path=tmp_path)  # type: ignore[assignment]
    actor.session = SimpleNamespace()  # type: ignore[assignment]
    actor.status = SimpleNamespace(set_state=lambda _: None)  # type: ignore[assignment]
    actor.role = SimpleNamespace(release=lambda: notes.append(read_exit_note(tmp_path, "video", os.getpid())))  # type: ignore[assignment]
    actor.notifier = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    actor.lifeline = SimpleNamespace(fd=0, is_gone=lambda: False)  # type: ignore[assignment]
    actor.close()
    assert notes == [ExitNote(os.getpid(), 0, debugger=True)]
