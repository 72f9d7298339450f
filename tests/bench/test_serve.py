"""The command against a real server: scenarios, load shapes, files, exit statuses."""

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mmrt.bench.serve.command import main
from mmrt.bench.serve.options import parse_options
from mmrt.bench.serve.record import Record
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ServerSection
from mmrt.runtime.process.run import create_run, run_info
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.bench.conftest import chunk

Script = Callable[[web.StreamResponse, dict[str, Any]], Awaitable[None]]
StartServer = Callable[[Script], str]


@pytest.fixture
def url(start_server: StartServer, honest: Script) -> str:
    return start_server(honest)


def bench(url: str, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    target = tmp_path / "report.json"
    status = main(["--url", url, "--json", str(target), *arguments])
    return status, json.loads(target.read_text()) if target.exists() else {}


def test_closed_loop_of_all_modalities(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, report = bench(
        url, tmp_path, "--num-requests", "12", "--concurrency", "3", "--max-tokens", "5", "--input-tokens", "43",
        "--scenario", "mixed", "--modality", "text,image,video,audio", "--seed", "3", "--out", str(out), "--slo-ttft", "5",
    )  # fmt: skip
    assert status == 0 and report["failures"] == {} and report["model"] == "toy"
    everything, *groups = report["groups"]
    assert (everything["group"], everything["num_requests"], everything["num_output_tokens"]) == ("all", 12, 60)
    assert {group["group"] for group in groups} <= {"text", "image", "video", "audio"} and len(groups) > 1
    assert everything["num_input_tokens"] == 12 * 43  # three tokens and two per word, learned by calibration
    assert report["slo"]["attainment"] == 1.0
    assert report["environment"]["cpu"] and report["environment"]["date"]
    lines = (out / "records.jsonl").read_bytes().splitlines()
    records = [Record(**{**json.loads(line), "chunks": []}) for line in lines]
    assert len(records) == 12 and json.loads((out / "report.json").read_text()) == report


def test_open_loop_sends_at_the_arrival_times(url: str, tmp_path: Path) -> None:
    status, report = bench(url, tmp_path, "--rate", "100", "--num-requests", "30", "--max-tokens", "2", "--no-extensions")
    assert status == 0 and report["groups"][0]["num_requests"] == 30
    assert 0.1 < report["duration_s"] < 5
    assert report["lag"]["min"] > -0.005 and report["lag"]["count"] == 30


def test_a_trace(url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": 1000 * n, "input_length": 21, "output_length": n + 1}) + "\n" for n in range(6)))
    status, report = bench(url, tmp_path, "--trace", str(trace), "--rate", "40", "--num-requests", "5")
    assert status == 0 and report["groups"][0]["num_output_tokens"] == 15 and report["groups"][0]["num_input_tokens"] == 5 * 21


def test_a_data_set(url: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"question {n}", "max_tokens": n + 1}) + "\n" for n in range(6)))
    status, report = bench(url, tmp_path, "--dataset", str(file))
    assert (status, report["scenario"], report["groups"][0]["num_output_tokens"]) == (0, "questions.jsonl", 21)
    assert report["settings"]["dataset"] == str(file) and "lengths.input_low" not in report["settings"]


def test_stall_has_both_phases_and_a_picture(url: str, tmp_path: Path) -> None:
    picture = tmp_path / "stall.png"
    status, report = bench(
        url, tmp_path, "--scenario", "stall", "--streams", "2", "--phase", "0.4", "--fresh-interval", "0.1",
        "--image-size", "32x32", "--fresh-max-tokens", "2", "--max-tokens", "50", "--plot", str(picture),
    )  # fmt: skip
    assert status == 0 and report["failures"] == {}
    stall = report["stall"]
    assert stall["alone"]["count"] > 20 and stall["with_fresh"]["count"] > 20 and stall["p99_ratio"] > 0
    assert stall["fresh_ttft"]["count"] == 4 and stall["alone_s"] > 0.39
    streams = next(group for group in report["groups"] if group["group"] == "stream")
    assert streams["num_cut"] == 2 and streams["num_requests"] > 2  # streams that end are started again
    assert picture.read_bytes().startswith(b"\x89PNG")


class Rememberer:
    """A script that answers with words of its own, and says how many tokens of a prompt it has seen as the beginning of another."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []

    async def __call__(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        messages = body["messages"]
        known = max((len(earlier) for earlier in self.asked if messages[: len(earlier)] == earlier), default=0)
        self.asked.append(messages)
        await response.write(chunk("an answer", 1))
        await response.write(chunk(f" to {len(messages)}", 2, "length"))
        num_tokens = 10 * len(messages) if body["max_tokens"] > 1 else len(messages[0]["content"])  # when it is calibrated
        usage = {"prompt_tokens": num_tokens, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 10 * known}}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")


def test_a_chat_sends_each_turn_with_all_before_it(
    start_server: StartServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Rememberer()
    status, report = bench(
        start_server(server), tmp_path, "--scenario", "chat", "--turns", "3", "--num-requests", "2", "--warmup", "0",
        "--image-size", "32x32", "--no-extensions",
    )  # fmt: skip
    assert status == 0 and report["failures"] == {}
    assert [group["group"] for group in report["groups"]] == ["all", "turn 1", "turn 2", "turn 3"]
    for chat in (server.asked[-6:-3], server.asked[-3:]):
        first, second, third = chat
        assert [part["type"] for part in first[0]["content"]] == ["image_url", "text"]
        assert second[:2] == [first[0], {"role": "assistant", "content": "an answer to 1"}] and isinstance(second[2]["content"], str)
        assert third[:4] == [*second, {"role": "assistant", "content": "an answer to 3"}]
    assert server.asked[-6][0] != server.asked[-3][0], "each conversation has a picture of its own"
    turns = report["chat"]
    assert [turn["num_prompt_tokens"] for turn in turns] == [10, 30, 50]
    assert [turn["num_cached_tokens"] for turn in turns] == [0, 10, 30] and [turn["num_hits"] for turn in turns] == [0, 2, 2]
    assert turns[0]["ttft_to_first"] == 1 and turns[2]["ttft"]["count"] == 2 and turns[2]["without_caches"] is None
    assert "cached" in capsys.readouterr().out


def test_a_chat_with_a_server_that_says_nothing_of_caches(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--scenario", "chat", "--turns", "2", "--num-requests", "4", "--concurrency", "2", "--max-tokens", "2")
    status, report = bench(url, tmp_path, *arguments, "--modality", "text")
    assert status == 0 and [turn["num_cached_tokens"] for turn in report["chat"]] == [None, None]
    assert report["groups"][0]["num_requests"] == 8 and "not said" in capsys.readouterr().out


def test_a_turn_that_fails_ends_its_conversation(start_server: StartServer, honest: Script, tmp_path: Path) -> None:
    async def fails_at_the_second(response: web.StreamResponse, body: dict[str, Any]) -> None:
        if len(body["messages"]) < 3:
            await honest(response, body)

    arguments = ("--scenario", "chat", "--turns", "4", "--num-requests", "2", "--max-tokens", "2", "--modality", "text")
    status, report = bench(start_server(fails_at_the_second), tmp_path, *arguments)
    assert status == 1 and report["failures"] == {"the stream ended without [DONE]": 2}
    assert [turn["turn"] for turn in report["chat"]] == [1]


@pytest.mark.slow
def test_caches_are_compared_in_runs_of_its_own(tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "null", "null")
    target = tmp_path / "report.json"
    status = main([
        "--scenario", "chat", "--compare-caches", str(tmp_path / "null"), "--modality", "text", "--num-requests", "2", "--turns", "2",
        "--max-tokens", "2", "--json", str(target),
    ])  # fmt: skip
    report = json.loads(target.read_text())
    assert status == 0 and [group["num_requests"] for group in report["groups"]] == [8, 2, 2, 2, 2]
    first, second = report["chat"]
    assert (first["num_hits"], second["num_hits"]) == (0, 2) and 0 < second["num_cached_tokens"] < second["num_prompt_tokens"]
    assert second["without_caches"]["count"] == 2 and second["ttft_to_without"] > 0
    assert not [*RunDirectory.default_path().parent.glob(f"bench-{os.getpid()}*")]


def test_a_missing_checkpoint_is_no_run_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scenario", "chat", "--compare-caches", str(tmp_path / "absent")]) == 1
    assert "absent" in capsys.readouterr().err and not [*RunDirectory.default_path().parent.glob(f"bench-{os.getpid()}*")]


def test_failures_are_reported_and_end_in_status_1(
    start_server: StartServer, honest: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails_for_four(response: web.StreamResponse, body: dict[str, Any]) -> None:
        if body["max_tokens"] != 4:
            await honest(response, body)

    url = start_server(fails_for_four)
    status, report = bench(url, tmp_path, "--num-requests", "3", "--max-tokens", "4", "--warmup", "0")
    assert status == 1 and report["failures"] == {"the stream ended without [DONE]": 3}
    assert "3 failed" in capsys.readouterr().out
    status, _ = bench(url, tmp_path, "--num-requests", "3", "--max-tokens", "4")
    assert status == 1 and "before the measurement failed" in capsys.readouterr().err
    stall = ("--scenario", "stall", "--max-tokens", "4", "--fresh-max-tokens", "3", "--phase", "30", "--num-requests", "1")
    status, _ = bench(url, tmp_path, *stall)
    assert status == 1 and "3 times in a row" in capsys.readouterr().err


def test_json_on_standard_output_is_nothing_but_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", f"{url}/v1/", "--num-requests", "1", "--max-tokens", "1", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["scenario"] == "steady" and "TTFT" in captured.err


def test_without_an_address_it_is_that_of_the_run(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MMRT_RUN_DIR", str(tmp_path / "run"))
    arguments = ["--num-requests", "1", "--max-tokens", "1", "--json", str(tmp_path / "report.json")]
    assert main(arguments) == 1
    assert f"no run is up in {tmp_path}/run: start one with `mmrt up`, or name a server with --url" in capsys.readouterr().err
    config = RuntimeConfig(server=ServerSection(api_key="a key"))
    with create_run(tmp_path / "run", run_info(config, Path("/m"), int(url.rpartition(":")[2]))) as run:
        assert main(arguments) == 0
        run.destroy()
    assert json.loads((tmp_path / "report.json").read_text())["failures"] == {}


def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = bench("http://127.0.0.1:1", tmp_path)
    assert status == 1 and "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    status, _ = bench("http://127.0.0.1:1", tmp_path, "--plot", str(tmp_path / "x.png"))
    assert status == 1 and "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "above 0"),
        (["--rate", "2", "--concurrency", "2"], "not allowed with"),
        (["--concurrency", "0"], "at least 1"),
        (["--modality", "smell"], "smell"),
        (["--image-size", "10"], "10"),
        (["--video-size", "11x10"], "even"),
        (["--input-tokens", "9-3"], "9-3"),
        (["--scenario", "stall", "--modality", "text"], "image, video or audio"),
        (["--scenario", "stall", "--rate", "2"], "--fresh-interval"),
        (["--trace", "x", "--concurrency", "2"], "--concurrency"),
        (["--slo-tbt", "1"], "--slo-ttft"),
        (["--scenario", "chat", "--rate", "2"], "conversations at a time"),
        (["--scenario", "chat", "--turns", "0"], "at least 1"),
        (["--compare-caches"], "servers of its own"),
        (["--scenario", "chat", "--compare-caches", "--url", "http://x"], "servers of its own"),
        (["--max-tokens", "many"], "not a number"),
    ],
)
def test_bad_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_options(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_missing_trace(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = bench(url, tmp_path, "--trace", str(tmp_path / "absent.jsonl"))
    assert status == 1 and "absent.jsonl" in capsys.readouterr().err
