"""The simulated run as a whole: nothing is lost or counted twice, known queues, order, repetition."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrt.bench.serve.report import GroupSummary, summarise_groups, summarise_slo
from mmrt.bench.serve.slo import Slo
from mmrt.lab.tests.sim.made_costs import FREE, VARIED, make_costs, options_of, simulate_costs
from mmrt.runtime.controller.machine import Controller
from mmrt.schema.gap_buckets import bucket_of
from mmrt.schema.media import MediaSpan
from mmrt_lab.sim import simulation as simulation_module
from mmrt_lab.sim.command import simulate
from mmrt_lab.sim.costs import Answers, Delays, Line, Overheads
from mmrt_lab.sim.decode import Decode
from mmrt_lab.sim.delays import DrawnDelays
from mmrt_lab.sim.events import EventQueue
from mmrt_lab.sim.links import Link
from mmrt_lab.sim.report import Steps, encode_report, make_report, time_between_tokens
from mmrt_lab.sim.simulation import Simulation, SimulationError, remembered
from mmrt_lab.sim.step_log import num_rows

MIXED = ("--scenario", "mixed", "--num-requests", "60", "--rate", "25", "--max-tokens", "40")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--layout", "EPD"),
        ("--layout", "2E+3P+D", "--no-caches"),
        ("--layout", "EP+2D"),
        ("--layout", "2E+P+3D", "--rows", "8", "--kv-tokens", "1200", "--max-tokens", "200"),
        ("--rows", "8", "--kv-tokens", "1200", "--max-tokens", "200"),  # preemption
        ("--modality", "text,video", "--video-size", "112x112"),
        ("--modality", "audio,image", "--audio-seconds", "0.5"),
    ],
)
def test_every_request_ends_once_and_everything_is_given_back(arguments: tuple[str, ...]) -> None:
    costs = make_costs()
    simulation, _ = simulate_costs(costs, *MIXED, *arguments)
    num_tokens = 200 if "200" in arguments else 40
    records, state = simulation.gateway.records, simulation.controller.state
    assert sorted(record.index for record in records) == list(range(60))
    assert all(record.error is None and record.num_tokens == num_tokens and record.end_ns > record.sent_ns for record in records)
    assert (state.totals.admitted, state.totals.finished, state.totals.generated_tokens) == (60, 60, 60 * num_tokens)
    assert simulation.is_idle and not state.requests and not state.plans and not simulation.plans
    assert {name: pool.num_used for name, pool in state.pools.items()} == dict.fromkeys(state.pools, 0)
    assert (state.totals.preempted > 0) == (num_tokens == 200)
    for log in simulation.logs:
        commits = log.commits()
        assert np.all(np.diff(commits) > 0) and len(commits) == log.num_steps > 0
    steps = Steps(simulation, costs)
    for record in records:
        assert all(steps.commits[before[1]] < steps.commits[after[0]] for before, after in pairwise(steps.of(record)))


def test_a_prompt_alone_is_cut_since_nothing_interrupts_its_plans() -> None:
    costs = make_costs(**FREE | {"prefill": Line(per_unit_s=4e-4)})
    simulation, _ = simulate_costs(costs, "--num-requests", "3", "--concurrency", "1", "--no-caches", "--input-tokens", "1201")
    assert simulation.works is not None
    works = [work for works in simulation.works.values() for work in works if work.step == "prefill"]
    assert len(works) > 3 and all(work.end_ns - work.begin_ns < 0.25e9 for work in works), "a plan of a request takes 0.2 s at most"


def test_rows_whose_pages_last_are_left_out_of_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    next_tick_s, num_left_out = Controller.next_tick_s, 0

    def compared(controller: Controller) -> float:
        nonlocal num_left_out
        found_s, decoding = next_tick_s(controller), controller.state.decoding()
        kept = [request.derived.short_at for request in decoding]
        num_left_out += sum(request.answer.committed < request.derived.short_at for request in decoding)
        for request in decoding:
            request.derived.short_at = 0
        assert next_tick_s(controller) == found_s
        for request, short_at in zip(decoding, kept, strict=True):
            request.derived.short_at = short_at
        return found_s

    monkeypatch.setattr(Controller, "next_tick_s", compared)
    simulation, _ = simulate_costs(make_costs(), *MIXED, "--rows", "8", "--kv-tokens", "1200", "--max-tokens", "200")
    assert simulation.controller.state.totals.preempted > 0 < num_left_out


def test_positions_of_prompts_are_remembered_up_to_so_many_bytes() -> None:
    asked: list[int] = []

    def positions(num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[bytes, int]:
        asked.append(num_tokens)
        return bytes(24 * num_tokens), 0

    find = remembered(positions, most_bytes=24 * 11 + 2)
    for num_tokens in (5, 4, 5, 6, 5, 4, 20, 20):  # 4 goes for 6, 6 for 4, and all for 20, which is too large itself
        assert len(find(num_tokens, ())[0]) == 24 * num_tokens
    assert asked == [5, 4, 6, 4, 20, 20]


def test_one_request_alone_takes_the_sum_of_its_parts() -> None:
    costs = make_costs(decode_context_s=0.0)
    simulation, _ = simulate_costs(costs, "--num-requests", "1", "--max-tokens", "10", "--input-tokens", "33", "--concurrency", "1")
    (record,) = simulation.gateway.records
    steps = Steps(simulation, costs)
    step_s, prefill_s = 0.0042, 0.004 + 33 * 2e-5
    # the request to the controller, a tick, its plan, which draws the first token, and the way back
    ttft_s = 0.003 + 2 * 0.0002 + 0.0003 + prefill_s + 0.001
    assert steps.ttft_s(record) == pytest.approx(ttft_s, abs=1e-6)
    assert simulation.logs[0].gaps().tolist()[1:] == [4_200_000] * 8
    handed_over_s = 2 * 0.0002 + 0.0003  # the answer, a tick, the row to decode
    assert (record.end_ns - record.sent_ns) / 1e9 == pytest.approx(ttft_s + handed_over_s + 9 * step_s, abs=1e-6)


def test_an_answer_of_one_token_takes_a_step_only_on_devices() -> None:
    load = ("--num-requests", "1", "--max-tokens", "1", "--input-tokens", "33")
    on_cpu, _ = simulate_costs(make_costs(), *load)
    on_devices, _ = simulate_costs(make_costs(), *load, link=Link())
    assert (on_cpu.logs[0].num_steps, on_cpu.first_tokens.log.num_steps) == (0, 1)
    assert (on_devices.logs[0].num_steps, on_devices.first_tokens.log.num_steps) == (1, 0)
    for simulation in (on_cpu, on_devices):
        steps = Steps(simulation, make_costs())
        (record,) = simulation.gateway.records
        assert record.num_tokens == 1 and steps.ttft_s(record) == pytest.approx((record.end_ns - record.sent_ns) / 1e9)
        assert simulation.works is not None
        breakdown = steps.breakdown(record, simulation.works[record.key])
        assert (breakdown.prefill_s > 0.004, breakdown.decode_s > 0) == (True, simulation is on_devices)


def test_the_first_step_after_a_pause_takes_longer() -> None:
    costs = make_costs(decode_context_s=0.0, decode_wake_s=0.0015)
    load = ("--num-requests", "3", "--max-tokens", "10", "--input-tokens", "33")
    alone, _ = simulate_costs(costs, *load, "--concurrency", "1")
    gaps = alone.logs[0].gaps().tolist()
    assert all(gaps[at : at + 8] == [4_200_000] * 8 for at in (1, 10, 19))
    quick, _ = simulate_costs(make_costs(decode_context_s=0.0), *load, "--concurrency", "1")
    times = [[(record.end_ns - record.sent_ns) / 1e9 for record in run.gateway.records] for run in (alone, quick)]
    assert [slow - fast for slow, fast in zip(*times, strict=True)] == pytest.approx([0.0015] * 3, abs=1e-6)


def test_a_single_row_waits_as_in_m_d_1() -> None:
    """One row, deterministic service, Poisson arrivals: the mean wait is rho S / 2 (1 - rho) (Pollaczek and Khinchine). The first of
    three tokens takes no time, the others a step each."""
    rho, service_s, num_requests = 0.7, 0.1, 1600
    costs = make_costs(**(FREE | {"decode": Line(fixed_s=service_s / 2)}))
    load = (
        "--num-requests",
        str(num_requests),
        "--rate",
        str(rho / service_s),
        "--max-tokens",
        "3",
        "--input-tokens",
        "2",
        "--seed",
        "5",
    )
    simulation, _ = simulate_costs(costs, *load, "--rows", "1", "--no-caches")
    steps = Steps(simulation, costs)
    waits = [float(steps.ttft_s(record) or 0.0) for record in simulation.gateway.records]
    batches = [statistics.fmean(waits[at : at + 100]) for at in range(0, num_requests, 100)]  # nearly independent
    error_s = statistics.stdev(batches) / math.sqrt(len(batches))
    expected_s = rho * service_s / (2 * (1 - rho))
    assert statistics.fmean(waits) == pytest.approx(expected_s, abs=3 * error_s)
    assert error_s < 0.2 * expected_s


def test_videos_are_sampled_as_the_run_is_configured(tmp_path: Path) -> None:
    tokens = []
    for media in ("fps = 2.0", "fps = 1.0", "max_frames = 4"):
        file = tmp_path / "run.toml"
        file.write_text(f"[media]\n{media}\n")
        load = ("--modality", "video", "--video-seconds", "8", "--num-requests", "1", "--max-tokens", "2")
        simulation, _ = simulate_costs(make_costs(), *load, "--config", str(file))
        tokens.append(simulation.gateway.records[0].num_prompt_tokens or 0)
    assert tokens[0] > tokens[1] > tokens[2]


def test_a_faster_encoder_is_never_worse() -> None:
    medians = []
    for factor in (1.0, 0.5, 0.1):
        line = Line(fixed_s=0.02 * factor, per_unit_s=4e-5 * factor)
        costs = make_costs(encode={"image": line})
        options, config = options_of("--modality", "image", "--num-requests", "50", "--rate", "15", "--max-tokens", "20")
        ttft = simulate(options, config, costs).groups[0].ttft
        assert ttft is not None
        medians.append(ttft.p50)
    assert medians == sorted(medians, reverse=True) and medians[-1] < 0.7 * medians[0]


@pytest.mark.parametrize("changes", [{}, VARIED])
def test_a_seed_gives_the_same_report(changes: dict[str, Any]) -> None:
    first, again, other = (
        encode_report(simulate(*options_of(*MIXED, "--slo-ttft", "0.1", "--seed", seed), make_costs(**changes)))
        for seed in ("3", "3", "4")
    )
    assert first == again != other


@pytest.mark.parametrize(("layout", "changes"), [("E+P+D", {}), ("EP+2D", {}), ("E+P+D", VARIED | {"decode_wake_s": 0.002})])
def test_jumps_equal_a_simulation_token_by_token(layout: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gap of every step, with interference, preemption and growing contexts; so also the report."""

    class TokenByToken(Decode):
        def _num_steps(self) -> int:
            return min(1, super()._num_steps())

    reports, gaps, num_events = [], [], []
    for decode in (Decode, TokenByToken):
        monkeypatch.setattr(simulation_module, "Decode", decode)
        costs = make_costs(**changes)
        load = ("--scenario", "mixed", "--num-requests", "40", "--rate", "8", "--max-tokens", "300", "--kv-tokens", "3000")
        load += ("--layout", layout)
        options, config = options_of(*load)
        simulation, made = simulate_costs(costs, *load)
        assert simulation.controller.state.totals.preempted > 0
        reports.append(encode_report(make_report(options, config, costs, simulation, made)))
        gaps.append(np.concatenate([log.gaps() for log in simulation.logs]))
        num_events.append(simulation.queue.num_events)
    assert np.array_equal(*gaps) and reports[0] == reports[1]
    assert num_events[0] < 0.75 * num_events[1]


@pytest.mark.parametrize("changes", [{}, VARIED])
def test_the_report_is_what_bench_serve_computes_of_the_same_tokens(changes: dict[str, Any]) -> None:
    costs, load = make_costs(**changes), (*MIXED, "--rows", "5", "--kv-tokens", "400", "--slo-ttft", "0.3", "--slo-tbt", "0.011")
    options, config = options_of(*load)
    simulation, made = simulate_costs(costs, *load)
    report = make_report(options, config, costs, simulation, made)
    records = [Steps(simulation, costs).record(record) for record in simulation.gateway.records]
    counts = Counter(bucket_of(round(1e9 * tbt_s)) for record in records for tbt_s in record.tbts_s)
    told = simulation.gap_counts  # without the pauses of preempted rows
    assert changes or all(told[bucket] <= count for bucket, count in counts.items())  # decode counts before the tokens' way out
    assert sum(told) > 0.9 * sum(counts.values())
    for mine, theirs in zip(report.groups, summarise_groups(records), strict=True):
        assert_equal(mine, theirs)
    theirs_slo = summarise_slo(records, Slo(0.3, 0.011))
    assert report.slo is not None and 0.05 < report.slo.attainment < 0.95
    assert report.slo.attainment == pytest.approx(theirs_slo.attainment)
    assert report.slo.attained_requests_per_s == pytest.approx(theirs_slo.attained_requests_per_s)


def assert_equal(mine: GroupSummary, theirs: GroupSummary) -> None:
    for field in mine.__struct_fields__:
        a, b = getattr(mine, field), getattr(theirs, field)
        if field in ("ttft", "tbt", "gap", "e2e"):
            for name in a.__struct_fields__:
                assert getattr(a, name) == pytest.approx(getattr(b, name), abs=2e-9), (field, name)
        else:
            assert a == (pytest.approx(b) if isinstance(b, float) else b), field


def test_steps_take_the_factors_of_the_stages_at_work() -> None:
    """A request alone: its prefill, then steps with each factor equally often, and a way out of its own for each step."""
    costs = make_costs(decode_context_s=0.0, **(VARIED | {"egress": [0.001, 0.002, 0.006]}))
    load = ("--num-requests", "1", "--max-tokens", "1000", "--input-tokens", "33", "--concurrency", "1")
    simulation, _ = simulate_costs(costs, *load)
    gaps = Counter(simulation.logs[0].gaps().tolist()[1:])
    assert set(gaps) == {round(4_200_000 * factor) for factor in (0.7, 0.9, 1.0, 1.4)} and min(gaps.values()) > 200
    (record,) = simulation.gateway.records
    times = [chunk.time_s for chunk in Steps(simulation, costs).record(record).chunks]
    ways = {round(1e3 * (at_s - commit / 1e9)) for at_s, commit in zip(times[1:], simulation.logs[0].commits(), strict=True)}
    assert ways <= {1, 2, 3, 4, 5, 6} and {1, 2, 6} <= ways and times == sorted(times)  # none passes the one before


def test_messages_take_longer_while_decode_works_and_stay_in_order() -> None:
    costs, queue = make_costs(beside=Delays(message_s=[0.0007, 0.0009])), EventQueue()
    is_busy = True
    delays = DrawnDelays(costs, queue, lambda: is_busy, seed=3)
    assert sorted(delays.message_ns() for _ in range(1000)) == [700_000] * 500 + [900_000] * 500
    assert delays.tick_ns() == 300_000  # not measured beside decode
    late_ns = max(delays.arrival_ns("a") for _ in range(20)) - queue.now_ns
    is_busy = False
    assert delays.message_ns() == 200_000 and delays.arrival_ns("b") - queue.now_ns == 200_000
    assert late_ns == 900_000 == delays.arrival_ns("a") - queue.now_ns


def test_requests_go_in_one_after_the_other() -> None:
    queue = EventQueue()
    costs = make_costs(overheads=Overheads(ingress_s=0.003, ingress_token_s=1e-6, ingress_byte_s=1e-8))
    delays = DrawnDelays(costs, queue, lambda: False, seed=0)
    assert [delays.in_ns(tokens, size) - queue.now_ns for tokens, size in ((0, 0), (1000, 0), (0, 10**5))] == [
        3_000_000,
        7_000_000,
        11_000_000,
    ]
    queue.now_ns += 20_000_000
    assert delays.in_ns(0, 0) - queue.now_ns == 3_000_000


def test_measured_ways_out_come_in_runs() -> None:
    """Of 400 measured times ten in a row belong to one stall: tokens that meet it are late one after the other."""
    costs = make_costs(decode_context_s=0.0, egress=[0.001] * 200 + [0.009] * 10 + [0.001] * 190)
    load = ("--num-requests", "1", "--max-tokens", "2000", "--input-tokens", "33", "--concurrency", "1")
    simulation, _ = simulate_costs(costs, *load)
    (record,) = simulation.gateway.records
    times = [chunk.time_s for chunk in Steps(simulation, costs).record(record).chunks]
    ways_ms = [round(1e3 * at_s - commit / 1e6) for at_s, commit in zip(times[1:], simulation.logs[0].commits(), strict=True)]
    stalls = [len([*run]) for is_late, run in groupby(ways_ms, lambda way_ms: way_ms > 5) if is_late]
    assert len(stalls) > 2 and max(stalls) >= 10 and sum(stalls) / len(ways_ms) < 0.08


def test_some_tokens_come_with_the_next_but_not_the_last() -> None:
    costs = make_costs(decode_context_s=0.0, egress=[0.001, None])
    load = ("--num-requests", "1", "--max-tokens", "101", "--input-tokens", "33", "--concurrency", "1")
    simulation, _ = simulate_costs(costs, *load)
    (record,) = simulation.gateway.records
    tbts = [round(1e3 * tbt_s, 3) for tbt_s in Steps(simulation, costs).record(record).tbts_s]
    assert set(tbts[1:]) <= {0.0, 4.2, 8.4} and tbts.count(0.0) == pytest.approx(50, abs=2) and tbts.count(8.4) > 40
    assert sum(tbts) == pytest.approx(420.7, abs=4.3)  # none came after its time


def test_a_sequence_alone_has_ways_out_of_its_own() -> None:
    costs = make_costs(decode_context_s=0.0, egress=[0.001], egress_single=[0.003])
    load = ("--num-requests", "2", "--max-tokens", "100", "--input-tokens", "33", "--concurrency", "2")
    simulation, _ = simulate_costs(costs, *load)
    (log,), steps = simulation.logs, Steps(simulation, costs)
    ways_ms = np.round((steps.arrivals[: log.num_steps] - log.commits()) / 1e6, 3)
    stretches = [[record.stretches[-1][1:]] for record in simulation.gateway.records]
    rows = num_rows(log.num_steps, stretches)
    assert (
        set(ways_ms[rows == 1]) == {3.0} and set(ways_ms[rows == 2][3:]) == {1.0} and (rows == 1).sum() > 1 and (rows == 2).sum() > 50
    )


def test_a_conversation_finds_its_beginning_in_the_caches() -> None:
    load = ("--scenario", "chat", "--num-requests", "3", "--turns", "3")
    warm, cold = (simulate(*options_of(*load, *more), make_costs()).chat for more in ((), ("--no-caches",)))
    assert warm is not None and cold is not None
    assert [turn.num_hits for turn in warm] == [0, 3, 3] and [turn.num_hits for turn in cold] == [0, 0, 0]
    assert warm[1].ttft_to_first is not None and warm[1].ttft_to_first < 0.7
    assert cold[1].ttft_to_first is not None and cold[1].ttft_to_first > 0.95


def test_answers_may_come_back_with_other_tokens() -> None:
    """A later turn finds less in the cache and has a longer prompt, by what its answer's tokens have become."""
    load = ("--scenario", "chat", "--num-requests", "16", "--turns", "2", "--max-tokens", "32")

    def second_turns(answers: Answers) -> list[tuple[int, int]]:
        records = simulate_costs(make_costs(answers=answers), *load)[0].gateway.records
        found = [(one.num_prompt_tokens, one.num_cached_tokens) for one in records if one.group == "turn 2"]
        return [(prompt, cached) for prompt, cached in found if prompt is not None and cached is not None]

    (whole,) = set(second_turns(Answers()))
    found = second_turns(Answers(kept=[None, 20, 40], growth=2.0))
    changed = [turn for turn in found if turn != whole]
    assert 0 < len(changed) < 16, "each answer draws one of the three"
    assert all(prompt == whole[0] + 12 and whole[1] - 16 <= cached < whole[1] for prompt, cached in changed)
    assert found == second_turns(Answers(kept=[None, 20, 40], growth=2.0))


def test_fresh_media_lengthen_the_streams_of_a_stall() -> None:
    options, config = options_of("--scenario", "stall", "--phase", "3", "--fresh-interval", "0.25")
    report = simulate(options, config, make_costs())
    assert report.stall is not None and report.stall.alone is not None and report.stall.with_fresh is not None
    assert report.stall.fresh_ttft is not None and report.stall.fresh_ttft.count == 12
    assert report.stall.p99_ratio is not None and 1.2 < report.stall.p99_ratio < 2.5
    assert report.groups[0].num_cut == 4  # streams


def test_stages_that_take_turns_hold_up_decode(tmp_path: Path) -> None:
    """With turns a step waits for a whole encode plan, and one behind prefill's token for two; without for none. Everything ends all
    the same."""
    costs = make_costs(encode={"image": Line(fixed_s=0.2)})
    longest = {}
    for turns in ("plans", "off"):
        file = tmp_path / f"{turns}.toml"
        file.write_text(f'[actors]\nlayout = "EPD"\nturns = "{turns}"\n')
        simulation, _ = simulate_costs(costs, *MIXED, "--config", str(file))
        assert all(record.num_tokens == 40 for record in simulation.gateway.records)
        tbt = time_between_tokens(simulation.gateway.records, Steps(simulation, costs))
        assert tbt is not None
        longest[turns] = tbt.max
    assert longest["off"] < 0.025 and 0.2 < longest["plans"] < 0.45


def test_a_queue_that_is_full_refuses() -> None:
    costs = make_costs(decode=Line(fixed_s=0.5), overheads=Overheads())
    options, config = options_of("--num-requests", "270", "--rate", "inf", "--rows", "1", "--max-tokens", "1", "--no-caches")
    report = simulate(options, config, costs)
    ((error, count),) = report.failures.items()
    assert error == "HTTP 503: 256 requests are waiting, the limit is 256"
    assert report.groups[0].num_requests == 270 and report.groups[0].num_failed == count == 13


def test_requests_past_their_deadline_fail() -> None:
    costs = make_costs(decode=Line(fixed_s=2.0), overheads=Overheads())
    options, config = options_of("--num-requests", "1", "--concurrency", "1", "--max-tokens", "400", "--no-caches")
    report = simulate(options, config, costs)
    assert list(report.failures) == ["HTTP 504: the request was not finished in time (server.request_timeout_s)"]


def test_a_simulation_that_stands_still_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "post", lambda *_: None)  # the controller hears nothing
    options, config = options_of("--num-requests", "1")
    with pytest.raises(
        SimulationError, match="no request has been sent or has ended for 1800 s of the simulation: 1 requests are open"
    ):
        simulate(options, config, make_costs())


def test_interrupted_plans_are_not_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "layers.toml"
    file.write_text('[actors]\nturns = "layers"\n')
    with pytest.raises(SystemExit):
        options_of("--config", str(file))
    assert 'actors.turns = "layers": the simulator does not interrupt plans' in capsys.readouterr().err
