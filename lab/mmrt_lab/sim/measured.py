"""From the flight records of the phases to a cost model. Called by ``profile`` (pure).

On a machine that does other work, times say little; processor time still does. Then lines go through the means of the processor time,
and rates of stages together are not measured.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from mmrt.bench.environment import Environment
from mmrt.models.architecture import ModelConfig
from mmrt.runtime.bus.plan_base import PlanKind
from mmrt.runtime.observe.flight import FlightRecord, Kind, unpack_pair, unpack_plan
from mmrt.runtime.stage_table import stage_of

from .costs import Costs, Line, encode_squares, prefill_squares, step_seconds
from .fits import Middle, Sample, Work, fit_context, fit_interference, fit_line, fit_spreads
from .interference import Interference
from .observation import MOST_OTHERS, Observation
from .overheads import fit_delays, fit_egress, fit_overheads, quick
from .phases import NUM_STREAMS, STREAM_INPUT, STREAM_TOKENS
from .requests import make_sample

_QUIET = 0.85  # share of its work in which a stage alone has a processor, on a machine that does nothing else
_NOTE = (
    "Measured on a machine that did other work: stages alone had a processor for {:.0%} of their time. Times are scaled by "
    "the processor time taken, and rates of stages together are assumed from threads and niceness."
)
_SOME_NOTE = (
    "In {} of {} phases with several stages others had more than {:.0%} of the processors: rates and times beside decode are "
    "measured in the rest."
)
_GAP_NS = 5_000_000  # between two steps, at most: decode was not idle
_LEAST_STEPS = 8  # over equally many sequences, for a median
_STAGES = {PlanKind.ANALYSE: "video", PlanKind.PREPROCESS: "video", PlanKind.ENCODE: "encoder", PlanKind.PREFILL: "prefill"}


class Machine(NamedTuple):
    """``threads`` and ``nice``: of each stage."""

    environment: Environment
    num_cores: int
    threads: dict[str, int]
    nice: dict[str, int]


def fit(name: str, model: ModelConfig, machine: Machine, seen: Sequence[Observation]) -> Costs:
    """The cost model of what was seen. Raises: ValueError for too little of it."""
    threads = machine.threads
    phases: dict[str, list[Observation]] = {}
    for one in seen:
        phases.setdefault(one.run.phase.name, []).append(one)
    quiet = min(statistics.median(one.running(stage, threads[stage]) for one in phases[stage]) for stage in ("prefill", "decode"))
    scaled: Mapping[str, int] = {} if quiet >= _QUIET else threads
    middle: Middle = statistics.median if quiet >= _QUIET else statistics.fmean  # a share of the time is one of the mean
    media = phases.get("media", [])
    kinds = list(dict.fromkeys(one.kind for one in media))
    lines = {
        work: {
            kind: fit_line((s for one in media if one.kind == kind for s in _media_samples(model, work, one, scaled)), middle)
            for kind in kinds
        }
        for work in (PlanKind.ANALYSE, PlanKind.PREPROCESS, PlanKind.ENCODE)
    }
    decode, context_s = fit_decode(phases["decode"], scaled, middle)
    costs = Costs(
        name=name,
        origin="measured",
        note="" if quiet >= _QUIET else _NOTE.format(quiet),
        model=model,
        device="cpu",
        num_cores=machine.num_cores,
        threads=threads,
        nice=machine.nice,
        environment=machine.environment,
        analyse=lines[PlanKind.ANALYSE],
        preprocess=lines[PlanKind.PREPROCESS],
        encode=lines[PlanKind.ENCODE],
        prefill=fit_line((sample for one in phases["prefill"] for sample in _prefill_samples(one, scaled)), middle),
        decode=decode,
        decode_context_s=context_s,
        overheads=fit_overheads(model, [*phases["prefill"], *media], statistics.median if quiet >= _QUIET else quick),
        interference={},
    )
    if quiet < _QUIET:
        return costs
    found = [one for one in phases["together"] if not one.is_disturbed]
    if len(found) < len(phases["together"]):
        num_all = len(phases["together"])
        costs = msgspec.structs.replace(costs, note=_SOME_NOTE.format(num_all - len(found), num_all, MOST_OTHERS))
    together = [work for one in found for work in _works(model, costs, one)]
    alone = [work for name in ("prefill", "decode", "media") for one in phases.get(name, []) for work in _works(model, costs, one)]
    costs = msgspec.structs.replace(costs, interference=fit_interference(together, Interference(costs).rates))
    serving = [one for one in found if one.run.phase.serves]
    serving = serving or [one for one in phases["decode"] if one.run.phase.num_at_once == NUM_STREAMS]
    single = [one for one in [*found, *phases["decode"]] if one.run.phase.num_at_once == 1 and one.run.phase.max_tokens > 1]
    waking = [one for one in [*phases["prefill"], *media, *phases["decode"]] if one.run.phase.num_at_once == 1]
    return msgspec.structs.replace(
        costs,
        alone=fit_delays(model, [*phases["prefill"], *media], costs.overheads),
        beside=fit_delays(model, serving, costs.overheads),
        egress=fit_egress(serving),
        egress_single=fit_egress([one for one in single if one.run.phase.name == "together"] or single),
        decode_wake_s=_wake_s([work for one in waking for work in _steps_together(costs, one)]),
        spreads=fit_spreads([*alone, *together], Interference(costs).rates),
    )


def _plans(records: Iterable[FlightRecord], kind: PlanKind) -> list[FlightRecord]:
    """Plans of a kind that were done."""
    return [record for record in records if record.kind == Kind.PLAN and unpack_plan(record.a)[:2] == (kind, 0)]


def _prefill_samples(seen: Observation, threads: Mapping[str, int]) -> list[Sample]:
    squares, share = _squares(seen.records), seen.running("prefill", threads.get("prefill", 0))
    plans = _plans(seen.records, PlanKind.PREFILL)
    return [Sample(plan.b, squares.get(plan.key, 0.0), share * plan.duration_ns / 1e9) for plan in plans]


def _squares(records: Iterable[FlightRecord]) -> dict[int, float]:
    """Of prefill plans, by number."""
    squares: dict[int, float] = {}
    for record in records:
        if record.kind == Kind.PLAN_REQUEST:
            first, last = unpack_pair(record.b)
            squares[record.a] = squares.get(record.a, 0.0) + prefill_squares(first, last)
    return squares


def _media_samples(model: ModelConfig, work: PlanKind, seen: Observation, threads: Mapping[str, int]) -> list[Sample]:
    kind, stage = seen.kind, _STAGES[work]
    item, shape = make_sample(model, kind, seen.run.phase.shapes)
    share = seen.running(stage, threads.get(stage, 0))
    samples = []
    for plan in _plans(seen.records, work):
        units, squares = float(plan.b), 0.0
        if work == PlanKind.ANALYSE and kind == "image":
            units = item.work
        elif work == PlanKind.ENCODE:
            squares = _encode_squares(plan.b, [segment.num_rows for segment in shape.segments])
        samples.append(Sample(units, squares, share * plan.duration_ns / 1e9))
    return samples


def _encode_squares(num_rows: int, parts: Sequence[int]) -> float:
    """Of an encode plan of so many rows, whose parts come from a medium with parts of these rows."""
    mean = sum(encode_squares(rows) for rows in parts) / sum(parts)
    return num_rows * mean


def fit_decode(seen: Sequence[Observation], threads: Mapping[str, int], middle: Middle) -> tuple[Line, float]:
    """The time of a step by its number of sequences, and the seconds per token in their KV cache. A step lasts from commit to commit;
    where others took processors, so long as it had one. Of a phase, steps over as many sequences as it keeps at once count."""
    lengths_s: dict[tuple[int, int], list[float]] = {}  # by sequences, and tokens of their prompts as they were asked for
    contexts: dict[tuple[int, int], list[float]] = {}  # tokens in their KV cache
    for one in seen:
        count = one.run.phase.num_at_once
        kind = count, one.run.phase.num_input_tokens
        steps = [record for record in one.records if record.kind == Kind.STEP]
        num_tokens = statistics.mean(record.num_prompt_tokens or 0 for record in one.run.records) + one.run.phase.max_tokens / 2
        share = one.running("decode", threads.get("decode", 0))
        contexts.setdefault(kind, []).append(count * num_tokens)
        found = lengths_s.setdefault(kind, [])
        for before, after in pairwise(steps):
            if before.a == after.a == count and after.key == before.key + 1:
                length_ns = share * after.duration_ns if threads else after.end_ns - before.end_ns
                found.append(length_ns / 1e9)
    kinds = [kind for kind, found in lengths_s.items() if len(found) >= _LEAST_STEPS]
    if not 2 <= len({count for count, _ in kinds}) < len(kinds):
        raise ValueError("too few steps of decode to tell what tokens in the KV cache cost: --seconds is too short")
    middles = {(kind[0], statistics.fmean(contexts[kind])): middle(lengths_s[kind]) for kind in kinds}
    context_s = fit_context(middles)
    by_count: dict[int, list[float]] = {}
    for (count, context), seconds in middles.items():
        by_count.setdefault(count, []).append(max(0.0, seconds - context_s * context))
    return Line(points=tuple((count, statistics.fmean(by_count[count])) for count in sorted(by_count))), context_s


def _wake_s(works: Iterable[Work]) -> float:
    """The seconds by which the first step after a pause is longer than others: the median, never negative. 0 where few were seen."""
    more = [(work.end_ns - work.begin_ns) / 1e9 - work.alone_s for work in works if work.stage == "decode" and work.is_first]
    return max(0.0, statistics.median(more)) if len(more) >= _LEAST_STEPS else 0.0


def _works(model: ModelConfig, costs: Costs, seen: Observation) -> list[Work]:
    """What the stages did while they worked together, and how long it would have taken alone."""
    return [*_steps_together(costs, seen), *plans_together(model, costs, seen)]


def _steps_together(costs: Costs, seen: Observation) -> list[Work]:
    """Steps over the phase's streams first, then over its other requests. As in ``fit_decode``, a step lasts from commit to commit."""
    num_prompt = statistics.mean(record.num_prompt_tokens or 0 for record in seen.run.records)
    works: list[Work] = []
    before: FlightRecord | None = None
    for record in seen.records:
        if record.kind == Kind.STEP:
            num_streams = min(record.a, seen.run.phase.num_streams)
            num_others = (record.a - num_streams) * (num_prompt + seen.run.phase.max_tokens / 2)
            context = num_streams * (STREAM_INPUT + STREAM_TOKENS / 2) + num_others
            follows = before is not None and before.key + 1 == record.key and record.time_ns - before.end_ns < _GAP_NS
            begin_ns = before.end_ns if before is not None and follows else record.time_ns
            works.append(Work("decode", begin_ns, record.end_ns, step_seconds(costs, record.a, round(context)), not follows))
            before = record
    return works


def plans_together(model: ModelConfig, costs: Costs, seen: Observation) -> list[Work]:
    """Return the plans that were done, each with the time that it takes alone; not those in whose breaks others were done."""
    squares = _squares(seen.records)
    phase = seen.run.phase
    item, shape = make_sample(model, seen.kind, phase.shapes) if {*phase.kinds} - {"text"} else (None, None)
    tables = {PlanKind.ANALYSE: costs.analyse, PlanKind.PREPROCESS: costs.preprocess, PlanKind.ENCODE: costs.encode}
    works, interrupted = [], _interrupted(seen.records)
    for record in seen.records:
        if record.kind != Kind.PLAN or unpack_plan(record.a)[1] or (record.actor, record.key) in interrupted:
            continue
        kind = unpack_plan(record.a)[0]
        if kind == PlanKind.PREFILL:
            seconds = costs.prefill.seconds(record.b, squares.get(record.key, 0.0))
        elif item is not None and shape is not None:
            units = item.work if kind == PlanKind.ANALYSE and item.kind == "image" else record.b
            parts = [segment.num_rows for segment in shape.segments]
            seconds = tables[kind][item.kind].seconds(units, _encode_squares(record.b, parts) if kind == PlanKind.ENCODE else 0.0)
        else:
            continue
        works.append(Work(stage_of(record.actor), record.time_ns, record.end_ns, seconds))
    return works


def _interrupted(records: Iterable[FlightRecord]) -> set[tuple[str, int]]:
    """Return the actors and numbers of prefill's plans in whose breaks others were done: their time is also that of these."""
    plans = [record for record in records if record.kind == Kind.PLAN and stage_of(record.actor) == "prefill"]
    pairs = pairwise(sorted(plans, key=lambda plan: (plan.actor, plan.time_ns)))
    return {(one.actor, one.key) for one, next in pairs if one.actor == next.actor and next.time_ns < one.end_ns}
