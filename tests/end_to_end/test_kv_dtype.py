"""A run with a quantized KV cache: the demo model's answers stay true, and kills in mid-stream change nothing."""

import signal
from collections.abc import Callable, Iterator

import pytest

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_demo_model import answer
from mmrt.tests.end_to_end.test_faults import PROMPT

LONG = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module", params=["int8", "fp8"])
def quantized(request: pytest.FixtureRequest, launch: Callable[..., Server]) -> Iterator[Server]:
    server = launch(None, f'[memory]\nkv_dtype = "{request.param}"\n')
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


def test_kills_change_nothing(quantized: Server) -> None:
    expected = quantized.chat(PROMPT, **LONG)[1]
    ids: list[int] = []
    victims = ["prefill", "decode"]
    for chunk in quantized.stream(PROMPT, **LONG):
        ids += [token for choice in chunk.choices for token in (getattr(choice, "token_ids", None) or [])]
        if victims and len(ids) > 5 * len(victims):
            quantized.kill(victims.pop(0), signal.SIGKILL)
    assert not victims and ids == expected
