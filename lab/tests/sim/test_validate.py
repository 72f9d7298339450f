"""The comparison with live runs; the whole command, with a run of the demo model, is slow."""

import json
from pathlib import Path

import msgspec
import pytest

from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.record import Record
from mmrt.lab.tests.sim.made_costs import make_costs, simulate_costs
from mmrt_lab.sim.command import main
from mmrt_lab.sim.costs import load_costs
from mmrt_lab.sim.profile import main as profile
from mmrt_lab.sim.report import Steps
from mmrt_lab.sim.validate import LOADS, check_loads, check_model, compare, figures_of, slowness_of


def records(seed: int) -> list[Record]:
    costs, arguments = make_costs(), [*LOADS["mixed"], "--num-requests", "20", "--seed", str(seed)]
    simulation, _ = simulate_costs(costs, *arguments)
    return [Steps(simulation, costs).record(record) for record in simulation.gateway.records]


def test_a_figure_is_compared_with_the_median_and_has_the_spread_beside_it() -> None:
    live, mine = [records(seed) for seed in (1, 2, 3)], [records(seed) for seed in (4, 5, 6)]
    found = {one.figure: one for one in compare("mixed", live, mine)}
    ttfts = [f"TTFT {part} of {kind}" for part in ("P50", "P90") for kind in ("text", "image")]
    assert list(found) == [*ttfts, "TTFT P99", "TBT mean", "TBT P99"]
    assert list(figures_of("chat", live[0])) == ["TTFT P50", "TTFT P90", "TTFT P99", "TBT mean", "TBT P99"]
    one = found["TTFT P90 of image"]
    values, simulated = (sorted(figures_of("mixed", run)["TTFT P90 of image"] for run in runs) for runs in (live, mine))
    assert sorted(one.live) == values and one.spread == pytest.approx((values[2] - values[0]) / values[1])
    assert one.simulated == simulated[1] and one.error == pytest.approx(simulated[1] / values[1] - 1)
    assert (found["TTFT P50 of text"].limit, found["TBT P99"].limit) == (0.15, 0.30)
    pictures = [record for record in live[0] if record.group == "image"]
    with pytest.raises(BenchError, match="mixed: none of the [0-9]+ requests that count is of kind text"):
        figures_of("mixed", pictures)
    far = msgspec.structs.replace(one, error=-0.2)
    assert not far.is_within and msgspec.structs.replace(far, limit=0.3).is_within


def test_the_requests_that_were_sent_first_do_not_count() -> None:
    run = records(1)
    before = figures_of("mixed", run)
    for record in sorted(run, key=lambda record: record.sent_s)[:2]:
        record.sent_s -= 100.0
    assert figures_of("mixed", run) == before


def test_failed_requests_cannot_be_compared() -> None:
    run = records(1)
    run[3].error = "HTTP 503: busy"
    with pytest.raises(BenchError, match="mixed: requests failed: {'HTTP 503: busy': 1}"):
        compare("mixed", [run], [run])


def test_the_slowness_of_a_load_is_of_the_references_before_and_after_it() -> None:
    assert slowness_of([[2.0, 4.0, 6.0, 2.0], [4.0, 4.0, 4.0, 6.0]], 2.0) == {
        "steady text": [1.5, 2.0],
        "mixed": [2.5, 2.0],
        "chat": [2.0, 2.5],
    }


def test_costs_of_another_model_are_not_validated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--validate", "1", "--costs", "small-cpu"]) == 1
    assert "the costs small-cpu are of another model than the demo model: language differs" in capsys.readouterr().err
    check_model(None, make_costs())
    check_model(None, load_costs("demo-cpu"))


def test_so_few_requests_that_a_kind_has_none_are_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--validate", "1", "--num-requests", "1"]) == 1
    assert "1 requests are too few: round 1 of mixed would compare none of kind text" in capsys.readouterr().err
    check_loads(2, ["--num-requests", "8"])


@pytest.mark.slow
def test_live_runs_and_the_simulation_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "validation.json"
    assert main(["--validate", "2", "--num-requests", "8", "--json", str(out)]) in (0, 1)  # how close they are is no test's business
    told = json.loads(out.read_text())
    assert {one["load"] for one in told["comparisons"]} == set(LOADS)
    assert {load: len(found) for load, found in told["slowness"].items()} == dict.fromkeys(LOADS, 2)
    assert all(len(one["live"]) == 2 and one["simulated"] > 0 for one in told["comparisons"])


@pytest.mark.slow
def test_costs_are_measured_between_the_rounds(tmp_path: Path) -> None:
    out, file = tmp_path / "validation.json", tmp_path / "mine.json"
    assert main(["--validate", "1", "--num-requests", "8", "--profile", str(file), "--json", str(out)]) in (0, 1)
    told = json.loads(out.read_text())
    assert told["costs"] == load_costs(str(file)).name == "mine" and len(told["comparisons"]) == 17


@pytest.mark.slow
def test_a_profile_is_measured_and_simulated(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    assert profile(["--seconds", "30", "--out", str(file)]) == 0
    assert main(["--costs", str(file), "--scenario", "mixed", "--num-requests", "8"]) == 0
