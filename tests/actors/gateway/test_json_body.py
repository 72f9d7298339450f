"""Large bodies: what is refused is refused before it is decoded or validated, and what may be sent is still taken."""

import base64
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.actors.gateway.reading import content, json_body
from mmrt.actors.gateway.reading.json_body import BodyLimits, decode_body
from mmrt.actors.gateway.reading.validation import Limits, read_chat, read_text
from mmrt.runtime.errors import RequestError
from mmrt.tests.settings import examples

LIMITS = Limits(model_name="tiny", kinds=("image",), max_context=2048)
BODY = LIMITS.body
MIB = 1 << 20


def messages(inner: bytes) -> bytes:
    return b'{"messages":[' + inner + b"]}"


def text(inner: bytes) -> bytes:
    return messages(b'{"role":"user","content":"' + inner + b'"}')


def repeated(entry: bytes, num_bytes: int = 9 * MIB) -> bytes:
    return b",".join([entry] * (num_bytes // (len(entry) + 1)))


SHAPES: dict[str, Callable[[], bytes]] = {  # made by the tests alone: every worker collects this module
    "tiny messages": lambda: messages(repeated(b'{"role":"user","content":""}')),
    "parts": lambda: messages(b'{"role":"user","content":[' + repeated(b'{"type":"text","text":""}') + b"]}"),
    "messages that are none": lambda: messages(repeated(b"0")),
    "empty arrays": lambda: b'{"x":[' + repeated(b"[]") + b"]}",
    "empty objects": lambda: b'{"x":[' + repeated(b"{}") + b"]}",
    "unclosed arrays": lambda: b"[" * MIB,
    "nested objects": lambda: b'{"a":' * 2 * MIB,
    "nested arrays": lambda: b'{"x":[' + repeated(b"[" * 500 + b"]" * 500) + b"]}",
    "unknown fields": lambda: b"{" + b",".join(b'"%d":null' % i for i in range(MIB)) + b"}",
    "long unknown fields": lambda: b"{" + b",".join(b'"%0200d":1' % i for i in range(MIB // 16)) + b"}",
    "stop strings": lambda: b'{"stop":[' + repeated(b'"stop"') + b"]}",
    "ids": lambda: b'{"prompt":[' + repeated(b"1") + b"]}",
    "long integers": lambda: b'{"prompt":[' + repeated(b"9" * 4000) + b"]}",
    "long numbers": lambda: b'{"prompt":[' + repeated(b"9." + b"9" * 790 + b"e-300") + b"]}",
    "spaces": lambda: b" " * 9 * MIB + b"{}",
    "a string of escapes": lambda: text(b"\\u0905" * MIB),
    "a string beyond ASCII": lambda: text("é".encode() * 5 * MIB),
    "a string of words": lambda: text(b"word " * 2 * MIB),
    "no JSON": lambda: b'{"a"' + b":" * 9 * MIB,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_large_bodies_are_refused_unread(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody runs while msgspec decodes, and 9 MB of it may take seconds."""
    monkeypatch.setattr(json_body, "_decode", None)
    body = SHAPES[shape]()
    for read in (read_chat, read_text):
        with pytest.raises(RequestError, match=rf"the body has more than ({BODY.elements} elements|{BODY.text_bytes} bytes of text)"):
            read(body, LIMITS)


@pytest.mark.parametrize("inner", [b'{"role":"user","content":""}', b'{"content":["x"]}', b"0", b"null"])
@pytest.mark.parametrize("num", [2048, 2049])
def test_messages_are_counted_before_they_are_validated(inner: bytes, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_read_message", lambda value, path, intake: content.Message("user", ""))
    body = messages(repeated(inner, num * (len(inner) + 1)))
    if num <= LIMITS.max_context:
        assert len(read_chat(body, LIMITS).conversation.messages) == num
    else:
        with pytest.raises(RequestError, match="messages: prompt is too long: 2049 tokens > 2047 maximum"):
            read_chat(body, LIMITS)


def test_so_are_their_parts() -> None:
    parts = {"role": "user", "content": [0] * 1025}
    body = json.dumps({"messages": [parts, {"role": "user", "content": "x"}, parts]}).encode()
    with pytest.raises(RequestError, match="messages: prompt is too long: 2051 tokens > 2047 maximum"):
        read_chat(body, LIMITS)


def test_what_may_be_sent_is_taken() -> None:
    """As many images as allowed, large and small, and a context full of text that is escaped as a whole, or of ids."""
    limits = Limits(model_name="tiny", kinds=("image",), max_context=1 << 20)
    images = [base64.b64encode(os.urandom(size)).decode() for size in [3 * MIB] * 4 + [3000] * 12]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images]
    body = json.dumps({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "ह" * (1 << 20)}]}]}).encode()
    assert [len(medium.data) for medium in read_chat(body, limits).conversation.media] == [3 * MIB] * 4 + [3000] * 12
    ids = [151_000] * (1 << 20)
    assert read_text(json.dumps({"prompt": ids}).encode(), limits).prompt == ids


def test_base64_in_lines_and_of_the_urls_alphabet_is_no_text() -> None:
    data = base64.urlsafe_b64encode(os.urandom(6 * MIB)).decode()
    for width, end in ((76, "\n"), (64, "\r\n")):
        wrapped = end.join(data[at : at + width] for at in range(0, len(data), width))
        assert decode_body(json.dumps({"a": wrapped}).encode(), BODY) == {"a": wrapped}
    with pytest.raises(RequestError, match="bytes of text outside base64"):
        decode_body(json.dumps({"a": "12345678\n" * MIB}).encode(), BODY)


@pytest.mark.parametrize("more", [0, 1])
def test_elements_are_counted_wherever_they_lie(more: int) -> None:
    """A mark at each end of what is looked at in one go, and far apart; the limit itself is allowed."""
    limits = BodyLimits(elements=1000, text_bytes=MIB)
    body = b"[" + b"x" * 4094 + b",{" + b"x" * 200_000 + b"," * (997 + more)
    with pytest.raises(RequestError, match="more than 1000 elements" if more else "not valid JSON"):
        decode_body(body, limits)


@pytest.mark.parametrize("more", [0, 1])
def test_text_is_counted_by_windows(more: int) -> None:
    limits = BodyLimits(elements=1000, text_bytes=8192)
    body = b"~" + b"x" * 40_959 + b" " * (4096 + more)
    with pytest.raises(RequestError, match="more than 8192 bytes of text" if more else "not valid JSON"):
        decode_body(body, limits)


@settings(max_examples=examples(300), deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.decimals(allow_nan=False, allow_infinity=False).map(str))
def test_numbers_are_read_as_by_python(number: float | str) -> None:
    written = b'{"x": %s}' % str(number).replace("E+", "e").encode()
    try:
        expected = json.loads(written)
        assert expected["x"] not in (float("inf"), float("-inf"))
    except (AssertionError, ValueError):
        with pytest.raises(RequestError, match="not valid JSON"):
            decode_body(written, BODY)
    else:
        read = decode_body(written, BODY)["x"]
        assert read == expected["x"] and isinstance(read, float) == isinstance(expected["x"], float)


def test_numbers_without_end() -> None:
    for number in (b"1" * MIB, b"0." + b"1" * MIB, b"1e" + b"1" * MIB, b"1" * MIB + b"e5", b"1" * 4000 + b".0"):
        with pytest.raises(RequestError, match="not valid JSON") as caught:
            decode_body(b'{"x":' + number + b"}", BODY)
        assert len(caught.value.message) < 200
