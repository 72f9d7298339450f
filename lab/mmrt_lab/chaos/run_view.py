"""A view of the run's shared memory from outside: the serving generations, and the current phases of its requests.

Read-only, and holds no lock of a run: the storm must not prevent the sweep of a dead one. Called by ``storm``, ``truth`` and
``census``.
"""

import time
from pathlib import Path

import msgspec

from mmrt.bench.processes import SUPERVISOR, ZYGOTE, children, what_is
from mmrt.runtime.controller.state.row_record import decode_record
from mmrt.runtime.stage_table import number_of, stage_of
from mmrt.schema.rows import EndCode, Phase
from mmrt.shm.controller_stats import ControllerStats, StatsSnapshot
from mmrt.shm.role_lock import RoleLock
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.shm.status import ActorState, ActorTable
from mmrt.shm.step_gaps import StepGaps

from .faults import Phase as StormPhase

_STEP_PHASES: dict[str, StormPhase] = {"video": "decoding", "encoder": "encoding", "prefill": "prefill"}  # by stage


class Serving(msgspec.Struct, frozen=True):
    """The generations that serve at one instant: one for each actor, 0 if it does not serve."""

    generations: dict[str, int]

    @property
    def missing(self) -> set[str]:
        return {name for name, generation in self.generations.items() if not generation}

    @property
    def lacking(self) -> set[str]:
        """Those that do not serve, of stages of which no other actor does."""
        served = {stage_of(name) for name, generation in self.generations.items() if generation}
        return {name for name in self.missing if stage_of(name) not in served}


class RunView:
    """Read-only tables of one run."""

    def __init__(self, path: Path, supervisor_pid: int) -> None:
        self.path = path
        self.supervisor_pid = supervisor_pid
        with RunDirectory.attach(path) as run:
            self._run = run
            self._actors = ActorTable.attach(run, writable=False)
            self._stats = ControllerStats.attach(run)
            self._table = SequenceTable.attach(run, writable=False)
            self._gaps = StepGaps.attach(run)

    @property
    def actors(self) -> tuple[str, ...]:
        """Those that belong to the run now."""
        return self._actors.present

    def close(self) -> None:
        self._actors.close()
        self._stats.close()
        self._table.close()
        self._gaps.close()

    def serving(self) -> Serving:
        """By the same facts as /ready: the words say active, and their writer lives, with the role lock."""
        found: dict[str, int] = {}
        for name in self.actors:
            row = self._actors.read(name)
            serves = row.state is ActorState.ACTIVE and RoleLock.acts(self._run, name, row.pid)
            found[name] = row.generation if serves else 0
        return Serving(found)

    def generations(self) -> dict[str, int]:
        """The newest generation of each actor."""
        return {actor: self._actors.read(actor).generation for actor in self.actors}

    def step_left_s(self, pid: int) -> float:
        """The time until the last deadline of the steps that this process is in; 0 if it is in none."""
        rows = [row for row in map(self._actors.read, self.actors) if row.pid == pid]
        return max([0.0, *(1e-9 * (row.step_deadline_ns - time.monotonic_ns()) for row in rows)])

    def stats(self) -> StatsSnapshot:
        return self._stats.read()

    def pid(self, target: str) -> int | None:
        """The process that does this work now; None if there is none."""
        if target == SUPERVISOR:
            return self.supervisor_pid
        if target != ZYGOTE:
            if target not in self.actors:
                return None
            row = self._actors.read(target)
            return row.pid if row.pid and RoleLock.holder(self._run, target) == row.pid else None
        return next((pid for pid in children(self.supervisor_pid) if what_is(pid) == ZYGOTE), None)

    def gaps(self) -> dict[str, list[int]]:
        """The times between tokens of each decode since the run began, by ``schema.gap_buckets``."""
        each = self._gaps.read_each()
        return {actor: each[number_of(actor)] for actor in self.actors if stage_of(actor) == "decode"}

    def num_rows_in_use(self) -> int:
        return sum(len(self._table.rows_in(phase)) for phase in Phase if phase is not Phase.FREE)

    def phases(self) -> set[StormPhase]:
        """The current phases; "idle" if there are none."""
        found: set[StormPhase] = set()
        now_ns = time.monotonic_ns()
        for actor in self.actors:
            phase = _STEP_PHASES.get(stage_of(actor))
            if phase is not None and self._actors.read(actor).step_deadline_ns > now_ns:
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
