"""A gateway's side of the keeper's channel, with a keeper that is nothing but the other end."""

import asyncio
import gc
import socket
import weakref

import pytest
import uvloop
from aiohttp import web

from mmrt.actors.gateway.connections import Connections, runner_of
from mmrt.actors.gateway.keeping import patience as patience_module
from mmrt.actors.gateway.keeping.adoption import Adoption
from mmrt.actors.gateway.keeping.connection import KeptConnection
from mmrt.actors.gateway.keeping.kept_bodies import KeptBodies
from mmrt.actors.gateway.keeping.patience import Patience
from mmrt.actors.gateway.keeping.state import ConnectionState, encode_state
from mmrt.actors.gateway.keeping.turns import Turns
from mmrt.runtime.process.kept_connections import Kind, Packet, receive, send
from mmrt.shm.connection_records import ConnectionRecords, RecordSizes

SIZES = RecordSizes(4, 4096, 4096)


def test_connections_of_no_use_are_released() -> None:
    """One whose descriptor did not arrive, since this process has too many, and one whose record cannot be read."""

    async def test() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(5)
        records, adopted = ConnectionRecords.create(SIZES), asyncio.Event()
        records.record(2).commit(b"\xff")
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
            connection, _ = listener.accept()
            adoption = Adoption(theirs, lambda: None, Turns(), adopted.set, False, Patience(), KeptBodies())  # type: ignore[arg-type, return-value]
            adoption.begin()
            assert receive(ours) == Packet(Kind.ADOPT)
            send(ours, Packet(Kind.RECORDS, tuple(SIZES), records.descriptor))  # type: ignore[arg-type]
            send(ours, Packet(Kind.HELD, (1, 0, 0)))
            send(ours, Packet(Kind.HELD, (2, 0, 0), connection.fileno()))
            send(ours, Packet(Kind.ALL))
            await asyncio.wait_for(adopted.wait(), 10)
            assert [receive(ours), receive(ours)] == [Packet(Kind.RELEASE, (1, 0, 0)), Packet(Kind.RELEASE, (2, 0, 0))]
            client.settimeout(10)
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            connection.close()
            adoption.close()
            ours.close()
            records.close()

    asyncio.run(test())


def test_a_suspect_that_another_gateway_has_left_is_tried_too() -> None:
    """It comes once all others have been taken over, so nothing else begins it."""

    async def test() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        records, adopted = ConnectionRecords.create(SIZES), asyncio.Event()
        runner = runner_of(web.Application(), Connections(10), 1.0)
        await runner.setup()
        adoption = Adoption(theirs, runner.server, Turns(), adopted.set, False, Patience(), KeptBodies())  # type: ignore[arg-type]
        adoption.begin()
        send(ours, Packet(Kind.RECORDS, tuple(SIZES), records.descriptor))  # type: ignore[arg-type]
        send(ours, Packet(Kind.ALL))
        await asyncio.wait_for(adopted.wait(), 10)
        records.record(1).commit(encode_state(ConnectionState(strikes=1)))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            with listener.accept()[0] as connection:
                send(ours, Packet(Kind.HELD, (1, 0, 0), connection.fileno()))
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 404")
            writer.close()
        adoption.close()
        await runner.cleanup()
        ours.close()
        records.close()

    asyncio.run(test())


def test_a_connection_that_has_ended_is_no_garbage() -> None:
    """It goes at once, with all that its handler had: a burst of connections must not wait for a collection."""

    async def test() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        served = list[weakref.ref[KeptConnection]]()

        async def serve(request: web.Request) -> web.Response:
            assert isinstance(request.transport, KeptConnection)
            served.append(weakref.ref(request.transport))
            return web.Response()

        app = web.Application()
        app.router.add_get("/", serve)
        records, runner = ConnectionRecords.create(SIZES), runner_of(app, Connections(10), 1.0)
        await runner.setup()
        adoption = Adoption(theirs, runner.server, Turns(), lambda: None, False, Patience(), KeptBodies())  # type: ignore[arg-type]
        adoption.begin()
        send(ours, Packet(Kind.RECORDS, tuple(SIZES), records.descriptor))  # type: ignore[arg-type]
        send(ours, Packet(Kind.ALL))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            with listener.accept()[0] as connection:
                send(ours, Packet(Kind.HELD, (1, 0, 0), connection.fileno()))
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200")
            writer.close()
        for _ in range(500):
            if served[0]() is None:
                break
            await asyncio.sleep(0.01)
        assert served[0]() is None, "it waits for a collection"
        adoption.close()
        await runner.cleanup()
        ours.close()
        records.close()

    gc.collect()
    gc.disable()
    try:
        uvloop.run(test())
    finally:
        gc.enable()


def test_it_gives_up_only_while_the_controller_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a controller nothing can be submitted again: then a request waits on, up to its own deadline."""
    monkeypatch.setattr(patience_module, "ADOPTION_S", 0.3)
    monkeypatch.setattr(patience_module, "SILENCE_S", 0.1)

    async def test() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        adopted = asyncio.Event()
        adoption = Adoption(theirs, lambda: None, Turns(), adopted.set, False, patience := Patience(), KeptBodies())  # type: ignore[arg-type, return-value]
        adoption.begin()
        await asyncio.sleep(0.8)
        assert not adopted.is_set()
        began_s = asyncio.get_running_loop().time()
        while not adopted.is_set():
            patience.heard()
            await asyncio.sleep(0.02)
        assert asyncio.get_running_loop().time() - began_s >= 0.25
        adoption.close()
        ours.close()

    asyncio.run(test())
