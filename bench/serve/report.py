"""From records to figures: distributions per group, throughput, failures, the stall comparison, SLO attainment. Pure.

Called by ``serve``; ``render`` and ``plot`` show what this computes. All figures are of the client: times are seconds.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from ..environment import Environment
from .chat import WITHOUT_CACHES
from .record import Record
from .slo import Slo, attainment
from .stall import StallRun, times_alone, times_under_way, times_with_fresh

ALL_GROUP = "all"
FORMAT_VERSION = 1


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Of a list of values; seconds unless said otherwise."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one group. TTFT, TBT and gaps are of requests that went well or that the bench cut; E2E of the former alone.

    ``gap`` is between chunks, ``tbt`` between tokens; a token that comes in the same chunk as the one before it has a TBT of 0.
    """

    group: str
    num_requests: int
    num_failed: int
    num_cut: int
    num_input_tokens: int
    num_output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    tokens_per_chunk: float
    ttft: Distribution | None
    tbt: Distribution | None
    gap: Distribution | None
    e2e: Distribution | None


class StallSummary(msgspec.Struct, frozen=True, kw_only=True):
    """TBT of the text streams alone and with fresh media, in one run; ratios are of the P99s."""

    alone: Distribution | None
    with_fresh: Distribution | None
    under_way: Distribution | None  # only while a fresh request waits for its first token
    p99_ratio: float | None
    p99_ratio_under_way: float | None
    fresh_ttft: Distribution | None
    alone_s: float
    with_fresh_s: float


class TurnSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of all conversations. ``ttft_to_first``: median TTFT over that of the first turn. ``without_caches`` and
    ``ttft_to_without``: TTFT of the same turn in the run without caches, of a comparison."""

    turn: int
    num_requests: int
    num_prompt_tokens: float  # mean
    num_cached_tokens: float | None  # mean; None where the server does not say
    num_hits: int  # requests with any
    ttft: Distribution | None
    ttft_to_first: float | None
    without_caches: Distribution | None = None
    ttft_to_without: float | None = None


class SloSummary(msgspec.Struct, frozen=True, kw_only=True):
    ttft_s: float
    tbt_s: float | None
    attainment: float
    attained_requests_per_s: float


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """Of a simulated run: what was assumed, and what the controller counted. ``costs``: the cost model's name; ``origin``: whether it
    was measured or is a roofline. ``endpoint``: what the load asks of the gateways, in words."""

    policy: str
    layout: str
    costs: str
    origin: str
    note: str
    num_ticks: int
    num_steps: int
    totals: dict[str, int]
    endpoint: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one run. ``groups`` begins with all requests together; ``lag`` is how late the client itself sent them.

    Of a simulation, ``environment`` is that of its cost model; None where that was not measured.
    """

    format_version: int = FORMAT_VERSION
    scenario: str
    model: str
    settings: dict[str, str | int | float | bool | None]
    environment: Environment | None
    duration_s: float
    groups: list[GroupSummary]
    failures: dict[str, int]
    lag: Distribution | None
    stall: StallSummary | None = None
    chat: list[TurnSummary] | None = None
    slo: SloSummary | None = None
    simulated: Simulated | None = None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, with linear interpolation as in numpy. Raises: ValueError without any, or outside [0, 100]."""
    if not ordered or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(ordered)} values")
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(values: Iterable[float]) -> Distribution | None:
    """None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        min=ordered[0],
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def duration_of(records: Sequence[Record]) -> float:
    """From the first request sent to the last one's end; 0 without any."""
    sent = [record for record in records if record.sent_s]
    return max(record.end_s for record in sent) - min(record.sent_s for record in sent) if sent else 0.0


def summarise_group(group: str, records: Sequence[Record], duration_s: float) -> GroupSummary:
    """The figures of some records, with rates over ``duration_s``."""
    good = [record for record in records if record.error is None]
    num_input_tokens = sum(record.num_prompt_tokens or 0 for record in good)
    num_output_tokens = sum(record.num_tokens for record in good)
    num_chunks = sum(len(record.chunks) for record in good)

    def rate(count: int) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return GroupSummary(
        group=group,
        num_requests=len(records),
        num_failed=len(records) - len(good),
        num_cut=sum(record.cut for record in good),
        num_input_tokens=num_input_tokens,
        num_output_tokens=num_output_tokens,
        requests_per_s=rate(sum(record.is_success for record in good)),
        input_tokens_per_s=rate(num_input_tokens),
        output_tokens_per_s=rate(num_output_tokens),
        tokens_per_chunk=num_output_tokens / num_chunks if num_chunks else 0.0,
        ttft=distribution(record.ttft_s for record in good if record.ttft_s is not None),
        tbt=distribution(tbt_s for record in good for tbt_s in record.tbts_s),
        gap=distribution(gap_s for record in good for _, gap_s in record.timed_gaps()),
        e2e=distribution(record.e2e_s for record in good if record.is_success),
    )


def summarise_groups(records: Sequence[Record]) -> list[GroupSummary]:
    """All requests together, then each group by name if there are several."""
    duration_s = duration_of(records)
    names = sorted({record.group for record in records})
    summaries = [summarise_group(ALL_GROUP, records, duration_s)]
    if len(names) > 1:
        summaries += [summarise_group(name, [r for r in records if r.group == name], duration_s) for name in names]
    return summaries


def summarise_stall(run: StallRun) -> StallSummary:
    """Compare the phases."""
    alone, with_fresh, under_way = (distribution(times(run)) for times in (times_alone, times_with_fresh, times_under_way))
    return StallSummary(
        alone=alone,
        with_fresh=with_fresh,
        under_way=under_way,
        p99_ratio=_p99_ratio(with_fresh, alone),
        p99_ratio_under_way=_p99_ratio(under_way, alone),
        fresh_ttft=distribution(r.ttft_s for r in run.fresh if r.ttft_s is not None and r.error is None),
        alone_s=run.alone[1] - run.alone[0],
        with_fresh_s=run.with_fresh[1] - run.with_fresh[0],
    )


def summarise_chat(records: Sequence[Record]) -> list[TurnSummary]:
    """The turns in order."""
    good: dict[str, list[Record]] = {}
    for record in records:
        if record.is_success:
            good.setdefault(record.group, []).append(record)
    names = sorted(name for name in good if not name.endswith(WITHOUT_CACHES))
    turns: list[TurnSummary] = []
    for number, name in enumerate(names, 1):
        mine = good[name]
        cached = [record.num_cached_tokens for record in mine if record.num_cached_tokens is not None]
        ttft, without = _ttft(mine), _ttft(good.get(name + WITHOUT_CACHES, ()))
        turns.append(
            TurnSummary(
                turn=number,
                num_requests=len(mine),
                num_prompt_tokens=sum(record.num_prompt_tokens or 0 for record in mine) / len(mine),
                num_cached_tokens=sum(cached) / len(cached) if cached else None,
                num_hits=sum(count > 0 for count in cached),
                ttft=ttft,
                ttft_to_first=_median_ratio(ttft, turns[0].ttft if turns else ttft),
                without_caches=without,
                ttft_to_without=_median_ratio(ttft, without),
            )
        )
    return turns


def _ttft(records: Iterable[Record]) -> Distribution | None:
    return distribution(record.ttft_s for record in records if record.ttft_s is not None)


def _median_ratio(value: Distribution | None, base: Distribution | None) -> float | None:
    return value.p50 / base.p50 if value and base and base.p50 > 0 else None


def _p99_ratio(value: Distribution | None, base: Distribution | None) -> float | None:
    return value.p99 / base.p99 if value and base and base.p99 > 0 else None


def summarise_slo(records: Sequence[Record], slo: Slo) -> SloSummary:
    """Attainment, and the rate of the requests that met the objective."""
    share = attainment(records, slo)
    duration_s = duration_of(records)
    judged = sum(not record.cut for record in records)
    return SloSummary(
        ttft_s=slo.ttft_s,
        tbt_s=slo.tbt_s if math.isfinite(slo.tbt_s) else None,
        attainment=share,
        attained_requests_per_s=share * judged / duration_s if duration_s > 0 else 0.0,
    )


def count_failures(records: Iterable[Record]) -> dict[str, int]:
    """Number of each error, the most frequent first."""
    return dict(Counter(record.error for record in records if record.error is not None).most_common())
