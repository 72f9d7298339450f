"""What strangers do to connections before there is a request, and by which names they reach the server. Real sockets."""

import asyncio
import contextlib
import resource
import socket
from typing import Any

import pytest

from mmrt.actors.gateway import connections
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.process.listening import connection_limit

HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


def test_half_sent_headers_are_dropped_and_idle_connections_are_not(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.2)

    async def test(scene: Any) -> None:
        idle_reader, idle_writer = await scene.connect()
        used_reader, used_writer = await scene.connect()
        used_writer.write(HALF + b"no\r\n\r\n")
        assert (await used_reader.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200 ")
        reader, writer = await scene.connect()
        writer.write(HALF)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        for other_reader, other_writer in ((idle_reader, idle_writer), (used_reader, used_writer)):
            other_writer.write(HALF + b"no\r\n\r\n")
            assert (await other_reader.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200 ")
            other_writer.close()
        writer.close()

    stage.run(test)


def test_headers_that_are_half_sent_as_the_connection_begins_are_dropped(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first bytes may be read before anybody waits for a request."""
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.2)

    async def test(scene: Any) -> None:
        host, port = scene.url.removeprefix("http://").rsplit(":", 1)
        held = [socket.create_connection((host, int(port))) for _ in range(20)]
        for connection in held:
            connection.sendall(HALF)
            connection.setblocking(False)
        async with asyncio.timeout(10):
            for connection in held:
                assert await asyncio.get_running_loop().sock_recv(connection, 100) == b""
                connection.close()

    stage.run(test)


def test_an_address_has_few_half_sent_headers(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_HALF_SENT", 3)

    async def test(scene: Any) -> None:
        held = [await scene.connect() for _ in range(3)]
        for _, writer in held:
            writer.write(HALF)
        dropped = False
        async with asyncio.timeout(10):
            while not dropped:  # until all three have been read
                reader, writer = await scene.connect()
                writer.write(HALF)
                try:
                    dropped = await asyncio.wait_for(reader.read(), 0.2) == b""
                except TimeoutError:
                    pass
                except ConnectionResetError:
                    dropped = True
                writer.transport.abort()
        assert (await scene.http.get("/health")).status_code == 200, "whole requests are served"
        held[0][1].write(b"no\r\n\r\n")
        assert (await held[0][0].readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200 ")
        for _, each in held:
            each.transport.abort()

    stage.run(test)


async def read_all(scene: Any, data: bytes) -> bytes:
    reader, writer = await scene.connect()
    writer.write(data)
    try:
        return bytes(await reader.read())
    finally:
        writer.transport.abort()


PROBE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
WORK = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_connections_beyond_the_limit_are_refused_and_probes_are_not(stage: Any) -> None:
    stage.configure("server", max_connections=3)

    async def test(scene: Any) -> None:
        held = [await scene.connect() for _ in range(3)]
        for reader, writer in held:
            writer.write(WORK)
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        for _ in range(3):
            refused = await read_all(scene, WORK)
            assert refused.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in refused and b"Connection: close" in refused
            assert b"3 connections are open already (server.max_connections)" in refused and b"overloaded_error" in refused
            probed = await read_all(scene, PROBE)
            assert probed.startswith(b"HTTP/1.1 200 ") and b"Connection: close" in probed
        held[0][1].transport.abort()
        async with asyncio.timeout(10):
            while not (await read_all(scene, WORK.replace(b"Host:", b"Connection: close\r\nHost:"))).startswith(b"HTTP/1.1 200 "):
                pass
        assert "mmrt_connections_over_limit_total 6.0" in (await scene.http.get("/metrics")).text
        for _, writer in held:
            writer.transport.abort()

    stage.run(test)


def test_a_flood_of_silent_connections_does_not_keep_probes_out(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "EXTRA_CONNECTIONS", 4)
    monkeypatch.setattr(connections, "EXTRA_S", 60.0)
    stage.configure("server", max_connections=2)

    async def test(scene: Any) -> None:
        held = [await scene.connect() for _ in range(20)]
        assert (await read_all(scene, PROBE)).startswith(b"HTTP/1.1 200 ")
        async with asyncio.timeout(10):
            for reader, _ in held[2:14]:  # the oldest beyond the limit
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
        held[0][1].write(WORK)
        assert (await held[0][0].readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        for _, writer in held:
            writer.transport.abort()

    stage.run(test)


def test_a_silent_connection_beyond_the_limit_does_not_last(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "EXTRA_S", 0.05)
    stage.configure("server", max_connections=1)

    async def test(scene: Any) -> None:
        _, kept = await scene.connect()
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionResetError):
                assert await read_all(scene, b"") == b""
        kept.transport.abort()

    stage.run(test)


@pytest.mark.parametrize(
    ("files", "configured", "limit"),
    [(1024, 0, 928), (1024, 928, 928), (128, 0, 32), (1 << 20, 0, 16_384), (resource.RLIM_INFINITY, 0, 16_384), (1024, 7, 7)],
)
def test_the_limit_follows_from_that_on_open_files(files: int, configured: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert connection_limit(configured) == limit


def test_more_connections_than_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(ConfigError, match="server.max_connections = 929: a process may open 1024 files here .* allows 928 connections"):
        connection_limit(929)
    assert connection_limit(0, 2) == 464, "a front has two files for each"


@pytest.mark.parametrize(
    "data",
    [
        b"BREW /health HTTP/1.1\r\n :a\r\n\r\n",
        b"\x00\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        HALF + b"y" * 9000 + b"\r\n\r\n",
        HALF + b"\r\nConnection: close\r\nExpect: x\r\n\r\n",
    ],
)
def test_no_answer_tells_versions(stage: Any, data: bytes) -> None:
    async def test(scene: Any) -> None:
        reader, writer = await scene.connect()
        writer.write(data)
        answer = await reader.read()
        assert b"HTTP/" in answer and b"Server: mmrt\r\n" in answer and b"aiohttp" not in answer and b"Python" not in answer
        writer.close()

    stage.run(test)


HOSTS = {
    "localhost": True, "LocalHost:8000": True, "127.0.0.1:1": True, "[::1]:8000": True, "10.1.2.3": True,
    "mmrt.localhost:8000": True, "a.b.localhost": True, "localhost.": True, "host.docker.internal:8000": True,
    "gateway.docker.internal": True, "host.containers.internal:1": True, f"{socket.gethostname().upper()}:8000": True,
    f"{socket.gethostname().partition('.')[0]}.local": True, f"evil.{socket.gethostname()}": False, "local": False,
    "evil.host.docker.internal": False, "mylocalhost": False, "mmrt": False,
    "evil.example": False, "evil.example:8000": False, "localhost.evil.example": False, "127.0.0.1.evil.example": False, "[::1": False,
}  # fmt: skip


@pytest.mark.parametrize("api_key", ["", "secret"])
def test_the_name_that_a_client_uses_is_checked(stage: Any, api_key: str) -> None:
    """A name of somebody else's may be made to point here: its pages would be of one origin with us. They do not have our key."""
    stage.configure("server", api_key=api_key)

    async def test(scene: Any) -> None:
        for host, is_ours in HOSTS.items():
            for path in ("/health", "/v1/models", "/nothing"):
                answer = await scene.http.get(path, headers={"Host": host, "Authorization": f"Bearer {api_key or 'none'}"})
                assert (answer.status_code != 421) == (is_ours or bool(api_key)), (host, path)
        answer = await scene.post(scene.chat(), headers={"Host": "evil.example"})
        if not api_key:
            assert answer.json()["error"]["code"] == 421 and 'allowed_hosts = ["evil.example"]' in answer.json()["error"]["message"]
        reader, writer = await scene.connect()
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.0 200 "), "programs may leave it out"
        writer.close()

    stage.run(test)


@pytest.mark.parametrize(("allowed", "status"), [((), 421), (("other.example",), 421), (("MMRT.example",), 200), (("*",), 200)])
def test_names_may_be_allowed(stage: Any, allowed: tuple[str, ...], status: int) -> None:
    stage.configure("server", allowed_hosts=allowed)

    async def test(scene: Any) -> None:
        assert (await scene.http.get("/health", headers={"Host": "mmrt.example:8000"})).status_code == status

    stage.run(test)
