"""Benches that compare with transformers say what to install where it is missing, before they measure anything."""

import sys
from collections.abc import Callable, Sequence

import pytest

from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt_demo_model.exam import command as exam
from mmrt_lab import accuracy, versus_transformers
from mmrt_lab.chaos import command as chaos


@pytest.mark.parametrize(
    ("main", "arguments"),
    [(accuracy.main, [str(DEFAULT_MODEL)]), (versus_transformers.main, ["--checkpoint", str(DEFAULT_MODEL)]), (exam.main, [])],
)
def test_a_missing_extra_is_named(
    main: Callable[[Sequence[str]], int], arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(arguments) == 1
    assert "the package transformers is missing: pip install -e './lab[reference]'" in capsys.readouterr().err


def test_chaos_says_what_it_needs_before_it_starts_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    assert chaos.main(["--faults", "1"]) == 1
    told = capsys.readouterr()
    assert told.err == f"mmrt chaos: OpenAI's client makes the load, and is not installed: {sys.executable} -m pip install openai\n"
    assert told.out == ""
