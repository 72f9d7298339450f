"""The judge as a whole: simulated, and once live; what it writes; what it refuses."""

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

import mmrt
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.slo import Slo
from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.observe.breakdown import PARTS
from mmrt.runtime.process.host_room import HostRoom
from mmrt.schema.policy_report import PolicyReport
from mmrt_lab.goodput.command import judge, main
from mmrt_lab.goodput.devices import costs_of, link_of
from mmrt_lab.goodput.live import check_policy, fit_at_once
from mmrt_lab.goodput.objective import Objective
from mmrt_lab.goodput.options import parse_goodput
from mmrt_lab.goodput.systems import configure
from mmrt_lab.sim.command import main as main_sim
from mmrt_lab.sim.costs import Line, load_costs
from mmrt_lab.sim.links import Link

LOAD = ("--scenario", "mixed", "--slo-ttft", "0.4", "--slo-tbt", "0.05", "--seconds", "0.1")


def judged(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "judged.json"
    assert main([*arguments, "--json", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def assert_parts_sum_to_latency(point: dict[str, Any]) -> None:
    assert list(point["breakdown"]) == list(PARTS) and min(part["mean"] for part in point["breakdown"].values()) >= 0
    assert sum(part["mean"] for part in point["breakdown"].values()) == pytest.approx(point["e2e"]["mean"], rel=0.02)


@pytest.mark.slow
def test_systems_are_compared_by_simulation(tmp_path: Path) -> None:
    arguments = ("--sim", "--systems", "monolithic,unified", "--num-requests", "40", "--rates", "64,32", "--precision", "0.4")
    report = judged(tmp_path, *arguments, *LOAD)
    assert (report["origin"], report["costs"], report["rates"]) == ("measured", "demo-cpu", [32, 64])
    assert [(system["name"], system["layout"]) for system in report["systems"]] == [("monolithic", "EPD"), ("unified", "E+P+D")]
    for system in report["systems"]:
        attainments = {point["rate"]: point["attainment"] for point in system["points"]}
        assert attainments[system["goodput"]] >= 0.9 > attainments[system["fails"]]
        assert system["fails"] <= 1.4 * system["goodput"] and 0 < system["area"] <= 1
        for point in system["points"]:
            assert point["num_requests"] == point["num_broken_down"] == 40 and set(point["by_group"]) == {"image", "text"}
            assert_parts_sum_to_latency(point)


def test_a_picture_and_a_page_are_written(tmp_path: Path) -> None:
    arguments = ("--sim", "--systems", "unified,slack@EP+D", "--rates", "20,40", "--no-search", "--num-requests", "10", "--rounds", "2")
    report = judged(tmp_path, *arguments, *LOAD, "--out", str(tmp_path / "out"))
    assert report["systems"][1]["layout"] == "EP+D" and report["systems"][0]["goodput"] is None
    (point, _) = report["systems"][0]["points"]
    assert point["num_requests"] == 20 and len({one["ttft_p90"] for one in point["rounds"]}) == 2  # each has requests of its own
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert (tmp_path / "out" / "goodput.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "slack@EP+D" in page and "lowest, median, highest" in page and "TTFT &lt; 0.4 s" in page and "data:image/png;base64," in page
    assert "http://" not in page and "https://" not in page  # it needs nothing else


def test_stall_is_judged_by_its_streams_while_media_come(tmp_path: Path) -> None:
    load = ("--scenario", "stall", "--phase", "2", "--fresh-interval", "0.5", "--num-requests", "3", "--max-tokens", "200")
    slo = ("--slo-ttft", "0.4", "--slo-tbt", "0.05")
    report = judged(tmp_path, "--sim", "--systems", "unified", *load, *slo, "--out", str(tmp_path / "out"))
    (point,) = report["systems"][0]["points"]
    assert point["rate"] is None and report["rates"] == [] and report["systems"][0]["goodput"] is None
    assert set(point["by_group"]) == {"image", "stream"} and point["by_group"]["image"]["num_requests"] == 3
    assert main_sim(["--policy", "unified", *load, "--json", str(tmp_path / "sim.json")]) == 0
    alone = json.loads((tmp_path / "sim.json").read_text())
    assert point["tbt"] == alone["stall"]["with_fresh"] and alone["stall"]["alone"]["count"] > 100
    assert point["tbt_alone"] == alone["stall"]["alone"]
    factor = point["tbt"]["mean"] / point["tbt_alone"]["mean"]
    assert point["output_tokens_per_s"] == pytest.approx(alone["groups"][0]["output_tokens_per_s"])
    page = (tmp_path / "out" / "index.html").read_text()
    assert "of the streams while media come" in page and "requests/s" not in page and "req/s" not in page
    assert ">factor<" in page and f">{factor:.2f}<" in page
    assert "concurrency" not in report["settings"]


def test_a_closed_loop_is_measured_round_by_round(tmp_path: Path) -> None:
    load = ("--scenario", "steady", "--concurrency", "2", "--num-requests", "6", "--slo-ttft", "1", "--rounds", "2")
    report = judged(tmp_path, "--sim", "--systems", "unified,auto", *load)
    assert report["settings"]["concurrency"] == 2 and report["settings"]["rounds"] == 2
    for (point,) in [system["points"] for system in report["systems"]]:
        assert point["rate"] is None and point["num_requests"] == 12 and point["attainment"] == 1.0
        assert len({one["ttft_p90"] for one in point["rounds"]}) == 2
        assert_parts_sum_to_latency(point)


def test_a_policy_of_a_file_is_judged_and_html_in_names_is_escaped(tmp_path: Path) -> None:
    file = tmp_path / "a&b.py"
    file.write_text("from mmrt.runtime.controller.scheduling.unified import Unified\npolicy = Unified()\n")
    load = ("--sim", "--systems", str(file), "--rates", "3", "--no-search", "--num-requests", "6", "--out", str(tmp_path / "out"))
    report = judged(tmp_path, *load, *LOAD)
    assert report["systems"][0]["policy"] == report["systems"][0]["name"] == "a&b.py"
    assert "a&amp;b.py" in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sim", "--kills-per-minute", "1"], "--kills-per-minute 1.0: a simulation has no processes"),
        (["--kills-per-minute", "0"], "kills 0 must be above 0"),
        (["--systems", "magic"], 'magic: scheduling.policy = "magic": expected one of unified'),
        (["--systems", "unified,unified"], "unified is named 2 times, once is enough"),
        (["--systems", "unified@E+P"], "unified@E+P: actors.layout"),
        (["--systems", "split@EPD"], "split@EPD: the preset split needs EP+D, or more of its processes"),
        (
            ["--systems", "monolithic@E+P+D"],
            "monolithic@E+P+D: the preset monolithic needs EPD",
        ),
        (["--slo-ttft", "0"], "seconds 0 must be above 0"),
        (["--slo-ttft", "1e9"], "slo.text.ttft_ms = 1000000000000.0"),
        (["--rates", "1,-3"], "rate -3 must be above 0"),
        (["--rates", "inf"], "rate inf must be finite"),
        (["--rates", "5000"], "--rates 5000 is outside of --least-rate 0.01 and --most-rate 1000"),
        (["--rounds", "3"], "--rounds 3 needs --no-search"),
        (["--rounds", "0"], "rounds 0 must be at least 1"),
        (["--seconds", "0"], "seconds 0 must be above 0"),
        (["--precision", "1e-9"], "share 1e-9 must be at least 0.001"),
        (["--json", "nowhere/a.json"], "nowhere is no directory"),
        (["--out", "/dev/null/report"], "/dev/null is no directory"),
        (["--target", "1.5"], "share 1.5 must be at most 1"),
        (["--least-rate", "9", "--most-rate", "3"], "--least-rate 9 is above --most-rate 3"),
        (["--no-search"], "--no-search needs --rates"),
        (["--rate", "3"], "--rate 3.0: rates are those of --rates and of the search"),
        (["--scenario", "chat", "--rates", "2"], "--rates [2.0]: --scenario chat has no rate"),
        (["--scenario", "stall", "--seconds", "5"], "--seconds 5.0: --scenario stall has no rate"),
        (["--scenario", "chat", "--slo-text", "1"], "--slo-text 1.0: the turns of a conversation have one objective"),
        (["--scenario", "stall", "--target", "0.5"], "--target 0.5: --scenario stall has no rate"),
        (["--concurrency", "3", "--precision", "0.1"], "--precision 0.1: --concurrency 3 has no rate"),
        (["--checkpoint", "x"], "--checkpoint x: a simulation has --costs"),
        (["--costs", "dream"], "no costs 'dream'; there are"),
    ],
)
def test_what_is_impossible_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--sim", "--slo-ttft", "1", *arguments])
    assert exit_.value.code == 2 and message in " ".join(capsys.readouterr().err.split())


def test_without_an_objective_there_is_one_and_costs_are_of_simulations(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_goodput([]).objective == Objective(Slo(4.0, 0.1))
    with pytest.raises(SystemExit):
        main(["--costs", "small-cpu"])
    assert "only a simulation (--sim) has costs" in " ".join(capsys.readouterr().err.split())


def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-10-01 00:00:01,-5,3\n")
    assert main(["--sim", "--slo-ttft", "1", "--trace", str(trace)]) == 1
    assert f"{trace}:2: -5 input tokens, the least is 0" in capsys.readouterr().err


def test_policies_steer_by_the_objective_that_they_are_judged_by() -> None:
    config = configure("auto", RuntimeConfig(), Objective(Slo(2.5, 0.08)))
    assert {(one.ttft_ms, one.tbt_ms) for one in (config.slo.text, config.slo.image, config.slo.video)} == {(2500.0, 80.0)}
    assert configure("auto", RuntimeConfig(), Objective(Slo(2.5))).slo.text.tbt_ms == 0.0
    options = parse_goodput(["--sim", "--objective", "qwen2-vl-7b/pope", "--workload", "pope"])
    assert [system.name for system in options.systems] == ["monolithic", "split", "unified", "auto"] and options.objective == Objective(
        Slo(8.0, 0.1)
    )


def test_a_load_lasts_long_enough_for_a_queue_to_grow() -> None:
    load = ["--sim", "--num-requests", "50", "--slo-tbt", "1"]
    options = parse_goodput([*load, "--slo-ttft", "20"])
    assert [options.load_at(rate).num_requests for rate in (0.5, 4.0)] == [50, 240] and options.load_at(4.0).rate == 4.0
    assert parse_goodput([*load, "--slo-ttft", "0.2"]).seconds == 10
    assert parse_goodput([*load, "--slo-ttft", "0.2", "--seconds", "3"]).load_at(100.0).num_requests == 300


@pytest.mark.parametrize("page", ["goodput", "experiments"])
def test_commands_in_the_documents_are_understood(page: str) -> None:
    text = (Path(mmrt.__path__[0]) / "lab" / "docs" / f"{page}.md").read_text().replace("\\\n", "")
    commands = [line for line in text.splitlines() if line.startswith("mmrt bench goodput ")]
    assert len(commands) >= 3
    for command in commands:
        parse_goodput(shlex.split(command)[3:])


def test_a_layout_can_be_a_pipeline() -> None:
    objective = Objective(Slo(1.0))
    config = configure("overlap@E+2P+D:pipeline", RuntimeConfig(), objective)
    assert (config.prefill_ranks, config.actors.layout) == (2, "E+2P+D")
    assert configure("overlap@E+2P+D", RuntimeConfig(), objective).prefill_ranks == 1
    assert configure("auto", config, objective).prefill_ranks == 2, "the configuration's layout stays as it is"
    for other in ("auto@E+2P+D", "monolithic"):
        assert configure(other, config, objective).prefill_ranks == 1
    devices = parse_config('[[devices]]\nname = "cpu:0"\n[[devices]]\nname = "cpu:1"')
    config = configure("overlap@E@cpu:0+2P@*+D@cpu:1:pipeline", devices, objective)
    assert (config.prefill_ranks, config.actors.layout) == (2, "E@cpu:0+P@cpu:0+P@cpu:1+D@cpu:1")
    assert configure("overlap@E@cpu:0+2P@*+D@cpu:1", devices, objective).prefill_ranks == 1
    with pytest.raises(ConfigError, match="'D:pipes' is not "):
        configure("overlap@E+2P+D:pipes", RuntimeConfig(), objective)
    with pytest.raises(ConfigError, match="has one prefill, expected 2 or more"):
        configure("overlap@E+P+D:pipeline", RuntimeConfig(), objective)


def test_a_split_gpu_is_two_halves_that_do_not_slow_each_other() -> None:
    gpu, cpu = load_costs("qwen2.5-vl-7b-h200"), load_costs("demo-cpu")
    split, unified = (configure(name, RuntimeConfig(), Objective(Slo(1.0))) for name in ("split", "unified"))
    halved = costs_of(split, gpu)
    uneven = msgspec.structs.replace(gpu, decode=Line(points=((1, 0.1), (4, 0.2))))
    assert costs_of(split, uneven).decode.seconds(2.5) == pytest.approx(0.3)
    assert halved.decode.seconds(9) == 2 * gpu.decode.seconds(9) and halved.prefill.seconds(9, 5) == 2 * gpu.prefill.seconds(9, 5)
    assert halved.interference["decode+encoder+prefill"] == {"decode": 1.0, "encoder": 0.5, "prefill": 0.5}
    assert halved.interference["decode+prefill"] == {"decode": 1.0, "prefill": 1.0}
    assert costs_of(split, cpu) is cpu and costs_of(unified, gpu) is gpu
    assert link_of(split, apart=True) is None and link_of(unified, apart=False) is None and link_of(unified, apart=True) == Link()


@pytest.mark.parametrize("why", [{"set_aside": "it raised"}, {"refused": "line 3: invalid syntax"}])
def test_figures_of_unified_are_not_taken_for_those_of_a_policy_that_fails(why: dict[str, str]) -> None:
    check_policy(PolicyReport(name="slack", wanted="slack", overruled=2, error="plan: it raised"))
    with pytest.raises(BenchError, match=f"mine.py.*{next(iter(why.values()))}: the figures would be those of unified"):
        check_policy(PolicyReport(wanted="mine.py", **why))


def test_systems_take_turns_at_each_rate_and_each_begins_once() -> None:
    told: list[str] = []
    arguments = ("--sim", "--systems", "unified,auto", "--rates", "16,32", "--no-search", "--num-requests", "4")
    judge(parse_goodput([*arguments, *LOAD]), told.append)
    order = [line.partition(" requests/s")[0] for line in told if "requests/s" in line]
    assert order == ["unified: 16", "auto: 16", "auto: 32", "unified: 32"]


def test_runs_are_up_at_once_where_the_machine_has_room_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fit(room_bytes: int, *arguments: str, shared_bytes: int = 64 << 30) -> bool:
        monkeypatch.setattr("mmrt_lab.goodput.live.read_host_room", lambda run: HostRoom(room_bytes, shared_bytes))
        return fit_at_once(parse_goodput(["--systems", "unified,auto,split", *arguments, *LOAD]))

    assert fit(5 << 30) and not fit(3 << 30)  # three times the processes, the pools, and the demo model's weights
    assert not fit(5 << 30, shared_bytes=1 << 30)  # pools and weights are files of the run
    pools = tmp_path / "pools.toml"
    pools.write_text("[memory]\nmedia_mib = 1024\n")
    assert not fit(5 << 30, "--config", str(pools)) and fit(8 << 30, "--config", str(pools))
    gpu = tmp_path / "gpu.toml"
    gpu.write_text('[model]\ndevice = "cuda"\n')
    assert not fit(1 << 40, "--config", str(gpu))  # the room of a GPU is another


@pytest.mark.slow
def test_live_runs_are_judged_by_their_clients_and_their_recorders(tmp_path: Path) -> None:
    """A run of the demo model: the parts of each request sum to its client's latency."""
    load = (
        "--scenario",
        "mixed",
        "--max-tokens",
        "8",
        "--num-requests",
        "8",
        "--seconds",
        "0.1",
        "--slo-ttft",
        "60",
        "--slo-tbt",
        "10",
    )
    report = judged(tmp_path, "--systems", "unified,auto", "--rates", "8", "--no-search", *load)
    assert report["origin"] == "live"
    for (point,) in [system["points"] for system in report["systems"]]:
        assert (point["attainment"], point["failures"]) == (1.0, {})
        assert point["num_broken_down"] == point["num_requests"] == 8
        assert_parts_sum_to_latency(point)
        assert all(point["breakdown"][part]["mean"] > 0 for part in ("encode_s", "prefill_s", "decode_s", "decode_queue_s"))


@pytest.mark.slow
def test_a_live_run_is_judged_while_its_processes_are_killed(tmp_path: Path) -> None:
    """Every answer comes, and the kills are counted."""
    load = ("--scenario", "mixed", "--max-tokens", "24", "--num-requests", "24", "--slo-ttft", "60", "--slo-tbt", "60")
    report = judged(tmp_path, "--systems", "auto", "--rates", "2", "--no-search", "--kills-per-minute", "20", *load)
    ((point,),) = [system["points"] for system in report["systems"]]
    assert point["num_kills"] >= 3 and (point["attainment"], point["failures"]) == (1.0, {})
    assert report["settings"]["kills_per_minute"] == 20
