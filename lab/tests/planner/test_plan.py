"""``mmrt plan`` as a whole: the table, the JSON, a rate, and what is refused."""

import json
import shlex
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mmrt
from mmrt.bench.serve.slo import Slo
from mmrt_lab.planner.command import main
from mmrt_lab.planner.measure import Hopeless, Watch, measure
from mmrt_lab.planner.options import parse_plan
from mmrt_lab.sim.events import EventQueue

LOAD = ("--devices", "3", "--workload", "textcaps", "--costs", "qwen2.5-vl-32b-h200", "--slo-ttft", "0.3", "--slo-tbt", "0.05")
SHORT = ("--seconds", "0.3", "--num-requests", "10")


def planned(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "plan.json"
    assert main([*LOAD, *SHORT, *arguments, "--json", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.mark.slow
def test_every_layout_is_planned_and_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(tmp_path, "--precision", "0.5", "--workers", "1")
    layouts = {one["layout"]: one for one in report["layouts"]}
    assert {*layouts} == {"E+P+D", "EP+2D", "2EP+D", "ED+2P", "2ED+P", "3EPD"}
    assert [one["goodput"] for one in report["layouts"]] == sorted((one["goodput"] for one in layouts.values()), reverse=True)
    assert layouts["3EPD"]["rank"] is None and report["chosen"] in report["division"]["layouts"]
    assert report["chosen_rank"] == 1 + sum(
        one["goodput"] > layouts[report["chosen"]]["goodput"] for one in layouts.values() if one["is_candidate"]
    )
    for one in layouts.values():
        attainments = {outcome["rate"]: outcome["attainment"] for outcome in one["outcomes"]}
        assert attainments.get(one["goodput"], 1.0) >= 0.9 > attainments[one["fails"]]
    shown = capsys.readouterr().out
    assert "Algorithm 2 chooses" in shown and f"rank {report['chosen_rank']} of 5" in shown


def test_layouts_are_compared_at_a_rate(tmp_path: Path) -> None:
    report = planned(tmp_path, "--rate", "20")  # in two processes
    assert len(report["layouts"]) == 6 and report["chosen"] is None and report["rate"] == 20
    for one in report["layouts"]:
        (outcome,) = one["outcomes"]
        assert outcome["num_requests"] == 10 and outcome["ttft_mean_s"] > 0 and outcome["tbt_mean_s"] > 0 and not outcome["is_cut"]


def test_a_load_that_must_fail_is_ended_early() -> None:
    options = parse_plan([*LOAD, "--num-requests", "100", "--seconds", "0.1"])
    cut, whole = (measure(options, "E+P+D", 500.0, to_the_end=to_the_end) for to_the_end in (False, True))
    assert cut.is_cut and cut.missed == "TTFT" and not whole.is_cut
    assert whole.attainment <= cut.attainment < 0.9


@pytest.mark.parametrize(("num_missed", "is_hopeless"), [(37, False), (38, True)])
def test_a_load_of_which_just_enough_can_meet_the_objective_goes_on(num_missed: int, is_hopeless: bool) -> None:
    """Of 370 requests 37 may miss it, though 0.1 times 370 is a little less as a float."""
    late = [SimpleNamespace(key=key, record=SimpleNamespace(stretches=[])) for key in range(num_missed)]
    gateway = SimpleNamespace(sent_before=lambda time_ns: late)
    controller = SimpleNamespace(state=SimpleNamespace(requests={}))
    simulation: Any = SimpleNamespace(queue=EventQueue(), gateway=gateway, controller=controller)
    with pytest.raises(Hopeless) if is_hopeless else nullcontext():
        Watch(simulation, Slo(1.0), 370, 0.9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "0 devices: a plan is made for 3 to 8"),
        (["--devices", "9"], "9 devices: a plan is made for 3 to 8"),
        (["--devices", "many"], "devices 'many' is not a number"),
        (["--precision", "1e-9"], "share 1e-9 must be at least 0.001"),
        (["--json", "nowhere/a.json"], "nowhere is no directory"),
        (["--json", "/dev"], "/dev is a directory"),
        (["--slo-ttft", "0"], "seconds 0 must be above 0"),
        (["--rate", "inf"], "--rate inf must be finite"),
        (["--rate", "-1"], "rate -1 must be above 0"),
        (["--concurrency", "3"], "--concurrency 3: layouts are compared at rates"),
        (["--scenario", "chat"], "--scenario chat has no rate"),
        (["--policy", "magic"], 'scheduling.policy = "magic": expected one of'),
        (["--costs", "dream"], "no costs 'dream'; there are"),
        (["--target", "2"], "share 2 must be at most 1"),
        (["--link", "0"], "GB/s 0 must be above 0"),
        (["--workers", "0"], "number 0 must be at least 1"),
        (["--layout", "X"], "unrecognized arguments: --layout X"),
    ],
)
def test_what_is_impossible_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--slo-ttft", "1", *arguments])
    assert exit_.value.code == 2 and message in " ".join(capsys.readouterr().err.split())


def test_without_an_objective_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_plan(["--devices", "8"]).objective.slo == Slo(4.0, 0.1)
    assert parse_plan(["--slo-ttft", "1"]).objective.slo == Slo(1.0)
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "Without an objective: --slo-ttft 4 --slo-tbt 0.1." in told and "--devices N to divide among the stages, 3 to 8 (8)" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo-ttft", "0.001"], "no layout meets a TTFT of 0.001 s"),
        (["--slo-ttft", "1", "--slo-tbt", "0.0001"], "no layout meets a TBT of 0.0001 s"),
        (["--slo-ttft", "1", "--modality", "audio"], "the model takes no audio"),
        (["--slo-ttft", "1", "--trace", "absent.csv"], "No such file"),
    ],
)
def test_what_no_layout_serves_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_a_trace_with_missing_columns_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens\n2024-10-01 00:00:01,5\n")
    assert main(["--slo-ttft", "1", "--trace", str(trace)]) == 1
    assert f"{trace}:1: no column GeneratedTokens" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["planner", "experiments"])
def test_commands_in_the_documents_are_understood(page: str) -> None:
    text = (Path(mmrt.__path__[0]) / "lab" / "docs" / f"{page}.md").read_text().replace("\\\n", "")
    commands = [line for line in text.splitlines() if line.startswith("mmrt plan ")]
    assert commands
    for command in commands:
        parse_plan(shlex.split(command, comments=True)[2:])
