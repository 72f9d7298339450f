"""From the records of a simulation to the report of ``bench serve`` (pure)."""

import math
from collections.abc import Sequence
from itertools import accumulate
from random import Random

import msgspec
import numpy as np

from mmrt.bench.serve.load_options import LoadOptions, settings_of
from mmrt.bench.serve.record import Chunk, Record
from mmrt.bench.serve.report import (
    ALL_GROUP,
    Distribution,
    GroupSummary,
    Report,
    Simulated,
    SloSummary,
    count_failures,
    distribution,
    summarise_chat,
    summarise_stall,
)
from mmrt.bench.serve.slo import TBT_SHARE, Slo
from mmrt.bench.serve.stall import STREAM_GROUP, StallRun
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.observe.breakdown import Breakdown, Work, break_down

from .costs import Costs
from .endpoint import gateways_busy, in_words
from .events import NS, to_ns
from .gateway import DRAWN, SimRecord
from .loads import Load, Stall
from .simulation import Simulation
from .step_log import Ints, Stretch, num_rows, pauses, weights

_RUN = 100  # consecutive measured times of tokens' ways out
_WITH_NEXT = -1  # in place of a token's time: it comes with the next one


class Steps:
    """The steps of a run, as far as records need them: those of each decode behind those of the one before, then the draws of prefills.
    ``arrivals``: when the tokens of each step come to their clients; ``tbts``: the times between them."""

    def __init__(self, simulation: Simulation, costs: Costs) -> None:
        logs = {**dict(enumerate(simulation.logs)), DRAWN: simulation.first_tokens.log}
        self.gaps = np.concatenate([log.gaps() for log in logs.values()])
        self.commits = np.concatenate([log.commits() for log in logs.values()])
        arrivals = [_arrivals(decode, log.commits(), simulation, costs) for decode, log in logs.items()]
        self.arrivals = np.concatenate(arrivals)
        self.tbts = np.concatenate([np.diff(of_one, prepend=of_one[:1]) for of_one in arrivals]) if costs.egress else self.gaps
        self._firsts = dict(zip(logs, accumulate((log.num_steps for log in logs.values()), initial=0), strict=False))
        self._of = dict(zip(logs, arrivals, strict=True))

    def of(self, record: SimRecord) -> list[Stretch]:
        """The steps that committed its tokens."""
        return [(self._firsts[decode] + first, self._firsts[decode] + last) for decode, first, last in record.stretches]

    def ttft_s(self, record: SimRecord) -> float | None:
        """From sending to the first token; None without one."""
        if not record.stretches:
            return None
        decode, first, _ = record.stretches[0]
        return (int(self.arrivals[self._firsts[decode] + first]) - record.sent_ns) / NS

    def cut_short(self, record: SimRecord) -> None:
        """Leave out the tokens that came after the client had gone."""
        if record.cut:
            left = []
            for decode, first, last in record.stretches:
                last = min(last, int(np.searchsorted(self._of[decode], record.end_ns, "right")) - 1)
                if first <= last:
                    left.append((decode, first, last))
            record.stretches = left
            record.num_tokens = sum(last + 1 - first for _, first, last in left)

    def record(self, record: SimRecord) -> Record:
        """The same request with the time of each token, as ``bench serve`` has it."""
        at_ns = [int(self.arrivals[step]) for first, last in self.of(record) for step in range(first, last + 1)]
        return Record(
            index=record.index,
            group=record.group,
            scheduled_s=record.scheduled_ns / NS,
            sent_s=record.sent_ns / NS,
            chunks=[Chunk(time_ns / NS, 1) for time_ns in at_ns],
            end_s=record.end_ns / NS,
            num_prompt_tokens=record.num_prompt_tokens,
            num_completion_tokens=record.num_tokens,
            num_cached_tokens=record.num_cached_tokens,
            error=record.error,
            cut=record.cut,
        )

    def breakdown(self, record: SimRecord, works: Sequence[Work]) -> Breakdown:
        """The parts of its latency. ``works``: its plans."""
        decoded = []
        for (decode, _, _), (first, last) in zip(record.stretches, self.of(record), strict=True):
            if decode == DRAWN:
                continue  # with prefill's plan
            commit_ns = int(self.commits[first])
            ready_ns = max((work.known_ns for work in works if work.known_ns <= commit_ns), default=record.sent_ns)
            begin_ns = max(commit_ns - int(self.gaps[first]), ready_ns)  # a gap may hold a pause of decode
            end_ns = int(self.commits[last])
            decoded.append(Work("decode", begin_ns, end_ns, end_ns))
        return break_down(record.sent_ns, record.end_ns, [*works, *decoded], "decode")


def _arrivals(decode: int, commits: Ints, simulation: Simulation, costs: Costs) -> Ints:
    """When the tokens of this decode, committed at these times, come to their clients: those of one step together, and in order. Some
    come with the next, but not the last of a request. Measured times come in runs of consecutive ones, which begin anywhere."""
    if not costs.egress or not len(commits):
        return commits + to_ns(costs.overheads.egress_s)
    stretches = [
        [(first, last) for number, first, last in record.stretches if number == decode] for record in simulation.gateway.records
    ]
    ways_ns = _ways_ns(costs.egress, len(commits), simulation.seed)
    if costs.egress_single:
        singles_ns = _ways_ns(costs.egress_single, len(commits), simulation.seed)
        ways_ns = np.where(num_rows(len(commits), stretches) == 1, singles_ns, ways_ns)
    lasts = [last for row in stretches for _, last in row[-1:]]
    at_last = ways_ns[lasts]
    ways_ns[lasts] = np.where(at_last == _WITH_NEXT, to_ns(costs.overheads.egress_s), at_last)
    is_held = ways_ns == _WITH_NEXT
    arrivals = np.maximum.accumulate(commits + np.where(is_held, 0, ways_ns))
    last_step = len(commits) - 1
    with_step = np.minimum.accumulate(np.where(is_held, last_step, np.arange(len(commits)))[::-1])[::-1]  # the next that is not held
    return arrivals[with_step]


def _ways_ns(measured: Sequence[float | None], count: int, seed: int) -> Ints:
    """So many times, in runs of consecutive measured ones."""
    length = min(_RUN, len(measured))
    starts = Random(seed).choices(range(len(measured) - length + 1), k=-(-count // length))
    order = (np.array(starts)[:, None] + np.arange(length)).ravel()[:count]
    return np.array([_WITH_NEXT if seconds is None else to_ns(seconds) for seconds in measured], np.int64)[order]


def make_report(options: LoadOptions, config: RuntimeConfig, costs: Costs, simulation: Simulation, load: Load) -> Report:
    """The report of a simulation that is over."""
    records, steps = simulation.gateway.records, Steps(simulation, costs)
    for record in records:
        steps.cut_short(record)
    duration_s = (max(r.end_ns for r in records) - min(r.sent_ns for r in records)) / NS if records else 0.0
    names = sorted({record.group for record in records})
    groups = [_group(ALL_GROUP, records, steps, duration_s)]
    if len(names) > 1:
        groups += [_group(name, [record for record in records if record.group == name], steps, duration_s) for name in names]
    state = simulation.controller.state
    busy = gateways_busy(len(records), sum(record.num_tokens for record in records), duration_s)
    return Report(
        scenario=options.workload or options.scenario,
        model=costs.title,
        settings=settings_of(options),
        environment=costs.environment,
        duration_s=duration_s,
        groups=groups,
        failures=count_failures(map(steps.record, (record for record in records if record.error is not None))),
        lag=None,
        stall=summarise_stall(stall_run(load, records, steps)) if isinstance(load, Stall) else None,
        chat=summarise_chat([steps.record(record) for record in records]) if options.scenario == "chat" else None,
        slo=_slo(records, steps, options.slo, duration_s) if options.slo else None,
        simulated=Simulated(
            policy=state.policy.name,
            layout=config.actors.layout,
            costs=costs.name,
            origin=costs.origin,
            note=costs.note,
            num_ticks=simulation.num_ticks,
            num_steps=sum(log.num_steps for log in simulation.logs),
            totals={field: getattr(state.totals, field) for field in _TOTALS},
            endpoint=in_words(busy, config.num_gateways),
        ),
    )


_TOTALS = ("admitted", "finished", "failed", "preempted", "evicted", "overruled", "illegal", "prompt_tokens", "cached_tokens")


def stall_run(load: Stall, records: Sequence[SimRecord], steps: Steps) -> StallRun:
    """The phases and records of a ``stall`` that is over."""
    told = [steps.record(record) for record in records]
    streams, fresh = ([r for r in told if (r.group == STREAM_GROUP) is is_stream] for is_stream in (True, False))
    alone_s, fresh_s, end_s = (at_ns / NS for at_ns in (load.alone_ns, load.fresh_ns, load.end_ns))
    return StallRun(streams, fresh, (alone_s, fresh_s), (fresh_s, end_s))


def _group(group: str, records: Sequence[SimRecord], steps: Steps, duration_s: float) -> GroupSummary:
    """See ``serve.report.summarise_group``."""
    good = [record for record in records if record.error is None]
    num_input_tokens = sum(record.num_prompt_tokens or 0 for record in good)
    num_output_tokens = sum(record.num_tokens for record in good)

    def rate(count: int) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    tbt = time_between_tokens(good, steps)
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
        tokens_per_chunk=1.0 if num_output_tokens else 0.0,
        ttft=distribution(ttft_s for record in good if (ttft_s := steps.ttft_s(record)) is not None),
        tbt=tbt,
        gap=tbt,
        e2e=distribution((record.end_ns - record.sent_ns) / NS for record in good if record.is_success),
    )


def time_between_tokens(records: Sequence[SimRecord], steps: Steps) -> Distribution | None:
    """Over all tokens of these records."""
    rows = [steps.of(record) for record in records]
    counts = weights(len(steps.tbts), rows)
    extra = [pause for row in rows if len(row) > 1 for pause in pauses(steps.arrivals, row)]
    values = np.concatenate((steps.tbts, np.array(extra, np.int64)))
    return weighted_distribution(values, np.concatenate((counts, np.ones(len(extra), np.int64))))


def weighted_distribution(values_ns: Ints, counts: Ints) -> Distribution | None:
    """``serve.report.distribution`` of values that occur so many times."""
    order = np.argsort(values_ns, kind="stable")
    order = order[counts[order] > 0]
    if not len(order):
        return None
    ordered, upto = values_ns[order], np.cumsum(counts[order])
    count = int(upto[-1])

    def at(position: int) -> int:
        return int(ordered[np.searchsorted(upto, position, "right")])

    def percentile(percent: float) -> float:
        position = (count - 1) * percent / 100
        below = math.floor(position)
        low, high = at(below), at(min(below + 1, count - 1))
        return (low + (high - low) * (position - below)) / NS

    return Distribution(
        count=count,
        mean=int(np.dot(ordered, counts[order])) / count / NS,
        min=int(ordered[0]) / NS,
        p50=percentile(50),
        p90=percentile(90),
        p95=percentile(95),
        p99=percentile(99),
        max=int(ordered[-1]) / NS,
    )


def _slo(records: Sequence[SimRecord], steps: Steps, slo: Slo, duration_s: float) -> SloSummary:
    """See ``serve.report.summarise_slo``."""
    verdicts = judge([record for record in records if not record.cut], steps, slo)
    num_met = sum(map(all, verdicts))
    return SloSummary(
        ttft_s=slo.ttft_s,
        tbt_s=slo.tbt_s if math.isfinite(slo.tbt_s) else None,
        attainment=num_met / len(verdicts) if verdicts else 0.0,
        attained_requests_per_s=num_met / duration_s if duration_s > 0 else 0.0,
    )


def judge(records: Sequence[SimRecord], steps: Steps, slo: Slo) -> list[tuple[bool, bool]]:
    """Return for each request whether it meets the objective of TTFT, and that of TBT. See ``serve.slo.is_met``."""
    late = np.concatenate(([0], np.cumsum(steps.tbts >= slo.tbt_s * NS)))  # before each step
    return [(_is_soon(record, steps, slo), record.is_success and _is_even(record, steps, late, slo)) for record in records]


def _is_soon(record: SimRecord, steps: Steps, slo: Slo) -> bool:
    ttft_s = steps.ttft_s(record)
    return record.is_success and ttft_s is not None and ttft_s < slo.ttft_s


def _is_even(record: SimRecord, steps: Steps, late: Ints, slo: Slo) -> bool:
    stretches = steps.of(record)
    num_late = sum(int(late[last + 1] - late[first + 1]) for first, last in stretches)
    num_late += sum(pause >= slo.tbt_s * NS for pause in pauses(steps.arrivals, stretches))
    num_tbts = record.num_tokens - 1
    return num_tbts - num_late >= TBT_SHARE * num_tbts


def encode_report(report: Report) -> bytes:
    """As JSON: of equal simulations equal bytes."""
    return msgspec.json.encode(report)
