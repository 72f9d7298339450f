"""Loads and limits that a hostile or busy world brings: crowds, clients that go or do not read, few descriptors, processes that stop.

At night: each takes seconds to a minute. Full file systems and lack of memory are in ``mmrt chaos`` (enospc, oom).
"""

import asyncio
import json
import os
import resource
import signal
import socket
import struct
import urllib.parse
from collections import Counter
from typing import Any

import pytest

from mmrt.tests.end_to_end.conftest import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 240.0
CROWD, LEAVING = 1200, 500
ACTORS = ("gateway", "controller", "video", "encoder", "prefill", "decode", "detokenizer", "memory")
ASKED = {"messages": [{"role": "user", "content": "Tell a story."}], "temperature": 0, "ignore_eos": True}


def request(server: Server, **options: Any) -> bytes:
    body = json.dumps({**ASKED, "model": server.checkpoint.name, **options}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def address(server: Server) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(server.url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


async def ask(server: Server, data: bytes) -> tuple[int, bytes]:
    """(status, answer) of one connection; (0, b"") if it is refused or reset before an answer."""
    try:
        reader, writer = await asyncio.open_connection(*address(server))
        try:
            writer.write(data)
            found = await reader.read(-1)
        finally:
            writer.close()
    except ConnectionError:
        return 0, b""
    return (int(found.split(b" ", 2)[1]) if found else 0), found


def num_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def content(found: bytes) -> str:
    """The text of a stream, or of a whole answer."""
    body = found.partition(b"\r\n\r\n")[2]
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events if json.loads(event)["choices"])


def test_twelve_hundred_connections_at_once(own: Server) -> None:
    """Each gets its answer, or is told when to come again; then nothing is left of them."""
    own.wait_until_empty()
    pid = own.pid("gateway")
    before = num_fds(pid)

    async def crowd() -> list[tuple[int, bytes]]:
        data = request(own, max_tokens=2)
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*(ask(own, data) for _ in range(CROWD)))

    answers = asyncio.run(crowd())
    counts = Counter(status for status, _ in answers)
    assert set(counts) <= {200, 503} and counts[200] >= 100, counts
    assert all(b"\r\nretry-after:" in found.lower() for status, found in answers if status == 503)
    own.wait_until_empty()
    own.wait(lambda _: num_fds(pid) <= before + 8, f"descriptors, of which there were {before}")
    assert own.pid("gateway") == pid


def test_five_hundred_clients_leave(own: Server) -> None:
    """In the queue, before and amid the answer; some with a reset."""

    async def leave(number: int) -> None:
        reader, writer = await asyncio.open_connection(*address(own))
        writer.write(request(own, max_tokens=200, stream=True))
        await writer.drain()
        if number % 3:
            await asyncio.wait({asyncio.create_task(reader.read(1 + number % 700))}, timeout=0.05 * (number % 9))
        if number % 2:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def crowd() -> None:
        async with asyncio.timeout(LIMIT_S):
            for first in range(0, LEAVING, 100):
                await asyncio.gather(*(leave(number) for number in range(first, first + 100)))

    before = own.chat("Say it.", max_tokens=8, temperature=0, extra_body={"ignore_eos": True})
    asyncio.run(crowd())
    own.wait_until_empty()
    assert own.chat("Say it.", max_tokens=8, temperature=0, extra_body={"ignore_eos": True}) == before


def test_who_does_not_read_holds_up_nobody(own: Server) -> None:
    """Six with small windows do not read what they asked for; others get theirs, and in the end the six have all as well."""
    data = request(own, max_tokens=300, stream=True)
    whole = content(asyncio.run(ask(own, data))[1])
    slow = []
    for _ in range(6):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)  # later the kernel would drop what it has sent already
        client.settimeout(LIMIT_S)
        client.connect(address(own))
        client.sendall(data)
        slow.append(client)

    async def others() -> list[tuple[int, bytes]]:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*(ask(own, request(own, max_tokens=20, stream=True)) for _ in range(10)))

    texts = {content(found) for status, found in asyncio.run(others()) if status == 200}
    assert len(texts) == 1 and whole.startswith(texts.pop())
    for client in slow:
        with client, client.makefile("rb") as file:
            assert content(file.read()) == whole


def test_few_descriptors(own: Server) -> None:
    """Whoever is beyond them waits or is refused; those within are served, and later all are."""
    pids = [own.pid("gateway"), int(own.status()["supervisor_pid"])]
    before = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids]
    data = request(own, max_tokens=4)

    async def crowd(number: int, limit_s: float) -> Counter[int]:
        async def one() -> int:
            try:
                async with asyncio.timeout(limit_s):
                    return (await ask(own, data))[0]
            except TimeoutError:
                return -1

        return Counter(await asyncio.gather(*(one() for _ in range(number))))

    try:
        for pid, (_, most) in zip(pids, before, strict=True):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_fds(pid) + 12, most))
        few = asyncio.run(crowd(60, 60.0))
        assert few[200] >= 5 and set(few) <= {200, 503, 0, -1}, few
    finally:
        for pid, limits in zip(pids, before, strict=True):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    own.wait_until_empty()
    assert asyncio.run(crowd(60, LIMIT_S)) == {200: 60}
    assert own.pid("gateway") == pids[0]


@pytest.mark.parametrize("actor", [*ACTORS, "supervisor"])
def test_a_process_that_stops_for_a_while(own: Server, actor: str) -> None:
    """Two seconds are no hang: the stream goes on, as if nothing had been, by the same process."""
    status = own.status()
    pid = int(status["supervisor_pid"]) if actor == "supervisor" else own.pid(actor)

    async def stopped() -> bytes:
        answer = asyncio.create_task(ask(own, request(own, max_tokens=300, stream=True)))
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(2.0)
        finally:
            os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(LIMIT_S):
            return (await answer)[1]

    whole = content(asyncio.run(ask(own, request(own, max_tokens=300, stream=True)))[1])
    assert content(asyncio.run(stopped())) == whole
    after = own.wait(lambda status: status["ready"], "the run to serve")
    assert (int(after["supervisor_pid"]) if actor == "supervisor" else own.pid(actor)) == pid
