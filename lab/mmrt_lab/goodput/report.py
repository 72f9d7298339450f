"""From the records of loads to curves (pure): attainment over rate and over the objective's scale, and latency by parts."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from mmrt.bench.environment import Environment
from mmrt.bench.serve.record import Record
from mmrt.bench.serve.report import Distribution, count_failures, distribution, duration_of
from mmrt.bench.serve.stall import StallRun, times_alone, times_with_fresh
from mmrt.runtime.observe.breakdown import PARTS, Breakdown

from .objective import Objective

FORMAT_VERSION = 1
SCALES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)


class Measured(msgspec.Struct, frozen=True):
    """One load on one system. ``breakdowns``: of the requests that went well and are known, with the seconds from the client.
    ``stall``: the phases of that scenario. ``num_kills``: of processes meanwhile."""

    records: list[Record]
    breakdowns: list[Breakdown]
    stall: StallRun | None = None
    num_kills: int = 0

    @property
    def good(self) -> list[Record]:
        """Those that did not fail."""
        return [record for record in self.records if record.error is None]

    @property
    def tbts_s(self) -> list[float]:
        """The times between tokens; in ``stall`` those of the streams while media come."""
        if self.stall is not None:
            return times_with_fresh(self.stall)
        return [tbt_s for record in self.good for tbt_s in record.tbts_s]

    @property
    def tbts_alone_s(self) -> list[float]:
        """In ``stall`` the times between tokens of the streams before media come."""
        return [] if self.stall is None else times_alone(self.stall)


class PartSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one part, over requests. ``share``: of their latency."""

    mean: float
    p95: float
    share: float


class GroupPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one kind in a load. ``num_cut``: those that the bench cut. They do not count in the attainment, which is None
    without others."""

    num_requests: int
    num_cut: int
    attainment: float | None
    ttft: Distribution | None


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one round of a load alone: TTFT P90 and TBT P99 in seconds, None without tokens."""

    attainment: float
    ttft_p90: float | None
    tbt_p99: float | None


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A load at one rate, all rounds together. ``rate``: None for one without. ``by_scale``: (scale, attainment) with TTFT and TBT of
    the objective times the scale. ``tbt``: in ``stall``, of the streams while media come; ``tbt_alone``: before."""

    rate: float | None
    num_requests: int
    duration_s: float
    attainment: float
    attained_requests_per_s: float
    by_group: dict[str, GroupPoint]
    by_scale: list[tuple[float, float]]
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Distribution | None
    tbt: Distribution | None
    e2e: Distribution | None
    num_broken_down: int
    breakdown: dict[str, PartSummary]
    failures: dict[str, int]
    rounds: list[Round]
    num_kills: int = 0
    tbt_alone: Distribution | None = None

    @property
    def degradation(self) -> float | None:
        """The factor by which media lengthen the mean time between tokens of streams (US10)."""
        if self.tbt is None or self.tbt_alone is None or not self.tbt_alone.mean:
            return None
        return self.tbt.mean / self.tbt_alone.mean


class SystemReport(msgspec.Struct, frozen=True, kw_only=True):
    """One policy or preset. ``goodput``: None where no search was made. ``fails``: the lowest rate that failed; None if none did.
    ``area``: under the attainment over the report's rates."""

    name: str
    policy: str
    layout: str
    goodput: float | None
    fails: float | None
    area: float | None
    points: list[Point]


class GoodputReport(msgspec.Struct, frozen=True, kw_only=True):
    """``origin``: where the figures come from. ``environment``: of the machine, or of a measured cost model's; None for a roofline.
    ``rates``: those that were asked for, at which every system was measured."""

    format_version: int = FORMAT_VERSION
    origin: Literal["live", "measured", "roofline"]
    costs: str
    note: str
    model: str
    load: str
    settings: dict[str, str | int | float | bool | None]
    environment: Environment | None
    objective: str  # in words
    slo_ttft_s: float
    slo_tbt_s: float | None
    slo_text_s: float | None
    target: float
    rates: list[float]
    systems: list[SystemReport]

    @property
    def has_rate(self) -> bool:
        """The load came at rates."""
        return any(point.rate is not None for system in self.systems for point in system.points)

    @property
    def has_kills(self) -> bool:
        """Processes were killed meanwhile."""
        return any(point.num_kills for system in self.systems for point in system.points)

    @property
    def source(self) -> str:
        """The origin in words."""
        if self.origin == "live":
            return "live on this machine"
        return f"simulated with costs {self.costs}" + (" (roofline, never measured)" if self.origin == "roofline" else "")


def summarise(rate: float | None, rounds: Sequence[Measured], objective: Objective) -> Point:
    """The figures of one load: those of all rounds together, and the most important ones of each."""
    records = [record for measured in rounds for record in measured.records]
    breakdowns = [breakdown for measured in rounds for breakdown in measured.breakdowns]
    good = [record for measured in rounds for record in measured.good]
    duration_s = sum(duration_of(measured.records) for measured in rounds)
    groups = sorted({record.group for record in records})
    return Point(
        rate=rate,
        num_requests=len(records),
        duration_s=duration_s,
        attainment=objective.attainment(records),
        attained_requests_per_s=_per_s(sum(objective.verdicts(records)), duration_s),
        by_group={group: _group([record for record in records if record.group == group], objective) for group in groups},
        by_scale=[(scale, objective.times(scale).attainment(records)) for scale in SCALES],
        input_tokens_per_s=_per_s(sum(record.num_prompt_tokens or 0 for record in good), duration_s),
        output_tokens_per_s=_per_s(sum(record.num_tokens for record in good), duration_s),
        ttft=_ttft(good),
        tbt=distribution(tbt_s for measured in rounds for tbt_s in measured.tbts_s),
        e2e=distribution(record.e2e_s for record in good if record.is_success),
        num_broken_down=len(breakdowns),
        breakdown=summarise_parts(breakdowns),
        failures=count_failures(records),
        rounds=[_round(measured, objective) for measured in rounds],
        num_kills=sum(measured.num_kills for measured in rounds),
        tbt_alone=distribution(tbt_s for measured in rounds for tbt_s in measured.tbts_alone_s),
    )


def _round(measured: Measured, objective: Objective) -> Round:
    ttft, tbt = _ttft(measured.records), distribution(measured.tbts_s)
    return Round(
        attainment=objective.attainment(measured.records),
        ttft_p90=None if ttft is None else ttft.p90,
        tbt_p99=None if tbt is None else tbt.p99,
    )


def _group(records: Sequence[Record], objective: Objective) -> GroupPoint:
    num_cut = sum(record.cut for record in records)
    attainment = objective.attainment(records) if num_cut < len(records) else None
    return GroupPoint(num_requests=len(records), num_cut=num_cut, attainment=attainment, ttft=_ttft(records))


def _ttft(records: Sequence[Record]) -> Distribution | None:
    return distribution(record.ttft_s for record in records if record.error is None and record.ttft_s is not None)


def _per_s(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def summarise_parts(breakdowns: Sequence[Breakdown]) -> dict[str, PartSummary]:
    """Each of the eight parts over these requests (TI22); nothing without any."""
    total_s = sum(one.total_s for one in breakdowns)
    parts = {}
    for field in PARTS:
        values = distribution(getattr(one, field) for one in breakdowns)
        if values is not None:
            parts[field] = PartSummary(mean=values.mean, p95=values.p95, share=values.mean * values.count / total_s if total_s else 0.0)
    return parts
