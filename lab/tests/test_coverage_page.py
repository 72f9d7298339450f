"""coverage.toml says what is true: its paths exist, its commands can be typed, and the page has its tables."""

import re
import shlex
from pathlib import Path

import pytest

from mmrt.cli import main
from mmrt_lab.coverage_page import BEGIN, END, PAGE, SECTIONS, STATES, mechanisms, tables

ROOT = Path(__file__).parents[2]
ROWS = mechanisms()


def test_the_page_has_the_tables() -> None:
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == tables(), "python -m mmrt_lab.coverage_page"


def test_every_mechanism_of_the_texts_has_a_row() -> None:
    numbers = {"FC": 14, "US": 19, "TI": 26, "RS": 12, "MS": 9, "VL": 12, "CW": 4, "PC": 2, "CF": 5, "KQ": 2, "KT": 3, "SO": 1}
    assert list(ROWS) == [f"{text}{at}" for text, number in numbers.items() for at in range(1, number + 1)]
    assert sorted(numbers) == sorted(prefix for prefixes in SECTIONS.values() for prefix in prefixes)


@pytest.mark.parametrize("name", ROWS)
def test_a_state_comes_with_what_shows_it(name: str) -> None:
    row = ROWS[name]
    assert set(row) <= {"mechanism", "module", "test", "state", "remark", "command"}
    assert row["state"] in STATES
    if row["state"] in ("live", "part", "simulated"):
        assert "module" in row and "command" in row
    if row["state"] == "part":
        assert "remark" in row, "it says what is missing"


def test_every_path_exists() -> None:
    """Of modules in the tree, of tests below tests/ or in the tree; both without ``.py``."""
    bases = {"module": [ROOT], "test": [ROOT / "tests", ROOT]}
    for name, row in ROWS.items():
        for key, places in bases.items():
            for path in row.get(key, ()):
                assert any((place / f"{path}{end}").exists() for place in places for end in ("", ".py")), f"{name}: {path}"


@pytest.mark.parametrize("command", sorted({row["command"] for row in ROWS.values() if "command" in row}))
def test_every_command_can_be_typed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "pytest"]:
        _check_tests(words[3:])
    elif words[0] == "mmrt":
        first = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
        assert main.run([*words[1:first], "--help"]) == 0
        shown = capsys.readouterr().out
        assert all(re.search(rf"{option}\b", shown) for option in words if option.startswith("--")), shown
    else:
        assert words[:3] == ["python", "-m", "mmrt_lab.gpu"] and (ROOT / "lab" / "mmrt_lab" / "gpu" / "__main__.py").exists()


def _check_tests(words: list[str]) -> None:
    files, chosen = (words[: words.index("-k")], words[-1]) if "-k" in words else (words, "")
    names = re.findall(r"^def (test_\w+)", "\n".join((ROOT / file).read_text() for file in files), re.MULTILINE)
    for word in chosen.split(" or "):
        assert any(word in name for name in names), word
