"""What the front reads of a body: the model, streams, and how long a client wants a model to stay."""

import json
import math
import time
from typing import Any

import pytest

from mmrt.runtime.errors import RequestError
from mmrt.serving.asked import Asked, keep_alive_s, read_asked


def asked(path: str, **fields: Any) -> Asked:
    return read_asked(path, json.dumps(fields).encode())


def test_model_and_stream() -> None:
    assert asked("/v1/chat/completions", messages=[]) == Asked()
    assert asked("/v1/chat/completions", model="a", stream=True, keep_alive=5) == Asked("a", True)
    assert asked("/api/chat", model="a", messages=[{}], keep_alive="5m") == Asked("a", True, 300.0)
    assert asked("/api/chat/", model="a", messages=[{}], stream=False) == Asked("a")
    assert asked("/api/show", name="a") == Asked("a") and asked("/v1/messages", name="a") == Asked()
    assert asked("/api/generate", model="a", keep_alive=0) == Asked("a", True, 0.0, is_empty=True)
    assert asked("/api/generate", model="a", prompt="x").is_empty is False


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (7, 7.0), (0, 0.0), (-1, math.inf), (0.5, 0.5), ("7", 7.0), ("5m", 300.0), ("1h30m", 5400.0), ("1.5s", 1.5), ("300ms", 0.3),
        ("-1", math.inf), ("-5m", math.inf), ("0", 0.0), ("", None), ("5 m", None), ("5x", None), ("m5", None), (True, None),
        ([], None), (None, None), ("9" * 40, None),
    ],
)  # fmt: skip
def test_keep_alive(value: object, seconds: float | None) -> None:
    assert keep_alive_s(value) == seconds


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "not valid JSON"),
        (b'{"model": 3}', "model: expected a string, got"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_what_no_run_would_take_loads_none(body: bytes, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        read_asked("/v1/chat/completions", body)
    assert caught.value.status == 400


def test_large_media_are_passed_over() -> None:
    body = json.dumps({"messages": [{"content": "A" * (32 << 20)}], "model": "a"}).encode()
    began_s = time.process_time()
    assert read_asked("/v1/chat/completions", body).model == "a"
    assert time.process_time() - began_s < 0.5
