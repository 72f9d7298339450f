"""A process of several actors: a thread for each, as ``actors.layout`` has it (TI1), on CUDA with a stream of its own (TI5).

Its parent sees one actor: warm when all are, serving when all serve, and alive while none hangs. When one of them fails the
process ends at once, before the others meet what it has left, and it records that their work was not the cause. Called by
``process``.
"""

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ...runtime.process.crash_cause import ExitNote, marked, write_exit_note
from ...runtime.process.lifeline import Lifeline
from ...runtime.process.notify import Notifier
from .actor import Actor, name_thread
from .device import is_lost

log = logging.getLogger(__name__)

SWITCH_S = 0.0005  # how long one actor's Python may keep the others from theirs
TURN_S = 0.5
LATE_S = 1.0  # a turn later than this means that this process was stopped or starved
_exit_lock = threading.Lock()  # of the actor that ends the process: taken once, never released


class ProcessNotifier:
    """Reports of a process's actors to its parent, through the notifier of the actor that the process is named after."""

    def __init__(self, notifier: Notifier, names: Sequence[str]) -> None:
        self.notifier = notifier
        self._lock = threading.Lock()
        self._cold, self._idle = set(names), set(names)
        self._beats: dict[str, float] = {}

    def ready(self, name: str, status: str) -> None:
        """Note that ``name`` is warm."""
        with self._lock:
            self._cold.discard(name)
            if not self._cold:
                self.notifier.ready(status)

    def active(self, name: str, status: str) -> None:
        """Note that ``name`` serves."""
        with self._lock:
            self._idle.discard(name)
            self._beats[name] = time.monotonic()
            if not self._idle:
                self.notifier.active(status)

    def beat(self, name: str) -> None:
        """Note that the loop of ``name`` has turned."""
        if name in self._beats:
            self._beats[name] = time.monotonic()

    def excuse(self) -> None:
        """Count all as heard of now."""
        for name in list(self._beats):
            self.beat(name)

    def last_heard_s(self, name: str) -> float:
        """The last turn of its loop, monotonic seconds."""
        return self._beats[name]

    def silent(self, since_s: float) -> list[str]:
        """The actors that serve and were not heard of after ``since_s``, monotonic seconds."""
        return [name for name, beat_s in list(self._beats.items()) if beat_s < since_s]


class ActorNotifier(Notifier):
    """The notifier of one actor of several."""

    def __init__(self, process_notifier: ProcessNotifier, actor: str) -> None:
        super().__init__(None, actor)
        self._process_notifier = process_notifier

    def ready(self, status: str = "ready") -> None:
        self._process_notifier.ready(self.actor, status)

    def active(self, status: str = "active") -> None:
        self._process_notifier.active(self.actor, status)

    def watchdog(self) -> None:
        self._process_notifier.beat(self.actor)


def run_together(actors: Sequence[Actor], lifeline: Lifeline, live: Callable[[Actor], int]) -> int:
    """Run ``live(actor)`` of each in a thread until all have ended; the process is named after the last. Returns the exit status.

    Does not return when one of them ends with another status than 0: the process ends with that. ``lifeline`` is this thread's own.
    """
    sys.setswitchinterval(SWITCH_S)
    if actors[-1].config.model.on_cuda:
        from ...triton_kernels.loading import load_one_at_a_time  # nothing of Triton is loaded on the CPU

        load_one_at_a_time()
    for handler in () if actors[-1].config.logging.is_json else logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter("%(levelname)s %(threadName)s: %(name)s: %(message)s"))
    process_notifier = ProcessNotifier(actors[-1].notifier, [actor.name for actor in actors])
    signalled, signalling = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    told = threading.Event()

    def end_all(*_: object) -> None:
        told.set()
        for actor in actors:
            actor.end()

    signal.signal(signal.SIGTERM, end_all)
    signal.set_wakeup_fd(signalling, warn_on_full_buffer=False)
    for actor in actors:
        actor.notifier = ActorNotifier(process_notifier, actor.name)
    ended: list[str] = []

    def be(actor: Actor) -> None:
        _be(actor, actors, live)
        ended.append(actor.name)
        with suppress(BlockingIOError):
            os.write(signalling, b"\0")

    for actor in actors:
        threading.Thread(target=marked(be, actor.name), args=(actor,), name=actor.name, daemon=True).start()
    last_s = time.monotonic()
    while len(ended) < len(actors):
        select.select([signalled], [], [], TURN_S)
        with suppress(BlockingIOError):
            os.read(signalled, 512)
        now_s = time.monotonic()
        if now_s > last_s + TURN_S + LATE_S or told.is_set() or lifeline.is_gone():
            process_notifier.excuse()
        last_s = now_s
        _look_after(actors, process_notifier, now_s)
    if told.is_set():
        process_notifier.notifier.stopping()
    process_notifier.notifier.close()
    return 0


def _be(actor: Actor, actors: Sequence[Actor], live: Callable[[Actor], int]) -> None:
    """Run one actor under its name, with its niceness from the start: its own threads inherit it. Returns if it was told to end."""
    name_thread(actor.name)
    os.nice(actor.config.actor(actor.name).nice)  # of this thread, on Linux
    try:
        status = live(actor)
    except BaseException as error:  # SystemExit, too, would end this thread alone
        log.exception("%s failed", actor.name)
        actor.failure, status = error, 1
    if status:
        _exit_lock.acquire()
        if actor.failure is None or not is_lost(actor.failure):
            _excuse_others(actor, actors, status)
        log.error("%s has failed: the process that it shares ends", actor.name)
        os._exit(status)


def _excuse_others(culprit: Actor, actors: Sequence[Actor], status: int) -> None:
    """Record that the others' work was not the cause. Actors that have not taken over yet record nothing: the words there are the
    previous process's."""
    for other in actors:
        if other is not culprit and other.status is not None:
            write_exit_note(other.run.path, other.name, ExitNote(os.getpid(), status, other_actor=True))


def _look_after(actors: Sequence[Actor], process_notifier: ProcessNotifier, now_s: float) -> None:
    """Say that the process is alive while no step is overdue, and end it with an actor that hangs outside of its steps."""
    watchdog_s = actors[-1].config.supervisor.watchdog_s
    silent = process_notifier.silent(now_s - watchdog_s)
    for actor in actors:
        if actor.status is not None and actor.status.step_deadline_ns:
            process_notifier.beat(actor.name)
        elif actor.name in silent:
            _exit_lock.acquire()
            # Earlier work still under way may be what holds it up.
            since_ns = 1e9 * process_notifier.last_heard_s(actor.name)
            later = [one for one in actors if one.status is not None and one.status.step_start_ns > since_ns]
            _excuse_others(actor, later, -signal.SIGKILL)
            log.error("%s hangs: no sign of life for %g s", actor.name, watchdog_s)
            if actor.status is not None:  # otherwise it would look like a kill from outside
                write_exit_note(actor.run.path, actor.name, ExitNote(os.getpid(), -signal.SIGKILL, hang=True))
            os.kill(os.getpid(), signal.SIGKILL)
    if not any(actor.status is not None and 0 < actor.status.step_deadline_ns < 1e9 * now_s for actor in actors):
        process_notifier.notifier.watchdog()
