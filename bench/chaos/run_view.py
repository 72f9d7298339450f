"""A view of the run's shared memory from outside: the serving generations, and the current phases of its requests.

Read-only, and holds no lock of a run: the storm must not prevent the sweep of a dead one. Called by ``storm``, ``truth`` and
``census``.
"""

import os
import select
import signal
import time
from pathlib import Path

import msgspec

from ...runtime.controller.request import decode_record
from ...runtime.stage_table import ACTORS
from ...schema.rows import EndCode, Phase
from ...shm.role_lock import RoleLock
from ...shm.run_directory import RunDirectory
from ...shm.sequence_table import SequenceTable
from ...shm.status import ActorState, ActorTable, ControllerStats, StatsSnapshot
from .faults import ZYGOTE
from .faults import Phase as StormPhase

# The kernel keeps 15 bytes of a name, of which "mmrt-" may be five.
_SHORT_NAMES = {length: actor for actor in ACTORS for length in (actor, actor[:10])}
_STEP_PHASES: dict[str, StormPhase] = {"video": "decoding", "encoder": "encoding", "prefill": "prefill"}


class Serving(msgspec.Struct, frozen=True):
    """The generations that serve at one instant: one for each actor, 0 if it does not serve."""

    generations: dict[str, int]

    @property
    def missing(self) -> set[str]:
        return {name for name, generation in self.generations.items() if not generation}


class RunView:
    """Read-only tables of one run."""

    def __init__(self, path: Path, supervisor_pid: int) -> None:
        self.path = path
        self.supervisor_pid = supervisor_pid
        with RunDirectory.attach(path) as run:
            self._run = run
            self._actors = ActorTable.attach(run, writable=False)
            self._stats = ControllerStats.attach(run, writable=False)
            self._table = SequenceTable.attach(run, writable=False)

    def close(self) -> None:
        self._actors.close()
        self._stats.close()
        self._table.close()

    def serving(self) -> Serving:
        """By the same facts as /ready: the words say active, and their writer holds the role lock.

        And it lives: a successor that has just got the lock has not written its pid yet.
        """
        found = {}
        for name in ACTORS:
            row = self._actors.read(name)
            serves = row.state is ActorState.ACTIVE and RoleLock.holder(self._run, name) == row.pid and not is_gone(row.pid)
            found[name] = row.generation if serves else 0
        return Serving(found)

    def generation(self, actor: str) -> int:
        return self._actors.read(actor).generation

    def stats(self) -> StatsSnapshot:
        return self._stats.read()

    def pid(self, target: str) -> int | None:
        """The process that does this work now; None if there is none."""
        if target != ZYGOTE:
            row = self._actors.read(target)
            return row.pid if row.pid and RoleLock.holder(self._run, target) == row.pid else None
        return next((pid for pid in children(self.supervisor_pid) if what_is(pid) == ZYGOTE), None)

    def num_rows_in_use(self) -> int:
        return sum(len(self._table.rows_in(phase)) for phase in Phase if phase is not Phase.FREE)

    def phases(self) -> set[StormPhase]:
        """The current phases; "idle" if there are none."""
        found: set[StormPhase] = set()
        now_ns = time.monotonic_ns()
        for actor, phase in _STEP_PHASES.items():
            if self._actors.read(actor).step_deadline_ns > now_ns:
                found.add(phase)
        for row, generation in self._table.rows_in(Phase.DECODE):
            if self._table.end(row, generation) == EndCode.NONE:
                found.add("mid-stream" if self._table.committed(row, generation) else "hand-over")
        for row, _ in self._table.rows_in(Phase.PREPARE):
            if self._is_filling(row):
                found.add("fetching")
        stats = self._stats.read()
        if stats.waiting:
            found.add("queued")
        if not found and not stats.preparing and not stats.running and not self.num_rows_in_use():
            found.add("idle")
        return found

    def _is_filling(self, row: int) -> bool:
        state = self._table.read_state(row)
        if state is None:
            return False
        record = decode_record(state)
        return bool(record.items) and not record.filled


def children(pid: int) -> list[int]:
    """Its direct children; none if it is gone."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []


def what_is(pid: int) -> str:
    """Kind of a process: an actor, the zygote, or "other". A forked actor has the zygote's command line, but its own name."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip().removeprefix("mmrt-")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "other"
    if name in _SHORT_NAMES:
        return _SHORT_NAMES[name]
    if b"mmrt.runtime.supervisor.zygote" in command:
        return ZYGOTE
    *_, last = command.rstrip(b"\0").split(b"\0")
    return last.decode() if last.decode(errors="replace") in ACTORS else "other"


def is_gone(pid: int) -> bool:
    """True if dead with all its threads, reaped or not: a zombie in /proc may be just the first thread of a process still ending."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 0)[0])
    finally:
        os.close(fd)


def send_signal(pid: int, number: int) -> bool:
    """Signal a process by descriptor; False if it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True
