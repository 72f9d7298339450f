"""Common to every actor process: its run, configuration, generation, role lock, status words, bus, and orderly ways to end.

An actor's module has ``main(actor)``: load and map everything (standby), ``become_active`` (wait for the role lock, which proves every
older generation gone), then work until ``ending``. ``process`` calls it.
"""

import asyncio
import ctypes
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...models.architecture import ModelConfig
from ...models.config import load_model_config
from ...runtime.bus.messages import Hello, ToActor, ToController, Welcome
from ...runtime.bus.transport import ActorSocket, Listening, listen_for_controller
from ...runtime.config.runtime_config import RuntimeConfig
from ...runtime.environment import read_environment
from ...runtime.observe.dumps import save_crash
from ...runtime.observe.flight import Kind
from ...runtime.pools import kv_pool
from ...runtime.process.crash_cause import Death, ExitNote, is_crash, judge, oom_kills, outlive, read_exit_note, recent_crashes
from ...runtime.process.descriptor_store import DescriptorStore
from ...runtime.process.lifeline import Lifeline
from ...runtime.process.memory_layout import MemoryLayout, read_layout
from ...runtime.process.notify import Notifier
from ...runtime.process.processors import num_shared_cores
from ...runtime.process.run import RunInfo, read_run_info, with_key
from ...runtime.stage_table import STAGES, InstanceId, stage_of
from ...shm.flight_recorder import FlightRecorder, FlightWriter
from ...shm.role_lock import RoleLock, next_generation
from ...shm.run_directory import RunDirectory
from ...shm.status import ActorState, ActorStatus, ActorTable
from .free_turn import FreeTurn
from .loaded_code import loaded_code
from .turns import open_turn

if TYPE_CHECKING:  # pdb takes its time to import, and only terminals need it
    from ...runtime.observe.debugger import DebugSession

log = logging.getLogger(__name__)

PR_SET_NAME = 15
MAX_NAME_BYTES = 15
POLL_S = 0.01
GRACE_S = 0.05  # for what a dead process's device may still do once its files are closed; not measured
NOTE_S, NOTE_POLL_S = 0.5, 0.001  # how long a standby waits for word of how the previous process ended, and how often it looks
HELLO_S = 1.0
ADOPTING_S = 60.0  # that a supervisor may take for a start: without a controller nothing can be adopted
LAST_S = 900.0  # how long ``memory`` waits for the end of processes that may not remove the run directory


class Ending(Exception):
    """The actor was told to end while it waited for something."""


class Actor:
    """One generation of one actor. Use it from the actor's own thread only, except ``end`` and ``wake``."""

    def __init__(
        self,
        name: InstanceId,
        run: RunDirectory,
        lifeline: Lifeline,
        notifier_address: str | None,
        listen_fds: Sequence[int] = (),
        keeper_fd: int | None = None,
        answers_fd: int | None = None,
        store: DescriptorStore | None = None,
        key: Callable[[RunInfo], str] = lambda _: "",
    ) -> None:
        self.name = name
        self.listen_fds = listen_fds  # the gateway's: sockets that outlive it
        self.keeper_fd = keeper_fd  # the gateway's: to the process that keeps its connections, if one does
        self.store = store  # the gateway's without a supervisor: has what outlives it
        self.answers_fd = answers_fd  # the gateway's: of the records of answers that outlive it
        self.has_adopted = True  # what the process before had under way, as far as this one goes on with it
        self.run = run
        info = read_run_info(run)
        if STAGES[stage_of(name)].listens:
            info = with_key(info, key(info))
        self.config: RuntimeConfig = info.config
        self.model_path = Path(info.model_path)
        model = self.config.model
        self.model: ModelConfig = load_model_config(
            self.model_path, model.dtype, model.max_context, self.config.memory.kv_dtype, model.weights
        )
        self.generation = next_generation(run, name)
        self.notifier = Notifier(notifier_address, name, self.generation)
        self.lifeline = lifeline
        self.role = RoleLock(run, name)
        self.status: ActorStatus | None = None
        self.session: DebugSession | None = None
        self.death: Death | None = None  # of the previous process, in the middle of a step; known once active
        self.failure: BaseException | None = None  # that ended ``main``, and nothing explained
        self.last_exit: ExitNote | None = None  # of the previous process, if one was left; known once active
        self.follows_a_crash = False  # the previous process ended of its work, in a step or not; known once active
        self.is_confined = False  # it can connect to nothing, and open nothing in the run directory, any more
        self.follows_a_death = False  # the previous process did not end in order, whatever its work; known once active
        self.turn = FreeTurn()  # around a plan or step
        self._flight: FlightWriter | None = None
        self._started_ns = time.monotonic_ns()
        self._standby_ns = 0
        self._code = 0
        self._bus: ActorSocket | None = None
        self._listening: Listening | None = None
        self._terminated = False
        self._hello_at_s = 0.0
        self._watchdog_at_s = 0.0
        self._say_active_at_s = math.inf
        self._signalled, self._signalling = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def catch_signals(self) -> None:
        """End at SIGTERM. For an actor in the main thread."""
        signal.signal(signal.SIGTERM, lambda *_: self.end())
        # A signal alone does not end a poll (PEP 475): its byte in this pipe does.
        signal.set_wakeup_fd(self._signalling, warn_on_full_buffer=False)

    @property
    def kv_pool(self) -> str:
        """Return the name of the KV pool that it works in."""
        return kv_pool(self.config.kv_device(self.name))

    @property
    def keeps_connections(self) -> bool:
        """Return whether others can go on with its clients' connections when it has died. Only the gateway's."""
        return self.keeper_fd is not None or self.store is not None

    @property
    def shares_process(self) -> bool:
        """Return whether it shares its process and device with other actors."""
        return any(len(together) > 1 and self.name in together for together in self.config.processes.values())

    @property
    def ending(self) -> bool:
        """True once the actor was told to end or its supervisor is gone. Checked between steps."""
        return self._terminated or self.lifeline.is_gone()

    def end(self) -> None:
        """Tell the actor to end, from any thread of this process."""
        self._terminated = True
        self.wake()

    def wake(self) -> None:
        """End the actor's current wait, or else its next one, from any thread."""
        with suppress(BlockingIOError):
            os.write(self._signalling, b"\0")

    def wait_for_layout(self) -> MemoryLayout:
        """Wait until ``memory`` has made every segment. Raises Ending."""
        while (layout := read_layout(self.run.path)) is None:
            self.pause(POLL_S)
        return layout

    def open_turn(self, finish: Callable[[], object]) -> None:
        """Open its ``turn``, once ``memory`` has made every segment. ``finish`` waits for all that it has launched."""
        self.turn = open_turn(self.run, self.config, self.name, self._wait_for_turn, self.check_ending, finish)
        self.share_cores()

    def share_cores(self) -> None:
        """Let its ``turn`` tell others when it computes, where stages compute at once on a CPU, and take cores that they leave idle.

        Torch follows where no bit depends on its threads. Those of a process are of all its actors: there torch has its share.
        """
        if self.config.actors.turns != "off" or self.config.model.on_cuda:
            return
        from .cores import SharedCores  # torch, which only actors that compute import
        from .torch_threads import may_change

        stage, most_threads = STAGES[stage_of(self.name)], self.config.most_threads(self.name)
        torch_too = stage.takes_plans and not self.shares_process and most_threads > self.config.actor(self.name).threads
        if torch_too:
            torch_too = may_change(self.model.dtype, most_threads) if stage.has_device else self.model.dtype == "float32"
        num_cores, table = num_shared_cores(self.config, self.name), ActorTable.attach(self.run)
        says, counts = self._set_computing, self._set_borrowed
        self.turn = SharedCores(self.config, self.name, table, num_cores, says, torch_too=torch_too, count=counts)

    def _set_borrowed(self, borrowed_ns: int) -> None:
        assert self.status is not None, "only the active generation works"
        self.status.set_borrowed(borrowed_ns)

    def _set_computing(self, computes: bool) -> None:
        assert self.status is not None, "only the active generation works"
        self.status.set_computing(computes)

    def _wait_for_turn(self, wait_ns: int) -> None:
        if self.status is not None:
            self.status.postpone(wait_ns)
        self.heartbeat()

    def pause(self, seconds: float) -> None:
        """Sleep a little. Raises Ending when told to end."""
        self.check_ending()
        time.sleep(seconds)

    def check_ending(self) -> None:
        """Raises Ending when told to end."""
        if self.ending:
            raise Ending

    def hold_connections(self) -> None:
        """Make the connections that a confined process needs: it can connect to nothing, and opens nothing in the run directory.

        For the active generation: the controller finds it by its name. The bus's threads begin later, and are as confined as it is.
        """
        self._listening = listen_for_controller(self.run.path, self.name)
        self.notifier.connect()
        self.is_confined = True

    def become_active(self) -> ActorStatus:
        """Report a warm standby, wait for the role lock, and open the status words. Raises Ending.

        Call ``serving`` when this generation does its work from now on.
        """
        self._code = loaded_code()
        self.notifier.ready("standby")
        self._standby_ns = time.monotonic_ns()
        while not self.role.try_acquire():
            self.check_ending()
            self.role.wait_for_holder(POLL_S) if self.keeps_connections else self.pause(POLL_S)
        table = ActorTable.attach(self.run)
        self.status = self._take_over(table)
        self._flight = FlightRecorder.attach(self.run, self.name).writer(self.generation)
        return self.status

    def _take_over(self, table: ActorTable) -> ActorStatus:
        """Read how the previous process died, and take over its words."""
        last, kills = table.read(self.name), oom_kills()
        if last.generation > self.generation:  # another process has acted since this one got its number, say while it was in pdb
            self.generation = self.notifier.generation = next_generation(self.run, self.name)
        note = read_exit_note(self.run.path, self.name, last.pid)
        keeps_answers = self.keeps_connections and last.state is ActorState.ACTIVE  # one of them may have ended it
        if self.lifeline.fd is not None and (last.step_deadline_ns or keeps_answers):
            patient_until_s = time.monotonic() + NOTE_S
            while note is None and time.monotonic() < patient_until_s:
                self.pause(NOTE_POLL_S)
                note = read_exit_note(self.run.path, self.name, last.pid)
        self.last_exit, self.follows_a_crash = note, is_crash(last, note, kills, is_supervised=self.lifeline.fd is not None)
        self.death = judge(last, note, time.monotonic_ns(), kills, is_supervised=self.lifeline.fd is not None)
        self.follows_a_death = self.death is not None or last.state in (ActorState.STARTING, ActorState.ACTIVE)
        if self.follows_a_death and self.config.model.on_cuda and STAGES[stage_of(self.name)].has_device:
            outlive(last.pid, command(self.config.process_of(self.name)), self.pause)
            self.pause(GRACE_S)
        if self.death is not None:
            log.warning("generation %d %s in step %x", last.generation, self.death.reason, self.death.step)
        status = table.writer(self.name, self.generation)
        status.set_inheritance(kills, recent_crashes(last, self.death), last.step_cost_ns)
        if self.session is not None:
            status.set_debugged()
        return status

    def serving(self, *, adopts: bool = False) -> None:
        """Say that this generation serves. ``adopts``: the supervisor learns of it once it has ``adopted`` what the process before had
        under way, or after ``ADOPTING_S``; a standby then starts behind it, which would keep processors from that."""
        assert self.status is not None
        self.status.set_state(ActorState.ACTIVE)
        self.flight.event(Kind.ACTIVE, os.getpid(), self._started_ns, self._standby_ns)
        self.has_adopted = not adopts
        self._say_active_at_s = time.monotonic() + (ADOPTING_S if adopts else 0.0)
        self._say_active(time.monotonic())

    def _say_active(self, now_s: float) -> None:
        if now_s >= self._say_active_at_s:
            self._say_active_at_s = math.inf
            self.notifier.active()

    @property
    def flight(self) -> FlightWriter:
        """The actor's flight recorder, once it is active."""
        assert self._flight is not None, "only the active generation writes"
        return self._flight

    def watch_ending(self, loop: asyncio.AbstractEventLoop, on_ending: Callable[[], None]) -> None:
        """In an asyncio actor: call ``on_ending`` at SIGTERM (each one) and when the supervisor is gone."""

        def terminated() -> None:
            self._terminated = True
            on_ending()

        def orphaned() -> None:
            assert self.lifeline.fd is not None
            loop.remove_reader(self.lifeline.fd)
            on_ending()

        loop.add_signal_handler(signal.SIGTERM, terminated)
        if self.session is not None:
            self.session.guard_prompt()
        if self.lifeline.fd is not None:
            loop.add_reader(self.lifeline.fd, orphaned)

    @property
    def bus(self) -> ActorSocket:
        """The socket to the controller, opened at first use."""
        if self._bus is None:
            self._bus = ActorSocket(self.run.path, self.name, self.generation, self._listening)
        return self._bus

    def adopted(self) -> None:
        """Say that whatever the process before had under way goes on, or will not."""
        self.has_adopted = True
        self._hello_at_s = self._say_active_at_s = 0.0
        self._say_active(time.monotonic())

    @property
    def has_greeted(self) -> bool:
        """Return whether its last Hello has left: before the first, the socket may not be connected yet."""
        return self._hello_at_s > 0

    def receive(self) -> list[ToActor]:
        """New messages; says Hello once a second so that a new controller learns of this actor."""
        self.heartbeat()
        return [message for message in self.bus.receive() if not isinstance(message, Welcome)]

    def heartbeat(self) -> None:
        """Hello and watchdog, each when it is time. Call it once per turn of the main loop."""
        now_s = time.monotonic()
        self._say_active(now_s)
        if now_s >= self._hello_at_s and self.bus.send(
            Hello(self.name, self.generation, os.getpid(), True, self._code, self.has_adopted)
        ):
            self._hello_at_s = now_s + HELLO_S
        is_overdue = self.status is not None and 0 < self.status.step_deadline_ns < time.monotonic_ns()
        if now_s >= self._watchdog_at_s and not is_overdue:
            self.notifier.watchdog()
            self._watchdog_at_s = now_s + self.config.supervisor.watchdog_s / 4

    def send(self, message: ToController) -> bool:
        """Send to the controller; False if it was not sent, which the flight recorder keeps."""
        return self._noted(self.bus.send(message))

    def hold(self, message: ToController) -> bool:
        """Send with the others of ``flush``; False if those of the last one were not sent."""
        return self.bus.hold(message)

    def flush(self) -> None:
        """Send what is held. What was not sent is in the flight recorder."""
        self._noted(self.bus.flush())

    def _noted(self, sent: bool) -> bool:
        if not sent and self._flight is not None:
            self._flight.event(Kind.UNSENT, 0, self.config.instances.index(InstanceId("controller")))
        return sent

    def wait(self, timeout_s: float, extra_fds: Sequence[int] = ()) -> None:
        """Block until a message, an extra descriptor, the supervisor's end, or the time.

        Not for long before the first Hello has left: the socket may not be connected yet, and nothing tells when it is.
        """
        if not self._hello_at_s:
            timeout_s = min(timeout_s, POLL_S)
        fds = [*extra_fds, self._signalled]
        if self.lifeline.fd is not None:
            fds.append(self.lifeline.fd)
        self.bus.poll(timeout_s, fds)
        with suppress(BlockingIOError):
            os.read(self._signalled, 512)  # what is left there would end every wait after this one

    def close(self) -> None:
        """Leave the run; the last process of a run that has no supervisor (any more) removes the run directory.

        One that is confined cannot: ``memory``, whose end nobody waits for, stays until that one has ended.
        """
        self.turn.rest()  # whoever comes next makes the word anew that says so
        if self.status is not None:
            self.status.set_state(ActorState.STOPPING)
        if self._flight is not None:
            self._flight.event(Kind.STOPPING, os.getpid(), int(self.ending))
        if self._bus is not None:
            self._bus.close()
        if self._terminated:
            self.notifier.stopping()  # a supervisor that has not told it to should know that it obeys
        orphaned = self.lifeline.fd is None or self.lifeline.is_gone()
        self.role.release()
        self.notifier.close()
        if self.is_confined:
            self.run.close()
        elif orphaned:
            lost = self.lifeline.fd is not None
            stays = lost and stage_of(self.name) == "memory"
            self.run.leave(self._save_recorders if lost else None, LAST_S if stays else 0.0)

    def _save_recorders(self) -> None:
        """The supervisor was killed and this is the last process of the run: save all recorders."""
        try:
            save_crash(self.run, read_environment().state_home / self.run.path.name, "supervisor", "the supervisor was killed")
        except OSError as error:
            log.warning("the flight recorders cannot be saved: %s", error)


def command(name: str) -> str:
    """The name of a process or a thread in ps, top and pkill."""
    return f"mmrt-{name}"[:MAX_NAME_BYTES]


def name_thread(name: str) -> None:
    """Give the calling thread the name of an actor; the main thread's is the process's."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, command(name).encode(), 0, 0, 0)
