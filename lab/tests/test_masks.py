"""The bench of masks measures sampling with and without them, and refuses bad options."""

import pytest

from mmrt_lab.micro.masks import main, measure


def test_masks_are_timed() -> None:
    bench = measure(num_streams=2, num_steps=3, vocab_size=3000)
    assert [cost.rows for cost in bench.costs] == ["greedy", "temperature 0.8, top-k 40"]
    assert all(cost.with_s > 0 and cost.without_s > 0 for cost in bench.costs)


@pytest.mark.parametrize("option", ["--streams", "--steps"])
def test_bad_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([option, "0"])
    assert caught.value.code == 2 and f"{option} 0" in capsys.readouterr().err
