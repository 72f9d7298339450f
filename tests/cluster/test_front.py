"""The front between a client and nodes that answer, stream, and are lost at any moment. Nodes are servers on real sockets."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from mmrt.actors.gateway.reading.bodies import LEAST_BYTES_S, due_s
from mmrt.cluster.front import Front
from mmrt.serving.relay import HELD_BODIES, SMALL_BYTES

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BODY = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()


@asynccontextmanager
async def node(handler: Handler) -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(handler, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Client:
    """One request through the front, as an ASGI server would hand it over."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.gone = asyncio.Event()
        self.got_some = asyncio.Event()
        self._is_sent = False

    async def ask(
        self, path: str = "/v1/chat/completions", body: bytes = BODY, method: str = "POST", query: bytes = b"", **more: bytes
    ) -> "Client":
        self._to_send = body
        headers = [(b"authorization", b"Bearer key"), (b"host", b"front"), *((name.encode(), value) for name, value in more.items())]
        scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": headers}
        await self.front(scope, self._receive, self._send)
        return self

    async def _receive(self) -> dict[str, Any]:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self._to_send, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
            self.got_some.set()


def with_nodes(test: Callable[[Callable[[], Client]], Awaitable[None]], *handlers: Handler, **known: str) -> None:
    """Run a test with a front before these nodes, named a, b, …, and others at given URLs."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            urls = {chr(ord("a") + index): await stack.enter_async_context(node(handler)) for index, handler in enumerate(handlers)}

            async def nodes() -> dict[str, str]:
                return known | urls

            front = Front(nodes)
            told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
            life = asyncio.create_task(front({"type": "lifespan"}, told.get, _ignore))
            told.put_nowait({"type": "lifespan.startup"})
            try:
                await test(lambda: Client(front))
            finally:
                told.put_nowait({"type": "lifespan.shutdown"})
                await life

    asyncio.run(run())


def _always(urls: dict[str, str]) -> Callable[[], Awaitable[dict[str, str]]]:
    async def nodes() -> dict[str, str]:
        return urls

    return nodes


async def _ignore(message: Any) -> None:
    pass


async def echo(request: web.Request) -> web.Response:
    seen = {"path": request.raw_path, "key": request.headers["Authorization"], "body": (await request.read()).decode()}
    return web.json_response(seen, status=201, headers={"x-request-id": "7"})


async def lose_at_once(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def losing_after(first: bytes, content_type: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": content_type})
        await response.prepare(request)
        await response.write(first)
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    return handle


def test_requests_and_answers_are_passed_on() -> None:
    async def test(client: Callable[[], Client]) -> None:
        answer = await client().ask(query=b"a=b%20c%2F")
        assert answer.status == 201 and answer.headers["x-request-id"] == "7"
        assert json.loads(answer.body) == {"path": "/v1/chat/completions?a=b%20c%2F", "key": "Bearer key", "body": BODY.decode()}
        assert (await client().ask("/v1/models", b"", "GET")).status == 201

    with_nodes(test, echo)


def test_connections_to_a_node_are_kept() -> None:
    ports: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        await response.write_eof()
        return response

    async def test(client: Callable[[], Client]) -> None:
        for _ in range(3):
            assert (await client().ask()).body == b"data: {}\n\n"
        assert len(ports) == 3 and len({*ports}) == 1

    with_nodes(test, answer)


def test_a_gateway_that_has_just_ended_is_asked_again() -> None:
    """A node repairs its gateway: its connections are lost, new ones wait for the next gateway."""
    asked: list[str] = []

    async def lose_the_first(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return await (lose_at_once if len(asked) == 1 else echo)(request)

    async def test(client: Callable[[], Client]) -> None:
        assert (await client().ask()).status == 201 and len(asked) == 2

    with_nodes(test, lose_the_first)


def test_bodies_are_bounded_together_and_kept_no_longer_than_needed() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        assert len(await request.content.read()) == limit
        response = web.StreamResponse()
        await response.prepare(request)
        if not begun.is_set():
            await response.write(b"first")
            begun.set()
            await go_on.wait()
        return response

    limit = 4 * SMALL_BYTES

    async def test(client: Callable[[], Client]) -> None:
        relay = client().front.relay
        relay.max_body_bytes = limit
        too_long = await client().ask(body=b"x" * (limit + 1))
        assert too_long.status == 413 and f"longer than {limit} bytes" in too_long.body.decode()
        mine = client()
        task = asyncio.create_task(mine.ask(body=b"x" * limit))
        await mine.got_some.wait()
        assert relay.num_body_bytes == 0, "the node has begun to answer"
        go_on.set()
        await task
        relay.num_body_bytes = HELD_BODIES * limit - SMALL_BYTES  # of requests that wait for their nodes
        refused = await client().ask("/v1/messages", body=b"x" * (SMALL_BYTES + 1))
        assert refused.status == 503 and refused.headers["retry-after"] == "1" and b"too many large requests" in refused.body
        assert relay.num_body_bytes == HELD_BODIES * limit - SMALL_BYTES

    with_nodes(test, slow)


def test_a_body_has_longer_the_more_of_it_has_come_but_never_without_a_byte() -> None:
    assert due_s(100.0, 0, 100.0) == due_s(100.0, 0, 150.0) == 160.0
    assert due_s(100.0, 10 * LEAST_BYTES_S, 120.0) == 170.0, "ten seconds longer"
    assert due_s(100.0, 1 << 40, 120.0) == 180.0


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else four clients that stop within their bodies would keep all large requests out."""
    monkeypatch.setattr("mmrt.actors.gateway.reading.bodies.BODY_TIMEOUT_S", 0.2)

    async def test(client: Callable[[], Client]) -> None:
        mine = client()
        pieces = [b"x" * 100, b"x"]

        async def receive() -> dict[str, Any]:
            if not pieces:
                await mine.gone.wait()
            return {"type": "http.request", "body": pieces.pop(), "more_body": True}

        mine._receive = receive  # type: ignore[method-assign]
        await asyncio.wait_for(mine.ask(), 10)
        assert mine.status == 408 and b"101 bytes" in mine.body and mine.front.relay.num_body_bytes == 0

    with_nodes(test, echo)


def test_what_goes_on_with_a_response_is_sent_to_its_node() -> None:
    def storing(name: str) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            await request.read()
            return web.Response(text=name, headers={"X-Request-Id": f"resp_{name}"})

        return answer

    async def test(client: Callable[[], Client]) -> None:
        front = client().front
        first = await client().ask("/v1/responses", b'{"input": "why?"}')
        name = first.body.decode()
        front._router._loads[name].tokens += 1_000_000
        other = (await client().ask("/v1/responses", b'{"input": "who?"}')).body.decode()
        assert {name, other} == {"a", "b"}
        for id in (name, other):
            body = json.dumps({"input": "so?", "previous_response_id": f"resp_{id}"}).encode()
            assert (await client().ask("/v1/responses", body)).body == id.encode()
            for method, below in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
                assert (await client().ask(f"/v1/responses/resp_{id}{below}", b"", method)).body == id.encode()

    with_nodes(test, storing("a"), storing("b"))


def test_who_names_a_stream_gets_its_node() -> None:
    def named(name: str) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            await request.read()
            return web.Response(text=name)

        return answer

    async def test(client: Callable[[], Client]) -> None:
        front, nodes = client().front, dict[bytes, str]()
        for chat in (b"one", b"two"):
            nodes[chat] = name = (await client().ask(**{"x-conversation-id": chat})).body.decode()
            front._router._loads[name].tokens += 1_000_000
        assert {*nodes.values()} == {"a", "b"}
        for chat, name in nodes.items():
            for method, path, more in (
                ("GET", f"/v1/stream/{chat.decode()}", {}),
                ("DELETE", f"/v1/stream/{chat.decode()}/", {}),
                ("POST", "/v1/chat/completions", {"x-conversation-id": chat}),
            ):
                assert (await client().ask(path, b"{}", method, **more)).body == name.encode()

    with_nodes(test, named("a"), named("b"))


def test_an_answer_without_an_id_binds_no_request_to_its_node() -> None:
    async def refuse(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=400)

    async def test(client: Callable[[], Client]) -> None:
        router = client().front._router
        await client().ask("/v1/responses", b"{}")
        router._loads["a"].tokens += 1_000_000
        assert (await client().ask()).status == 201, "a has much to do"

    with_nodes(test, refuse, echo)


def test_headers_are_those_of_the_client() -> None:
    """None of the front's own, no cookie that another client was given, and no ``Expect``, which the front has answered."""

    async def headers(request: web.Request) -> web.Response:
        await request.read()
        answer = web.json_response({name.lower(): value for name, value in request.headers.items()})
        answer.set_cookie("session", "secret")
        return answer

    async def test(client: Callable[[], Client]) -> None:
        front = client().front
        urls = await front._nodes()
        front._nodes = _always({"a": urls["a"].replace("127.0.0.1", "localhost")})  # a name: cookies of addresses are not kept
        for _ in range(2):
            answer = await client().ask(expect=b"100-continue", accept=b"text/plain", name="\u00e9".encode())
            sent = json.loads(answer.body)
            assert sent.pop("host").startswith("localhost") and "session=secret" in answer.headers["set-cookie"]
            assert sent == {"authorization": "Bearer key", "accept": "text/plain", "name": "\u00e9", "content-length": str(len(BODY))}

    with_nodes(test, headers)


def test_answers_are_passed_on_as_they_are() -> None:
    """Compressed ones stay so, and a client follows a redirect itself."""
    packed = gzip.compress(b"packed")

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/old":
            return web.Response(status=307, headers={"location": "/v1/new"})
        return web.Response(body=packed, headers={"content-encoding": "gzip"})

    async def test(client: Callable[[], Client]) -> None:
        moved = await client().ask("/v1/old")
        assert (moved.status, moved.headers["location"], moved.body) == (307, "/v1/new", b"")
        found = await client().ask("/v1/new")
        assert (found.headers["content-encoding"], found.body) == ("gzip", packed)

    with_nodes(test, answer)


def test_a_large_body_is_passed_on() -> None:
    async def length(request: web.Request) -> web.Response:
        return web.json_response(len(await request.content.read()))

    async def test(client: Callable[[], Client]) -> None:
        assert (await client().ask(body=b"x" * (4 << 20))).body == b"%d" % (4 << 20)

    with_nodes(test, length)


@pytest.mark.parametrize("path", ["/", "/metrics", "/page/kill", "/v2/x", "/v1/../metrics", "/v1/x/./y"])
def test_what_trusts_its_own_machine_is_not_served(path: str) -> None:
    async def test(client: Callable[[], Client]) -> None:
        answer = await client().ask(path)
        assert answer.status == 404 and path in answer.body.decode()

    with_nodes(test, echo)


def test_a_node_that_is_lost_before_it_answers_is_passed_over() -> None:
    async def test(client: Callable[[], Client]) -> None:
        assert (await client().ask()).status == 201

    with_nodes(test, lose_at_once, echo)
    with_nodes(test, echo, **{"0": "http://127.0.0.1:1"})


def test_without_a_node_the_answer_is_503() -> None:
    async def test(client: Callable[[], Client]) -> None:
        answer = await client().ask()
        assert answer.status == 503 and answer.headers["retry-after"] == "1" and b"lost before" in answer.body

    async def none(client: Callable[[], Client]) -> None:
        assert b"no node is there" in (await client().ask()).body
        answer = await client().ask("/api/chat")
        assert json.loads(answer.body) == {"error": "no node is there"} and answer.headers["retry-after"] == "1"
        assert json.loads((await client().ask("/v1/messages")).body)["type"] == "error"

    with_nodes(test, lose_at_once, lose_at_once)
    with_nodes(none)


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b'"message":"the node that served this request was lost"}}\n\n'),
        ("/v1/responses", b'"param":null,"code":500}}\n\n'),
    ],
)
def test_a_stream_whose_node_is_lost_ends_with_an_error(path: str, end: bytes) -> None:
    async def test(client: Callable[[], Client]) -> None:
        answer = await client().ask(path)
        assert answer.status == 200 and answer.body.startswith(b"data: {}\n\n") and answer.body.endswith(end)
        assert b"was lost" in answer.body

    with_nodes(test, losing_after(b"data: {}\n\n", "text/event-stream"), losing_after(b"data: {}\n\n", "text/event-stream"))


@pytest.mark.parametrize("sent", [b'{"done":false}\n', b'{"done":fal'])
def test_a_stream_of_lines_whose_node_is_lost_ends_with_an_error(sent: bytes) -> None:
    async def test(client: Callable[[], Client]) -> None:
        answer = await client().ask("/api/chat")
        assert answer.body.splitlines() == [sent.strip(), b'{"error":"the node that served this request was lost"}']

    with_nodes(test, losing_after(sent, "application/x-ndjson"))


def test_an_answer_that_is_no_stream_is_cut_off() -> None:
    async def test(client: Callable[[], Client]) -> None:
        with pytest.raises(ConnectionError, match="lost in the middle"):
            await client().ask()

    with_nodes(test, losing_after(b"{", "application/json"))


def test_a_client_that_goes_ends_the_request_at_the_node() -> None:
    ended: list[str] = []

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: {}\n\n")
                await asyncio.sleep(0.01)
        except (ConnectionError, asyncio.CancelledError):
            ended.append(request.path)
            raise

    async def test(client: Callable[[], Client]) -> None:
        mine = client()
        task = asyncio.create_task(mine.ask())
        await mine.got_some.wait()
        mine.gone.set()
        await task
        for _ in range(1000):
            if ended:
                break
            await asyncio.sleep(0.01)
        assert ended == ["/v1/chat/completions"]
        load = mine.front._router._loads["a"]
        assert (load.tokens, load.media_tokens) == (0, 0)

    with_nodes(test, endless)


def test_a_client_that_goes_before_the_first_byte_ends_the_request_at_the_node() -> None:
    """Headers of a stream come at once, its first byte only when the prompt is computed."""

    async def test(client: Callable[[], Client]) -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def computing(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return response

        async with node(computing) as url:
            mine = client()
            mine.front._nodes = _always({"z": url})
            task = asyncio.create_task(mine.ask())
            await begun.wait()
            await asyncio.sleep(0.2)  # the front gets the headers
            mine.gone.set()
            await task
            await asyncio.wait_for(ended.wait(), 20)

    with_nodes(test)


def test_a_client_that_goes_while_it_sends_is_no_error() -> None:
    async def test(client: Callable[[], Client]) -> None:
        mine = client()
        mine._is_sent = True
        mine.gone.set()
        await mine.ask()
        assert mine.status == 0

    with_nodes(test, echo)


def test_a_directory_that_starts_anew_takes_no_node_away() -> None:
    async def test(client: Callable[[], Client]) -> None:
        mine = client()
        assert (await mine.ask()).status == 201
        mine.front._nodes = _always({})
        await mine.front._refresh()
        assert (await client().ask()).status == 201

    with_nodes(test, echo)
