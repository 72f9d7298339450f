"""The GPU bench without a GPU: counts, judgements, tables, files, sections that die, and the clock on a toy device."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import simplejpeg
import torch

import mmrt_lab.gpu.__main__ as command
from mmrt.media import nvjpg
from mmrt_lab.gpu import device_tests, runner, sampling, section, sharing, speed, timing, video_units, works
from mmrt_lab.gpu.case import Check, Timing, WrongResult, require_close
from mmrt_lab.gpu.counts import SHAPE_3B, SHAPE_7B, attention_flops, decode_bytes, extend_flops, rotate_and_write_bytes
from mmrt_lab.gpu.device import read_facts
from mmrt_lab.gpu.report import Report, format_report, format_table, write_report
from mmrt_lab.gpu.results import REFERENCE_CEILINGS, Row, find_ceilings, judge
from mmrt_lab.gpu.runner import read_rows, run_section
from mmrt_lab.gpu.section import execute

ROOT = Path(__file__).parents[2]
H100 = {"GB/s": 2150.0, "TFLOP/s": 395.0}  # half of what targets are written for


def test_bytes_of_decode() -> None:
    assert decode_bytes([8192] * 64, 28, 4, 128, 2) == 64 * (8192 * 2 * 4 * 256 + 2 * 28 * 256)
    assert decode_bytes([3, 0], 4, 2, 32, 1) == 3 * 2 * 2 * (32 + 4) + 2 * 2 * 4 * 64


def test_operations_of_attention() -> None:
    visible = sum(i + 1 for i in range(7, 12)) + 3
    assert extend_flops([(7, 12), (2, 3)], 4, 32) == 4 * 32 * 4 * visible
    assert attention_flops([3, 5], 2, 80) == 4 * 80 * 2 * (9 + 25)


def test_bytes_of_the_fused_write() -> None:
    assert rotate_and_write_bytes(1, 28, 4, 128, 2) == (36 + 32 + 8) * 256


def test_shapes_are_those_of_the_models() -> None:
    weights = SHAPE_7B.num_layers * SHAPE_7B.layer_bytes() // 2 + 2 * SHAPE_7B.vocabulary * SHAPE_7B.hidden + SHAPE_7B.hidden
    assert weights == 7_615_616_512  # of Qwen2.5-7B
    weights = SHAPE_3B.num_layers * SHAPE_3B.layer_bytes() // 2 + SHAPE_3B.vocabulary * SHAPE_3B.hidden + SHAPE_3B.hidden
    assert weights == 3_085_938_688  # of Qwen2.5-3B, whose head is its embedding table
    assert SHAPE_7B.step_bytes([1]) - SHAPE_7B.step_bytes([0]) == SHAPE_7B.num_layers * 2 * 4 * 128 * 2
    assert SHAPE_7B.prefill_flops([(0, 1)]) == 28 * (2 * SHAPE_7B.product_weights + 4 * 128 * 28)


@pytest.mark.parametrize(
    ("row", "share", "goal", "verdict"),
    [
        (Row(case="", rate=3600.0, unit="GB/s", target="decode"), 3600 / 4300, 3600.0, "reached"),
        (Row(case="", rate=3599.0, unit="GB/s", target="decode"), 3599 / 4300, 3600.0, "MISSED"),
        (Row(case="", rate=1.6, unit="x", target="decode, 8 bits over 16"), None, 1.7, "MISSED"),
        (Row(case="", time_us=18.0, rate=1800.0, unit="GB/s", target="decode, one row"), 1800 / 4300, 18.0, "reached"),
        (Row(case="", time_us=1.0, rate=0.81 * 4300, unit="GB/s", target="step, one row"), 0.81, 0.8, "reached"),
        (Row(case="", time_us=1.0, rate=0.59 * 790, unit="TFLOP/s", target="prefill"), 0.59, 0.6, "MISSED"),
        (Row(case="", rate=100.0, unit="TFLOP/s"), 100 / 790, None, ""),
        (Row(case="", difference=0.0), None, None, "ok"),
        (Row(case="", failed=True, target="decode"), None, None, "FAILED"),
    ],
)
def test_judgement(row: Row, share: float | None, goal: float | None, verdict: str) -> None:
    judged = judge(row, REFERENCE_CEILINGS, "NVIDIA H200")
    assert judged.share == pytest.approx(share) and judged.goal == pytest.approx(goal) and judged.verdict == verdict


def test_other_devices_are_measured_by_their_own_ceilings() -> None:
    assert judge(Row(case="", rate=1800.0, unit="GB/s", target="decode"), H100, "NVIDIA H100").verdict == "reached"
    assert judge(Row(case="", time_us=36.5, target="decode, one row"), H100, "NVIDIA H100").goal == 36.0
    assert judge(Row(case="", rate=1.7, unit="x", target="decode, 8 bits over 16"), H100, "NVIDIA H100").verdict == "reached"
    assert judge(Row(case="", rate=9e9, unit="GB/s", target="decode"), {}, "NVIDIA H100").verdict == ""


def test_ceilings_are_the_best_of_their_section() -> None:
    rows = [
        Row(section="ceilings", case="a", rate=10.0, unit="GB/s"),
        Row(section="ceilings", case="b", rate=12.0, unit="GB/s"),
        Row(section="ceilings", case="c", rate=99.0, unit="GB/s", failed=True),
        Row(section="other", case="d", rate=50.0, unit="GB/s"),
        Row(section="ceilings", case="e", failed=True),
    ]
    assert find_ceilings(rows, "ceilings") == {"GB/s": 12.0}


def test_a_row_survives_its_file() -> None:
    row = Row(section="s", case="c", time_us=1.5, rate=2.0, unit="GB/s", target="decode", first_s=0.1, note="é")
    assert Row(**json.loads(row.to_json())) == row


def test_differences_are_found_wherever_they_are() -> None:
    nan = float("nan")
    assert require_close("x", torch.tensor([1.0, nan, 3.5]), torch.tensor([1.0, nan, 3.0]), atol=0.5) == 0.5
    for wrong in ([1.0, 0.0, 3.0], [nan, nan, 3.0], [1.0, nan, float("inf")]):
        with pytest.raises(WrongResult, match=r"x\[\d\] is .*; 1 of 3 are wrong"):
            require_close("x", torch.tensor(wrong), torch.tensor([1.0, nan, 3.0]), atol=0.5)
    with pytest.raises(WrongResult, match=r"x has shape \[2\], expected \[3\]"):
        require_close("x", torch.zeros(2), torch.zeros(3), atol=1.0)
    assert require_close("x", torch.zeros(0), torch.zeros(0), atol=0.0) == 0.0


def make_report(rows: list[Row]) -> Report:
    judged = [judge(row, REFERENCE_CEILINGS, "H200") for row in rows]
    seconds = dict.fromkeys((row.section for row in rows), 3.0)
    return Report(facts={"device": "NVIDIA H200"}, quick=False, ceilings=REFERENCE_CEILINGS, rows=judged, seconds=seconds)


ROWS = [
    Row(section="paged_decode", case="check bf16", difference=0.004, first_s=2.0),
    Row(section="paged_decode", case="bf16", time_us=321.0, rate=3345.6, unit="GB/s", target="decode", note="28/4 heads"),
    Row(section="sampling", case="64 rows", time_us=150.0, target="sampling"),
    Row(section="sampling", case="check greedy", failed=True, note="WrongResult: tokens"),
]


def test_table() -> None:
    text = format_report(make_report(ROWS))
    assert (
        "paged_decode  (3 s, of which first launches 2.0 s)" in text and "ceilings that shares are of: 4,300 GB/s, 790 TFLOP/s" in text
    )
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert lines["bf16"] == "bf16 321.0 us 3,346 GB/s 77.8% 3,600 GB/s MISSED 28/4 heads".split()
    assert lines["check bf16"] == "check bf16 ok 2.0 s differs by 4.0e-03".split()
    assert lines["64 rows"] == "64 rows 150.0 us 200 us reached".split()
    assert lines["check greedy"] == "check greedy FAILED WrongResult: tokens".split()
    assert text.endswith("6 s; 1 ok, 1 FAILED, 1 reached, 1 MISSED")


def test_empty_columns_are_left_out() -> None:
    assert format_table("t", ["", "a", "b"], [["x", "", "1"], ["long", "", "22"]]) == "t\n      b\nx     1\nlong  22"


def test_files(tmp_path: Path) -> None:
    path = write_report(make_report(ROWS), tmp_path / "speed.json")
    assert list(tmp_path.iterdir()) == [path]
    found = json.loads(path.read_text())
    assert found["facts"] == {"device": "NVIDIA H200"} and len(found["rows"]) == 4
    assert found["rows"][1]["verdict"] == "MISSED" and found["rows"][1]["goal"] == 3600 and found["rows"][1]["share"] > 0.77


def test_a_report_that_is_cut_off_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(make_report(ROWS[:2]), tmp_path / "speed.json")

    def cut_off(self: Path, text: str) -> None:
        self.write_bytes(text.encode()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut_off)
    with pytest.raises(KeyboardInterrupt):
        write_report(make_report(ROWS), path)
    assert len(json.loads(path.read_text())["rows"]) == 2


def test_a_timing_that_raises_is_a_row() -> None:
    def broken(clock: object) -> list[Row]:
        raise RuntimeError("out of\n  resources")

    (row,) = execute(Timing("t", broken), object(), lambda: None)  # type: ignore[arg-type]
    assert row == Row(case="t", failed=True, note="RuntimeError: out of resources")
    (row,) = execute(Timing("t", broken, is_peer=True), object(), lambda: None)  # type: ignore[arg-type]
    assert not row.failed and row.note


SECTION = """
import json, os, signal, sys, time
section, file, skip = sys.argv[1], sys.argv[3], int(sys.argv[5])
with open(file, "a") as sink:
    def write(**fields):
        sink.write(json.dumps(fields) + "\\n")
        sink.flush()
    for number, case in enumerate(["good", "faults", "also good", "peer hangs", "last"]):
        if number < skip:
            continue
        write(begun=number, case=case, is_peer=case.startswith("peer"))
        if case == "faults" and section == "lost":
            write(section=section, case=case, failed=True, note="illegal address")
            sys.exit(3)
        if case == "faults" and section == "killed":
            sink.write('{"section": "ki')
            sink.flush()
            os.kill(os.getpid(), signal.SIGSEGV)
        if case == "peer hangs" and section == "killed":
            os.kill(os.getpid(), signal.SIGALRM)
        if case == "last" and section == "slow":
            time.sleep(60)
        write(section=section, case=case, difference=0.0)
"""


def started(behaviour: str, tmp_path: Path, seconds: float) -> dict[str, Row]:
    command = [sys.executable, "-c", SECTION]
    rows = run_section(behaviour, command, tmp_path / behaviour, dict(os.environ), time.monotonic() + seconds)
    assert len({row.case for row in rows}) == len(rows)
    return {row.case: row for row in rows}


def test_a_section_goes_on_behind_a_fault(tmp_path: Path) -> None:
    rows = started("lost", tmp_path, 60)
    assert {case: row.failed for case, row in rows.items()} == {
        "good": False,
        "faults": True,
        "also good": False,
        "peer hangs": False,
        "last": False,
    }
    assert rows["faults"].note == "illegal address"


def test_a_process_that_dies_is_a_failed_row_of_its_case(tmp_path: Path) -> None:
    rows = started("killed", tmp_path, 60)
    assert rows["faults"].failed and rows["faults"].note == "the process ended with signal 11"
    assert rows["peer hangs"].note == "took too long and was ended" and not rows["peer hangs"].failed
    assert rows["last"].difference == 0.0 and rows["also good"].difference == 0.0


def test_a_section_ends_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_LEAST_S", 0.5)
    rows = started("slow", tmp_path, 2)
    assert rows["last"].note == "the section's time was over" and not rows["last"].failed and len(rows) == 5


def test_a_section_without_time_is_not_started(tmp_path: Path) -> None:
    (row,) = run_section("s", ["false"], tmp_path / "rows", {}, time.monotonic() + 1)
    assert row.note == "not run: no time left" and not row.failed


def test_a_section_that_cannot_start_is_one_failed_row(tmp_path: Path) -> None:
    (row,) = run_section("s", ["false"], tmp_path / "rows", dict(os.environ), time.monotonic() + 60)
    assert row.failed and row.note == "the process ended with status 1"
    assert read_rows(tmp_path / "rows").rows == []


def test_a_section_writes_each_row_and_stops_when_the_device_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, RuntimeError("lost")])

    def synchronize() -> None:
        if (answer := next(answers, None)) is not None:
            raise answer

    def faulty(clock: object) -> list[Row]:
        raise RuntimeError("illegal address")

    found = [
        Check("a", lambda: 0.5),
        Timing("b", lambda clock: [Row(case="", time_us=1.0)]),
        Timing("c", faulty),
        Check("d", lambda: 0.0),
    ]
    monkeypatch.setattr(section, "cases", lambda name, device, quick, only: iter(found))
    monkeypatch.setattr(section, "Clock", lambda device: object())
    monkeypatch.setattr(section.signal, "alarm", lambda seconds: None)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: 0)
    assert section.main(["sampling", "--rows", str(tmp_path / "rows"), "--skip", "1"]) == section.LOST
    written = read_rows(tmp_path / "rows")
    assert (written.begun, written.case, [row.case for row in written.rows]) == (2, "c", ["b", "c"])
    assert written.rows[1].failed and all(row.section == "sampling" for row in written.rows)
    assert section.main(["sampling", "--rows", str(tmp_path / "rows"), "--skip", "3"]) == 0
    assert [row.case for row in read_rows(tmp_path / "rows").rows] == ["b", "c", "check d"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: 1)  # of a capture that failed
    assert section.main(["sampling", "--rows", str(tmp_path / "rows"), "--skip", "3"]) == section.LOST


def test_a_section_has_its_checks_or_its_timings_alone() -> None:
    name, cpu = "rms_norm, silu_mul", torch.device("cpu")
    timings = list(section.cases(name, cpu, quick=True, only="timings"))
    assert timings and all(isinstance(case, Timing) for case in timings)
    assert isinstance(next(section.cases(name, cpu, quick=True, only="checks")), Check)
    everything = [type(case) for case in section.cases(name, cpu, quick=True)]
    assert set(everything) == {Check, Timing} and everything.count(Timing) == len(timings)


@pytest.fixture
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for part in (speed, works):
        monkeypatch.setattr(part, "read_facts", lambda: {"device": "NVIDIA H200"})


def sections_of(file: Path) -> set[str]:
    return {row["section"] for row in json.loads(file.read_text())["rows"]}


@pytest.mark.usefixtures("a_device")
@pytest.mark.parametrize(("is_wrong", "status"), [(False, 0), (True, 1)])
def test_speed_prints_its_table_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_wrong: bool, status: int
) -> None:
    sections: list[str] = []
    kept: list[set[str]] = []

    def run(name: str, process: list[str], file: Path, environment: dict[str, str], end_s: float) -> list[Row]:
        assert process[-3:] == ["--only", "timings", "--quick"] and not file.exists()
        kept.append(sections_of(tmp_path / "speed.json"))
        sections.append(name)
        return [Row(section=name, case="case", rate=4000.0, unit="GB/s", failed=is_wrong and name == "peers")]

    monkeypatch.setattr(speed, "run_section", run)
    assert command.main(["speed", "--quick", "--out", str(tmp_path)]) == status
    assert sections == list(section.MODULES)
    assert kept == [set(sections[:number]) for number in range(len(sections))]  # before each section, all that came before
    said = capsys.readouterr().out.partition("wrote ")[2]
    assert "steps  (0 s, " in said and said.endswith("MISSED\n")


@pytest.mark.usefixtures("a_device")
@pytest.mark.parametrize("wrong", ["", "sampling", "tests that need a GPU", "answers"])
def test_works_runs_tests_checks_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    steps: list[str] = []
    kept: list[set[str]] = []

    def run(name: str, process: list[str], file: Path, environment: dict[str, str], end_s: float) -> list[Row]:
        is_suite = name in device_tests.SUITES
        assert process[2:] == ["mmrt_lab.gpu.device_tests"] if is_suite else process[-2:] == ["--only", "checks"]
        kept.append(sections_of(tmp_path / "works.json"))
        steps.append(name)
        note = "passed" if name != wrong else "AssertionError: 3 == 4"
        return [Row(section=name, case="t", note=note, failed=name == wrong)]

    def answer(file: Path, missing: str, limit_s: float) -> list[Row]:
        steps.append("answers")
        return [Row(section="answers", case="equal", rate=1.0, unit="of 1", failed=wrong == "answers")]

    monkeypatch.setattr(works, "run_section", run)
    monkeypatch.setattr(works, "answers", answer)
    assert command.main(["works", "--out", str(tmp_path)]) == bool(wrong)
    assert steps == [*device_tests.SUITES, *section.MODULES, "answers"]
    assert kept == [set(steps[:number]) for number in range(len(steps) - 1)]
    said = capsys.readouterr().out
    assert "device: NVIDIA H200" in said.partition("tests that need a GPU")[0]
    assert ("AssertionError: 3 == 4" in said) == (wrong not in ("", "answers"))
    assert f"{bool(wrong):d} FAILED" in said


@pytest.mark.usefixtures("a_device")
def test_whole_runs_say_what_they_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "what_serving_lacks", lambda: "No module named 'zmq'")
    assert command.main(["serve", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: whole runs cannot be measured: No module named 'zmq'\n"
    (row,) = works.answers(tmp_path / "none", "No module named 'zmq'", 1.0)
    assert (row.note, row.failed) == ("not run: No module named 'zmq'", False)


TESTS = """
import os, pytest

def test_right():
    pass

@pytest.mark.parametrize("value", [3, 4])
def test_some(value):
    assert value == 4, "not four"

@pytest.mark.skip("no room")
def test_later():
    pass

@pytest.mark.slow
def test_not_chosen():
    raise AssertionError

def test_dies():
    os.kill(os.getpid(), 11)

@pytest.fixture
def broken():
    yield
    raise OSError("disk full")

def test_broken_behind_its_end(broken):
    pass
"""


def test_tests_on_the_device_are_rows_and_go_on_behind_one_that_takes_the_process_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow"]\naddopts = ["-n", "4"]\n')
    script = "import sys; from pathlib import Path; from mmrt_lab.gpu import device_tests as tests; "
    script += "tests.ROOT = Path.cwd(); tests.SUITES['suite'] = ('-m', 'not slow', 'tests'); sys.exit(tests.main(sys.argv[1:]))"
    (tmp_path / "run.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = run_section("suite", [sys.executable, "run.py"], tmp_path / "rows", environment, time.monotonic() + 120)
    rows = {row.case.rpartition("::")[2]: row for row in found}
    assert {case: row.failed for case, row in rows.items()} == {
        "test_right": False,
        "test_some[3]": True,
        "test_some[4]": False,
        "test_later": False,
        "test_dies": True,
        "test_broken_behind_its_end": True,
    }
    assert rows["test_some[3]"].note.startswith("AssertionError: not four")
    assert rows["test_dies"].note == "the process ended with signal 11"
    assert rows["test_broken_behind_its_end"].note == "OSError: disk full"
    first, *others = works.condense("suite", found)
    assert (first.case, first.note, len(others)) == ("2 tests passed", "1 skipped", 3)


def test_the_suites_name_what_is_there() -> None:
    for selection in device_tests.SUITES.values():
        assert all((ROOT / argument).exists() for argument in selection if argument.startswith("tests"))


def test_facts_that_cannot_be_had_say_so() -> None:
    facts = read_facts()
    assert facts["torch"] == torch.__version__ and facts["triton"]
    if not torch.cuda.is_available():
        assert str(facts["device"]).startswith("unknown: ")


class ToyEvent:
    """Time passes in calls of launches, of 2 ms each."""

    now_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.time_ms = -1.0

    def record(self) -> None:
        self.time_ms = ToyEvent.now_ms

    def elapsed_time(self, end: "ToyEvent") -> float:
        assert self.time_ms >= 0
        return end.time_ms - self.time_ms


class ToyStream:
    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def wait_stream(self, stream: "ToyStream") -> None:
        pass


class ToyGraph:
    """Replays what was launched since it was made."""

    def __init__(self) -> None:
        self.begun_ms = ToyEvent.now_ms

    def replay(self) -> None:
        ToyEvent.now_ms += self.took_ms

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        yield
        self.took_ms = ToyEvent.now_ms - self.begun_ms


@pytest.fixture
def toy_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 4096)
    monkeypatch.setattr(torch.cuda, "Event", ToyEvent)
    monkeypatch.setattr(torch.cuda, "Stream", ToyStream)
    monkeypatch.setattr(torch.cuda, "current_stream", ToyStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ToyGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: graph.captured())


@pytest.mark.usefixtures("toy_device")
def test_the_clock_gives_the_time_of_works_beside_each_other() -> None:
    """The toy device runs one after the other: the first's time is its own, that of both the sum."""

    def takes(ms: float) -> Callable[[], None]:
        def launch() -> None:
            ToyEvent.now_ms += ms

        return launch

    beside = timing.Clock(torch.device("cpu")).beside(takes(2.0), 3, takes(5.0), 4)
    assert (beside.first_us, beside.both_us) == pytest.approx((2000, 26000))


@pytest.mark.usefixtures("toy_device")
@pytest.mark.parametrize("in_graph", [False, True])
def test_the_clock_gives_the_time_of_one_launch(in_graph: bool) -> None:
    def launch() -> None:
        ToyEvent.now_ms += 2.0

    timed = timing.Clock(torch.device("cpu")).time([launch] * 3, in_graph=in_graph)
    assert timed.time_us == pytest.approx(2000) and timed.first_s >= 0


@pytest.mark.parametrize("part", ["works", "speed", "serve"])
def test_without_a_device_it_says_so(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([part, "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr() == ("", "error: this bench needs a CUDA device, and torch sees none\n")
    assert not (tmp_path / "out").exists()


def test_a_source_tree_with_torch_triton_and_numpy_is_enough(tmp_path: Path) -> None:
    """As --help tells: a link, and nothing that mmrt otherwise depends on."""
    (tmp_path / "mmrt").symlink_to(ROOT)
    (tmp_path / "lab").symlink_to(ROOT / "lab")
    for absent in ("msgspec", "rich", "typer", "zmq", "transformers", "safetensors", "matplotlib", "aiohttp", "uvloop", "av", "PIL"):
        (tmp_path / f"{absent}.py").write_text(f"raise ModuleNotFoundError({absent!r})\n")
    script = "import importlib, runpy, sys, mmrt_lab.gpu as gpu; from mmrt_lab.gpu.section import MODULES; print(gpu.__file__); "
    script += "[importlib.import_module(f'mmrt_lab.gpu.{m}') for m in MODULES.values()]; "
    script += "sys.argv[1:] = ['works']; runpy.run_module('mmrt_lab.gpu', run_name='__main__')"
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(tmp_path / "lab"), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "error: this bench needs a CUDA device, and torch sees none\n")
    assert done.stdout.startswith(str(tmp_path / "lab"))


@pytest.mark.parametrize(("absent", "failed"), [("msgspec", False), ("mmrt.models.nothing", True)])
def test_what_is_not_installed_is_no_failure(absent: str, failed: bool) -> None:
    def run(clock: timing.Clock) -> list[Row]:
        raise ModuleNotFoundError(f"No module named {absent!r}", name=absent)

    (row,) = execute(Timing("a tower", run), object(), lambda: None)  # type: ignore[arg-type]
    assert row.failed == failed and absent in row.note


def test_what_serving_lacks_on_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command.what_serving_lacks() == "No module named 'cuda.bindings'"
    only = {"cuda.bindings": object()}
    monkeypatch.setattr(command.importlib.util, "find_spec", only.get)
    assert command.what_serving_lacks() == "", "transformers is for one section alone"


@pytest.mark.parametrize(("missing", "is_failure"), [("msgspec", False), ("mmrt_lab.gpu.sampling", True)])
def test_a_section_without_what_it_imports_is_not_run(monkeypatch: pytest.MonkeyPatch, missing: str, is_failure: bool) -> None:
    def absent(name: str, package: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(section, "importlib", SimpleNamespace(import_module=absent))
    (row,) = section.cases("sampling", torch.device("cpu"), False)
    assert isinstance(row, Row) and row.failed == is_failure and f"No module named {missing!r}" in row.note


def test_sampling_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all logits, those of companions too, and of counts."""
    clock = SimpleNamespace(device=torch.device("cpu"), time=lambda launches: timing.Timed(10.0, 0.0))
    monkeypatch.setattr(sampling, "_VOCABULARY", 1000)
    (row,) = sampling._time(4, torch.bfloat16, {"temperature": 0.8}, False, "sampling", clock)  # type: ignore[arg-type]
    assert (row.rate, row.unit) == (4 * 1000 * 2 / 10 / 1e3, "GB/s")
    (row,) = sampling._time(4, torch.float32, {"guidance": 1.5}, True, "", clock)  # type: ignore[arg-type]
    assert row.rate == pytest.approx((2 * 4 * 1000 * 4 + 4 * 1000 * 4) / 10 / 1e3)


def test_batches_for_which_there_is_no_time_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(device=torch.device("cpu"), time=lambda launches: timing.Timed(2000.0, 0.0))
    monkeypatch.setattr(sharing, "_stack", lambda num_rows, device: object())
    monkeypatch.setattr(sharing, "_decode", lambda num_rows, stack: sharing.Phase(f"decode {num_rows}", list))
    monkeypatch.setattr(sharing, "slowed", lambda clock, phase, *_: Row(case=phase.name, rate=1.5, unit="x"))
    times_s = iter([0.0, 1.0, 99.0, 99.0])
    monkeypatch.setattr(sharing, "time", SimpleNamespace(monotonic=lambda: next(times_s)))
    rows = sharing._batches((8, 32, 128), lambda stack: sharing.Phase("prefill", list), clock)  # type: ignore[arg-type]
    assert [(row.case, row.note) for row in rows] == [
        ("decode 8", ""),
        ("prefill", ""),
        ("decode 32 beside prefill", "not run: no time left"),
        ("decode 128 beside prefill", "not run: no time left"),
    ]


def test_a_neighbour_lives_while_it_is_needed() -> None:
    with sharing.neighbour([sys.executable, "-c", "print('ready', flush=True); input()"]):
        pass
    with pytest.raises(sharing.NeighbourError, match="or has ended"), sharing.neighbour(["true"]):
        pass


def test_jpegs_are_timed_where_there_are_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_units, "_JPEG_SIDE", 64)
    case = next(case for case in video_units.timings(True) if case.name == "a JPEG of a megapixel")
    if not torch.cuda.is_available():
        (row,) = execute(case, object(), lambda: None)  # type: ignore[arg-type]
        assert row.note == "not run: no nvImageCodec, or no JPEG unit that it can use" and not row.failed
    toy = lambda data, width, height: simplejpeg.decode_jpeg(data) ^ 2  # noqa: E731
    monkeypatch.setattr(nvjpg, "nvjpg_decoder", lambda: toy)
    units, core, ratio = execute(case, object(), lambda: None)  # type: ignore[arg-type]
    assert units.note == "differs by up to 2 of 255" and units.time_us and core.time_us
    assert ratio.rate == core.time_us / units.time_us
