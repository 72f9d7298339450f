"""Find out why the previous process died: because of its work, or because of a signal from outside?

A dead generation died in the step that its status words still show. The way in which the process ended tells if that work is the
cause; the supervisor notes it in the run directory before it starts another process. A signal that a process raises in itself, an
exit, an exception, exhausted memory or a missed deadline is a *crash* and counts against the work; SIGKILL from outside never does.
Used by every actor that becomes active (``actors/host/actor.py``); the supervisor writes the note.

The thresholds: a piece of work that has crashed its actor twice is given up (``MAX_CRASHES`` in ``controller/rows/poison``; a
crash and a trial in ``actors/host/solo_trials.py``). Crashes in steps do not break an actor, since each narrows down the cause. After
``MAX_UNEXPLAINED`` recent ones without a known cause, further ones count as ordinary failures (``supervisor/restart_policy``).
"""

import contextlib
import errno
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FunctionType
from typing import ParamSpec, TypeVar

import msgspec

from ...shm.run_directory import NOTES
from ...shm.status import ActorReading, ActorState

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

MAX_UNEXPLAINED = 16
FORGET_STEPS = 1000  # without a crash cancel one unexplained crash

_MARK = "mmrt_actor_"
_POLL_S = 0.01
_SAY_S = 2.0
_OWN_SIGNALS = frozenset({
    signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP, signal.SIGXCPU,
    signal.SIGXFSZ, signal.SIGPROF,
})  # fmt: skip


def is_from_outside(status: int, obeys: bool, oom_kills: int) -> bool:
    """Return whether a process was ended from outside: by a signal that no process raises in itself, or one that it ``obeys``, as it
    has reported. ``oom_kills`` on the machine during its life: then SIGKILL is attributed to the kernel, which will repeat it."""
    if status >= 0:
        return status == 0 and obeys
    return -status not in _OWN_SIGNALS and not (status == -signal.SIGKILL and oom_kills)


class ExitNote(msgspec.Struct, frozen=True):
    """The end of a process: exit status, or minus the signal.

    ``hang``: by the watchdog; ``debugger``: under a debugger; ``other_actor``: by the work of another actor of the same process.
    """

    pid: int
    status: int
    hang: bool = False
    debugger: bool = False
    other_actor: bool = False


_decode_note = msgspec.json.Decoder(ExitNote).decode


class Death(msgspec.Struct, frozen=True):
    """The previous process died in step ``step``. ``crashed``: the work is the cause.

    If not, the step is simply repeated. ``crashes``: recent unexplained ones, including this one.
    """

    step: int
    crashed: bool
    reason: str
    crashes: int = 0


def judge(last: ActorReading, note: ExitNote | None, now_ns: int, oom_kills: int, is_supervised: bool = True) -> Death | None:
    """Judge the death of the generation that wrote ``last``; None if it was in no step or ended in order.

    ``note`` is about the same process, if there is one; without a supervisor (under systemd) nobody leaves one, and the work is
    suspected. ``oom_kills`` is the machine's current counter. Only for the holder of the role lock, which proves that generation dead.
    """
    if last.state == ActorState.ABSENT or not last.step_deadline_ns:
        return None
    crashed, reason = _blame(last, note, now_ns, oom_kills)
    if note is None and not crashed and not is_supervised and not last.debugged:
        crashed, reason = True, "ended, and no supervisor saw how,"
    return Death(last.step_plan, crashed, reason, _forgetting(last) + crashed)


def is_crash(last: ActorReading, note: ExitNote | None, oom_kills: int, is_supervised: bool = True) -> bool:
    """Return whether the generation that wrote ``last`` ended of its work, for an actor that declares no steps. Arguments as for
    ``judge``."""
    if last.state != ActorState.ACTIVE or (note is not None and not note.status):
        return False
    is_unseen = note is None and not is_supervised and not last.debugged
    return is_unseen or _blame(last, note, 0, oom_kills)[0]


def leave_notes(run: Path, note: ExitNote, actors: Collection[str], suspects: Collection[str]) -> list[str]:
    """Leave a note on a process's end for each of its actors, unless the process left one. Returns the actors whose work is the cause.

    ``suspects``: the actors whose work is known to have ended it; if none is known, the work of all counts as the cause.
    """
    blamed = []
    for actor in actors:
        own = read_exit_note(run, actor, note.pid)
        if own is None:
            own = msgspec.structs.replace(note, other_actor=bool(suspects) and actor not in suspects)
            write_exit_note(run, actor, own)
        if not own.other_actor:
            blamed.append(actor)
    return blamed


def marked(function: Callable[P, R], actor: str) -> Callable[P, R]:
    """Wrap the plain ``function`` as the body of an actor's thread, under a name that Python prints when the thread crashes.

    (``faulthandler`` prints functions, not the names of threads.)
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=_MARK + actor, co_qualname=_MARK + actor)
    renamed: Callable[P, R] = FunctionType(code, function.__globals__, closure=function.__closure__)
    return renamed


def crashed_in(actors: Collection[str], lines: Sequence[str]) -> list[str]:
    """Return the actors whose marked thread is in ``faulthandler``'s traceback, the last lines that the process printed."""
    return [actor for actor in actors if any(line.endswith(f" in {_MARK}{actor}") for line in lines)]


def recent_crashes(last: ActorReading, death: Death | None) -> int:
    """Return the number of recent crashes, for the status words of the generation after ``last``."""
    return _forgetting(last) if death is None else death.crashes


def _forgetting(last: ActorReading) -> int:
    return max(0, last.crashes - last.steps // FORGET_STEPS)


def _blame(last: ActorReading, note: ExitNote | None, now_ns: int, oom_kills: int) -> tuple[bool, str]:
    if last.debugged or (note is not None and note.debugger):
        return False, "ended in a debugger"
    if note is not None and note.other_actor:
        return False, "ended with another actor of its process"
    if note is not None and note.hang or note is None and last.is_overdue(now_ns):
        return True, "hung"
    if last.raised:
        return True, "failed with an exception"
    if oom_kills > last.oom_kills and (note is None or note.status == -signal.SIGKILL):
        return True, "was killed because memory ran out"
    if note is not None and (note.status >= 0 or -note.status in _OWN_SIGNALS):
        return True, f"ended with status {note.status}" if note.status >= 0 else f"died of {signal.Signals(-note.status).name}"
    return False, "was killed"


def outlive(pid: int, command: str, pause: Callable[[float], None]) -> None:
    """Wait until a process and all its files are gone. Its memory may be gone before: then its role is free, but its device is closed
    only with its files, and until then its kernels may write there. ``command`` is the process's name: another process that
    got the same pid is not waited for."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):  # EINVAL, ENOENT: a thread or a process group has the number now
            return
        raise
    began_s, is_said = time.monotonic(), False
    try:
        while _command(pid) == command and not select.select([pidfd], [], [], 0)[0]:
            if not is_said and time.monotonic() - began_s > _SAY_S:
                log.warning("waiting for process %d (%s), which is dead and not gone yet", pid, command)
                is_said = True
            pause(_POLL_S)
    finally:
        os.close(pidfd)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def oom_kills() -> int:
    """Return how many processes the kernel has killed on this machine for lack of memory; 0 where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _path(run: Path, actor: str) -> Path:
    return run / NOTES / f"{actor}.exit"


def write_exit_note(run: Path, actor: str, note: ExitNote) -> None:
    """Write a note on how a process of ``actor`` ended. Without room for it none is left, and a successor has to guess."""
    part = run / NOTES / f".{actor}.exit"
    try:
        part.write_bytes(msgspec.json.encode(note))
        os.replace(part, _path(run, actor))
    except OSError:
        part.unlink(missing_ok=True)


def read_exit_note(run: Path, actor: str, pid: int) -> ExitNote | None:
    """Read the note about this process; None if there is none."""
    try:
        note = _decode_note(_path(run, actor).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return note if note.pid == pid else None
