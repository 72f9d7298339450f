"""The bench of chunks finds a prompt among the slices of a trace, and measures runs that differ in their chunks."""

import json
from pathlib import Path
from typing import Any

import pytest

from mmrt.bench.serve.errors import BenchError
from mmrt_lab.micro.chunks import find_block, main


def slice_of(name: str, begin_ms: float, end_ms: float, tokens: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": 1000 * begin_ms, "dur": 1000 * (end_ms - begin_ms), "args": {"tokens": tokens}}


EARLIER = [slice_of("prefill", 100, 105, 32), *(slice_of("step", at, at + 2) for at in range(110, 300, 3))]
PROMPT = [slice_of("prefill", at, at + 20, 50) for at in (300, 325, 350)]
BESIDE = [slice_of("step", at, at + 2) for at in (321, 346, 371, 374)]


def test_a_prompt_among_streams() -> None:
    """Three chunks of 20 ms, with a step behind each; before them a step takes 2 ms, and 1 ms passes between two."""
    block = find_block([*BESIDE, *PROMPT, *EARLIER], 150)
    assert (block.chunk_s, block.prompt_s) == pytest.approx((0.020, 0.070))
    assert (block.alone_s, block.waiting_s) == pytest.approx((0.003, 0.025))
    assert block.beside_s == pytest.approx((0.373 - 0.298) / 4)


def test_the_last_token_may_be_decodes() -> None:
    assert find_block([*EARLIER, *PROMPT, *BESIDE], 151) == find_block([*EARLIER, *PROMPT, *BESIDE], 150)


def test_a_prompt_whose_streams_are_overwritten_is_refused() -> None:
    with pytest.raises(BenchError, match="take a smaller one"):
        find_block([*PROMPT, *BESIDE], 150)
    with pytest.raises(BenchError, match="take a smaller one"):
        find_block([], 150)


@pytest.mark.slow
def test_two_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rounds", "1", "--tokens", "1024", "--chunks", "128,512", "--streams", "2"]
    assert main([*small, "--json", str(tmp_path / "figures.json")]) == 0
    cells = json.loads((tmp_path / "figures.json").read_text())["cells"]
    assert [(cell["num_streams"], cell["chunk_tokens"]) for cell in cells] == [(2, 128), (2, 512)]
    assert all(seconds > 0 for cell in cells for block in cell["blocks"] for seconds in block.values())
    assert "a prompt of 1024 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--tokens", "2047"], ["--chunks", "0"], ["--streams", "x"]])
def test_bad_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2 and options[0] in capsys.readouterr().err
