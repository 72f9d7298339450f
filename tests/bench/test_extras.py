"""Benches that compare with transformers say what to install where it is missing, before they measure anything."""

import sys
from collections.abc import Callable, Sequence

import pytest

from mmrt.bench import accuracy, versus_transformers
from mmrt.examples.demo_model.exam import command as exam
from mmrt.runtime.process.run import DEFAULT_MODEL


@pytest.mark.parametrize(
    ("main", "arguments"),
    [(accuracy.main, [str(DEFAULT_MODEL)]), (versus_transformers.main, ["--checkpoint", str(DEFAULT_MODEL)]), (exam.main, [])],
)
def test_a_missing_extra_is_named(
    main: Callable[[Sequence[str]], int], arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(arguments) == 1
    assert "the package transformers is missing: pip install 'mmrt[reference]'" in capsys.readouterr().err
