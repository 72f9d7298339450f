"""``mmrt advise --replay``: the traffic of the past, the machine's speed in it, and other systems, judged with their doubt."""

import io
import random
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from mmrt.bench.serve.record import Chunk, Record
from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.errors import ConfigError, UserError
from mmrt.runtime.observe.traffic import TrafficMedium, TrafficRow
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.end_to_end.conftest import Server
from mmrt_lab.planner.hindsight import compare, find_factor, layouts, replay, show, times
from mmrt_lab.planner.past_traffic import Past, from_file, from_run
from mmrt_lab.sim.command import run_load
from mmrt_lab.sim.costs import load_costs
from mmrt_lab.sim.options import load_policy, parse_sim
from mmrt_lab.sim.report import Steps

ROW = TrafficRow(timestamp=0.0, input_length=300, output_length=8, hash_ids=[], ttft_ms=100.0)


def record(index: int, ttft_s: float, group: str = "text") -> Record:
    chunks = [Chunk(index + ttft_s, 1), Chunk(index + ttft_s + 0.01, 1)]
    return Record(index=index, group=group, scheduled_s=index, sent_s=index, chunks=chunks, end_s=index + 1.0)


def traffic(seed: int = 0, count: int = 40) -> Past:
    """Texts, and a picture now and then."""
    rng, at_ms, rows = random.Random(seed), 0.0, []
    for number in range(count):
        at_ms += rng.expovariate(1 / 400)
        media = [TrafficMedium(type="image", id=number, tokens=16, width=112, height=112)] if rng.random() < 0.3 else []
        rows.append(msgspec.structs.replace(ROW, timestamp=at_ms, input_length=rng.randint(100, 700), media=media))
    return Past(rows, at_ms / 1000)


def as_served(past: Past, policy: str, factor: float, place: Path) -> Past:
    """The same traffic with the times that a machine so many times as slow has given it."""
    past.write(place / "trace.jsonl")
    load, config, costs, _, _ = parse_sim(["--trace", str(place / "trace.jsonl"), "--costs", "demo-cpu", "--policy", policy])
    costs = times(costs, factor)
    simulation, _ = run_load(load, config, costs, load_policy(policy))
    steps = Steps(simulation, costs)
    records = sorted(map(steps.record, simulation.gateway.records), key=lambda one: one.index)
    rows = [msgspec.structs.replace(row, ttft_ms=1000 * (one.ttft_s or 0.0)) for row, one in zip(past.rows, records, strict=True)]
    return Past(rows, past.seconds)


def test_the_machines_speed_is_found_again_and_systems_are_compared(tmp_path: Path) -> None:
    past, told = as_served(traffic(), "monolithic", 3.0, tmp_path), []
    found = replay(past, parse_config('[scheduling]\npolicy = "monolithic"\n'), "demo-cpu", None, told.append)
    assert found.factor == pytest.approx(3.0, rel=0.1) and found.num_requests == 40
    assert found.present.ttft_s == pytest.approx(found.was_s, rel=0.15)
    assert (found.present.policy, found.present.layout) == ("monolithic", "E+P+D")
    systems = {(one.policy, one.layout) for one in found.others}
    assert {("auto", "E+P+D"), ("slack", "E+P+D")} < systems and ("monolithic", "E+P+D") not in systems
    assert len({layout for _, layout in systems}) == 5, "one process more of each stage"
    assert all(0 <= one.sure <= 1 and one.gain[0] <= one.gain[1] <= one.gain[2] for one in found.others)
    out = io.StringIO()
    show(Console(file=out, width=140), found)
    assert "40 requests of 0 min, simulated with costs demo-cpu times" in out.getvalue() and "monolithic E+P+D (now)" in out.getvalue()


def test_a_pipeline_keeps_its_stages() -> None:
    config = parse_config('[actors]\nlayout = "E+2P+D"\n[scheduling]\nprefill_pipeline = true')
    assert "E+2P+2D" in (found := {other.actors.layout for other in layouts(config)})
    assert all("2P" in layout for layout in found)


def test_a_difference_is_as_sure_as_it_stays_in_resamplings() -> None:
    config = RuntimeConfig()
    late, early = ([record(index, ttft_s) for index in range(100)] for ttft_s in (1.5, 0.5))
    better, worse, same = (
        compare(config, config, early, late),
        compare(config, config, late, early),
        compare(config, config, late, late),
    )
    assert (better.sure, better.gain, better.attainment) == (1.0, (1.0, 1.0, 1.0), 1.0)
    assert (worse.sure, worse.gain[1], same.sure, same.gain[1]) == (0.0, -1.0, 0.0, 0.0)
    mixed = [record(index, 0.5 if index < 10 else 1.5) for index in range(100)]
    assert 0.5 < compare(config, config, mixed, late).sure < 1, "all of it in two stretches"
    pictures = [record(index, 3.5, "image") for index in range(100)]
    assert compare(config, config, pictures, pictures).attainment == 1.0, "their objective is 4 s"
    films = [record(index, 15.0, "audio+video") for index in range(100)]
    assert compare(config, config, films, films).attainment == 1.0, "theirs is 20 s, that of sounds 4 s"


@pytest.mark.parametrize("factor", [0.2, 1.0, 17.0])
def test_the_factor_of_the_costs(factor: float) -> None:
    found = find_factor([0.2 * factor, 0.4 * factor], lambda tried: [record(0, 0.2 * tried), record(1, 0.4 * tried)])
    assert found == pytest.approx(factor, rel=0.02)


def test_all_times_of_the_costs_grow_and_nothing_else() -> None:
    costs = load_costs("demo-cpu")
    twice = times(costs, 2.0)
    assert twice.prefill.seconds(100, 50.0) == pytest.approx(2 * costs.prefill.seconds(100, 50.0))
    assert twice.overheads.tick_s == 2 * costs.overheads.tick_s and twice.alone.message_s == [2 * one for one in costs.alone.message_s]
    assert twice.egress == [one if one is None else 2 * one for one in costs.egress]
    assert (twice.interference, twice.spreads, twice.model, twice.num_cores) == (
        costs.interference, costs.spreads, costs.model, costs.num_cores,
    )  # fmt: skip


def test_a_file_gives_its_last_hour_without_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [ROW, msgspec.structs.replace(ROW, timestamp=4_000_000.0), msgspec.structs.replace(ROW, timestamp=4_200_000.0, status=500)]
    rows.append(msgspec.structs.replace(ROW, timestamp=4_100_000.0))
    Past(rows, 0.0).write(file)
    past = from_file(file)
    assert [row.timestamp for row in past.rows] == [4_000_000.0, 4_100_000.0] and past.seconds == 100.0
    file.write_text('{"timestamp": 1}\n')
    with pytest.raises(UserError, match="trace.jsonl:1 is no line of mmrt record"):
        from_file(file)
    with pytest.raises(UserError, match="cannot read"):
        from_file(tmp_path / "none")


@pytest.mark.parametrize(
    ("count", "settings", "error", "message"),
    [
        (19, "", UserError, "19 requests were recorded, 20 are needed"),
        (20, '[[devices]]\nname = "0"\n[[devices]]\nname = "1"\n[actors]\nlayout = "2EPD@*"\n', ConfigError, "are not simulated"),
    ],
)
def test_what_cannot_be_replayed_is_refused(count: int, settings: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replay(Past([ROW] * count, 10.0), parse_config(settings), "demo-cpu", None, lambda text: None)


def test_a_live_runs_traffic_is_in_its_recorders(server: Server) -> None:
    with RunDirectory.attach(server.run_path) as run:
        before = len(from_run(run).rows)
        for text in ("one two three", "four five"):
            server.chat(text, max_tokens=5, extra_body={"ignore_eos": True})
        server.wait(lambda _: len(from_run(run).rows) == before + 2, "both requests")
        mine = from_run(run).rows[-2:]
    assert [row.output_length for row in mine] == [5, 5] and all(row.ttft_ms > 0 for row in mine)
    done = server.mmrt("advise", "--replay")
    assert done.returncode != 0 and "are needed: come back later, or give --trace" in done.stderr + done.stdout
