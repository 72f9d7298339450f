"""From flight records of the phases to the times outside the stages. Called by ``measured`` (pure)."""

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from ...models.architecture import ModelConfig
from ...runtime.observe.flight import FlightRecord, Kind, unpack_id
from .costs import Overheads
from .fits import Middle, fit_not_negative, spread_of
from .requests import make_sample
from .seen import Seen


def fit_overheads(model: ModelConfig, seen: Sequence[Seen], typical: Middle) -> Overheads:
    """From requests that came one after the other: the times between what client, gateway, controller and actors noted."""
    ingress: dict[int, list[float]] = {}
    fill, egress, messages, ticks = [], [], [], []
    for one in seen:
        kind = one.run.phase.kinds[0]
        num_bytes = 0 if kind == "text" else one.run.phase.num_items * make_sample(model, kind, one.run.phase.shapes)[0].num_bytes
        ticks += [record.duration_ns / 1e9 for record in one.records if record.kind == Kind.TICK and record.a]
        messages += _message_times(one.records)
        fill += [record.duration_ns / 1e9 / record.c for record in one.records if record.kind == Kind.WRITTEN and record.c]
        for record in one.run.records:
            inside = [r for r in one.records if record.sent_s * 1e9 <= r.time_ns and r.end_ns <= record.end_s * 1e9]
            submitted = [r.time_ns / 1e9 - record.sent_s for r in inside if r.kind == Kind.SUBMITTED]
            commits = [r.end_ns / 1e9 for r in inside if r.kind == Kind.STEP]
            if submitted and commits and record.chunks:
                ingress.setdefault(num_bytes, []).append(submitted[0])
                egress.append(record.chunks[0].time_s - commits[0])
    if not ingress or not messages:
        raise ValueError("no request came to its end in its phase: --seconds is too short")
    ingress_s, ingress_byte_s = fit_not_negative([(1.0, float(size)) for size in ingress], list(map(typical, ingress.values())))
    return Overheads(
        ingress_s=ingress_s,
        ingress_byte_s=ingress_byte_s,
        fill_byte_s=typical(fill) if fill else 0.0,
        egress_s=max(0.0, typical(egress)),
        message_s=typical(messages),
        tick_s=typical(ticks),
    )


def quick(values: Sequence[float]) -> float:
    """The tenth percentile: of short times, those that nobody else lengthened."""
    return sorted(values)[len(values) // 10]


def fit_beside(seen: Sequence[Seen], alone: Overheads) -> tuple[Overheads, list[float]]:
    """From phases whose requests came while others were decoded: the means of the same times, and the times of tokens from their
    commits to their clients, see ``Costs.egress``. What was not seen is as ``alone``."""
    beside = [one for one in seen if one.run.phase.num_at_once > 1]
    ways = [way for one in beside for way in _ways(one)]
    ticks = [record.duration_ns / 1e9 for one in beside for record in one.records if record.kind == Kind.TICK and record.a]
    messages = [seconds for one in beside for seconds in _message_times(one.records)]
    egress = [max(0.0, seconds) for way in ways for seconds in way.egress_s]

    def mean(values: Sequence[float], otherwise: float) -> float:
        return statistics.fmean(values) if values else otherwise

    overheads = msgspec.structs.replace(
        alone,
        ingress_s=mean([way.ingress_s for way in ways], alone.ingress_s),
        egress_s=mean(egress, alone.egress_s),
        message_s=mean(messages, alone.message_s),
        tick_s=mean(ticks, alone.tick_s),
    )
    return overheads, spread_of(egress) if egress else []


class _Way(NamedTuple):
    """Seconds of a request from its client to the controller, and of its tokens from their commits to the client."""

    ingress_s: float
    egress_s: list[float]


def _ways(seen: Seen) -> Iterator[_Way]:
    """Of each request of a phase that decode has ended there, if every token came to the client with a time. A request has a token
    of each step up to that in which it ended."""
    keys, rows, submitted_ns, ended_ns = {}, {}, {}, {}
    for record in seen.records:
        if record.kind == Kind.RECEIVED:
            keys[unpack_id(record.a, record.b)] = record.key
        elif record.kind == Kind.SUBMITTED:
            submitted_ns[record.key] = record.time_ns
        elif record.kind == Kind.ROW:
            rows[record.a, record.b] = record.key
        elif record.kind == Kind.ROW_ENDED and (record.key, record.a) in rows:
            ended_ns[rows[record.key, record.a]] = record.time_ns
    commits_ns = [record.end_ns for record in seen.records if record.kind == Kind.STEP]
    for request in seen.run.records:
        key = keys.get(request.request_id, 0)
        if key in submitted_ns and key in ended_ns:
            end = bisect_right(commits_ns, ended_ns[key])
            count = sum(chunk.num_tokens for chunk in request.chunks)
            lasts = accumulate(chunk.num_tokens for chunk in request.chunks)
            if count == request.num_tokens <= end:
                egress = [c.time_s - commits_ns[end - count + last - 1] / 1e9 for c, last in zip(request.chunks, lasts, strict=True)]
                yield _Way(submitted_ns[key] / 1e9 - request.sent_s, egress)


def _message_times(records: Sequence[FlightRecord]) -> list[float]:
    """Of plans that waited for nothing: from the controller to the actor, and back."""
    issued = {record.key: record.time_ns for record in records if record.kind == Kind.ISSUED}
    known = {record.key: record.time_ns for record in records if record.kind == Kind.ACKNOWLEDGED}
    times = []
    for record in records:
        if record.kind == Kind.PLAN and record.key in issued and record.key in known:
            times.append((record.time_ns - record.c - issued[record.key]) / 1e9)
            times.append((known[record.key] - record.end_ns) / 1e9)
    return [seconds for seconds in times if seconds > 0]
