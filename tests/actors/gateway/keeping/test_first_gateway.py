"""Another gateway than the first, with a keeper that is nothing but the other end of its channel."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from mmrt.actors.gateway.connections import Connections, runner_of
from mmrt.actors.gateway.keeping.adoption import Adoption
from mmrt.actors.gateway.keeping.first_gateway import leave_to_first
from mmrt.actors.gateway.keeping.kept_bodies import KeptBodies
from mmrt.actors.gateway.keeping.patience import Patience
from mmrt.actors.gateway.keeping.turns import Turns
from mmrt.runtime.errors import RequestError
from mmrt.runtime.process.kept_connections import Kind, Packet, receive, send
from mmrt.shm.connection_records import ConnectionRecords, RecordSizes

SIZES = RecordSizes(4, 4096, 4096)
BROKEN = {"gateway": "2 failures within 30 s"}


@web.middleware
async def shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return web.Response(status=error.status, text=error.message)


async def here(request: web.Request) -> web.Response:
    return web.Response(text="here")


@asynccontextmanager
async def second_gateway(broken: dict[str, str]) -> AsyncIterator[socket.socket]:
    """Yields the keeper's end of the channel of a gateway that has no connection yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    records = ConnectionRecords.create(SIZES)
    app = web.Application(middlewares=[shape])
    app.router.add_route("*", "/{path:.*}", here)
    leave_to_first(app, lambda: broken)
    runner = runner_of(app, Connections(10), 1.0)
    await runner.setup()
    adoption = Adoption(theirs, runner.server, Turns(), lambda: None, False, Patience(), KeptBodies())  # type: ignore[arg-type]
    adoption.begin()
    assert receive(ours) == Packet(Kind.ADOPT)
    send(ours, Packet(Kind.RECORDS, tuple(SIZES), records.descriptor))  # type: ignore[arg-type]
    send(ours, Packet(Kind.ALL))
    yield ours
    adoption.close()
    await runner.cleanup()
    ours.close()
    records.close()


async def answer_or_packet(keeper: socket.socket, request: bytes) -> bytes | Packet:
    """Ask on a new connection. Returns the answer, or what the gateway says of the connection if it does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        with listener.accept()[0] as connection:
            send(keeper, Packet(Kind.HELD, (1, 0, 0), connection.fileno()))
        writer.write(request)
        answer, said = asyncio.create_task(reader.read(4096)), asyncio.Event()
        asyncio.get_running_loop().add_reader(keeper, said.set)
        saying = asyncio.create_task(said.wait())
        await asyncio.wait((answer, saying), timeout=10, return_when=asyncio.FIRST_COMPLETED)
        asyncio.get_running_loop().remove_reader(keeper)
        found = receive(keeper) if said.is_set() else await answer
        answer.cancel()
        saying.cancel()
        writer.close()
        assert found is not None
        return found


HEAD = b" HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("request_line", "moves", "is_refused"),
    [
        (b"GET /v1/responses/resp_1" + HEAD, True, True),
        (b"POST /v1/responses/" + HEAD + b"Content-Length: 9\r\n", True, True),
        (b"DELETE /v1/stream/a" + HEAD, True, True),
        (b"POST /v1/chat/completions" + HEAD + b"x-conversation-id: a\r\n", True, True),
        (b"GET /page/state?after=3" + HEAD, True, False),
        (b"GET /v1/responsesome" + HEAD, False, False),
    ],
)
def test_what_is_left_to_the_first(request_line: bytes, moves: bool, is_refused: bool) -> None:
    """While the first is broken, what it alone can answer is refused, else it would wait as long as that lasts."""

    async def test() -> None:
        async with second_gateway({}) as keeper:
            found = await answer_or_packet(keeper, request_line + b"\r\n")
            assert found == Packet(Kind.MOVE, (1, 0, 0)) if moves else b"here" in found
        async with second_gateway(BROKEN) as keeper:
            found = await answer_or_packet(keeper, request_line + b"\r\n")
            assert isinstance(found, bytes)
            if is_refused:
                assert found.startswith(b"HTTP/1.1 503") and b"alone keeps answers, is broken: 2 failures within 30 s" in found
            else:
                assert b"here" in found

    asyncio.run(test())
