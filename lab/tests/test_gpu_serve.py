"""The bench of whole runs on a GPU: what it says without one, and how figures are judged."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmrt.bench.own_run import OwnRun
from mmrt.bench.serve.errors import BenchError
from mmrt.models.families.qwen2_5.made_checkpoint import SHAPES
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt_lab.gpu import serve, serving, whole_runs, works
from mmrt_lab.gpu.figures import Figure
from mmrt_lab.gpu.mps import multi_process_service
from mmrt_lab.gpu.report import format_table
from mmrt_lab.gpu.serve import COLUMNS, main
from mmrt_lab.gpu.whole_runs import SECTIONS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_what_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--sections", "answers", "restart"]) == 1
    assert capsys.readouterr().err.startswith("error: answers, restart cannot run on cuda: torch ")


@pytest.mark.parametrize(
    ("value", "unit", "target", "verdict"),
    [
        (3.0, "s", 3.0, "reached"),
        (3.1, "s", 3.0, "MISSED"),
        (2.1, "times", 2.0, "MISSED"),
        (1.0, "of 1", 1.0, "reached"),
        (0.9, "of 1", 1.0, "MISSED"),
        (9.0, "tokens/s", None, ""),
        (None, "s", 3.0, "FAILED"),
    ],
)
def test_verdicts(value: float | None, unit: str, target: float | None, verdict: str) -> None:
    figure = Figure(section="restart", case="decode", value=value, unit=unit, target=target)
    assert figure.verdict == verdict
    assert verdict in format_table("", COLUMNS, [figure.cells()])


@pytest.mark.parametrize(
    ("device_gib", "disk_gb", "shape", "why"),
    [
        (80, 100, "7b", ""),
        (24, 100, "3b", "26 GB on the device, 43 are needed"),
        (80, 10, "3b", "10 GB in /tmp, 20 are needed"),
    ],
)
def test_the_7b_shape_is_timed_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, device_gib: int, disk_gb: int, shape: str, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=device_gib << 30))
    monkeypatch.setattr(serve.tempfile, "gettempdir", lambda: "/tmp")
    monkeypatch.setattr(serve.shutil, "disk_usage", lambda path: SimpleNamespace(free=disk_gb * 10**9))
    assert serve.choose_shape("cuda") == (shape, why)


def test_only_the_7b_shape_has_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, target in (("7b", 3.0), ("3b", None), ("tiny", None)):
        language = SimpleNamespace(hidden_size=SHAPES[shape].text["hidden_size"])  # type: ignore[index]
        monkeypatch.setattr(serving, "load_model_config", lambda path, language=language: SimpleNamespace(language=language))
        assert serving.target_of(3.0, Path("model")) == target


class ToyRun:
    """Counts what is started and ended."""

    def __init__(self) -> None:
        self.config: RuntimeConfig | None = None
        self.said: list[str] = []

    def up(self, config: RuntimeConfig) -> float:
        self.config = config
        self.said.append(f"up {config.model.dtype} {config.actors.layout}")
        return 2.0

    def down(self) -> float:
        self.config = None
        self.said.append("down")
        return 0.0

    def report(self) -> SimpleNamespace:
        return SimpleNamespace(endpoint="http://there")


def test_a_run_stays_up_for_sections_that_need_the_same() -> None:
    run = ToyRun()
    up: Any = serving.serving
    for given in ({"anew": True}, {}, {"layout": "EPD"}, {"layout": "EPD", "anew": True}):
        with up(run, Path("model"), "cuda", **given) as (url, ready_s):
            assert url == "http://there" and ready_s == (2.0 if given else 0.0)
    assert run.said == ["up auto E+P+D", "down", "up auto EPD", "down", "up auto EPD"]
    with pytest.raises(KeyboardInterrupt), up(run, Path("model"), "cuda", layout="EPD"):
        raise KeyboardInterrupt
    assert run.said[-1] == "down" and run.config is None


def test_the_figures_of_one_request() -> None:
    throughput, ttft, tbt = whole_runs._one_request("one request", 64, 6.5, 0.2)
    assert (throughput.value, ttft.value, tbt.value) == pytest.approx((64 / 6.5, 200.0, 100.0))


def test_what_was_measured_is_kept_when_a_section_fails_and_when_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> Iterator[Figure]:
        assert [figure["section"] for figure in json.loads(file.read_text())["figures"]] == ["load", "stall"]
        yield Figure(section="restart", case="one", value=2.0)
        raise KeyboardInterrupt

    file = tmp_path / "serve.json"
    monkeypatch.setitem(SECTIONS, "load", lambda *_: [Figure(section="load", case="one", value=1.0)])
    monkeypatch.setitem(SECTIONS, "stall", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error: out of memory")))
    monkeypatch.setitem(SECTIONS, "restart", end)
    sections = ["--sections", "load", "stall", "restart", "answers"]
    assert main(["--device", "cpu", "--shape", "3b", *sections, "--json", str(file)]) == 1
    figures = [Figure(**figure) for figure in json.loads(file.read_text())["figures"]]
    assert [(figure.section, figure.note) for figure in figures] == [
        ("load", ""),
        ("stall", "RuntimeError: CUDA error: out of memory"),
        ("restart", ""),
        ("restart", "ended early"),
        ("answers", "ended early"),
    ]
    assert [figure.verdict for figure in figures] == ["", "FAILED", "", "", ""]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure for minutes")
def test_answers_without_a_device_are_a_failure(tmp_path: Path) -> None:
    (row,) = works.answers(tmp_path / "answers.json", "", 60.0)
    assert (row.note, row.failed) == ("ended with status 1", True)
    (row,) = works.answers(tmp_path / "answers.json", "", 0.1)
    assert (row.note, row.failed) == ("ended with status -9", True)


def test_a_limit_ends_it_and_leaves_what_there_is(tmp_path: Path) -> None:
    """The run that is starting is down before it ends."""
    file = tmp_path / "serve.json"
    command = [sys.executable, "-m", "mmrt_lab.gpu.serve", "--device", "cpu", "--shape", "tiny", "--sections", "load", "stall"]
    done = subprocess.run([*command, "--limit", "21", "--json", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = [Figure(**figure) for figure in json.loads(file.read_text())["figures"]]
    assert figures[-1].note == "ended early" and "Traceback" not in done.stderr


CONTROL = """#!/bin/sh
echo "$* $CUDA_MPS_PIPE_DIRECTORY $(cat)" >> {said}
echo not today >&2
exit {status}
"""


@pytest.fixture
def mps_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Put a program in the daemon's place that ends with this status; where it writes what it was told."""

    def place(status: int) -> Path:
        program, said = tmp_path / "bin" / "nvidia-cuda-mps-control", tmp_path / "said"
        program.parent.mkdir()
        program.write_text(CONTROL.format(said=said, status=status))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return said

    return place


def test_the_multi_process_service_ends_with_what_it_was_started_for(mps_control: Callable[[int], Path]) -> None:
    said = mps_control(0)
    with pytest.raises(KeyboardInterrupt), multi_process_service() as environment:
        home = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(home).is_dir()
        raise KeyboardInterrupt
    assert said.read_text().splitlines() == [f"-d {home} ", f" {home} quit"] and not Path(home).exists()


def test_a_multi_process_service_that_does_not_start_is_an_error(mps_control: Callable[[int], Path]) -> None:
    mps_control(1)
    with pytest.raises(BenchError, match="nvidia-cuda-mps-control ended with status 1: not today"), multi_process_service():
        pass


def test_where_there_is_no_multi_process_service_its_section_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for device, why in (("cpu", "the service is for CUDA"), ("cuda", "there is no nvidia-cuda-mps-control")):
        (figure,) = SECTIONS["mps"](OwnRun(tmp_path, tmp_path / "run"), argparse.Namespace(device=device))
        assert (figure.note, figure.verdict) == (why, "")


def test_the_section_beside_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BenchError, match=r"^the package transformers is missing: pip install -e './lab\[reference\]'$"):
        next(SECTIONS["transformers"](OwnRun(tmp_path, tmp_path / "run"), argparse.Namespace(device="cpu")))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sections_on_the_processor(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    main(
        [
            "--device",
            "cpu",
            "--shape",
            "tiny",
            "--quick",
            "--json",
            str(file),
            "--sections",
            "load",
            "stall",
            "restart",
            "transformers",
            "together",
        ]
    )
    figures = [Figure(**figure) for figure in json.loads(file.read_text())["figures"]]
    assert {figure.section for figure in figures} == {"load", "stall", "restart", "transformers", "together"}
    assert all(figure.value is not None and figure.value > 0 for figure in figures)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_answers_of_a_run_on_the_processor_equal_themselves(tmp_path: Path) -> None:
    (row,) = works.answers(tmp_path / "answers.json", "", 500.0, device="cpu")
    assert (row.case, row.rate, row.failed) == ("equal", 1.0, False)
