"""The bench of DeltaNets measures steps, folds, prompts and reading, and refuses bad options."""

import pytest

from mmrt.models.architecture import DeltaConfig
from mmrt_lab.micro.delta import main, measure


def test_all_is_timed() -> None:
    bench = measure(DeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16), [1, 3], num_steps=1, num_threads=1)
    assert [cost.rows for cost in bench.costs] == [1, 3] and bench.prompt_s > 0
    assert all(seconds > 0 for cost in bench.costs for seconds in (cost.step_s, cost.fold_s, cost.read_s))


def test_the_command_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--key-heads", "1", "--value-heads", "2", "--size", "16", "--rows", "2", "--steps", "1"]) == 0
    assert "1 key and 2 value heads of 16 and 16" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--rows", "0"], ["--steps", "0"], ["--key-heads", "0"], ["--value-heads", "33"]])
def test_bad_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2 and " ".join(options) in capsys.readouterr().err
