"""The comparison with live runs; the whole command, with a run of the demo model, is slow."""

import json
from pathlib import Path

import msgspec
import pytest

from mmrt.bench.serve.client import BenchError
from mmrt.bench.serve.report import Report
from mmrt.bench.sim.command import main, simulate
from mmrt.bench.sim.profile import main as profile
from mmrt.bench.sim.validate import LOADS, check_model, compare, figures_of
from mmrt.tests.bench.sim.made_costs import make_costs, options_of


def report(seed: int) -> Report:
    return simulate(*options_of(*LOADS["mixed"], "--num-requests", "10", "--seed", str(seed)), make_costs())


def test_a_figure_is_compared_with_the_median_and_has_the_spread_beside_it() -> None:
    live, mine = [report(seed) for seed in (1, 2, 3)], report(4)
    found = {one.figure: one for one in compare("mixed", live, mine)}
    assert list(found) == ["TTFT P50", "TTFT P90", "TTFT P99", "TBT mean", "TBT P99"]
    one = found["TTFT P90"]
    values = sorted(figures_of(report)["TTFT P90"] for report in live)
    assert sorted(one.live) == values and one.spread == pytest.approx((values[2] - values[0]) / values[1])
    assert one.error == pytest.approx(figures_of(mine)["TTFT P90"] / values[1] - 1)
    assert (found["TTFT P50"].limit, found["TBT P99"].limit) == (0.15, 0.30)
    far = msgspec.structs.replace(one, error=-0.2)
    assert not far.is_within and msgspec.structs.replace(far, limit=0.3).is_within


def test_failed_requests_cannot_be_compared() -> None:
    failed = msgspec.structs.replace(report(1), failures={"HTTP 503: busy": 2})
    with pytest.raises(BenchError, match="mixed: requests failed: {'HTTP 503: busy': 2}"):
        compare("mixed", [failed], failed)


def test_costs_of_another_model_are_not_validated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--validate", "1", "--costs", "small-cpu"]) == 1
    assert "the costs small-cpu are of another model than the demo model: language differs" in capsys.readouterr().err
    check_model(None, make_costs())


@pytest.mark.slow
def test_live_runs_and_the_simulation_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "validation.json"
    assert main(["--validate", "2", "--num-requests", "4", "--json", str(out)]) in (0, 1)  # how close they are is no test's business
    told = json.loads(out.read_text())
    assert {one["load"] for one in told["comparisons"]} == set(LOADS)
    assert all(len(one["live"]) == 2 and one["simulated"] > 0 for one in told["comparisons"])


@pytest.mark.slow
def test_a_profile_is_measured_and_simulated(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    assert profile(["--seconds", "30", "--out", str(file)]) == 0
    assert main(["--costs", str(file), "--scenario", "mixed", "--num-requests", "8"]) == 0
