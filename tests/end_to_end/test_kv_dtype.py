"""Runs with a KV cache and weights in narrow formats: the demo model's answers stay true, and a kill or a restart in mid-stream changes
nothing."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mmrt.models.config import load_model_config, weight_bytes
from mmrt.runtime.process.memory_layout import read_layout
from mmrt.runtime.process.run import DEFAULT_MODEL
from mmrt.tests.end_to_end.conftest import Server, also_slow
from mmrt.tests.end_to_end.test_demo_model import answer, part
from mmrt.tests.end_to_end.test_faults import PROMPT
from mmrt.tests.models.quantized_checkpoint import CONFIGS, quantize_checkpoint

pytestmark = pytest.mark.slow  # what pages of int8 hold is compared in tests/models/test_kv_pages.py

LONG = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module", params=[("int8", "int4"), *also_slow((("fp8", "float16"),))], ids=["int8 and int4", "fp8 and float16"])
def quantized(
    request: pytest.FixtureRequest, launch: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The demo model: quantized by AWQ's rules, and kept so; or in other formats than the checkpoint's."""
    kv_dtype, weights = request.param
    path, asked = DEFAULT_MODEL, weights
    if weights == "int4":
        path, asked = quantize_checkpoint(DEFAULT_MODEL, tmp_path_factory.mktemp("awq"), CONFIGS["awq"])[0], "auto"
    model = f'path = "{path}"\nname = "{DEFAULT_MODEL.name}"\nweights = "{asked}"\n'
    server = launch(None, f'[model]\n{model}[memory]\nkv_dtype = "{kv_dtype}"\n')
    compute = server.status()["compute"]
    assert (compute["dtype"], compute["weights"], compute["kv_dtype"]) == ("float32", weights, kv_dtype)
    layout = read_layout(server.run_path)
    assert layout is not None
    config = load_model_config(path, kv_dtype=kv_dtype, weights=weights)
    segment = max(path.stat().st_size for path in server.run_path.glob("weights.*"))
    assert weight_bytes(config) <= segment < 1.05 * weight_bytes(config) < 0.8 * weight_bytes(load_model_config(DEFAULT_MODEL))
    assert layout.pools["kv"].page_bytes == config.kv_page_bytes(16) < 0.6 * load_model_config(DEFAULT_MODEL).kv_page_bytes(16)
    yield server
    server.down()


@pytest.mark.parametrize(
    ("question", "name", "expected"),
    [
        ("What colour is the circle?", "shapes.png", "Red."),
        ("What shape is yellow?", "shapes.png", "A star."),
        ("What moves?", "moving.mp4", "An orange square."),
        ("How many beeps are there?", "beeps.wav", "Three."),
    ],
)
def test_answers_stay_true(quantized: Server, question: str, name: str, expected: str) -> None:
    assert answer(quantized, question, name) == expected


@pytest.mark.parametrize("restart", [False, *also_slow(True)], ids=["kill", "restart"])
def test_a_kill_or_restart_changes_nothing(quantized: Server, restart: bool) -> None:
    """What decode reads afterwards is what it had written before."""
    expected = quantized.chat(PROMPT, **LONG)[1]
    ids: list[int] = []
    before = killed = quantized.pid("decode")
    for chunk in quantized.stream(PROMPT, **LONG):
        ids += [token for choice in chunk.choices for token in (getattr(choice, "token_ids", None) or [])]
        if killed and len(ids) > 5:
            if restart:
                assert quantized.mmrt("restart", "decode").returncode == 0
            else:
                os.kill(killed, signal.SIGKILL)
            killed = 0
    assert ids == expected and quantized.pid("decode") != before


def test_answers_from_the_cache_stay_true(quantized: Server) -> None:
    """The second question about a picture finds the first one's quantized pages."""
    hits = []
    for question, expected in (("What colour is the circle?", "Red."), ("What shape is yellow?", "A star.")) * 2:
        found = ask(quantized, question, "shapes.png")
        assert found.choices[0].message.content == expected
        hits.append(found.usage.prompt_tokens_details.cached_tokens)
    assert hits[0] == 0 < hits[1] <= min(hits[2:])


def ask(server: Server, question: str, name: str) -> Any:
    content = [part(name), {"type": "text", "text": question}]
    return server.client.chat.completions.create(
        model=server.checkpoint.name,
        messages=[{"role": "user", "content": content}],  # type: ignore[list-item]
        temperature=0,
        extra_body={"cache_salt": "shared"},
    )
