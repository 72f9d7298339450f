"""From records to curves and parts."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.bench.serve.record import Chunk, Record
from mmrt.bench.serve.slo import Slo, attainment
from mmrt.bench.serve.stall import STREAM_GROUP
from mmrt.runtime.observe.breakdown import Breakdown
from mmrt_lab.goodput.objective import Objective
from mmrt_lab.goodput.report import SCALES, Measured, summarise, summarise_parts

SLO = Slo(1.0, 0.1)
OBJECTIVE = Objective(SLO)


def record(ttft_s: float, tbt_s: float, group: str = "text", error: str | None = None) -> Record:
    times = [10.0 + ttft_s + number * tbt_s for number in range(6)]
    chunks = [] if error else [Chunk(time_s, 1) for time_s in times]
    return Record(
        index=0, group=group, scheduled_s=10.0, sent_s=10.0, chunks=chunks, end_s=times[-1], num_prompt_tokens=30, error=error
    )


RECORDS = st.lists(st.builds(record, st.floats(0.01, 5), st.floats(0.001, 0.5)), min_size=1, max_size=8)


@given(RECORDS)
def test_attainment_grows_with_the_scale_of_the_objective(records: list[Record]) -> None:
    by_scale = summarise(1.0, [Measured(records, [])], OBJECTIVE).by_scale
    shares = [share for _, share in by_scale]
    assert [scale for scale, _ in by_scale] == list(SCALES) and shares == sorted(shares)
    assert dict(by_scale)[1.0] == attainment(records, SLO) and shares[0] == attainment(records, Slo(0.25, 0.025))


def test_failures_violate_the_objective_and_are_counted() -> None:
    records = [record(0.5, 0.05), record(0.5, 0.2, "image"), record(0.5, 0.05, "image", "HTTP 503: full"), record(0.1, 0.01)]
    point = summarise(4.0, [Measured(records, [])], OBJECTIVE)
    assert point.attainment == 0.5 and {name: group.attainment for name, group in point.by_group.items()} == {"image": 0.0, "text": 1.0}
    assert point.failures == {"HTTP 503: full": 1} and point.num_requests == 4 and point.breakdown == {}
    assert point.duration_s == pytest.approx(1.5) and point.attained_requests_per_s == pytest.approx(2 / 1.5)
    assert point.input_tokens_per_s == pytest.approx(90 / 1.5) and point.output_tokens_per_s == pytest.approx(18 / 1.5)


def test_texts_can_have_an_objective_of_their_own() -> None:
    objective = Objective(SLO, 0.2)
    records = [record(0.5, 0.05), record(0.1, 0.05), record(0.5, 0.05, "image")]
    point = summarise(4.0, [Measured(records, [])], objective)
    assert point.attainment == pytest.approx(2 / 3) and dict(point.by_scale)[4.0] == 1.0 and dict(point.by_scale)[0.5] == 0.0
    assert {name: group.attainment for name, group in point.by_group.items()} == {"image": 1.0, "text": 0.5}
    assert objective.sections["text"] == {"ttft_ms": 200.0, "tbt_ms": 100.0} and objective.sections["video"]["ttft_ms"] == 1000.0
    assert str(objective) == "TTFT < 1 s (text 0.2 s) and 90 % of TBTs < 0.1 s" and str(Objective(Slo(2.0))) == "TTFT < 2 s"


def test_streams_are_texts_and_those_that_the_bench_cuts_do_not_count() -> None:
    cut = msgspec.structs.replace(record(0.5, 0.05, STREAM_GROUP), cut=True)
    records = [record(0.5, 0.05, STREAM_GROUP), record(0.1, 0.05, STREAM_GROUP), cut, record(0.5, 0.05, "image")]
    point = summarise(None, [Measured(records, [])], Objective(SLO, 0.2))
    assert point.attainment == pytest.approx(2 / 3) and point.num_requests == 4
    assert point.attained_requests_per_s == pytest.approx(2 / 0.75) and point.e2e is not None and point.e2e.count == 3
    stream = point.by_group[STREAM_GROUP]
    assert (stream.num_requests, stream.num_cut, stream.attainment) == (3, 1, 0.5)
    assert summarise(None, [Measured([cut], [])], OBJECTIVE).by_group[STREAM_GROUP].attainment is None  # nobody knows


def test_rounds_are_one_load_and_show_their_spread() -> None:
    fast, slow = [record(0.5, 0.05)], [record(2.0, 0.05), record(0.5, 0.05)]
    point = summarise(4.0, [Measured(fast, []), Measured(slow, [])], OBJECTIVE)
    assert (point.num_requests, point.attainment) == (3, pytest.approx(2 / 3))
    assert point.duration_s == pytest.approx(0.75 + 2.25)  # the time between rounds is nobody's
    assert [one.attainment for one in point.rounds] == [1.0, 0.5]
    assert [one.ttft_p90 for one in point.rounds] == [pytest.approx(0.5), pytest.approx(1.85)]


def test_parts_have_means_shares_and_tails() -> None:
    parts = summarise_parts([Breakdown(prefill_s=0.1, decode_s=0.1), Breakdown(prefill_s=0.3, decode_queue_s=0.1)])
    assert parts["prefill_s"].mean == pytest.approx(0.2) and parts["prefill_s"].share == pytest.approx(0.4 / 0.6)
    assert sum(part.share for part in parts.values()) == pytest.approx(1) and parts["encode_s"].p95 == 0
    assert parts["prefill_s"].p95 == pytest.approx(0.29) and summarise_parts([]) == {}
