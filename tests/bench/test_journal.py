"""The journal's bench measures a journal, beside one that does nothing."""

from pathlib import Path

import pytest

from mmrt.bench.micro.journal import main, measure_cost


def test_cost_of_a_request(tmp_path: Path) -> None:
    cost = measure_cost(tmp_path, 512, 2000)
    assert cost.with_s > 0 and cost.without_s > 0
    assert cost.compactions >= 1  # what has ended does not stay
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--requests", "--streams", "--rounds"])
def test_bad_numbers(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([option, "0"])
    assert stopped.value.code == 2 and "at least 1" in capsys.readouterr().err
