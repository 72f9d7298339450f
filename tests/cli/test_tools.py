"""``trace``, ``inspect`` and ``replay`` refuse what they cannot do, in a line that names it, and leave nothing behind."""

from contextlib import closing
from pathlib import Path

import pytest

from mmrt.cli.inspect import find
from mmrt.cli.main import run
from mmrt.runtime.errors import RunError
from mmrt.runtime.observe.inspect_report import RequestReport
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
        (["replay", "--last", "video.1"], 2, "no actor 'video.1': a run has one video"),
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
        assert not (tmp_path / "run" / "capture-encoder").exists()


def test_an_actor_that_the_run_has_not_is_refused_at_once(tmp_path: Path, capsys: Captured) -> None:
    with RunDirectory.create(tmp_path / "run", {"config": {}}) as directory, closing(ActorTable.create(directory, actors_of("2E+P+D"))):
        assert run(["replay", "--capture", "encoder.2"]) == 1
        assert "no actor 'encoder.2' in this run; there are memory, " in (error := capsys.readouterr().err) and "encoder.1, " in error
        assert not (tmp_path / "run" / "capture-encoder.2").exists()


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
