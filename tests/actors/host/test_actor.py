"""What every actor process has: waiting that a signal ends once, its number, and what it says while it is debugged."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from mmrt.actors.host.actor import ADOPTING_S, Actor
from mmrt.actors.host.cores import SharedCores
from mmrt.actors.host.free_turn import FreeTurn
from mmrt.runtime.bus.transport import ActorSocket
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.process.crash_cause import ExitNote, write_exit_note
from mmrt.runtime.process.notify import Notifier, NotifyListener
from mmrt.runtime.stage_table import InstanceId
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.shm.role_lock import RoleLock, next_generation
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
        early = bare_actor(run, next_generation(run, "video"))
        other = next_generation(run, "video")
        table.writer("video", other).set_state(ActorState.ACTIVE)
        early._take_over(table)
        assert early.generation == early.notifier.generation == table.read("video").generation == other + 1


def test_who_is_debugged_says_so_in_its_words(tmp_path: Path) -> None:
    """Its interpreter may take longer to end than the successor waits for the supervisor's word."""
    with RunDirectory.create(tmp_path / "run", {}) as run:
        table = ActorTable.create(run, ["video"])
        for number, session in enumerate((None, SimpleNamespace()), 1):
            actor = bare_actor(run, number)
            actor.session = session  # type: ignore[assignment]
            actor._take_over(table)
            assert table.read("video").debugged == (session is not None)


def test_one_that_is_confined_removes_nothing(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", {}) as run:
        actor = bare_actor(run, 1)
        actor._listening = None
        actor.hold_connections()
        assert actor.is_confined and (run.path / "video.bus").is_socket()
        actor.status, actor._flight, actor._bus, actor._terminated = None, None, None, False
        actor.role = SimpleNamespace(release=lambda: None)  # type: ignore[assignment]
        actor.close()
        assert (tmp_path / "run").exists()
        actor._listening.socket.close()


def test_one_that_ends_in_the_midst_of_work_computes_no_more(tmp_path: Path) -> None:
    """Before another may take over: its role lock is what this one releases."""
    with RunDirectory.create(tmp_path / "run", {}) as run:
        table = ActorTable.create(run, ["video", "decode"])
        actor, look, seen = bare_actor(run, 1), table.lookout(["video"]), list[int]()
        status = actor.status = table.writer("video", 1)
        actor.turn = SharedCores(actor.config, actor.name, table, 2, status.set_computing, torch_too=False)
        actor._flight, actor._bus, actor._terminated, actor.is_confined = None, None, False, True
        actor.role = SimpleNamespace(release=lambda: seen.append(look()))  # type: ignore[assignment]
        actor.turn.work()
        assert look() == 1
        actor.close()
        assert seen == [0]


def test_who_goes_on_with_answers_waits_for_word_of_how_the_last_one_ended(tmp_path: Path) -> None:
    """A warm one is there before the supervisor has noted it."""
    with RunDirectory.create(tmp_path / "run", {}) as run:
        table = ActorTable.create(run, ["video"])
        table.writer("video", 1).set_state(ActorState.ACTIVE)
        note = ExitNote(os.getpid(), -signal.SIGSEGV)
        writing = threading.Timer(0.1, write_exit_note, (run.path, "video", note))
        writing.start()
        actor = bare_actor(run, 2)
        actor.keeper_fd, actor._terminated = 3, False
        actor.lifeline = SimpleNamespace(fd=4, is_gone=lambda: False)  # type: ignore[assignment]
        actor._take_over(table)
        assert actor.last_exit == note
        writing.join()


def test_who_waits_for_the_role_has_it_as_soon_as_its_holder_is_gone(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", {}) as run:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(writing, b"!" * RoleLock(run, "video").try_acquire())
            time.sleep(60)
        os.read(reading, 1)
        role, began_s = RoleLock(run, "video"), time.monotonic()
        assert not role.try_acquire()
        role.wait_for_holder(0.2)
        assert time.monotonic() - began_s > 0.15
        killing = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
        killing.start()
        began_s = time.monotonic()
        while not role.try_acquire():
            role.wait_for_holder(60.0)
        assert time.monotonic() - began_s < 30
        os.waitpid(pid, 0)
        role.release()


def test_the_supervisor_learns_of_it_once_all_is_taken_over(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", {}) as run:
        listener = NotifyListener(run.path / "notify")
        actor = bare_actor(run, 1)
        actor.notifier = Notifier(str(listener.path), "video", 1)
        actor.status = ActorTable.create(run, ["video"]).writer("video", 1)
        actor._flight, actor._started_ns, actor._standby_ns = FlightRecorder.create(run, "video", 64).writer(1), 0, 0
        actor.serving(adopts=True)
        actor._say_active(time.monotonic())
        assert listener.drain() == [] and not actor.has_adopted
        actor._say_active(time.monotonic() + ADOPTING_S)
        assert [said.active for said in listener.drain()] == [True], "the controller may be away for long"
        actor.adopted()
        assert [said.active for said in listener.drain()] == [True] and actor.has_adopted
        actor.notifier.close()
        listener.close()


def bare_actor(run: RunDirectory, generation: int) -> Actor:
    """As much of one as takes over the words of its predecessor, without a supervisor."""
    actor = Actor.__new__(Actor)
    actor.name, actor.run, actor.config = InstanceId("video"), run, RuntimeConfig()
    actor.lifeline = SimpleNamespace(fd=None)  # type: ignore[assignment]
    actor.generation, actor.is_confined, actor.session, actor.keeper_fd = generation, False, None, None
    actor.store = None
    actor.notifier, actor.turn = Notifier(None, "video", generation), FreeTurn()
    return actor
