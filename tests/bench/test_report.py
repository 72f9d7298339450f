"""Figures: against numpy, and against records whose figures are known; SLOs; the phases of a stall."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.bench.serve.chat import WITHOUT_CACHES
from mmrt.bench.serve.record import Chunk, Record
from mmrt.bench.serve.report import (
    count_failures,
    distribution,
    duration_of,
    percentile,
    summarise_chat,
    summarise_group,
    summarise_groups,
    summarise_slo,
    summarise_stall,
)
from mmrt.bench.serve.slo import Slo, attainment, is_met
from mmrt.bench.serve.stall import STREAM_GROUP, StallRun, times_alone, times_under_way, times_with_fresh


def record(*times_s: float, sent_s: float = 0.0, group: str = "text", **fields: Any) -> Record:
    """A request sent at ``sent_s`` whose tokens came at ``times_s``."""
    chunks = [Chunk(time_s, 1) for time_s in times_s]
    end_s = fields.pop("end_s", times_s[-1] if times_s else sent_s)
    return Record(index=0, group=group, scheduled_s=sent_s, sent_s=sent_s, chunks=chunks, end_s=end_s, **fields)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_are_numpy_s(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_distributions_are_numpy_s(values: list[float]) -> None:
    found = distribution(values)
    assert found is not None and found.count == len(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert (found.min, found.max) == (min(values), max(values))
    expected = np.percentile(values, [50, 90, 95, 99])
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-9)


def test_of_nothing() -> None:
    assert distribution([]) is None
    assert duration_of([]) == 0.0
    with pytest.raises(ValueError):
        percentile([], 50)
    with pytest.raises(ValueError):
        percentile([1.0], 101)


def test_a_group_s_figures() -> None:
    shared = record(11.0, 14.0, sent_s=10.0, num_prompt_tokens=5, num_completion_tokens=4)
    shared.chunks = [Chunk(11.0, 1), Chunk(14.0, 3)]
    single = record(10.5, sent_s=10.0, end_s=10.5, num_prompt_tokens=7)
    failed = record(10.1, sent_s=10.0, error="HTTP 500", num_prompt_tokens=100, num_completion_tokens=100)
    cut = record(12.0, 13.0, sent_s=11.0, cut=True)
    summary = summarise_group("text", [shared, single, failed, cut], 4.0)
    assert (summary.num_requests, summary.num_failed, summary.num_cut) == (4, 1, 1)
    assert (summary.num_input_tokens, summary.num_output_tokens) == (12, 7)
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.input_tokens_per_s) == (0.5, 1.75, 3.0)
    assert summary.tokens_per_chunk == pytest.approx(7 / 5)
    assert summary.ttft is not None and summary.ttft.count == 3 and summary.ttft.max == 1.0
    assert summary.tbt is not None and (summary.tbt.count, summary.tbt.min, summary.tbt.max) == (4, 0.0, 3.0)
    assert summary.gap is not None and (summary.gap.count, summary.gap.min) == (2, 1.0)
    assert summary.e2e is not None and (summary.e2e.count, summary.e2e.max) == (2, 4.0)


def test_groups_come_after_all_together() -> None:
    records = [record(1.0, group="text"), record(2.0, group="image"), record(3.0, group="text", error="x")]
    assert [(s.group, s.num_requests) for s in summarise_groups(records)] == [("all", 3), ("image", 1), ("text", 2)]
    assert [s.group for s in summarise_groups(records[:1])] == ["all"]


def test_failures_are_counted_by_message() -> None:
    records = [record(error="a"), record(error="b"), record(error="b"), record(1.0)]
    assert count_failures(records) == {"b": 2, "a": 1}


def test_slo_needs_the_first_token_and_nine_tenths_of_the_others() -> None:
    slo = Slo(ttft_s=1.0, tbt_s=0.5)
    times = np.cumsum([0.9, *[0.1] * 9, 0.6]).tolist()  # 9 of 10 TBTs are under 0.5
    assert is_met(record(*times), slo)
    assert not is_met(record(*np.cumsum([0.9, *[0.1] * 8, 0.6, 0.6]).tolist()), slo)
    assert not is_met(record(1.0, 1.1), slo)
    assert is_met(record(0.5), slo)
    assert not is_met(record(0.5, error="x"), slo)
    assert not is_met(record(), slo)


def test_attainment_counts_failures_as_violations_and_leaves_out_what_the_bench_cut() -> None:
    records = [record(0.5), record(0.5, error="x"), record(2.0), record(0.5, cut=True)]
    assert attainment(records, Slo(1.0)) == pytest.approx(1 / 3)
    assert attainment([], Slo(1.0)) == 0.0


def test_the_slo_summary_counts_the_requests_that_met_it_per_second() -> None:
    records = [record(10.5, sent_s=10.0), record(10.5, sent_s=10.0, error="x"), record(14.0, sent_s=10.0)]
    summary = summarise_slo(records, Slo(1.0))
    assert (summary.tbt_s, summary.attainment) == (None, pytest.approx(1 / 3))
    assert summary.attained_requests_per_s == pytest.approx(1 / 4)


def test_a_stall_is_counted_in_the_phase_where_it_ends() -> None:
    stream = record(0.5, 1.0, 2.0, 5.5, 6.0, 7.0, 8.0, 9.0, group=STREAM_GROUP)
    image = record(6.5, sent_s=5.1, group="image")
    run = StallRun([stream], [image], (0.9, 5.0), (5.0, 8.5))
    assert times_alone(run) == [1.0]
    assert times_with_fresh(run) == [3.5, 0.5, 1.0, 1.0]
    assert times_under_way(run) == [3.5, 0.5, 1.0]
    summary = summarise_stall(run)
    assert summary.p99_ratio == pytest.approx(float(np.percentile([3.5, 0.5, 1.0, 1.0], 99)))
    assert summary.fresh_ttft is not None and summary.fresh_ttft.p50 == pytest.approx(1.4)


def test_a_stall_run_without_tokens_has_no_ratio() -> None:
    summary = summarise_stall(StallRun([record(group=STREAM_GROUP)], [], (0.0, 1.0), (1.0, 2.0)))
    assert summary.p99_ratio is None and summary.alone is None and summary.fresh_ttft is None


def test_turns_are_compared_with_the_first_and_with_those_without_caches() -> None:
    def turn(number: int, ttft_s: float, suffix: str = "", **fields: Any) -> Record:
        return record(5.0 + ttft_s, sent_s=5.0, group=f"turn {number}{suffix}", **fields)

    records = [
        *(turn(1, ttft_s, num_prompt_tokens=100, num_cached_tokens=0) for ttft_s in (0.9, 1.0, 3.0)),
        *(turn(2, ttft_s, num_prompt_tokens=200, num_cached_tokens=cached) for ttft_s, cached in ((0.1, 96), (0.2, 0), (0.3, 96))),
        *(turn(2, ttft_s, WITHOUT_CACHES, num_prompt_tokens=200) for ttft_s in (1.0, 2.0, 3.0)),
        turn(2, 50.0, error="HTTP 500", num_cached_tokens=9),
    ]
    first, second = summarise_chat(records)
    assert (first.turn, first.num_requests, first.num_hits, first.ttft_to_first, first.without_caches) == (1, 3, 0, 1.0, None)
    assert (second.num_requests, second.num_prompt_tokens, second.num_cached_tokens, second.num_hits) == (3, 200, 64, 2)
    assert second.ttft_to_first == pytest.approx(0.2) and second.ttft_to_without == pytest.approx(0.1)
    assert second.without_caches is not None and second.without_caches.p50 == pytest.approx(2.0)
