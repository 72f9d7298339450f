"""What the generation before died of, as its successor finds out: was it the work that it was doing, or somebody from outside?

A step that still stands in the status words of a dead generation is what it died in. Whether that work is to blame is told by how
the process ended, which the supervisor notes in the run directory before it starts another one: a signal that a process raises in
itself, an exit, an exception, memory that ran out or a missed deadline is a *crash* and counts against the work; SIGKILL from outside
never does. Used by every actor that becomes active (``actors/host/actor.py``); the note is written by the supervisor.

The thresholds: a piece of work that has crashed its actor twice is given up (``MAX_CRASHES`` in ``runtime/controller/poison.py``; a
crash and a trial in ``actors/host/solo_trials.py``). Crashes in steps do not break an actor, since each brings a culprit nearer, but
for ``MAX_UNEXPLAINED`` of late for which none was found: from there on they are failures like others (``supervisor/restart_policy``).
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

from ...shm.status import ActorReading, ActorState

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

MAX_UNEXPLAINED = 16
FORGET_STEPS = 1000  # without a crash make up for one unexplained

_MARK = "mmrt_actor_"
_POLL_S = 0.01
_SAY_S = 2.0
_OWN_SIGNALS = frozenset({
    signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP, signal.SIGXCPU,
    signal.SIGXFSZ,
})  # fmt: skip


def is_from_outside(status: int, obeys: bool, oom_kills: int) -> bool:
    """Whether somebody else has ended a process: by a signal that no process raises in itself, or one that it ``obeys``, as it has
    said. ``oom_kills`` of the machine in its life: it is the kernel's SIGKILL then, which will come again, and nobody else's."""
    if status >= 0:
        return status == 0 and obeys
    return -status not in _OWN_SIGNALS and not (status == -signal.SIGKILL and oom_kills)


class ExitNote(msgspec.Struct, frozen=True):
    """How a process ended: exit status, or minus the signal.

    ``hang``: by the watchdog; ``debugger``: under a debugger; ``other_actor``: by the work of another actor of the same process.
    """

    pid: int
    status: int
    hang: bool = False
    debugger: bool = False
    other_actor: bool = False


class Death(msgspec.Struct, frozen=True):
    """The generation before died in step ``step``. ``crashed``: the work is to blame.

    If not, the step is done again as if nothing had been. ``crashes``: unexplained ones of late, this one included.
    """

    step: int
    crashed: bool
    reason: str
    crashes: int = 0


def judge(last: ActorReading, note: ExitNote | None, now_ns: int, oom_kills: int) -> Death | None:
    """What the generation that wrote ``last`` died of; None if it was in no step or ended in order.

    ``note`` is about the same process, if there is one. ``oom_kills`` is the machine's counter of now. Only for the holder of the
    role lock, which proves that generation dead.
    """
    if last.state == ActorState.ABSENT or not last.step_deadline_ns:
        return None
    crashed, reason = _blame(last, note, now_ns, oom_kills)
    return Death(last.step_plan, crashed, reason, _forgetting(last) + crashed)


def leave_notes(run: Path, note: ExitNote, actors: Collection[str], suspects: Collection[str]) -> list[str]:
    """Tell each actor of a process of its end, unless the process has left word itself. Returns those whose work is to blame for it.

    ``suspects``: whose work ended it, as far as that is known: then the others' is not to blame, else everybody's is.
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
    """The plain ``function`` as the body of an actor's thread: under a name that Python prints when the thread crashes.

    (``faulthandler`` prints functions, not the names of threads.)
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=_MARK + actor, co_qualname=_MARK + actor)
    renamed: Callable[P, R] = FunctionType(code, function.__globals__, closure=function.__closure__)
    return renamed


def crashed_in(actors: Collection[str], lines: Sequence[str]) -> list[str]:
    """The actors of a process whose marked thread stands in ``faulthandler``'s traceback, the last lines that the process printed."""
    return [actor for actor in actors if any(line.endswith(f" in {_MARK}{actor}") for line in lines)]


def recent_crashes(last: ActorReading, death: Death | None) -> int:
    """Crashes of late, for the status words of the generation after ``last``."""
    return _forgetting(last) if death is None else death.crashes


def _forgetting(last: ActorReading) -> int:
    return max(0, last.crashes - last.steps // FORGET_STEPS)


def _blame(last: ActorReading, note: ExitNote | None, now_ns: int, oom_kills: int) -> tuple[bool, str]:
    if note is not None and (note.debugger or note.other_actor):
        return False, "ended in a debugger" if note.debugger else "ended with another actor of its process"
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
    """Wait until a process is gone with all its files, where its memory may be gone already: its role is free then, but its device
    is closed with its files, and until then what it launched may write there. ``command`` is what the process was called: another
    that has got its pid is not waited for."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):  # the two others: a thread or a process group has the number now
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
    """How many processes the kernel has killed on this machine because memory ran out; 0 where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _path(run: Path, actor: str) -> Path:
    return run / f"{actor}.exit"


def write_exit_note(run: Path, actor: str, note: ExitNote) -> None:
    """Leave word of how a process of ``actor`` ended. Without room for it nothing is left: a successor then guesses."""
    part = run / f".{actor}.exit"
    try:
        part.write_bytes(msgspec.json.encode(note))
        os.replace(part, _path(run, actor))
    except OSError:
        part.unlink(missing_ok=True)


def read_exit_note(run: Path, actor: str, pid: int) -> ExitNote | None:
    """The note about this process, or None."""
    try:
        note = msgspec.json.decode(_path(run, actor).read_bytes(), type=ExitNote)
    except (OSError, msgspec.DecodeError):
        return None
    return note if note.pid == pid else None
