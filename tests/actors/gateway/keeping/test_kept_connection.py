"""HTTP on connections whose server is killed and replaced: aiohttp as the gateway has it, in processes of their own, real clients."""

import asyncio
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvloop
from aiohttp import web

from mmrt.actors.gateway.answers.answer_record import AnswerRecord, needs_media
from mmrt.actors.gateway.connections import Connections, Runner
from mmrt.actors.gateway.keeping.connection import MAX_SHOWN, KeptConnection
from mmrt.actors.gateway.keeping.kept_bodies import KeptBodies
from mmrt.actors.gateway.keeping.state import ConnectionState, OpenAnswer, Place, RecordError, decode_state, encode_state
from mmrt.actors.gateway.keeping.turns import Turns
from mmrt.shm.connection_records import ConnectionRecords, RecordSizes
from mmrt.shm.workplace import Workplace
from mmrt.tests.settings import examples

LARGE = 3_000_000
NUM_WORDS = 40


async def serve(record: ConnectionRecords, connection: socket.socket, ready: int, bodies: KeptBodies, echo_s: float) -> None:
    async def echo(request: web.Request) -> web.Response:
        body = await request.read()
        await asyncio.sleep(echo_s)
        return web.json_response({"length": len(body), "sum": sum(body), "x": request.query.get("x")})

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=b"z" * LARGE)

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=413, text="too large")

    async def stream(request: web.Request) -> web.StreamResponse:
        connection = request.transport
        assert isinstance(connection, KeptConnection)
        recorded = connection.recorded
        if recorded is None:
            connection.open(OpenAnswer("id", 1, 1.0, [1]))
        connection.claimed()
        await asyncio.sleep(0.02)
        response, first = web.StreamResponse(), 0
        await response.prepare(request)
        if recorded is not None and recorded.has_begun:
            request.writer.send_headers()
            connection.restored()
            first = recorded.places[0].num_bytes
        for number in range(first, NUM_WORDS):
            await response.write(b"word %d;" % number)
            connection.commit([Place(num_bytes=number + 1)])
            await asyncio.sleep(0.002)
        await response.write_eof()
        connection.answered(bool(response.keep_alive))
        return response

    async def ahead(request: web.Request) -> web.StreamResponse:
        connection, response = request.transport, web.StreamResponse()
        assert isinstance(connection, KeptConnection)
        connection.open(OpenAnswer("id", 1, 1.0, [1]))
        await response.prepare(request)
        for number in range(30):
            await response.write(b"%d" % (number % 10) * 100_000)
            connection.commit([Place(num_bytes=number + 1)])
            await connection.drained(None, int(request.query["most"]))
        await response.write_eof()
        connection.answered(bool(response.keep_alive))
        return response

    app = web.Application(client_max_size=1 << 22)
    app.router.add_get("/ahead", ahead)
    app.router.add_get("/stream", stream)
    app.add_routes([web.post("/echo", echo), web.get("/echo", echo), web.get("/large", large), web.post("/refuse", refuse)])
    runner = Runner(app, Connections(10), handler_cancellation=True, access_log=None)
    await runner.setup()
    lost = asyncio.Event()
    kept = KeptConnection(record.record(0), connection, runner.server(), Turns(), lambda: None, lambda _: lost.set(), bodies=bodies)
    connection.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: kept, connection)
    os.write(ready, b"!")
    await lost.wait()


class Kept:
    """A connection, its record, and servers one after another."""

    def __init__(self, out_bytes: int = 256 << 20, bodies: KeptBodies | None = None, echo_s: float = 0.002) -> None:
        self.bodies, self.echo_s = bodies or KeptBodies(), echo_s
        self.records = ConnectionRecords.create(RecordSizes.of(1, 1 << 20)._replace(out_bytes=out_bytes))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname())
            self.connection = listener.accept()[0]
        self.client.settimeout(20)
        self.received = b""
        self.pid = 0

    def start(self) -> None:
        ready, told = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                self.client.close()
                uvloop.run(serve(self.records, self.connection.dup(), told, self.bodies, self.echo_s))
                self.connection.shutdown(socket.SHUT_RDWR)  # as the keeper does
            finally:
                os._exit(0)
        os.close(told)
        assert os.read(ready, 1) == b"!"
        os.close(ready)

    def narrow(self) -> "Kept":
        """Let the kernel take little before the client reads."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        return self

    def kill(self, after_s: float = 0.0) -> None:
        time.sleep(after_s)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0

    def restart(self, after_s: float = 0.0) -> None:
        self.kill(after_s)
        self.start()

    def until(self, mark: bytes) -> bytes:
        while mark not in self.received:
            data = self.client.recv(1 << 16)
            assert data, f"the end after {self.received[-100:]!r}"
            self.received += data
        found, _, self.received = self.received.partition(mark)
        return found

    def answer(self) -> tuple[int, bytes]:
        head = self.until(b"\r\n\r\n").lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
        while len(self.received) < length:
            data = self.client.recv(1 << 16)
            assert data
            self.received += data
        body, self.received = self.received[:length], self.received[length:]
        return int(head.split()[1]), body

    def close(self) -> None:
        if self.pid:
            self.kill()
        self.client.close()
        self.connection.close()
        self.records.close()


@pytest.fixture
def kept() -> Iterator[Kept]:
    one = Kept()
    one.start()
    yield one
    one.close()


def post(body: bytes, x: int = 0, more: str = "") -> bytes:
    return f"POST /echo?x={x} HTTP/1.1\r\nHost: localhost\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(body: bytes, x: int, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    frames = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return f"POST /echo?x={x} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + frames + b"0\r\n\r\n"


def expected(body: bytes, x: int) -> bytes:
    return b'{"length": %d, "sum": %d, "x": "%d"}' % (len(body), sum(body), x)


def test_every_request_is_answered_once_whenever_the_server_is_killed(kept: Kept) -> None:
    """Bodies of all kinds in pieces of any size, several requests at once; kills at any time, also while a successor begins."""
    chance = random.Random(11)
    for turn in range(examples(7)):
        asked = [
            (
                b"\r\n\r\n" * 2000
                if chance.random() < 0.1
                else bytes(chance.choices(b"ab\r\n0", k=chance.choice((0, 5, 5000, 200_000)))),
                number,
            )
            for number in range(chance.choice((1, 1, 3)))
        ]
        wire = b"".join(
            chunked(body, x, chance.choice((1000, 70_000))) if chance.random() < 0.4 else post(body, x) for body, x in asked
        )
        step = max(1, len(wire) // chance.choice((1, 2, 7)))
        for at in range(0, len(wire), step):
            kept.client.sendall(wire[at : at + step])
            if chance.random() < 0.4:
                kept.restart(chance.random() * 0.004)
        for body, x in asked:
            if chance.random() < 0.5:
                kept.restart(chance.random() * 0.004)
            assert kept.answer() == (200, expected(body, x)), f"turn {turn}"
    assert kept.received == b""


def test_a_large_answer_goes_on_where_it_was_cut(kept: Kept) -> None:
    kept.client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n" + post(b"after", 6))
    head, received = kept.until(b"\r\n\r\n"), bytearray()
    assert f"content-length: {LARGE}".encode() in head.lower()
    for share in (0.2, 0.4, 0.9):
        while len(received) + len(kept.received) < share * LARGE:
            kept.received += kept.client.recv(1 << 16)
        received += kept.received
        kept.received = b""
        kept.restart()
    while len(received) < LARGE:
        received += kept.client.recv(LARGE - len(received))
    assert received == b"z" * LARGE
    assert kept.answer() == (200, expected(b"after", 6))


def test_a_last_answer_is_whole_though_it_was_cut(kept: Kept) -> None:
    kept.narrow().client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    kept.until(b"\r\n\r\n")
    kept.restart()
    while data := kept.client.recv(1 << 16):
        kept.received += data
    assert len(kept.received) == LARGE


def test_a_client_that_has_said_all_gets_the_rest(kept: Kept) -> None:
    kept.narrow().client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
    kept.until(b"\r\n\r\n")
    kept.client.shutdown(socket.SHUT_WR)
    while data := kept.client.recv(1 << 16):
        kept.received += data
    assert len(kept.received) == LARGE


def test_an_answer_larger_than_its_record_is_whole_unless_its_gateway_dies() -> None:
    kept = Kept(out_bytes=1 << 20)
    kept.start()
    ask = b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"
    kept.client.sendall(ask + post(b"after", 6))
    assert kept.answer() == (200, b"z" * LARGE) and kept.answer() == (200, expected(b"after", 6))
    kept.restart()
    kept.narrow().client.sendall(ask)
    kept.until(b"\r\n\r\n")
    kept.kill()
    with pytest.raises(RecordError, match="bytes were sent"):
        KeptConnection(kept.records.record(0), kept.connection, None, None, lambda: None, lambda _: None)  # type: ignore[arg-type]
    kept.close()


def test_a_client_that_does_not_read_keeps_no_answer_from_its_end(kept: Kept) -> None:
    """Its row is free then: the record has the rest, also when the server dies."""
    record = kept.narrow().records.record(0)
    kept.client.sendall(b"GET /ahead?most=4000000 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    deadline = time.monotonic() + 20
    while (state := decode_state(record.load())).written < 3_000_000 or state.answer is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kept.restart()
    data = b"".join(piece.split(b"\r\n")[0] for piece in kept.until(b"\r\n0\r\n\r\n").split(b"186a0\r\n")[1:])
    assert data == b"".join(b"%d" % (number % 10) * 100_000 for number in range(30))


def test_a_client_that_reads_late_is_waited_for_when_much_is_unread(kept: Kept) -> None:
    record = kept.narrow().records.record(0)
    kept.client.sendall(b"GET /ahead?most=500000 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    time.sleep(0.3)
    state = decode_state(record.load())
    assert state.answer is not None and state.written < 1_500_000
    kept.until(b"\r\n0\r\n\r\n")


def test_memory_of_answers_is_given_back(kept: Kept) -> None:
    kept.client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert kept.answer() == (200, b"z" * LARGE)
    end_s = time.monotonic() + 10
    while (num_bytes := os.fstat(kept.records.descriptor).st_blocks * 512) > 1 << 18:
        assert time.monotonic() < end_s, num_bytes
        time.sleep(0.01)


def test_a_recorded_answer_goes_on_whether_it_had_begun_or_not(kept: Kept) -> None:
    chance = random.Random(12)
    for _ in range(examples(9)):
        kept.client.sendall(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n" + post(b"after", 7))
        for after_s in chance.choice(([0.01], [0.01, 0.04], [0.03, 0.05, 0.02])):
            kept.restart(chance.random() * after_s)
        head, words = kept.until(b"\r\n\r\n"), b""
        assert head.startswith(b"HTTP/1.1 200") and b"chunked" in head
        while size := int(kept.until(b"\r\n"), 16):
            words += kept.until(b"\r\n")
            assert len(words.rpartition(b"word")[2]) + 4 == size
        kept.until(b"\r\n")
        assert words == b"".join(b"word %d;" % number for number in range(NUM_WORDS))
        assert kept.answer() == (200, expected(b"after", 7))


def test_a_client_is_told_to_continue_once(kept: Kept) -> None:
    body = b"x" * 50_000
    whole = post(body, 3, "Expect: 100-continue\r\n")
    kept.client.sendall(whole[: -len(body)])
    assert kept.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue"
    kept.restart()
    kept.client.sendall(body[:20_000])
    kept.restart(0.005)
    kept.client.sendall(body[20_000:])
    assert kept.answer() == (200, expected(body, 3))


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_last_answer_closes(kept: Kept, is_killed: bool) -> None:
    kept.client.sendall(post(b"bye", 1, "Connection: close\r\n"))
    if is_killed:
        kept.kill(0.05)  # the answer is out, the connection closed by the loop alone
        kept.start()
    assert kept.answer() == (200, expected(b"bye", 1)) and kept.client.recv(1) == b""


def test_a_body_that_is_refused_early_and_what_follows(kept: Kept) -> None:
    kept.client.sendall(b"POST /refuse HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n" + b"r" * 1000)
    assert kept.answer() == (413, b"too large")
    kept.restart()
    kept.client.sendall(b"r" * 299_000 + post(b"next", 4))
    assert kept.answer() == (200, expected(b"next", 4))


@pytest.mark.parametrize("is_chunked", [False, True])
def test_what_follows_a_body_that_was_refused_early(kept: Kept, is_chunked: bool) -> None:
    """The parser tells of the body's end in the midst of its work: it must not be given the next request there."""
    body = b"r" * 600_000
    wire = chunked(body, 0, 70_000) if is_chunked else post(body)
    for number in range(3):
        whole = wire.replace(b"/echo", b"/refuse")
        kept.client.sendall(whole[:1000])
        assert kept.answer() == (413, b"too large")
        kept.client.sendall(whole[1000:] + post(b"next", number) + post(b"last", number))
        assert kept.answer() == (200, expected(b"next", number)) and kept.answer() == (200, expected(b"last", number))


def test_bytes_that_are_no_http_are_answered_and_end_it(kept: Kept) -> None:
    kept.client.sendall(b"no\1\2\r\n\r\n" + post(b"never"))
    assert kept.answer()[0] == 400 and kept.client.recv(1) == b""


def test_a_request_at_work_in_two_crashes_is_given_up(kept: Kept) -> None:
    kept.client.sendall(post(b"one"))
    kept.answer()
    kept.client.sendall(post(b"poison")[:30])
    kept.kill(0.05)
    record, ignored = kept.records.record(0), ([None], None, lambda: None, lambda _: None)

    def strikes(place: Workplace | None, has_crashed: bool) -> int:
        if place is not None:
            record.set_at_work(place, True)
        KeptConnection(record, kept.connection, *ignored, has_crashed=has_crashed)  # type: ignore[arg-type]
        assert not any(record.is_at_work(one) for one in Workplace)
        return decode_state(record.load()).strikes

    assert [strikes(None, True), strikes(Workplace.LOOP, False), strikes(Workplace.THREAD, True)] == [0, 0, 1]
    kept.start()
    kept.client.sendall(post(b"poison")[30:])
    assert kept.answer() == (200, expected(b"poison", 0))
    kept.kill()
    assert strikes(Workplace.LOOP, True) == 0, "nothing is under way"
    kept.client.sendall(post(b"poison")[:30])
    kept.start()
    kept.kill(0.05)
    assert [strikes(Workplace.LOOP, True), strikes(Workplace.LOOP, True)] == [1, 2]
    kept.start()
    assert kept.answer()[0] == 500 and kept.client.recv(1) == b""


def test_a_stream_that_is_given_up_is_reset(kept: Kept) -> None:
    kept.client.sendall(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
    kept.until(b"word 1;")
    kept.kill()
    record = kept.records.record(0)
    state = decode_state(record.load())
    state.strikes = 2
    record.commit(encode_state(state))
    kept.start()
    with pytest.raises(AssertionError, match="the end after"):
        kept.until(b"0\r\n\r\n")
    linger = kept.connection.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)
    assert linger == struct.pack("ii", 1, 0), "by which the keeper resets it"


def test_an_answer_of_too_many_requests_to_record_begins_anew_and_nobody_waits_for_it(kept: Kept) -> None:
    kept.kill()
    record, claimed = kept.records.record(0), list[int]()
    record.commit(encode_state(ConnectionState(answer=OpenAnswer("id", 1, 1.0, []))))
    connection = KeptConnection(record, kept.connection, None, None, lambda: claimed.append(1), lambda _: None)  # type: ignore[arg-type]
    answer = AnswerRecord(SimpleNamespace(transport=connection), "x-", 5.0)  # type: ignore[arg-type]
    answer.open(1, lambda: 7)
    assert claimed == [1] and answer.request(0)[0] == 7 and not answer.shown
    state = decode_state(record.load())
    assert state.answer is not None and state.answer.keys == [7]


def test_nobody_waits_for_who_reads_an_answer_that_goes_on_by_itself(kept: Kept) -> None:
    kept.kill()
    record, claimed = kept.records.record(0), list[int]()
    record.commit(encode_state(ConnectionState(answer=OpenAnswer("id", 1, 1.0, [], [Place(has_begun=True)], 3))))
    connection = KeptConnection(record, kept.connection, None, None, lambda: claimed.append(1), lambda _: None)  # type: ignore[arg-type]
    answer = AnswerRecord(SimpleNamespace(transport=connection), "x-", 5.0)  # type: ignore[arg-type]
    answer.open(0, lambda: 7)
    assert claimed == [1] and answer.num_events == 3


def test_media_are_not_asked_for_again_once_the_controller_has_them(kept: Kept) -> None:
    """Those at a URL may be others, or gone, at a second look."""
    kept.kill()
    record = kept.records.record(0)

    def adopt() -> AnswerRecord:
        connection = KeptConnection(record, kept.connection, None, None, lambda: None, lambda _: None)  # type: ignore[arg-type]
        answer = AnswerRecord(SimpleNamespace(transport=connection), "x-", 5.0)  # type: ignore[arg-type]
        assert answer.needs_media == needs_media(SimpleNamespace(transport=connection))  # type: ignore[arg-type]
        answer.open(2, iter((7, 8)).__next__)
        return answer

    answer = adopt()
    assert answer.needs_media
    for number in (0, 0, 1):
        assert adopt().needs_media, "one of its requests is not prepared"
        keeping = answer.request(number)[1]
        assert keeping is not None
        keeping.on_prepared()
    assert not adopt().needs_media


def test_a_record_that_does_not_fit_is_refused(kept: Kept) -> None:
    kept.client.sendall(post(b"one"))
    kept.answer()
    kept.kill()
    record = kept.records.record(0)
    state = decode_state(record.load())
    assert state.request_at == state.received_from > 50 and state.written > 100 and state.answer is None
    for wrong in (
        ConnectionState(**{**{name: getattr(state, name) for name in state.__struct_fields__}, "written": 10}),
        ConnectionState(**{**{name: getattr(state, name) for name in state.__struct_fields__}, "received_from": 10_000}),
    ):
        record.commit(encode_state(wrong))
        with pytest.raises(RecordError, match="bytes were (sent|received)"):
            KeptConnection(record, kept.connection, None, None, lambda: None, lambda _: None)  # type: ignore[arg-type]
    for data in (b"\xff", encode_state(ConnectionState(format=99))):
        with pytest.raises(RecordError, match="cannot be read|format 99"):
            decode_state(data)


def test_one_connection_leaves_the_loop_to_others_and_its_record_once_it_is_lost() -> None:
    """With a handler that only counts: no request ends in what it is shown."""

    async def test(kept: Kept) -> None:
        loop, record, shown, lost = asyncio.get_running_loop(), kept.records.record(0), [0], asyncio.Event()
        handler = SimpleNamespace(_request_count=0, connection_made=lambda _: None, connection_lost=lambda _: None)

        def count(_: bytes) -> None:
            shown[-1] += 1

        handler.data_received = count
        connection = KeptConnection(record, kept.connection, handler, Turns(), lambda: None, lambda _: lost.set())  # type: ignore[arg-type]
        kept.connection.setblocking(False)
        await loop.connect_accepted_socket(lambda: connection, kept.connection.dup())
        kept.client.sendall(b"\r\n\r\n" * 1000)
        while sum(shown) < 1000:
            await asyncio.sleep(0)
            shown.append(0)
        assert 1 < max(shown) <= MAX_SHOWN
        for data in (b"head", b"HTTP/1.1 100 is the body"):
            connection.write(data)
        connection.commit([])
        assert await asyncio.to_thread(kept.client.recv, 100) == b"headHTTP/1.1 100 is the body"
        connection.write(b"more")
        connection.abort()
        await lost.wait()
        record.clear()
        connection.commit([])
        other = b"o" * (1 << 20)
        record.sent.base = 0
        record.sent.put(0, other)
        await connection.finish(True)
        assert record.load() == b"" and record.sent.get(0, len(other)) == other, "it may be another connection's by now"

    kept = Kept()
    asyncio.run(test(kept))
    kept.close()


@pytest.mark.parametrize(("max_body_bytes", "is_followed"), [(400_000, False), (100_000, False), (100_000, True)])
def test_large_requests_share_a_bounded_memory(max_body_bytes: int, is_followed: bool) -> None:
    """One that finds no room in it is answered, and ends with its gateway; one that does lives on. So also where the next request has
    come behind it."""
    one = Kept(bodies=KeptBodies(max_body_bytes), echo_s=1.0)
    one.start()
    body, record = os.urandom(1_400_000), one.records.record(0)
    try:
        one.client.sendall(post(body) + post(b"more") * is_followed)
        deadline = time.monotonic() + 0.8
        while not (state := decode_state(record.load())).received_from and time.monotonic() < deadline:
            time.sleep(0.01)
        if max_body_bytes == 400_000:
            assert not state.received_from and os.fstat(one.records.descriptor).st_blocks * 512 > len(body)
            one.restart()
        else:
            with pytest.raises(RecordError, match="were received"):  # by the successor, which drops the connection
                state.check(0, len(post(body)), 1 << 20, 4 << 20)
            while os.fstat(one.records.descriptor).st_blocks * 512 > len(body) // 4 and time.monotonic() < deadline + 20:
                time.sleep(0.01)
            assert os.fstat(one.records.descriptor).st_blocks * 512 < len(body) // 4
        assert one.answer()[0] == 200
        if not is_followed:
            one.client.sendall(post(b"more"))
        assert b'"length": 4' in one.answer()[1]
        one.restart()
        one.client.sendall(post(b"again"))
        assert one.answer()[0] == 200
    finally:
        one.close()
