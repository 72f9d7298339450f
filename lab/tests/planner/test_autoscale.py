"""A simulated run whose processes come and go: nothing is lost, hours are counted, bursts are met, and hours are saved."""

import json
import shlex
from pathlib import Path

import pytest

import mmrt
from mmrt.bench.serve.planned import plan_requests
from mmrt.lab.tests.sim.made_costs import make_costs, options_of
from mmrt.runtime.autoscale.scaler import Proposal, Scaler
from mmrt.runtime.stage_table import InstanceId
from mmrt_lab.planner.autoscale import main, parse_autoscale, plan_load
from mmrt_lab.planner.bursts import FEW, MANY, PERIOD_S, is_burst
from mmrt_lab.planner.scaled_run import ScaledRun
from mmrt_lab.sim.command import make_load, run
from mmrt_lab.sim.links import Link
from mmrt_lab.sim.requests import Requests
from mmrt_lab.sim.simulation import Simulation, simulated_limits


class Script(Scaler):
    """Proposes these numbers of PD processes at these seconds, whatever the figures are."""

    def __init__(self, numbers: dict[float, int]) -> None:
        self.numbers = numbers
        self.began_s: float | None = None

    def propose(self, now_s: float, figures: object) -> list[Proposal]:
        self.began_s = now_s if self.began_s is None else self.began_s
        due = [at_s for at_s in self.numbers if at_s <= now_s - self.began_s]
        num = figures["PD"].num  # type: ignore[index]
        return [Proposal("PD", num, self.numbers.pop(at_s), "") for at_s in due[:1]]


def scaled(numbers: dict[float, int]) -> tuple[Simulation, ScaledRun]:
    """A load of 30 s on 1 E and 2 PD, which become as many as these."""
    costs = make_costs()
    options, config = options_of(
        "--scenario", "mixed", "--num-requests", "300", "--rate", "10", "--max-tokens", "60", "--layout", "E+2PD"
    )
    requests, load = Requests(costs, options.shapes, config.media), make_load(options, plan_requests(options))
    simulation = Simulation(config, costs, simulated_limits(config, costs), link=Link())
    processes = [(InstanceId("encoder"),), *((InstanceId(f"prefill{n}"), InstanceId(f"decode{n}")) for n in ("", ".1"))]
    watched = ScaledRun(simulation, processes, Script(numbers), look_s=1.0, start_s=2.0)
    run(simulation, load, requests)
    return simulation, watched


def test_processes_come_and_go_and_no_request_is_lost() -> None:
    simulation, watched = scaled({2.0: 4, 10.0: 1, 18.0: 3})
    records = simulation.gateway.records
    assert len(records) == 300 and all(record.error is None and record.num_tokens == 60 for record in records)
    assert simulation.is_idle and [change.num for change in watched.changes] == [4, 1, 3]
    assert simulation.controller.state.totals.handed_over > 0  # rows of decodes that left went on elsewhere
    assert {*simulation.decodes} == {"decode", "decode.1", "decode.2"}
    decodes = [decode for record in records for decode, _, _ in record.stretches]
    assert {*decodes} == set(range(6)) and len(simulation.logs) == 6  # each that has come has had tokens


def test_hours_count_from_the_decision_until_a_process_is_drained() -> None:
    simulation, watched = scaled({2.0: 3, 20.0: 1})
    begin_ns = simulation.gateway.records[0].sent_ns
    end_ns = max(record.end_ns for record in simulation.gateway.records)
    length_s = (end_ns - begin_ns) / 1e9
    constant, changing = 2 * length_s, (20 - 2) + (20 - 3) + 0  # E and the first PD; the third; the second until then
    assert watched.process_s(end_ns) == pytest.approx(constant + changing + 3, abs=4)


def test_bursts_are_of_pictures_and_not_of_requests() -> None:
    options = parse_autoscale("--rate 5 --slo-ttft 2 --slo-tbt 0.1 --seconds 3600 --seed 1".split())
    bursts, plain = plan_load(options), plan_requests(options.plan.load_at(5.0))
    assert [plan.arrival_s for plan in bursts] == [plan.arrival_s for plan in plain]
    assert options.plan.load.workload == "modserve"
    assert parse_autoscale("--rate 5 --slo-ttft 2 --trace azure.csv".split()).plan.load.workload is None  # it has pictures of its own
    periods = [is_burst(at * PERIOD_S, 1) for at in range(200)]
    assert 0.2 < sum(periods) / 200 < 0.38 and not any(a and b for a, b in zip(periods, periods[1:], strict=False))
    for before, after in zip(plain, bursts, strict=True):
        if before.media:
            assert len(after.media) in dict(MANY if is_burst(before.arrival_s, 1) else FEW)
        else:
            assert after == before


def test_both_ways_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    arguments = "--rate 20 --seconds 3 --num-requests 60 --slo-ttft 2 --slo-tbt 0.1 --devices 4 --workers 1 --look 1 --start 1"
    assert main([*arguments.split(), "--costs", "qwen2.5-vl-32b-h200", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["static"]["outcome"]["attainment"] >= 0.9 and report["static"]["changes"] == []
    assert report["scaled"]["process_hours"] > 0 and report["saved"] == pytest.approx(
        1 - report["scaled"]["process_hours"] / report["static"]["process_hours"]
    )
    assert "fewest throughout" in capsys.readouterr().out


def test_commands_in_the_documents_are_understood() -> None:
    text = (Path(mmrt.__path__[0]) / "lab" / "docs" / "experiments.md").read_text().replace("\\\n", "")
    commands = [line for line in text.splitlines() if line.startswith("mmrt bench autoscale ")]
    assert commands
    for command in commands:
        parse_autoscale(shlex.split(command)[3:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo-ttft", "1"], "--rate is needed"),
        (["--rate", "2", "--slo-ttft", "1", "--calm", "0"], "seconds 0 must be above 0"),
    ],
)
def test_what_is_impossible_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2 and message in " ".join(capsys.readouterr().err.split())
