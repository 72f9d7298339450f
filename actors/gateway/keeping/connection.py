"""A connection whose record lets another gateway go on with it: what comes in is received into the record, and what goes out is
committed there by one word before it is sent. Runs in the gateway's event loop, between its transport and aiohttp's handler.

To the handler it is the transport. What the handler writes is held until it is committed, at the latest with the end of its answer.
The handler is shown no byte behind the end of a request until that is answered. So after a death a successor that has the same bytes
shown finds the same request, whose answer was either not begun, or is recorded.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from aiohttp import web

from ....shm.connection_records import MAX_STATE_BYTES, ConnectionRecord
from ....shm.tcp_count import bytes_put, bytes_taken
from ..at_work import Work
from .endings import GIVEN_UP, reset
from .kept_bodies import LARGE_BYTES, HeldBody, KeptBodies
from .state import OpenAnswer, Place, decode_state, encode_state
from .turns import Turns

log = logging.getLogger(__name__)

PIECE_BYTES = 256 * 1024  # given to the loop's transport at once
RECEIVE_BYTES = 256 * 1024
AHEAD_BYTES = 64 * 1024  # of further requests, that are received while one is answered
MAX_STRIKES = 2  # deaths in the midst of a request, with which it is given up
MAX_SHOWN = 64  # pieces of a request in one turn of the loop
_BLANK_LINE = b"\r\n\r\n"  # where headers and bodies in chunks end
_CONTINUE = b"HTTP/1.1 100 "
_CHOICE_BYTES = 48  # of a state, at most: its key and its place


class KeptConnection(asyncio.Transport, asyncio.BufferedProtocol):
    """One connection."""

    def __init__(
        self,
        record: ConnectionRecord,
        connection: socket.socket,
        handler: web.RequestHandler,
        turns: Turns,
        on_claimed: Callable[[], None],
        on_lost: Callable[[int | None], None],
        has_crashed: bool = False,
        bodies: KeptBodies | None = None,
    ) -> None:
        """``on_claimed``: called once what a gateway before had under way is under way again, or is over. ``on_lost``: at its end,
        with the number of the gateway that it moves to. ``bodies``: of all connections. ``has_crashed``: the gateway before did; a
        request that it worked on then gets a strike.

        Raises: RecordError, and OSError if the client has dropped it.
        """
        super().__init__()
        state = self._state = decode_state(record.load())
        self._sent = bytes_put(connection)  # offset of the next byte for the loop's transport
        self._read = bytes_taken(connection)
        state.check(self._sent, self._read, record.sent.size, record.received.size)
        record.received.base, record.sent.base = state.received_from, state.sent_from
        self.work = Work(record)
        if self.work.take() and has_crashed and state.request_at < self._read:
            state.strikes += 1
            record.commit(encode_state(state))
        self.recorded = state.answer
        self.is_awaited = state.answer is not None or state.strikes > 0  # until it is claimed
        self._record = record
        self._handler = handler
        self._turns = turns
        self._held_body = HeldBody(bodies)
        self._has_turn = self._has_asked = False  # for the current request
        self._on_claimed, self._on_lost = on_claimed, on_lost
        self._real: asyncio.Transport | None = None
        self._shown = state.request_at
        self._payload: Any = None  # of the current request, once its headers are shown
        self._end: int | None = None  # of the current request, where its length is known
        self._is_answered = False
        self._may_go_on = False  # to the next request, once the end of this one was shown
        self._is_paused = False  # by the handler
        self._is_ahead = False  # too much was received of further requests
        self._is_full = False  # the loop's transport is
        self._is_restored = False
        self._is_due = False  # the rest is shown in the next turn of the loop
        self._is_leaving = False  # it ends once the loop's transport has all that is committed
        self._is_lost = False  # then its record may be another connection's
        self.moves_to: int | None = None  # the number of another gateway
        self._held: list[bytes] = []
        self._after: list[Callable[[], None]] = []
        self._drained: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------------------------ the loop's transport's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._real = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._real.set_write_buffer_limits(0)  # so it is full as long as the kernel has not taken all
        self._handler.connection_made(self)
        self._push()
        if self._state.closes:
            self.close()
        elif self._state.strikes >= MAX_STRIKES:
            log.error("gateways have died %d times in the midst of a request: it is given up", self._state.strikes)
            self._held.append(GIVEN_UP)
            self.answered(keeps_alive=False)
            self.close()
        else:
            self._feed()

    @property
    def is_suspect(self) -> bool:
        """Return whether a gateway has died in the midst of its request."""
        return self._state.strikes > 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._record.received.space(self._read, min(self._room, RECEIVE_BYTES))

    @property
    def _room(self) -> int:
        return self._record.received.size - max(0, self._read - self._state.request_at)

    def buffer_updated(self, nbytes: int) -> None:
        self._read += nbytes
        self._feed()
        if not self._room:
            log.info("a connection is dropped: a request of more than %d bytes", self._record.received.size)
            self.abort()
        elif self._is_whole() and not self._is_ahead and self._read - self._shown > AHEAD_BYTES:
            self._is_ahead = True
            self._pace()

    def eof_received(self) -> bool:
        self._handler.eof_received()
        self.close()
        return True  # what is committed still goes out

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._push()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = self.work.is_over = True
        self._held_body.release()
        self._handler.connection_lost(exc)
        self._wake()
        self._run_after()
        self.claimed()
        self._on_lost(self.moves_to)

    # ------------------------------------------------------------------------------------------------------ requests

    def _feed(self) -> None:
        """Show the handler what has come, up to the end of a request that is not answered."""
        if self._is_due:
            return
        for _ in range(MAX_SHOWN):
            if self._is_paused or self.is_closing():
                return
            if self._is_whole():
                if not self._may_go_on:
                    return
                self._next()
            if self._shown >= self._read:
                return
            if not self._has_turn:
                self._ask()
                return
            self._show(self._next_stop())
        self._feed_soon()  # a body of blank lines must not keep the loop from others

    def _ask(self) -> None:
        if not self._has_asked:
            self._has_asked = True
            self._turns.ask(self._begin)

    def _begin(self) -> None:
        self._has_turn, self._has_asked = True, False
        self._feed()

    def _feed_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._feed_now)

    def _feed_now(self) -> None:
        self._is_due = False
        self._feed()

    def _is_whole(self) -> bool:
        """Return whether the end of the current request was shown."""
        if self._payload is None:
            return False
        return self._shown >= self._end if self._end is not None else bool(self._payload.is_eof())

    def _next_stop(self) -> int:
        """Return up to where no request can end, or just does."""
        if self._end is not None:
            return min(self._read, self._end)
        at = max(self._state.received_from, self._shown - len(_BLANK_LINE) + 1)
        found = self._record.received.find(_BLANK_LINE, at, self._read)
        return self._read if found < 0 else found + len(_BLANK_LINE)

    def _show(self, stop: int) -> None:
        data, self._shown = self._record.received.get(self._shown, stop), stop
        count = self._handler._request_count
        self.work.do(lambda: self._handler.data_received(data))
        if self._payload is None and self._handler._request_count > count:
            message, self._payload = self._handler._messages[-1]
            headers = getattr(message, "headers", {})  # bytes that are no HTTP have none: they are answered, and that is the end
            if self._payload.is_eof():
                self._end = stop
            elif not getattr(message, "chunked", False) and "Content-Length" in headers:
                self._end = stop + int(headers["Content-Length"])
        if self._is_whole():
            self._hold()

    def _hold(self) -> None:
        """Keep a large request until it is answered. Where others have the memory, its connection ends with this gateway: a successor
        will find that less is recorded than was received."""
        num_bytes = self._shown - self._state.request_at
        is_kept = num_bytes <= LARGE_BYTES or self._is_answered or self._held_body.hold(num_bytes)
        if not is_kept:
            log.info("a connection ends with this gateway: its request has %d bytes, and others fill the memory for them", num_bytes)
            received, further = self._record.received, self._record.received.get(self._shown, self._read)
            self._state.received_from = self._shown
            self._commit(b"")
            received.empty(self._shown)
            received.put(self._shown, further)  # of the next requests; a few KiB, see AHEAD_BYTES

    def _next(self) -> None:
        """Go on to the next request: the current one is answered, and its end was shown."""
        if self._state.request_at != self._shown:  # a body in chunks, refused before it had come
            self._state.request_at, self._state.closes = self._shown, False
            self._commit(b"")
        self.work.retire()
        self.work = Work(self._record)
        self._payload, self._end, self._has_turn = None, None, False
        self._is_answered = self._may_go_on = self._is_ahead = False
        self._pace()

    # ------------------------------------------------------------------------------------------- the handler's transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing():
            return
        if self._held or bytes(data[: len(_CONTINUE)]) != _CONTINUE:
            self._held.append(bytes(data))
        elif not self._state.is_told_to_continue:
            self._state.is_told_to_continue = True
            self._commit(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self._real is None or self._is_leaving or self._real.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default if self._real is None else self._real.get_extra_info(name, default)

    def close(self) -> None:
        self._is_leaving = True
        self._pace()
        self._push()
        self._wake()

    def abort(self) -> None:
        if self._real is not None:
            self._real.abort()

    def move(self, gateway: int) -> None:
        """Leave the connection as it is to another gateway, which is shown the present request again: nothing of its answer is
        committed. The handler learns that the connection is lost."""
        self.moves_to, self._is_lost = gateway, True
        self.work.retire()
        self.abort()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._pace()

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._pace()
            self._feed_soon()  # not at once: the parser calls this in the midst of its work

    def is_reading(self) -> bool:
        return not self._is_paused

    def _pace(self) -> None:
        """Let the loop receive, or not."""
        if self._real is None or self._real.is_closing():
            return
        with contextlib.suppress(RuntimeError):  # it does so already
            if self._is_paused or self._is_ahead or self._is_leaving:
                self._real.pause_reading()
            else:
                self._real.resume_reading()

    # ------------------------------------------------------------------------------------------------------- answers

    def open(self, answer: OpenAnswer) -> bool:
        """Record an answer before its requests are submitted. Returns False where these are too many: it cannot be gone on with."""
        has_room = len(answer.keys) * _CHOICE_BYTES < MAX_STATE_BYTES // 2
        self._state.answer = answer if has_room else msgspec.structs.replace(answer, keys=[])
        self._commit(b"")
        return has_room

    def prepared(self) -> None:
        """Record that the controller has all that it needs of the answer's media."""
        if self._state.answer is not None:
            self._state.answer = msgspec.structs.replace(self._state.answer, is_prepared=True)
            self._commit(b"")

    def claimed(self) -> None:
        """Tell that the requests of a recorded answer have been submitted again, or will not be."""
        if self.is_awaited:
            self._on_claimed()

    def restored(self) -> None:
        """Drop what is held: the client has it of a gateway before. The answer goes on from there."""
        self._held.clear()
        self._is_restored = True

    def commit(self, places: Sequence[Place], num_events: int = 0) -> None:
        """Commit what is held, and how far the choices of the recorded answer are shown with it; then send."""
        answer = self._state.answer
        if answer is not None:
            places = list(places) if answer.keys else [Place()]
            self._state.answer = OpenAnswer(answer.id, answer.created, answer.deadline_s, answer.keys, places, num_events)
        self._commit(self._take_held())

    def answered(self, keeps_alive: bool) -> None:
        """Commit the rest of the answer, with which the request is over."""
        if self._is_lost:
            return
        state, is_whole = self._state, self._is_whole()
        if self.recorded is not None and self.recorded.has_begun and not self._is_restored:
            log.error("%s: its stream cannot be gone on with", self.recorded.id)
            reset(self)
            return
        received_from = state.received_from
        state.request_at = self._shown if self._end is None else self._end
        state.closes = not keeps_alive or (not is_whole and self._end is None)
        state.answer, state.is_told_to_continue, state.strikes = None, False, 0
        if state.request_at == self._read:
            state.received_from = self._read
        self._commit(self._take_held())
        if state.received_from != received_from:
            self._record.received.empty(self._read)
            self._held_body.release()
        self._is_answered, self._is_restored = True, False
        self.claimed()
        self.recorded, self.is_awaited = None, False
        self._run_after()

    async def finish(self, keeps_alive: bool) -> None:
        """End the answer unless it has ended, wait until the client has taken it, and go on. Raises: ConnectionResetError."""
        if not self._is_answered:
            self.answered(keeps_alive)
        await self.drained()
        if self._is_lost:
            return
        self._record.sent.empty(self._state.written)
        self._may_go_on = True
        if not self._state.closes or not self._is_whole():
            self._feed()

    def after_answer(self, done: Callable[[], None]) -> None:
        """Call ``done`` when the answer is committed, or the connection is lost."""
        self._after.append(done)
        if self._is_answered or self.is_closing():
            self._run_after()

    async def drained(self, on_more: Callable[[], None] | None = None, most_left: int = 0) -> None:
        """Wait until the kernel has taken all that is committed, except ``most_left`` bytes. Each time that the client has taken more,
        ``on_more`` is called. Raises: ConnectionResetError."""
        while self._state.written - self._sent > most_left or (self._is_full and not most_left):
            if self.is_closing():
                raise ConnectionResetError("the connection is lost")
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
            if on_more is not None:
                on_more()

    def _take_held(self) -> bytes:
        held, self._held = self._held, []
        return held[0] if len(held) == 1 else b"".join(held)

    def _commit(self, data: bytes) -> None:
        """Write ``data`` into the record, commit it with the state, and send it."""
        if self._is_lost:
            return
        state, ring = self._state, self._record.sent
        is_idle = self._sent == state.written and not self._is_full
        if data and self._real is not None:
            num_unsent = state.written - self._sent + self._real.get_write_buffer_size()
            if len(data) > ring.size:
                self._send_unrecorded(data)
                return
            if not num_unsent:
                ring.empty(state.written)
                state.sent_from = state.written
            elif num_unsent + len(data) > ring.size:
                log.info("a connection is dropped: its client leaves %d bytes unread", num_unsent)
                reset(self)
                return
            ring.put(state.written, data)
            state.written += len(data)
        self._record.commit(encode_state(state))
        if data and is_idle and len(data) <= PIECE_BYTES and self._real is not None and not self._real.is_closing():
            self._sent = state.written
            self._real.write(data)
        else:
            self._push()

    def _send_unrecorded(self, data: bytes) -> None:
        """Send more than a record holds. If this gateway dies before the kernel has taken it, the connection is dropped: less than
        ``sent_from`` was sent."""
        assert self._real is not None
        state, ring = self._state, self._record.sent
        rest = ring.get(self._sent, state.written)
        self._sent = state.written = state.sent_from = state.written + len(data)
        ring.empty(state.written)
        self._record.commit(encode_state(state))
        self._real.writelines([rest, data])

    def _push(self) -> None:
        """Give the loop's transport what is committed, as long as it takes more."""
        while self._real is not None and self._sent < self._state.written and not self._is_full and not self._real.is_closing():
            start, self._sent = self._sent, min(self._state.written, self._sent + PIECE_BYTES)
            self._real.write(self._record.sent.get(start, self._sent))
        if self._is_leaving and self._real is not None and self._sent == self._state.written:
            self._real.close()

    def _wake(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _run_after(self) -> None:
        after, self._after = self._after, []
        for done in after:
            done()
