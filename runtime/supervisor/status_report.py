"""Make a ``RunReport``: in the supervisor, or in ``mmrt status`` from the run directory alone when no supervisor answers.

Everything about pools, queues and steps is read from the status words in shared memory, without the bus.
"""

import os
import time
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from ...schema.policy_report import NO_POLICY_YET, PolicyReport
from ...shm.controller_stats import ControllerStats
from ...shm.errors import ShmError
from ...shm.role_lock import RoleLock
from ...shm.run_directory import RunDirectory
from ...shm.status import ActorTable
from ..pools import pools_of
from ..process.memory_layout import read_layout
from ..process.run import read_run_info
from .managed_actor import SupervisedActor
from .processes import cpu_seconds, pss_bytes, tree_pss_bytes
from .run_report import ActorReport, ComputeReport, PoolReport, RequestsReport, RunReport

_CPU_SAMPLE_S = 0.1


class ActorWords(msgspec.Struct, frozen=True):
    """The status words of an actor's active generation."""

    state: str = "absent"
    pid: int = 0
    generation: int = 0
    started_s: float = 0.0
    step_start_s: float = 0.0  # CLOCK_MONOTONIC, like all times here
    step_deadline_s: float = 0.0  # 0: no step is running
    queue_depth: int = 0
    steps: int = 0
    crashes: int = 0  # recent, unexplained
    is_leaving: bool = False


class StatusTables:
    """The status words of a run. They appear while the run starts: until then everything reads as absent and zero."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._actors: ActorTable | None = None
        self._stats: ControllerStats | None = None

    def actor(self, name: str) -> ActorWords:
        """Return the row of ``name``."""
        if self._actors is None:
            if read_layout(self._run.path) is None:
                return ActorWords()  # if the memory actor dies now, its successor makes all segments again
            try:
                self._actors = ActorTable.attach(self._run, writable=False)
            except ShmError:
                return ActorWords()
        if name not in self._actors.actors:
            return ActorWords()
        row = self._actors.read(name)
        return ActorWords(
            state=row.state.name.lower(),
            pid=row.pid,
            generation=row.generation,
            started_s=row.started_ns / 1e9,
            step_start_s=row.step_start_ns / 1e9,
            step_deadline_s=row.step_deadline_ns / 1e9,
            queue_depth=row.queue_depth,
            steps=row.steps,
            crashes=row.crashes,
            is_leaving=name in self._actors.leaving,
        )

    def pools_and_requests(self) -> tuple[dict[str, PoolReport], RequestsReport]:
        """Return the use of every pool, and the requests per state, as last reported by the controller."""
        if self._stats is None:
            try:
                self._stats = ControllerStats.attach(self._run)
            except ShmError:
                return _pools_of_layout(self._run), RequestsReport()
        snapshot = self._stats.read()
        pools = {name: PoolReport(pool.pages, pool.used) for name, pool in snapshot.pools.items()}
        requests = RequestsReport(snapshot.waiting, snapshot.preparing, snapshot.running, snapshot.waiting_for)
        return pools or _pools_of_layout(self._run), requests

    def broken(self) -> dict[str, str]:
        """Return the actors that the controller does without, and why; call it after ``pools_and_requests``."""
        return {} if self._stats is None else self._stats.read().broken

    def drained(self, version: int) -> list[str]:
        """Return the leaving actors that hold nothing, as the controller sees it once it knows ``version`` of the actor table."""
        if self._stats is None:
            self.pools_and_requests()
        stats = None if self._stats is None else self._stats.read()
        return stats.drained if stats is not None and stats.instances_version >= version else []

    def policy(self) -> PolicyReport:
        """Return the controller's report on its policy; call it after ``pools_and_requests``."""
        return NO_POLICY_YET if self._stats is None else self._stats.read().policy

    def close(self) -> None:
        for table in (self._actors, self._stats):
            if table is not None:
                table.close()
        self._actors = self._stats = None


def _pools_of_layout(run: RunDirectory) -> dict[str, PoolReport]:
    """Return the pools as made by ``memory``, all unused: for the time before the controller's first counts."""
    layout = read_layout(run.path)
    pools = {} if layout is None else layout.pools
    kinds = (False, False) if layout is None else (layout.has_states, layout.has_windows)
    names = pools_of(read_run_info(run).config.num_kv_pools, *kinds)
    return {name: PoolReport(pools[name].num_pages if name in pools else 0) for name in names}


def compute_of(run: RunDirectory) -> ComputeReport | None:
    """Return the run's compute report, once ``memory`` has made its layout."""
    layout = read_layout(run.path)
    if layout is None:
        return None
    reason = str(run.info.get("dtype_reason", ""))
    return ComputeReport(layout.device, layout.dtype, layout.kv_dtype, layout.sharing, reason, layout.weights)


class CpuMeter:
    """Measures processor use of processes between calls. One per observer."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float]] = {}  # pid -> (when, seconds used)

    def watch(self, pids: Collection[int]) -> None:
        """Start to measure the new processes of ``pids``, and forget all not in it."""
        self._last = {pid: last for pid, last in self._last.items() if pid in pids}
        for pid in pids:
            if pid not in self._last:
                self.percent(pid)

    def percent(self, pid: int) -> float | None:
        """Return percent of one processor since the last call for this pid; None at the first call."""
        used_s = cpu_seconds(pid)
        now_s = time.monotonic()
        if used_s is None:
            self._last.pop(pid, None)
            return None
        before = self._last.get(pid)
        self._last[pid] = now_s, used_s
        if before is None or now_s - before[0] < 0.01:
            return None
        return max(0.0, 100 * (used_s - before[1]) / (now_s - before[0]))


def report_actor(name: str, actor: SupervisedActor, words: ActorWords, meter: CpuMeter) -> ActorReport:
    """Report actor ``name`` from the supervisor's view of its process and from its own status words.

    Memory and processor use are the process's, and are reported for the actor that it is named after.
    """
    report = ActorReport(
        name=name,
        state=actor.state,
        ready=actor.ready,
        restarts=max(0, actor.num_starts - 1),
        last_exit=actor.last_exit,
    )
    if actor.outage is not None:
        report.broken = actor.outage.reason
        report.status = actor.status
    instance = actor.current
    if instance is None or not instance.process.alive:
        if actor.outage is not None:
            report.next_probe_s = max(0.0, actor.outage.next_probe_s - time.monotonic())
        return report
    report.pid = instance.process.pid
    report.uptime_s = instance.process.lifetime_s
    if name == actor.name:
        report.generation = instance.generation
        report.status = actor.status
        report.memory_bytes = tree_pss_bytes(instance.process.pid)
        report.cpu_percent = meter.percent(instance.process.pid)
    else:
        report.status = f"in the process of {actor.name}"
    if words.pid == instance.process.pid:
        report.generation = words.generation
        report.queue_depth = words.queue_depth
        report.steps = words.steps
    if words.is_leaving and actor.outage is None:
        report.status = "leaves the run when its work is done"
    return report


class RunFacts(NamedTuple):
    """Facts that only the supervisor knows about its run. ``began_s`` is CLOCK_MONOTONIC."""

    run: RunDirectory
    began_s: float
    was_ready: bool
    is_ending: bool
    zygote_pids: Sequence[int]  # with its spare


def report_run(facts: RunFacts, supervised: Iterable[SupervisedActor], tables: StatusTables, meter: CpuMeter) -> RunReport:
    """Report the state of a run from its supervisor. Some ms: the kernel adds up every process's memory."""
    pools, requests = tables.pools_and_requests()
    actors = [report_actor(name, actor, tables.actor(name), meter) for actor in supervised for name in actor.spec.roles]
    ready = all(actor.ready for actor in actors)
    state = "stopping" if facts.is_ending else "ready" if ready else "degraded" if facts.was_ready else "starting"
    info = read_run_info(facts.run)
    return RunReport(
        ready=ready and not facts.is_ending,
        state=state,
        path=str(facts.run.path),
        run_id=facts.run.run_id,
        layout=info.config.actors.layout,
        endpoint=info.endpoint,
        model=info.origin or info.model_path,
        supervisor_pid=os.getpid(),
        overhead_bytes=sum(pss_bytes(pid) or 0 for pid in (os.getpid(), *facts.zygote_pids)),
        uptime_s=time.monotonic() - facts.began_s,
        actors=actors,
        pools=pools,
        requests=requests,
        compute=compute_of(facts.run),
        policy=tables.policy(),
    )


def report_without_supervisor(run: RunDirectory) -> RunReport:
    """Report a run from its directory, role locks and status words: for runs under systemd, or whose supervisor is gone."""
    info, tables = read_run_info(run), StatusTables(run)
    meter = CpuMeter()
    try:
        holders = {name: RoleLock.holder(run, name) for name in info.config.instances}
        for pid in holders.values():
            if pid:
                meter.percent(pid)
        time.sleep(_CPU_SAMPLE_S)
        actors = [
            _observe(name, info.config.process_of(name), holders[name], tables.actor(name), meter) for name in info.config.instances
        ]
        pools, requests = tables.pools_and_requests()
        broken, policy = tables.broken(), tables.policy()
    finally:
        tables.close()
    for actor in actors:
        if not actor.pid and actor.name in broken:
            actor.state, actor.status = "broken", broken[actor.name]
            actor.broken = actor.status
    return RunReport(
        ready=all(actor.ready for actor in actors),
        state="unsupervised",
        path=str(run.path),
        run_id=run.run_id,
        layout=info.config.actors.layout,
        endpoint=info.endpoint,
        model=info.origin or info.model_path,
        supervisor_pid=None,
        uptime_s=time.time() - info.created_s,
        actors=actors,
        pools=pools,
        requests=requests,
        compute=compute_of(run),
        policy=policy,
    )


def _observe(name: str, process: str, holder: int | None, words: ActorWords, meter: CpuMeter) -> ActorReport:
    """Report an actor from outside. ``process``: the actor that its process is named after, which gets memory and processor use."""
    if not holder:
        return ActorReport(name=name, state="absent")
    return ActorReport(
        name=name,
        state=words.state if words.pid == holder else "active",
        ready=words.pid == holder and words.state == "active",
        pid=holder,
        generation=words.generation,
        uptime_s=time.monotonic() - words.started_s if words.pid == holder else 0.0,
        status="" if process == name else f"in the process of {process}",
        memory_bytes=tree_pss_bytes(holder) if process == name else None,
        cpu_percent=meter.percent(holder) if process == name else None,
        queue_depth=words.queue_depth,
        steps=words.steps,
    )
