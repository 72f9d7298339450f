"""The bench of experts measures both ways, which give the same, in all formats, and refuses bad options."""

import pytest
import torch

from mmrt.models.lm.experts import route
from mmrt_lab.micro.experts import FORMATS, Shape, _Layer, main, measure

SMALL = {"num_experts": 6, "top_k": 2, "hidden": 64, "width": 64}


@pytest.mark.parametrize("weights", FORMATS)
def test_both_ways_are_timed(weights: str) -> None:
    shape = Shape(**SMALL, weights=weights)
    bench = measure(shape, [1, 4], num_steps=3, num_threads=1)
    assert [cost.rows for cost in bench.costs] == [1, 4]
    assert all(cost.before_s > 0 and cost.after_s > 0 and cost.ratio > 0 for cost in bench.costs)
    assert bench.costs[0].chosen == 2 < bench.costs[1].chosen <= 6
    of_expert = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int8g": 1, "int4": 0.5}[weights] * 3 * 64 * 64
    scales = {"int8": 2 * 3 * 64, "int8g": 2 * 3 * 64 * 2, "int4": 4 * 3 * 64 * 2}.get(weights, 0)
    assert bench.costs[0].num_bytes == 2 * (of_expert + scales)


@pytest.mark.parametrize("weights", FORMATS)
def test_both_ways_give_the_same(weights: str) -> None:
    layer = _Layer(Shape(**SMALL, weights=weights))
    x = torch.randn(5, 64).to(layer.dtype)
    routes = route(torch.randn(5, 6), layer.config)
    torch.testing.assert_close(layer.at_once(x, routes), layer.one_by_one(x, routes), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    "options", [["--rows", "0"], ["--steps", "0"], ["--threads", "0"], ["--hidden", "100"], ["--width", "65"], ["--chosen", "129"]]
)
def test_bad_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2 and " ".join(options) in capsys.readouterr().err
