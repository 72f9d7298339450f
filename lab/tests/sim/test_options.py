"""The command line of ``bench sim``: what is impossible is refused before anything runs, with value and limit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmrt.runtime.controller.scheduling.policy import POLICIES
from mmrt_lab.sim.command import main
from mmrt_lab.sim.options import parse_sim
from mmrt_lab.sim.profile import parse_profile


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "magic"], """scheduling.policy = "magic": expected one of unified"""),
        (["--policy", "absent.py"], "cannot read the policy"),
        (["--layout", "E+P"], "has no decode (D)"),
        (["--layout", "9E+P+D"], "9 of encoder, a run has at most 8"),
        (["--layout", "EE+P+D"], "encoder twice"),
        (["--layout", "X"], "no stage 'X'"),
        (["--rate", "-2"], "rate -2 must be above 0"),
        (["--rate", "0"], "rate 0 must be above 0"),
        (["--rate", "nan"], "rate nan must be above 0"),
        (["--num-requests", "0"], "number 0 must be at least 1"),
        (["--rows", "-1"], "max_sequences = -1: expected `int` >= 0"),
        (["--costs", "a-dream"], "no costs 'a-dream'; there are "),
        (["--config", "absent.toml"], "cannot read the configuration absent.toml"),
        (["--scenario", "chat", "--rate", "1"], "the chat scenario has --concurrency"),
        (["--validate", "2", "--rate", "3"], "--rate 3.0: --validate has loads of its own"),
        (["--validate", "2", "--scenario", "chat"], "--scenario chat: --validate has loads of its own"),
        (["--validate", "2", "--costs", "qwen2.5-vl-7b-h200"], "--validate compares with runs on this machine"),
        (["--checkpoint", "x"], "--checkpoint and --profile are for the live runs of --validate"),
        (["--profile", "x.json"], "--checkpoint and --profile are for the live runs of --validate"),
        (["--validate", "2", "--profile", "x.json", "--costs", "small-cpu"], "--costs small-cpu: --profile measures the costs"),
        (["--validate", "2", "--profile", "x.txt"], "x.txt: the name of a cost file ends with .json"),
        (["--validate", "2", "--profile", "absent/x.json"], "absent is no directory"),
        (["--link", "0"], "GB/s 0 must be above 0"),
        (["--link-packing", "int8"], "--link-packing int8: there is no --link"),
        (["--link-recompute"], "--link-recompute True: there is no --link"),
        (["--validate", "2", "--link", "3"], "--link 3.0: --validate compares with runs on one device"),
    ],
)
def test_what_is_impossible_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_pipeline_is_not_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "pipeline.toml"
    config.write_text('[actors]\nlayout = "E+2P+D"\n[scheduling]\nprefill_pipeline = true\n')
    with pytest.raises(SystemExit):
        main(["--validate", "2", "--profile", str(tmp_path / "x.json"), "--config", str(config)])
    assert "a stage of scheduling.prefill_pipeline shows a part of" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modality", "audio", "--costs", "qwen2.5-vl-7b-h200"], "the model takes no audio; it takes text, image, video"),
        (["--image-size", "9000x20", "--modality", "image"], "aspect ratio of 9000x20 is 450, above the limit of 200"),
        (["--kv-tokens", "3"], "memory.kv_tokens is 3, at least two pages (32 tokens) are needed"),
    ],
)
def test_what_the_model_does_not_take_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_more_media_than_the_run_takes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "few.toml"
    config.write_text("[media]\nmax_items = 16\n")
    assert main(["--workload", "modserve", "--config", str(config)]) == 1
    assert "a request has 25 media, media.max_items is 16" in capsys.readouterr().err


def test_devices_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their KV pools, and the copies between them, are not simulated."""
    config = tmp_path / "devices.toml"
    config.write_text('[actors]\nlayout = "EP@left+D@right"\n[[devices]]\nname = "left"\n[[devices]]\nname = "right"\n')
    with pytest.raises(SystemExit):
        main(["--config", str(config)])
    assert "[[devices]] makes 2 KV pools: the simulator has one" in capsys.readouterr().err


def test_a_trace_that_runs_backwards_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [{"timestamp": at, "input_length": 9, "output_length": 3} for at in (0, 2000, 1000)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert main(["--trace", str(trace)]) == 1
    assert f"{trace}:3: arrives 1 s before the line above" in capsys.readouterr().err


def test_a_trace_is_simulated_and_the_report_written(tmp_path: Path) -> None:
    trace, out = tmp_path / "t.csv", tmp_path / "report.json"
    rows = [
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
        *(f"2024-10-01 00:00:{at:02},{at % 2},{50 + at},{at}" for at in range(9)),
    ]
    trace.write_text("\n".join(rows))
    assert main(["--trace", str(trace), "--rate", "4", "--layout", "2E+P+D", "--json", str(out), "--slo-ttft", "1"]) == 0
    report = json.loads(out.read_text())
    assert [group["group"] for group in report["groups"]] == ["all", "image", "text"]
    assert report["groups"][0]["num_output_tokens"] == sum(range(9)) + 1  # none becomes one
    assert report["simulated"]["layout"] == "2E+P+D" and report["simulated"]["origin"] == "measured"
    assert report["slo"]["attainment"] == 1.0 and report["settings"]["rate"] == 4


def test_a_link_gives_each_process_a_device(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    load = ["--num-requests", "4", "--input-tokens", "200", "--layout", "EP+D", "--no-caches", "--json", str(out)]

    def ttft_s(*link: str) -> float:
        assert main([*load, *link]) == 0
        report = json.loads(out.read_text())
        assert report["settings"].get("link.bytes_per_s") == (1e9 * float(link[1]) if link else None)
        return float(report["groups"][0]["ttft"]["mean"])

    fast, slow, packed = ttft_s("--link", "64"), ttft_s("--link", "0.002"), ttft_s("--link", "0.002", "--link-packing", "int4")
    assert slow > 2 * packed > 2 * fast


def test_a_configuration_gives_what_no_flag_says(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[actors]\nlayout = "EPD"\n[memory]\nmax_sequences = 7\nprefix_cache = false\n')
    options, config, costs, policy, _ = parse_sim(["--config", str(file)])
    assert (options.layout, config.memory.max_sequences, options.caches, policy.name) == ("EPD", 7, False, "auto")
    assert costs.name == "demo-cpu" and config.model.device == "cpu"
    assert parse_sim(["--config", str(file), "--layout", "E+P+D"])[1].actors.layout == "E+P+D"
    assert parse_sim(["--costs", "qwen2.5-vl-7b-h200"])[1].model.device == "cuda"


POLICY = """
from mmrt.runtime.controller.scheduling.unified import Unified

class LastFirst(Unified):
    def rank(self, request, facts):
        return (-request.arrival,)

policy = LastFirst()
"""


def test_a_policy_of_a_file_is_in_charge(tmp_path: Path) -> None:
    file, out = tmp_path / "last_first.py", tmp_path / "report.json"
    file.write_text(POLICY)
    load = ["--num-requests", "20", "--rate", "inf", "--rows", "1", "--max-tokens", "4", "--no-caches", "--json", str(out)]
    assert main([*load, "--policy", str(file)]) == 0
    report = json.loads(out.read_text())
    assert report["simulated"]["policy"] == "last_first.py" and report["simulated"]["totals"]["overruled"] == 0


FAILING = """
from mmrt.runtime.controller.scheduling.unified import Unified

class Failing(Unified):
    num_calls = 0
    def plan(self, view, limits, memory):
        Failing.num_calls += 1
        if Failing.num_calls <= NUM_FAILURES:
            raise OSError("broken")
        return super().plan(view, limits, memory)

policy = Failing()
"""


@pytest.mark.parametrize(("num_failures", "status"), [(1, 0), (100, 1)])
def test_figures_of_unified_are_not_taken_for_those_of_a_failing_policy(
    tmp_path: Path, num_failures: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "failing.py"
    file.write_text(FAILING.replace("NUM_FAILURES", str(num_failures)))
    assert main(["--num-requests", "20", "--rate", "20", "--max-tokens", "4", "--policy", str(file)]) == status
    said = capsys.readouterr()
    if status:
        assert "the policy was overruled 5 times within 10 s, last because of plan: OSError('broken')" in said.err
    else:
        assert "the policy was overruled once: unified planned in its place then" in said.out


def test_broken_policies_are_told_with_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("import math\npolicy = 1 / 0\n")
    with pytest.raises(SystemExit):
        main(["--policy", str(tmp_path / "broken.py")])
    assert "broken.py:2: ZeroDivisionError: division by zero" in capsys.readouterr().err


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "unified"])
def test_every_policy_serves_a_mix(policy: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    load = ["--scenario", "mixed", "--num-requests", "40", "--rate", "20", "--max-tokens", "10", "--json", str(out)]
    assert main([*load, "--policy", policy, "--layout", "EPD" if policy == "monolithic" else "E+P+D"]) == 0
    simulated = json.loads(out.read_text())["simulated"]
    assert simulated["policy"] == policy and simulated["totals"]["finished"] == 40


def test_a_simulation_loads_neither_torch_nor_a_client_nor_a_decoder() -> None:
    code = "import sys; from mmrt_lab.sim.command import main; main(['--num-requests', '2']); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "aiohttp", "av"} & {*result.stdout.splitlines()[-1].split()}


def test_a_profile_is_refused_before_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "mine.json")]
    assert parse_profile(out).layout is None and parse_profile([*out, "--layout", "EP+D"]).layout == "EP+D"
    for arguments, message in (
        ([*out, "--layout", "E+P"], "argument --layout: 'E+P' has no decode (D)"),
        ([*out, "--seconds", "3"], "seconds 3 must be at least 10"),
        (["--out", str(tmp_path / "absent" / "mine.json")], f"{tmp_path}/absent is no directory"),
        (["--out", str(tmp_path / "mine.txt")], "mine.txt: the name of a cost file ends with .json"),
    ):
        with pytest.raises(SystemExit):
            parse_profile(arguments)
        assert message in " ".join(capsys.readouterr().err.split())
