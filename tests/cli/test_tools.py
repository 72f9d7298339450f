"""``trace``, ``inspect`` and ``replay`` refuse what they cannot do, in a line that names it, and leave nothing behind."""

from contextlib import closing
from pathlib import Path

import pytest

from mmrt.cli.inspect import find
from mmrt.cli.main import run
from mmrt.cli.replay import find_capture
from mmrt.runtime.errors import RunError, UserError
from mmrt.runtime.observe.inspect_report import RequestReport
from mmrt.runtime.observe.replay_capture import is_ordered
from mmrt.runtime.observe.request_names import is_named, short_name
from mmrt.runtime.stage_table import actors_of
from mmrt.shm.flight_recorder import FlightRecorder
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.status import ActorTable

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMRT_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["trace"], 1, "no run is up in {tmp}/run"),
        (["trace", "--crash", "latest"], 2, "nothing was saved in {tmp}/state/mmrt/run"),
        (["trace", "--crash", "monday"], 2, "no saved recording 'monday' in {tmp}/state/mmrt/run (there are: none)"),
        (["trace", "--last", "0"], 2, "0 is not a number of seconds above 0"),
        (["trace", "--last", "-3"], 2, "-3 is not a number of seconds above 0"),
        (["trace", "--last", "nan"], 2, "nan is not a number of seconds above 0"),
        (["trace", "--crash", "{tmp}/junk"], 2, "{tmp}/junk is no flight recording"),
        (["trace", "--run", "../x"], 2, "'../x' is not a name"),
        (["inspect"], 1, "no run is up in {tmp}/run"),
        (["inspect", "chatcmpl-1"], 1, "no run is up in {tmp}/run"),
        (["cache", "show"], 1, "no run is up in {tmp}/run"),
        (["cache", "clear"], 1, "no run is up in {tmp}/run"),
        (["replay"], 2, "give one of PLAN, --last ACTOR, --capture ACTOR"),
        (["replay", "x", "--last", "video"], 2, "give one of PLAN, --last ACTOR, --capture ACTOR"),
        (["replay", "--capture", "decode"], 2, "'decode' does no plans; video, encoder, prefill do"),
        (["replay", "--capture", "encoder.9"], 2, "no actor 'encoder.9': '9' is no number from 1 to 7"),
        (["replay", "--last", "memory.1"], 2, "'memory.1' does no plans; video, encoder, prefill do"),
        (["replay", "--last", "gateway"], 2, "'gateway' does no plans; video, encoder, prefill do"),
        (["replay", "--last", "prefill"], 2, "no plan of prefill has been captured in {tmp}/state/mmrt/run/captures"),
        (["replay", "0x1234"], 2, "no captured plan '0x1234'"),
        (["replay", "9" * 5000], 2, "no captured plan '999"),
        (["trace", "--crash", "x" * 300], 2, "no saved recording 'xxx"),
        (["replay", "{tmp}/junk"], 2, "{tmp}/junk cannot be read as safetensors"),
        (["replay", "{tmp}"], 2, "{tmp} is a directory"),
        (["replay", "--capture", "video"], 1, "no run is up in {tmp}/run"),
        (["replay", "--capture", "video", "-n", "9"], 2, "9 is not from 1 to 8"),
        (["replay", "x", "--repeat", "0"], 2, "0 is not from 1 to 10000"),
        (["replay", "--capture", "video", "-n", "2", "-o", "f"], 2, "--out names one file, --count asks for 2"),
    ],
)
def test_refused(tmp_path: Path, capsys: Captured, arguments: list[str], status: int, message: str) -> None:
    (tmp_path / "junk").write_bytes(b"junk")
    assert run([argument.format(tmp=tmp_path) for argument in arguments]) == status
    error = capsys.readouterr().err
    plain = " ".join(error.replace("│", " ").split())
    assert message.format(tmp=tmp_path) in plain, error
    assert "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["junk"]


@pytest.mark.parametrize("command", ["trace", "inspect", "replay"])
def test_help(command: str, capsys: Captured) -> None:
    assert run([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert f"mmrt {command}" in told
    assert command != "replay" or told.count("video, encoder or prefill") == 2, "stages that have plans"


def test_a_trace_that_cannot_be_written(tmp_path: Path, capsys: Captured) -> None:
    with RunDirectory.create(tmp_path / "run", {}) as directory:
        FlightRecorder.create(directory, "decode").writer(1).event(1)
        assert run(["trace", "-o", "/nowhere/t.json"]) == 2
        assert "cannot write /nowhere/t.json: No such file or directory" in capsys.readouterr().err
        assert run(["trace", "-o", "-"]) == 0


def test_a_run_that_is_only_just_starting(tmp_path: Path, capsys: Captured) -> None:
    with RunDirectory.create(tmp_path / "run", {}):
        assert run(["inspect"]) == 1
        assert "the run is only just starting" in capsys.readouterr().err


def test_no_plan_in_time_leaves_no_order(tmp_path: Path, capsys: Captured) -> None:
    from mmrt.shm.plan_table import PlanTable

    with RunDirectory.create(tmp_path / "run", {"config": {}}) as directory:
        PlanTable.create(directory)
        assert run(["replay", "--capture", "encoder", "--wait", "0.1"]) == 1
        waited, failed = capsys.readouterr().err.splitlines()
        assert waited == "waiting up to 0.1 s (--wait) for the next plan of encoder: ask the server something"
        assert "encoder was given no plan within 0.1 s (--wait)" in failed
        assert not is_ordered(tmp_path / "run", "encoder")


def test_an_actor_that_the_run_has_not_is_refused_at_once(tmp_path: Path, capsys: Captured) -> None:
    with RunDirectory.create(tmp_path / "run", {"config": {}}) as directory, closing(ActorTable.create(directory, actors_of("2E+P+D"))):
        assert run(["replay", "--capture", "encoder.2"]) == 1
        assert "no actor 'encoder.2' in this run; there are memory, " in (error := capsys.readouterr().err) and "encoder.1, " in error
        assert not is_ordered(tmp_path / "run", "encoder.2")


def report(request_id: str, key: str, stage: str = "decoding") -> RequestReport:
    return RequestReport(key=key, request_id=request_id, stage=stage, live=True, age_s=1.0, deadline_s=None)


def test_finding_a_request() -> None:
    live = [report("chatcmpl-aa11", "1f"), report("chatcmpl-aa22", "2f"), report("", "3f")]
    ended = [report("chatcmpl-bb33", "4f", "over")]
    for name, key in (
        ("chatcmpl-aa11", "1f"),
        ("aa2", "2f"),
        ("chatcmpl-aa2", "2f"),
        ("0x3f", "3f"),
        ("1", "1f"),
        ("bb", "4f"),
        ("4f", "4f"),
    ):
        assert find(name, live, ended).key == key
    with pytest.raises(RunError, match="'aa' is ambiguous: chatcmpl-aa11, chatcmpl-aa22"):
        find("aa", live, ended)
    with pytest.raises(RunError, match=r"no request 'zz', neither live nor recorded \(live are: chatcmpl-aa11, chatcmpl-aa22, 3f\)"):
        find("zz", live, ended)
    with pytest.raises(RunError, match=r"no request '', .*"):
        find("", [], ended)


@pytest.mark.parametrize(
    ("request_id", "short"),
    [
        ("chatcmpl-0123456789abcdef", "chatcmpl-01234567"),
        ("cmpl-0123456789abcdef", "cmpl-01234567"),
        ("msg_0123456789abcdef", "msg_01234567"),
        ("resp_0123456789abcdef", "resp_01234567"),
        ("mine", "mine"),
        ("", "7f"),
    ],
)
def test_a_request_has_one_short_name(request_id: str, short: str) -> None:
    assert short_name(request_id, "7f") == short
    for wanted in (short, short[: len(short) - 2] or short, request_id or "7f", request_id[-16:] or "7"):
        assert is_named(wanted, request_id, "7f")
    assert not is_named("", request_id, "7f") and not is_named("zz", request_id, "7f")


def test_a_captured_plan_is_found_by_how_its_id_begins(tmp_path: Path) -> None:
    for name in ("encoder-1a2b", "encoder-1a9c", "video-77"):
        (tmp_path / f"{name}.safetensors").touch()
    assert find_capture("1a2", None, tmp_path).stem == "encoder-1a2b"
    assert find_capture("0x77", None, tmp_path).stem == "video-77"
    with pytest.raises(UserError, match="'1a' is ambiguous: encoder-1a2b, encoder-1a9c"):
        find_capture("1a", None, tmp_path)


def test_logs_of_one_request(tmp_path: Path, capsys: Captured) -> None:
    logs = tmp_path / "state" / "mmrt" / "run"
    logs.mkdir(parents=True)
    stamp = "2026-11-28T20:00:00.00000"
    (logs / "gateway.log").write_text(f"{stamp}1Z chatcmpl-0123abcd came\n" + f"{stamp}2Z other\n" * 100)
    (logs / "decode.log").write_text(f"{stamp}3Z chatcmpl-0123abcd ended\n{stamp}4Z chatcmpl-9999 came\n")
    assert run(["logs", "--request", "chatcmpl-0123"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["came", "ended"]
    assert run(["logs", "--request", "chatcmpl-0123", "-n", "1"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["ended"]
    assert run(["logs", "--request", "nobody"]) == 0
    assert "has logged nothing about nobody" in capsys.readouterr().err
