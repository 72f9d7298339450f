"""A load in steps on layouts, fixed and following: the trace, the systems, and a live round with kills."""

import json
from pathlib import Path

import pytest

from mmrt.bench.serve.slo import Slo
from mmrt.bench.serve.traces import load_trace
from mmrt_lab.goodput.objective import Objective
from mmrt_lab.planner.followed_load import config_of, main
from mmrt_lab.planner.steps import STEPS, trace_of


@pytest.mark.parametrize("seed", range(3))
def test_a_trace_has_the_rates_of_its_steps(seed: int, tmp_path: Path) -> None:
    trace = tmp_path / "steps.jsonl"
    trace.write_text(trace_of(seed, rate=20.0))
    rows, begin_s, first_s = load_trace(trace), 0.0, json.loads(trace.read_text().partition("\n")[0])["timestamp"] / 1000
    for step in STEPS:
        mine = [row for row in rows if begin_s <= row.arrival_s + first_s < begin_s + step.seconds]
        for per_s, found in ((step.texts, [r for r in mine if not r.media]), (step.pictures, [r for r in mine if r.media])):
            expected = 20 * per_s * step.seconds
            assert abs(len(found) - expected) <= 5 * expected**0.5
        begin_s += step.seconds
    assert trace_of(seed) == trace_of(seed) != trace_of(seed + 1)


def test_a_system_is_a_layout_or_follows() -> None:
    objective = Objective(Slo(2.0, 0.2))
    fixed, follows = config_of("2V+E+2P+D", objective, 3, 15.0), config_of("follows", objective, 3, 15.0)
    assert fixed.actors.layout == "2V+E+2P+D" and not fixed.autoscale.enabled
    assert follows.actors.layout == "E+P+D" and (follows.autoscale.enabled, follows.autoscale.most) == (True, 3)
    assert fixed.slo.text.ttft_ms == follows.slo.image.ttft_ms == 2000.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_live_round_is_measured(tmp_path: Path) -> None:
    """A layout comes, the processes in it are killed, and no answer changes."""
    report = tmp_path / "report.json"
    arguments = [
        "--layouts",
        "2V+E+P+D",
        "--rounds",
        "1",
        "--times",
        "0.5",
        "--rate",
        "3",
        "--slo-ttft",
        "0.3",
        "--calm",
        "5",
        "--idle-cores",
        "0",
    ]
    assert main([*arguments, "--json", str(report)]) == 0
    fixed, follows = json.loads(report.read_text())["rounds"]
    assert (fixed["system"], fixed["taken"]["layouts"], fixed["taken"]["num_kills"]) == ("2V+E+P+D", ["2V+E+P+D"], 0)
    assert follows["system"] == "follows" and follows["taken"]["layouts"][0] == "E+P+D" and follows["taken"]["num_kills"]
    for one in (fixed, follows):
        assert one["num_failed"] == one["taken"]["num_wrong"] == 0 and one["taken"]["num_asked"] > 3
        assert one["taken"]["cpu_s"] > 1 and one["taken"]["process_s"] > 100
