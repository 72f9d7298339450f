"""The comparison with transformers: its side on a tiny checkpoint, ours against a toy server."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.workload import Lengths, MediaShapes, RequestPlan, plan_steady
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt_lab.versus_transformers import main, measure_server, measure_transformers

Script = Callable[[web.StreamResponse, dict[str, Any]], Awaitable[None]]
StartServer = Callable[[Script], str]

SHAPES = MediaShapes(image_size=(56, 84))


def plans(count: int) -> list[RequestPlan]:
    return plan_steady({"image": 1.0}, count, Lengths(input_low=4, input_high=4, max_tokens=3), 0)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_5_omni"])
def test_transformers_answers_every_request_in_full(tmp_path: Path, family: Any) -> None:
    make_checkpoint("tiny", tmp_path / "tiny", family)
    side = measure_transformers(tmp_path / "tiny", "float32", plans(2), SHAPES)
    assert side.num_tokens == 6 and side.tokens_per_s == pytest.approx(6 / side.duration_s)


def test_a_server_answers_all_at_once(start_server: StartServer, honest: Script) -> None:
    side = measure_server(start_server(honest), plans(4), SHAPES)
    assert side.num_tokens == 12 and side.ttft is not None and side.ttft.count == 4


def test_a_failed_request_ends_the_comparison(start_server: StartServer) -> None:
    async def silent(response: web.StreamResponse, body: dict[str, Any]) -> None:
        pass

    with pytest.raises(BenchError, match="1 of 1 requests failed"):
        measure_server(start_server(silent), plans(2), SHAPES)


def test_a_checkpoint_without_pictures_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("tiny", tmp_path / "null", "null")
    assert main(["--checkpoint", str(tmp_path / "null")]) == 1
    assert "takes no images" in capsys.readouterr().err
