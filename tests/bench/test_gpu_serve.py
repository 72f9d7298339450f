"""The bench of whole runs on a GPU: what it says without one, and how figures are judged."""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mmrt.bench.client import BenchError
from mmrt.bench.gpu.mps import multi_process_service
from mmrt.bench.gpu.report import format_table
from mmrt.bench.gpu.serve import COLUMNS, main
from mmrt.bench.gpu.whole_runs import SECTIONS, Figure
from mmrt.bench.own_run import OwnRun


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


def test_what_was_measured_is_kept_when_a_section_fails_and_when_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> Iterator[Figure]:
        assert [figure["section"] for figure in json.loads(file.read_text())["figures"]] == ["load", "stall"]
        yield Figure(section="restart", case="one", value=2.0)
        raise KeyboardInterrupt

    file = tmp_path / "serve.json"
    monkeypatch.setitem(SECTIONS, "load", lambda *_: [Figure(section="load", case="one", value=1.0)])
    monkeypatch.setitem(SECTIONS, "stall", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error: out of memory")))
    monkeypatch.setitem(SECTIONS, "restart", end)
    assert main(["--device", "cpu", "--sections", "load", "stall", "restart", "answers", "--json", str(file)]) == 1
    figures = [Figure(**figure) for figure in json.loads(file.read_text())["figures"]]
    assert [(figure.section, figure.note) for figure in figures] == [
        ("load", ""),
        ("stall", "RuntimeError: CUDA error: out of memory"),
        ("restart", ""),
        ("restart", "ended early"),
        ("answers", "ended early"),
    ]
    assert [figure.verdict for figure in figures] == ["", "FAILED", "", "", ""]


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
