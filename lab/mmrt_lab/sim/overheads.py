"""From flight records of the phases to the times outside the stages. Called by ``measured`` (pure)."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from mmrt.models.architecture import ModelConfig
from mmrt.runtime.observe.flight import FlightRecord, Kind, unpack_id

from .costs import Delays, Overheads
from .fits import Middle, fit_not_negative, spread_of
from .observation import Observation
from .requests import make_sample

_MOST_EGRESS = 1024  # times of tokens' ways out in a cost file


def fit_overheads(model: ModelConfig, seen: Sequence[Observation], typical: Middle) -> Overheads:
    """From requests that came one after the other: the times between what client, gateway, controller and actors noted."""
    ingress: dict[tuple[int, int], list[float]] = {}  # by tokens and bytes
    fill, egress, messages, ticks = [], [], [], []
    for one in seen:
        num_bytes = _num_bytes(model, one)
        ticks += [record.duration_ns / 1e9 for record in one.records if record.kind == Kind.TICK and record.a]
        messages += _message_times(one.records)
        fill += [record.duration_ns / 1e9 / record.c for record in one.records if record.kind == Kind.WRITTEN and record.c]
        for record in one.run.records:
            inside = [r for r in one.records if record.sent_s * 1e9 <= r.time_ns and r.end_ns <= record.end_s * 1e9]
            submitted = [(r.a, r.time_ns / 1e9 - record.sent_s) for r in inside if r.kind == Kind.SUBMITTED]
            commits = [r.end_ns / 1e9 for r in inside if r.kind == Kind.STEP]
            if submitted and commits and record.chunks:
                num_tokens, seconds = submitted[0]
                ingress.setdefault((num_tokens, num_bytes), []).append(seconds)
                egress.append(record.chunks[0].time_s - commits[0])
    if not ingress or not messages:
        raise ValueError("no request came to its end in its phase: --seconds is too short")
    sizes = [(1.0, float(num_tokens), float(num_bytes)) for num_tokens, num_bytes in ingress]
    ingress_s, ingress_token_s, ingress_byte_s = fit_not_negative(sizes, list(map(typical, ingress.values())))
    return Overheads(
        ingress_s=ingress_s,
        ingress_token_s=ingress_token_s,
        ingress_byte_s=ingress_byte_s,
        fill_byte_s=typical(fill) if fill else 0.0,
        egress_s=max(0.0, typical(egress)),
        message_s=typical(messages),
        tick_s=typical(ticks),
    )


def _num_bytes(model: ModelConfig, seen: Observation) -> int:
    """Of the media of a request with some."""
    phase = seen.run.phase
    return sum(phase.num_items * make_sample(model, kind, phase.shapes)[0].num_bytes for kind in phase.kinds if kind != "text")


def quick(values: Sequence[float]) -> float:
    """The tenth percentile: of short times, those that nobody else lengthened."""
    return sorted(values)[len(values) // 10]


def fit_delays(model: ModelConfig, seen: Sequence[Observation], overheads: Overheads) -> Delays:
    """The times of these phases: of each request's way in without its tokens' and bytes' part, of messages, and of ticks."""
    ticks = [record.duration_ns / 1e9 for one in seen for record in one.records if record.kind == Kind.TICK and record.a]
    return Delays(
        ingress_s=spread_of([seconds for one in seen for seconds in _ingress_times(model, one, overheads)]),
        message_s=spread_of([seconds for one in seen for seconds in _message_times(one.records)]),
        tick_s=spread_of(ticks),
    )


def fit_egress(seen: Sequence[Observation]) -> list[float | None]:
    """The times of tokens from their commits to their clients, None for one that came with the next: of some of the requests, so that a
    cost file holds them, and of each length of prompts equally many, for how many tokens come together depends on the text."""
    lengths = sorted({one.run.phase.num_input_tokens for one in seen})
    kept: list[float | None] = []
    for length in lengths:
        runs = [times for one in seen if one.run.phase.num_input_tokens == length for times in _egress_times(one)]
        step = -(-sum(map(len, runs)) * len(lengths) // _MOST_EGRESS)
        kept += [seconds and float(f"{seconds:.3g}") for times in runs[:: max(1, step)] for seconds in times]
    return kept


def _ingress_times(model: ModelConfig, seen: Observation, overheads: Overheads) -> Iterator[float]:
    """Each request's since it was sent, or since the one before it was submitted: client and gateway have one thread each."""
    num_bytes = _num_bytes(model, seen)
    submitted = {record.key: record for record in seen.records if record.kind == Kind.SUBMITTED}
    keys = _request_keys(seen.records)
    sent_s = {keys[request.request_id]: request.sent_s for request in seen.run.records if request.request_id in keys}
    before_s = 0.0
    for key, record in submitted.items():  # in the order of time
        if key in sent_s:
            now_s = record.time_ns / 1e9
            more_s = overheads.ingress_token_s * record.a + overheads.ingress_byte_s * num_bytes * bool(record.b)
            yield max(0.0, now_s - max(sent_s[key], before_s) - more_s)
            before_s = now_s


def _egress_times(seen: Observation) -> Iterator[list[float | None]]:
    """Of each request that decode has ended in the phase, if every token came to the client with a time: of its tokens in order, None
    for one that came with the next. A request has a token of each step up to that in which it ended."""
    keys = _request_keys(seen.records)
    rows, ended_ns = {}, {}
    for record in seen.records:
        if record.kind == Kind.ROW:
            rows[record.a, record.b] = record.key
        elif record.kind == Kind.ROW_ENDED and (record.key, record.a) in rows:
            ended_ns[rows[record.key, record.a]] = record.time_ns
    commits_ns = [record.end_ns for record in seen.records if record.kind == Kind.STEP]
    for request in seen.run.records:
        key = keys.get(request.request_id, 0)
        if key in ended_ns:
            end = bisect_right(commits_ns, ended_ns[key])
            count = sum(chunk.num_tokens for chunk in request.chunks)
            if count == request.num_tokens <= end:
                times: list[float | None] = []
                for chunk in request.chunks:
                    last = end - count + len(times) + chunk.num_tokens - 1
                    times += [None] * (chunk.num_tokens - 1) + [max(0.0, chunk.time_s - commits_ns[last] / 1e9)]
                yield times


def _request_keys(records: Sequence[FlightRecord]) -> dict[str, int]:
    return {unpack_id(record.a, record.b): record.key for record in records if record.kind == Kind.RECEIVED}


def _message_times(records: Sequence[FlightRecord]) -> list[float]:
    """Of plans: from the controller to an actor that did nothing, and back. An actor at work would have taken the message later."""
    issued = {record.key: record.time_ns for record in records if record.kind == Kind.ISSUED}
    known = {record.key: record.time_ns for record in records if record.kind == Kind.ACKNOWLEDGED}
    plans = [record for record in records if record.kind == Kind.PLAN]
    free_ns: dict[str, int] = {}
    times = []
    for record in sorted(plans, key=lambda plan: plan.time_ns):
        if record.key in issued and record.key in known:
            if issued[record.key] >= free_ns.get(record.actor, 0):
                times.append((record.time_ns - record.c - issued[record.key]) / 1e9)
            times.append((known[record.key] - record.end_ns) / 1e9)
        free_ns[record.actor] = max(free_ns.get(record.actor, 0), record.end_ns)
    return [seconds for seconds in times if seconds > 0]
