"""The client against a real server: how it counts tokens, and every way in which a stream can go wrong."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from mmrt.bench.serve.client import EventParser, StreamReader, find_model, open_session, stream_chat
from mmrt.bench.serve.errors import BenchError
from mmrt.bench.serve.record import Chunk, Record

Script = Callable[[web.StreamResponse, dict[str, Any]], Awaitable[None]]
ToyServer = Callable[[Script], AbstractAsyncContextManager[str]]

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def text(content: str, finish: str | None = None, completion_tokens: int | None = None) -> bytes:
    data: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]}
    if completion_tokens is not None:
        data["usage"] = {"prompt_tokens": 7, "completion_tokens": completion_tokens}
    return event(data)


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}})


def new_record() -> Record:
    return Record(index=0, group="text", scheduled_s=0.0)


def request(toy_server: ToyServer, script: Script, max_tokens: int = 4, timeout_s: float = 5.0) -> Record:
    """The record of one request to a server that follows ``script``."""
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "a b"}], "max_tokens": max_tokens}).encode()

    async def run() -> Record:
        record = new_record()
        async with toy_server(script) as url, open_session(timeout_s) as session:
            await stream_chat(session, url, body, record)
        return record

    return asyncio.run(run())


def writes(*pieces: bytes) -> Script:
    """A script that sends these pieces, a little apart, and ends the response cleanly."""

    async def script(response: web.StreamResponse, body: dict[str, Any]) -> None:
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.005)

    return script


def test_an_honest_stream(toy_server: ToyServer, honest: Script) -> None:
    before_s = time.monotonic()
    record = request(toy_server, honest, max_tokens=5)
    assert record.error is None and record.finish_reason == "length"
    assert (record.num_prompt_tokens, record.num_completion_tokens) == (7, 5)
    assert sum(chunk.num_tokens for chunk in record.chunks) == 5 and len(record.tbts_s) == 4
    assert before_s < record.sent_s < record.chunks[0].time_s <= record.chunks[-1].time_s <= record.end_s
    assert record.ttft_s is not None and 0 < record.ttft_s <= record.e2e_s


def test_continuous_usage_counts_tokens_that_share_a_chunk(toy_server: ToyServer) -> None:
    script = writes(text("", None, 0), text("a b c", None, 3), text("d", None, 4), text("e", "stop", 6), usage(9, 6), DONE)
    record = request(toy_server, script)
    assert [chunk.num_tokens for chunk in record.chunks] == [3, 1, 2]
    tbts = record.tbts_s
    assert [tbt > 0 for tbt in tbts] == [False, False, True, True, False]
    assert len(list(record.timed_gaps())) == 2 and (record.num_prompt_tokens, record.num_tokens) == (9, 6)


def test_without_continuous_usage_a_chunk_is_a_token_and_the_final_usage_the_total(toy_server: ToyServer) -> None:
    record = request(toy_server, writes(text(""), text("a b c"), text("d"), text("", "stop"), usage(9, 4), DONE))
    assert [chunk.num_tokens for chunk in record.chunks] == [1, 1]
    assert record.num_tokens == 4 and record.error is None


def test_usage_in_the_last_chunk_alone_is_not_continuous(toy_server: ToyServer) -> None:
    record = request(toy_server, writes(text("a b"), text("c"), text("", "stop", 3), DONE))
    assert [chunk.num_tokens for chunk in record.chunks] == [1, 1] and record.num_tokens == 3


def test_tokens_without_text_still_have_a_first_token_time(toy_server: ToyServer) -> None:
    record = request(toy_server, writes(text("", "stop"), usage(9, 1), DONE))
    assert record.error is None and record.ttft_s is not None and record.num_tokens == 1


def test_reasoning_is_tokens(toy_server: ToyServer) -> None:
    thought = event({"choices": [{"delta": {"content": None, "reasoning_content": "hm"}, "finish_reason": None}]})
    assert len(request(toy_server, writes(thought, text("a"), text("", "stop"), DONE)).chunks) == 2


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ((text("a"), text("", "stop")), "without [DONE]"),
        ((text("a"), DONE), "without a finish reason"),
        ((text("a"), event({"error": {"message": "encoder died", "code": 500}}), DONE), "encoder died"),
        ((text("a"), event({"error": "flat"}), DONE), "flat"),
        ((text("a"), text("", "error"), DONE), "finish reason 'error'"),
        ((b"data: {not json}\n\n",), "bad event"),
        ((b'data: {"choices": 3}\n\n',), "bad event"),
        ((b"data: \xff\xfe\n\n",), "bad event"),
        ((), "without [DONE]"),
        ((b"<html>hello</html>",), "without [DONE]"),
    ],
)
def test_what_counts_as_a_failure(toy_server: ToyServer, pieces: tuple[bytes, ...], error: str) -> None:
    record = request(toy_server, writes(*pieces))
    assert record.error is not None and error in record.error
    assert not record.is_success and record.end_s >= record.sent_s


def test_a_dropped_connection_is_a_failure(toy_server: ToyServer) -> None:
    async def script(response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.write(text("a"))
        transport = response._req.transport  # type: ignore[union-attr]
        assert transport is not None
        transport.abort()

    record = request(toy_server, script)
    assert record.error is not None and len(record.chunks) == 1


def test_trouble_after_done_is_none(toy_server: ToyServer) -> None:
    async def script(response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.write(text("a") + text("", "stop") + DONE)
        transport = response._req.transport  # type: ignore[union-attr]
        assert transport is not None
        transport.abort()

    assert request(toy_server, script).error is None


def test_a_refusal_carries_the_server_s_words(toy_server: ToyServer, honest: Script) -> None:
    record = request(toy_server, honest, max_tokens=20_000)
    assert record.error is not None and record.error.startswith("HTTP 400") and "max_tokens is too large" in record.error


def test_a_silent_server_times_out(toy_server: ToyServer) -> None:
    async def script(response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.write(text("a"))
        await asyncio.Event().wait()

    record = request(toy_server, script, timeout_s=0.2)
    assert record.error is not None and "Timeout" in record.error


def test_cancelling_cuts(toy_server: ToyServer) -> None:
    async def script(response: web.StreamResponse, body: dict[str, Any]) -> None:
        while True:
            await response.write(text("a"))
            await asyncio.sleep(0.001)

    async def run() -> Record:
        record = new_record()
        arrived = asyncio.Event()

        class Watched(list[Chunk]):
            def append(self, chunk: Chunk) -> None:
                super().append(chunk)
                arrived.set()

        record.chunks = Watched()
        async with toy_server(script) as url, open_session(5.0) as session:
            task = asyncio.create_task(stream_chat(session, url, b'{"max_tokens": 1, "messages": []}', record))
            await arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return record

    record = asyncio.run(run())
    assert record.cut and record.error is None and not record.is_success and record.end_s > 0


def test_the_model_is_found_and_an_absent_server_named(toy_server: ToyServer, honest: Script) -> None:
    async def run() -> str:
        async with toy_server(honest) as url, open_session(5.0) as session:
            model = await find_model(session, url)
        async with open_session(5.0) as session:
            with pytest.raises(BenchError, match=url):
                await find_model(session, url)
        return model

    assert asyncio.run(run()) == "toy"


@given(st.data())
def test_events_survive_any_cut(data: st.DataObject) -> None:
    stream = b": keep-alive\n\ndata: one\r\n\r\ndata:two\ndata: lines\n\nevent: x\ndata: three\nid: 4\n\n\n\ndata: [DONE]\n\ndata: rest"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    parser = EventParser()
    events = [found for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True) for found in parser.feed(stream[start:end])]
    assert events == [b"one", b"two\nlines", b"three", b"[DONE]"]


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmrt.bench.serve.client.MAX_EVENT_BYTES", 100)
    with pytest.raises(ValueError, match="100 bytes"):
        EventParser().feed(b"data: " + b"x" * 200)


def test_an_event_without_choices_or_usage_is_nothing() -> None:
    record = new_record()
    reader = StreamReader(record)
    reader.take(b"{}", 1.0)
    assert record.chunks == [] and reader.verdict() is not None


def test_a_session_of_new_connections_loses_no_request_to_a_server_that_closes_them_unsaid() -> None:
    """llama.cpp's server does so behind a stream: a kept connection looks alive until the next request is written."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
        piece = text("hi", "stop", 1) + DONE
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(piece), piece))
        writer.close()

    async def run() -> list[str | None]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        records = [new_record() for _ in range(20)]
        async with server, open_session(30.0, keeps_connections=False) as session:
            for record in records:
                await stream_chat(session, url, b"{}", record)
        return [record.error for record in records]

    assert asyncio.run(run()) == [None] * 20
