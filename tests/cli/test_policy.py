"""``mmrt policy`` without a run: what it refuses, and the trial of a file."""

import subprocess
import sys
from pathlib import Path

import pytest

import mmrt
from mmrt.cli.main import run

EXAMPLE = Path(mmrt.__file__).parent / "examples" / "shortest_first.py"
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMRT_RUN_DIR", str(tmp_path / "run"))


def test_the_list_has_a_line_for_each(capsys: Captured) -> None:
    assert run(["policy", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[0] == "unified" and "First come, first served" in line for line in lines[1:])


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["show"], 1, "no run is up in"),
        (["set", "unified"], 1, "no run is up in"),
        (["set", "unifed"], 2, "no policy 'unifed'; did you mean unified? There are unified"),
        (["set", "/nowhere/mine.py"], 2, "/nowhere/mine.py cannot be read: No such file or directory"),
        (["set", "/nowhere/\udcff.py"], 2, "the path '/nowhere/\\udcff.py' is not UTF-8"),
    ],
)
def test_refusals(arguments: list[str], status: int, words: str, capsys: Captured) -> None:
    assert run(["policy", *arguments]) == status
    assert words in capsys.readouterr().err


def test_the_example_is_the_one_in_the_page_and_has_forty_lines_at_most() -> None:
    source = EXAMPLE.read_text()
    assert f"```python\n{source}```" in (EXAMPLE.parents[1] / "docs" / "writing_a_policy.md").read_text()
    assert len(source.splitlines()) <= 40
    command = [sys.executable, "-m", "mmrt.cli.main", "policy", "check", str(EXAMPLE)]
    assert f"{EXAMPLE}: ok (version " in subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
