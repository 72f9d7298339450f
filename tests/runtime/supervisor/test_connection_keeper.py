"""The keeper of connections, with real clients and gateways that are nothing but a channel."""

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmrt.runtime.environment import CHILD_LISTEN_FD
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.process.kept_connections import Kind, Packet, check_shared, receive, record_sizes, send, served_connections
from mmrt.runtime.supervisor import connection_keeper
from mmrt.runtime.supervisor.connection_keeper import ConnectionKeeper
from mmrt.runtime.supervisor.control import DebugReply, DebugRequest, encode
from mmrt.runtime.supervisor.control_server import ControlServer, WithDescriptors
from mmrt.runtime.supervisor.managed_actor import ActorSpec
from mmrt.runtime.supervisor.starter import Starter
from mmrt.shm.connection_records import ConnectionRecords, RecordSizes
from mmrt.shm.kept_records import KeptRecords

SIZES = RecordSizes(4, 4096, 4096)
GATEWAYS: list["Gateway"] = []


class Gateway:
    """Asks for the connections and takes them."""

    @classmethod
    def of(cls, channel: socket.socket) -> "Gateway":
        return cls(SimpleNamespace(channel=lambda _: channel))  # type: ignore[arg-type]

    def __init__(self, keeper: ConnectionKeeper, number: int = 0) -> None:
        self.channel = keeper.channel(number)
        GATEWAYS.append(self)
        self.channel.setblocking(False)
        self.held: dict[int, socket.socket] = {}
        self.has_all = False
        self.records: ConnectionRecords | None = None

    async def adopt(self) -> "Gateway":
        send(self.channel, Packet(Kind.ADOPT))
        await self.until(lambda: self.has_all)
        return self

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                with contextlib.suppress(BlockingIOError):
                    self.take(receive(self.channel))
                    continue
                await asyncio.sleep(0.001)

    def take(self, packet: Packet | None) -> None:
        assert packet is not None, "the keeper is gone"
        if packet.kind == Kind.RECORDS:
            self.records = ConnectionRecords(packet.descriptor, RecordSizes(*packet.numbers))
        elif packet.kind == Kind.HELD:
            self.held[packet.numbers[0]] = socket.socket(fileno=packet.descriptor)
            assert not os.get_inheritable(packet.descriptor)
        elif packet.kind == Kind.ALL:
            self.has_all = True

    def release(self, number: int) -> None:
        self.held.pop(number).close()
        send(self.channel, Packet(Kind.RELEASE, (number, 0, 0)))

    def close(self) -> None:
        self.channel.close()
        for connection in self.held.values():
            connection.close()


@asynccontextmanager
async def keeping() -> AsyncIterator[tuple[ConnectionKeeper, Callable[[], socket.socket]]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        keeper = ConnectionKeeper([listener], SIZES)

        clients = []

        def connect() -> socket.socket:
            clients.append(client := socket.create_connection(listener.getsockname()))
            client.settimeout(10)
            return client

        try:
            yield keeper, connect
        finally:
            keeper.close()
            for one in [*GATEWAYS, *clients]:
                one.close()
            GATEWAYS.clear()


async def read(client: socket.socket) -> bytes:
    return await asyncio.to_thread(client.recv, 100)


def test_a_successor_gets_all_connections_and_those_that_wait() -> None:
    async def test() -> None:
        async with keeping() as (keeper, connect):
            first = await Gateway(keeper).adopt()
            standby = Gateway(keeper)
            clients = [connect(), connect()]
            await first.until(lambda: len(first.held) == 2)
            first.held[0].sendall(b"half")
            assert first.records is not None
            first.records.record(1).commit(b"state")
            first.close()
            clients.append(connect())  # waits: nobody serves
            await asyncio.sleep(0.02)
            assert keeper.num_held == 2
            await standby.adopt()
            await standby.until(lambda: len(standby.held) == 3)
            standby.held[0].sendall(b", whole")
            assert await read(clients[0]) == b"half, whole"
            assert standby.records is not None and standby.records.record(1).load() == b"state"
            for number in list(standby.held):
                standby.release(number)
            for client in clients:
                assert await read(client) == b""

    asyncio.run(test())


def test_two_gateways_share_the_connections() -> None:
    """Each gets half, its successor gets its own alone, and what one leaves to the other is that one's, also while that is away."""

    async def test() -> None:
        async with keeping() as (keeper, connect):
            first, second = await Gateway(keeper).adopt(), await Gateway(keeper, 1).adopt()
            clients = []
            for number in range(4):
                clients.append(connect())
                await (first, second)[number % 2].until(lambda number=number: number in (first, second)[number % 2].held)
            second.close()
            send(first.channel, Packet(Kind.MOVE, (2, 1, 0)))
            await asyncio.sleep(0.02)
            assert keeper.num_held == 4 and first.held.keys() == {0, 2}, "nobody else gets what is the second's"
            second = await Gateway(keeper, 1).adopt()
            assert second.held.keys() == {1, 2, 3}
            second.held[2].sendall(b"moved")
            assert await read(clients[2]) == b"moved"
            send(second.channel, Packet(Kind.MOVE, (1, 0, 0)))
            first.held.pop(2).close()
            await first.until(lambda: 1 in first.held)
            first.release(0)
            assert await read(clients[0]) == b""
            clients.append(connect())
            await first.until(lambda: 0 in first.held)

    asyncio.run(test())


@pytest.mark.parametrize(("most", "num_gateways", "each"), [(100, 1, 100), (100, 3, 34), (1, 2, 1)])
def test_gateways_divide_the_connections(most: int, num_gateways: int, each: int) -> None:
    """The first may have all of them: a connection that asks for a kept answer moves to it."""
    number = record_sizes(most, 4096, num_gateways=num_gateways).number
    assert [served_connections(number, num_gateways, gateway) for gateway in range(num_gateways)] == [
        most,
        *[each] * (num_gateways - 1),
    ]
    assert served_connections(64, 8, 0) == served_connections(64, 8, 7) == 1


def test_gateways_need_connections_that_can_be_kept() -> None:
    """Else nobody gives connections to them: refused before anything starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        check_shared(1, 0)
        with pytest.raises(ConfigError, match=r"has 2 gateways, and connections cannot be kept here: few files may be open"):
            check_shared(2, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    check_shared(2, 0)


def test_a_released_connection_ends_for_its_client_and_its_record_is_empty() -> None:
    async def test() -> None:
        async with keeping() as (keeper, connect):
            gateway = await Gateway(keeper).adopt()
            closed, dropped = connect(), connect()
            await gateway.until(lambda: len(gateway.held) == 2)
            assert gateway.records is not None
            gateway.records.record(0).commit(b"state")
            gateway.held[0].sendall(b"last")
            gateway.release(0)
            assert await read(closed) == b"last" and await read(closed) == b""
            gateway.held[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            gateway.release(1)
            with pytest.raises(ConnectionResetError):
                await read(dropped)
            assert keeper.num_held == 0 and gateway.records.record(0).load() == b""

    asyncio.run(test())


def test_a_debugger_gets_the_connections_too(tmp_path: Path) -> None:
    """``mmrt debug gateway``: else their clients would wait for its end."""

    async def test() -> None:
        async with keeping() as (keeper, connect):
            starter = Starter.__new__(Starter)
            starter._run, starter._environment, starter._keeper, starter._lifeline = tmp_path, {}, keeper, -1
            starter._answers, starter._key = None, ""
            with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
                starter._listeners = [listener]
                environment, fds = starter.inheritance(ActorSpec(name="gateway", command=(), listens=True), stack)
                assert environment["MMRT_LISTEN_FDS"] == "1" and environment["MMRT_KEEPER_FD"] == str(CHILD_LISTEN_FD + 1)
                assert fds[0] == listener.fileno()
                assert environment["MMRT_ANSWERS_FD"] == str(CHILD_LISTEN_FD + 2)
                KeptRecords(fds[2])
                os.close(fds[2])
                debugger = Gateway.of(socket.socket(fileno=os.dup(fds[1])))
            connect()
            await debugger.adopt()
            await debugger.until(lambda: debugger.held)

    asyncio.run(test())


@pytest.mark.parametrize("is_there", [True, False])
def test_descriptors_that_were_sent_are_let_go(tmp_path: Path, is_there: bool) -> None:
    sent = threading.Event()

    async def handler(request: object, pid: int) -> WithDescriptors:
        return WithDescriptors(DebugReply({}), [0] if is_there else [-1], sent.set)

    async def test() -> None:
        server = ControlServer(tmp_path / "control", handler)
        await server.start()
        _, writer = await asyncio.open_unix_connection(tmp_path / "control")
        writer.write(encode(DebugRequest("gateway")) + b"\n")
        assert await asyncio.to_thread(sent.wait, 10)
        writer.close()
        await server.close()

    asyncio.run(test())


def test_connections_beyond_the_records_wait_for_one() -> None:
    async def test() -> None:
        async with keeping() as (keeper, connect):
            gateway = await Gateway(keeper).adopt()
            clients = [connect() for _ in range(SIZES.number + 2)]
            await gateway.until(lambda: len(gateway.held) == SIZES.number)
            await asyncio.sleep(0.02)
            assert keeper.num_held == SIZES.number
            gateway.release(2)
            await gateway.until(lambda: 2 in gateway.held)
            gateway.held[2].sendall(b"yours")
            assert await read(clients[SIZES.number]) == b"yours"

    asyncio.run(test())


def test_a_gateway_that_does_not_read_its_channel_loses_nothing() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=600) as listener:
            listener.setblocking(False)
            keeper = ConnectionKeeper([listener], RecordSizes(600, 4096, 4096))
            gateway = Gateway(keeper)
            send(gateway.channel, Packet(Kind.ADOPT))
            clients = [socket.create_connection(listener.getsockname()) for _ in range(500)]
            await asyncio.sleep(0.1)
            await gateway.until(lambda: len(gateway.held) == 500)
            keeper.close()
            gateway.close()
            GATEWAYS.clear()
            for client in clients:
                client.close()

    asyncio.run(test())


def test_a_lack_of_files_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with keeping() as (keeper, _):
            for _ in range(3):
                keeper._say_that_some_wait("Too many open files")
            keeper._say_at_s -= connection_keeper.SAY_S
            keeper._say_that_some_wait("Too many open files")

    asyncio.run(test())
    assert len([record for record in caplog.records if "connections wait" in record.getMessage()]) == 2


def test_few_open_files_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    assert record_sizes(0, 1 << 20).number == 0
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert record_sizes(0, 1 << 20).number == 1024 - 256 and record_sizes(100, 1 << 20).number == 132
