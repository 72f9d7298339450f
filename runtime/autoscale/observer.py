"""A live run, watched from outside for the scaler and the drift detector: samples of its counts, and what its requests ask for.

Reads the controller's published counts and the new flight records; writes nothing.
"""

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ...shm.controller_stats import ControllerStats
from ...shm.errors import MissingError
from ...shm.run_directory import RunDirectory
from ..config.runtime_config import RuntimeConfig
from ..errors import RunError
from ..observe.flight import FlightRecord, Kind
from ..observe.live import RecordFollower
from ..process.run import read_run_info
from ..stage_table import ALL_ACTORS, STAGES, InstanceId, stage_of
from .demand import Demand
from .scaler import Sample

_WANTED = (Kind.PLAN, Kind.PREPARED, Kind.STEP)


class Counts(NamedTuple):
    """The counts of flight records, since the observation began."""

    busy_ns: Counter[InstanceId]
    units: Counter[InstanceId]
    num_requests: int = 0
    num_prompt_tokens: int = 0


class Observer:
    """Looks at a run again and again. Raises: RunError if it is not up, or no longer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._run = RunDirectory.attach(path, timeout_s=0.0)
            self._stats = ControllerStats.attach(self._run)
        except MissingError:
            raise RunError(f"no run is up in {path} (mmrt up)") from None
        watched = [actor for actor in ALL_ACTORS if stage_of(actor) == "controller" or STAGES[stage_of(actor)].can_scale]
        self._follower = RecordFollower(self._run, watched, [kind for kind in Kind if kind not in _WANTED], num_first=1)
        self._follower.take()  # what was before does not count
        self._num_tokens = self._follower.num_tokens
        self._counts = Counts(Counter(), Counter())
        self._idle = time.monotonic(), idle_seconds()

    def close(self) -> None:
        self._follower.close()
        self._stats.close()
        self._run.close()

    @property
    def config(self) -> RuntimeConfig:
        """Of the run, with its present layout. Raises: RunError once it is down."""
        try:
            with closing(RunDirectory.attach(self._path, timeout_s=0.0)) as run:
                return read_run_info(run).config
        except MissingError:
            raise RunError(f"the run in {self._path} is down") from None

    def look(self) -> tuple[Sample, Demand]:
        """A sample now, and what the requests since the last look asked for. Records that were overwritten meanwhile are missed."""
        before = self._counts
        self._counts = counts = count(before, self._follower.take())
        num_tokens, self._num_tokens = self._follower.num_tokens - self._num_tokens, self._follower.num_tokens
        stats, now_s = self._stats.read(), time.monotonic()
        idle_s, (before_s, idle_before_s) = idle_seconds(), self._idle
        self._idle = now_s, idle_s
        sample = Sample(
            at_s=now_s,
            idle_cores=None if idle_s is None or idle_before_s is None else (idle_s - idle_before_s) / max(1e-3, now_s - before_s),
            busy_s={actor: busy_ns / 1e9 for actor, busy_ns in counts.busy_ns.items()},
            units=dict(counts.units),
            rows_left=stats.rows_left,
            tokens_left=stats.tokens_left,
            video_left=stats.video_left,
            tbt_p99_s=stats.tbt_p99_s,
            tbt_objective_s=stats.tbt_objective_s,
        )
        encoded = (units - before.units[actor] for actor, units in counts.units.items() if stage_of(actor) == "encoder")
        demand = Demand(
            num_requests=counts.num_requests - before.num_requests,
            encode_rows=sum(encoded),
            prompt_tokens=counts.num_prompt_tokens - before.num_prompt_tokens,
            decode_tokens=num_tokens,
        )
        return sample, demand


def idle_seconds(stat: Path = Path("/proc/stat"), usable: Collection[int] | None = None) -> float | None:
    """Return for how long the processors that this process may use have done nothing, together, since the machine began. None where
    the system does not say, as in containers that number processors anew."""
    usable = os.sched_getaffinity(0) if usable is None else usable
    try:
        numbered = {words[0]: words for line in stat.read_text().splitlines() if (words := line.split())}
        ticks = sum(sum(map(int, numbered[f"cpu{number}"][4:6])) for number in usable)  # idle, and waiting for a disk
    except (OSError, KeyError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def count(before: Counts, records: Iterable[FlightRecord]) -> Counts:
    """Add new flight records (pure)."""
    busy_ns, units = before.busy_ns.copy(), before.units.copy()
    num_requests, num_tokens = before.num_requests, before.num_prompt_tokens
    for record in records:
        if record.kind is Kind.PLAN:
            busy_ns[InstanceId(record.actor)] += record.duration_ns
            units[InstanceId(record.actor)] += record.b if stage_of(record.actor) != "video" else 1
        elif record.kind is Kind.PREPARED:
            num_requests += 1
            num_tokens += record.a + record.b
    return Counts(busy_ns, units, num_requests, num_tokens)
