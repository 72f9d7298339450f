"""What a request says without effect is named: in the answer's header, streams and errors included, and once in the log."""

import json
import logging
from typing import Any

import pytest

from mmrt.actors.gateway.reading import ignored
from mmrt.actors.gateway.reading.ignored import HEADER, MAX_HEADER_CHARS, MAX_NAMES, collecting, note, tolerate
from mmrt.runtime.errors import RequestError


def test_names_are_short_safe_and_each_there_once() -> None:
    with collecting() as found:
        note("messages[3].content[12].cache_control", "why")
        note("messages[4].content[0].cache_control", "why")
        tolerate("a\r\nSet-Cookie: b, ü.c", "why")
        note("x" * 500, "why")
    assert list(found.reasons) == ["messages[].content[].cache_control", "a%0D%0ASet-Cookie%3A%20b%2C%20%C3%BC.c", "x" * 128]
    assert found.header == ", ".join(found.reasons)
    with collecting() as found:
        for number in range(2 * MAX_NAMES):
            note(f"a_field_with_a_long_name_{number}", "why")
    assert len(found.reasons) == MAX_NAMES
    assert len(found.header) <= MAX_HEADER_CHARS and found.header.endswith(", ...") and ", ," not in found.header
    note("x", "outside of a request nobody listens")


def test_strict_fields_refuse_what_is_tolerated() -> None:
    with collecting(is_strict=True) as found:
        note("metadata", "nobody reads it")
        with pytest.raises(RequestError) as caught:
            tolerate("no_such_field", "is not supported")
    assert (caught.value.message, caught.value.param, caught.value.status) == ("no_such_field: is not supported", "no_such_field", 400)
    assert found.header == "metadata"


def test_answers_name_it(stage: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Also those whose bodies a thread parses, and those of requests that come at the same time on other connections."""
    monkeypatch.setattr(ignored, "_logged", set[str]())
    caplog.set_level(logging.INFO, "mmrt.actors.gateway.reading.ignored")

    async def test(scene: Any) -> None:
        for more in ({}, {"stream": True}, {"messages": [{"role": "user", "content": "a " * 20_000}]}):
            answer = await scene.post(scene.chat(metadata={"a": "b"}, store=True, **more) | more)
            assert answer.headers[HEADER] == "metadata, store"
            assert HEADER not in (await scene.post(scene.chat(**more) | more)).headers
        answer = await scene.post(scene.chat(metadata={"a": "b"}, temperature=7))
        assert answer.status_code == 400
        body = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], "metadata": {"user_id": "u"}}
        assert (await scene.http.post("/v1/messages", json=body)).headers[HEADER] == "metadata"
        body = {"prompt": "hi", "keep_alive": "5m", "options": {"num_ctx": 4096}}
        answer = await scene.http.post("/api/generate", content=json.dumps(body))
        assert answer.status_code == 200 and answer.headers[HEADER] == "options.num_ctx, keep_alive"

    stage.run(test)
    lines = [record.getMessage() for record in caplog.records if record.name == "mmrt.actors.gateway.reading.ignored"]
    assert sorted(line.partition(" ")[0] for line in lines) == ["keep_alive", "metadata", "options.num_ctx", "store"]
