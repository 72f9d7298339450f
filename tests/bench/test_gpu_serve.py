"""The bench of whole runs on a GPU: what it says without one, and how figures are judged."""

import pytest
import torch

from mmrt.bench.gpu.report import format_table
from mmrt.bench.gpu.serve import COLUMNS, Figure, main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_what_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--sections", "answers", "restart"]) == 1
    assert capsys.readouterr().err.startswith("error: answers, restart cannot run on cuda: torch ")


@pytest.mark.parametrize(
    ("value", "unit", "target", "verdict"),
    [
        (3.0, "s", 3.0, "reached"),
        (3.1, "s", 3.0, "MISSED"),
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
