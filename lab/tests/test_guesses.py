"""The bench of guesses runs a model with and without them, and its answers are the same."""

import json
from pathlib import Path

import pytest

from mmrt_lab.micro.guesses import CASES, main


@pytest.mark.slow
def test_answers_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "1", "--tokens", "24", "--json", str(tmp_path / "figures.json")]) == 0
    cases = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert [case["name"] for case in cases] == list(CASES) and all(case["same"] for case in cases)
    assert all(case["with_guesses"][0] > 0 for case in cases) and "eight stories" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--tokens", "0"]])
def test_bad_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2 and "at least 1" in capsys.readouterr().err
