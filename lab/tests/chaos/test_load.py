"""What the clients of a storm make of an endpoint that breaks its promises: a server that answers with given events."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from mmrt_lab.chaos.load import Load
from mmrt_lab.chaos.requests import ChaosRequest
from mmrt_lab.chaos.verdict import Outcome, Reference, judge

REFERENCE = Reference("one", [1], "length")
TEXT = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": "one"}, "token_ids": [1], "finish_reason": None}]}
FINISH = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
USAGE = {"id": "chatcmpl-1", "choices": [], "usage": {"completion_tokens": 1}}
ERROR = {"error": {"code": 500, "message": "no"}}
DONE = "[DONE]"


async def ask(events: Sequence[Any], leave_after: int | None = None) -> Outcome:
    """The outcome of one request to which the server answers with these events."""
    body = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        load = Load([], seed=1, concurrency=1, cancel_share=0.0, request_timeout_s=5.0, on_outcome=lambda outcome: None)
        load.connect(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "tiny")
        request = ChaosRequest(name="text", body={"messages": [{"role": "user", "content": "Hi"}]})
        try:
            return await load._ask(request, leave_after)
        finally:
            await load.disconnect()


@pytest.mark.parametrize(
    ("events", "end", "problem"),
    [
        ([TEXT, FINISH, USAGE, DONE], "complete", ""),
        ([TEXT, FINISH, DONE], "complete", "its usage says None"),
        ([TEXT, FINISH, USAGE], "silent", "ended silent"),
        ([TEXT, TEXT, FINISH, USAGE, DONE], "complete", "differs from the reference"),
        ([FINISH, USAGE, DONE], "complete", "lacks an end"),
        ([TEXT, FINISH, USAGE, DONE, TEXT], "garbled", "something came after [DONE]"),
        ([TEXT, FINISH, TEXT, USAGE, DONE], "garbled", "more came after the finish reason"),
        ([TEXT, ERROR, FINISH, DONE], "garbled", "text after an error"),
        ([TEXT, DONE], "garbled", "without a finish reason"),
        ([TEXT, {"id": "chatcmpl-1"}], "garbled", "choices"),
        ([TEXT, "{", DONE], "garbled", "JSON"),
        ([TEXT, ERROR, DONE], "error", "ended error (500 no)"),
    ],
)
def test_a_broken_answer_is_seen(events: list[Any], end: str, problem: str) -> None:
    outcome = asyncio.run(ask(events))
    found = judge(outcome, REFERENCE, [])
    assert outcome.end == end and problem in found and bool(found) is bool(problem)


def test_who_leaves_after_an_error_has_seen_it() -> None:
    assert asyncio.run(ask([TEXT, FINISH, USAGE, DONE], leave_after=1)).end == "cancelled"
    assert asyncio.run(ask([TEXT, ERROR, DONE], leave_after=2)).end == "error"
