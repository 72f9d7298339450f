"""A finished phase of ``profile``, with its flight records."""

from typing import NamedTuple

from mmrt.runtime.observe.flight import FlightRecord, Kind
from mmrt.schema.media import MediaKind

from .phases import PhaseRun

MOST_OTHERS = 0.05  # share of the processors' time that others have on a machine that does nothing else: 0.02 were seen
_LEAST_CPU_S = 0.2  # of a stage in a phase: the kernel counts in steps of 10 ms


class Observation(NamedTuple):
    """A phase, and all flight records of its time."""

    run: PhaseRun
    records: list[FlightRecord]

    @property
    def kind(self) -> MediaKind:
        """Of the media of a phase with media."""
        return next(kind for kind in self.run.phase.kinds if kind != "text")

    @property
    def is_disturbed(self) -> bool:
        """Others used the processors."""
        return self.run.others > MOST_OTHERS

    def running(self, stage: str, num_threads: int) -> float:
        """The share of the stage's work in which it had a processor: less than 1 where others of the machine took it. Of a stage with
        one thread in a process of its own; 1 for others."""
        work_s = sum(r.duration_ns for r in self.records if r.kind in (Kind.PLAN, Kind.STEP) and r.actor == stage) / 1e9
        cpu_s = self.run.cpu_s.get(stage, 0.0)
        return min(1.0, cpu_s / work_s) if num_threads == 1 and work_s > 0 and cpu_s > _LEAST_CPU_S else 1.0
