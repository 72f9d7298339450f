"""The record of one answer on its connection: what it is, the keys of its requests, how far it is shown. Runs in the gateway's loop.

Where the connection is not kept (TLS, no supervisor), nothing is recorded, and an answer ends with its gateway.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from aiohttp import web

from ....runtime.errors import RequestError
from ..keeping.connection import KeptConnection
from ..keeping.state import OpenAnswer, Place
from .client_request import ClientRequest
from .link import Keeping

AHEAD_BYTES = 1 << 20  # of a stream, committed before its client has read them


def needs_media(http: web.Request) -> bool:
    """Return whether the controller may ask for the media of the request. Not if a gateway before had it prepared."""
    kept = http.transport
    recorded = kept.recorded if isinstance(kept, KeptConnection) else None
    return recorded is None or not (recorded.has_begun or recorded.is_prepared)


class Keys(Protocol):
    """The keys of the requests of an answer, for each what keeps it."""

    def request(self, number: int) -> tuple[int, Keeping | None]: ...


class Progress(Protocol):
    """The places up to which a stream is shown: by the gateway before, and by this one."""

    @property
    def shown(self) -> list[Place]: ...
    @property
    def num_events(self) -> int: ...
    async def commit(self, places: Sequence[Place], num_events: int, on_more: Callable[[], None]) -> None: ...


class AnswerRecord:
    """Of the answer to one request. ``id``, ``created`` and ``deadline_s`` stay what they are whatever gateway goes on with it."""

    def __init__(self, http: web.Request, id_prefix: str, timeout_s: float) -> None:
        self._connection = http.transport if isinstance(http.transport, KeptConnection) else None
        recorded = None if self._connection is None else self._connection.recorded
        if recorded is not None and not recorded.keys and not recorded.has_begun:
            recorded = None  # nobody has seen any of it
        self._recorded = recorded
        self.needs_media = needs_media(http)
        self.id = f"{id_prefix}{secrets.token_hex(12)}" if recorded is None else recorded.id
        self.created = int(time.time()) if recorded is None else recorded.created
        self.deadline_s = time.monotonic() + timeout_s if recorded is None else recorded.deadline_s
        self._keys: list[int] = []
        self._unknown: set[int] = set()
        self._unprepared: set[int] = set()
        self._is_kept = False

    @property
    def shown(self) -> list[Place]:
        """Return the place up to which an earlier gateway has shown each choice; [] if none has begun."""
        return [] if self._recorded is None else self._recorded.places

    @property
    def num_events(self) -> int:
        """The events that a gateway before has numbered."""
        return 0 if self._recorded is None else self._recorded.num_events

    def open(self, num_requests: int, new_key: Callable[[], int]) -> None:
        """Fix the keys of its requests, and record it. Raises: RequestError if a gateway before had others."""
        if self._recorded is not None:
            self._keys, self._unknown, self._is_kept = self._recorded.keys, set(self._recorded.keys), True
            self._unprepared = set(self._keys)
            if len(self._keys) != num_requests:
                raise RequestError("the answer cannot be gone on with", status=500, type="internal_error")
            if not self._unknown and self._connection is not None:
                self._connection.claimed()  # it reads what goes on by itself
            return
        self._keys = [new_key() for _ in range(num_requests)]
        self._unprepared = set(self._keys)
        if self._connection is not None:
            answer = OpenAnswer(self.id, self.created, self.deadline_s, self._keys)
            self._is_kept = self._connection.open(answer)
            self._connection.claimed()  # whatever a gateway before had of it: nobody will ask for that

    def request(self, number: int) -> tuple[int, Keeping | None]:
        """Return key and keeping of its ``number``th request."""
        key = self._keys[number]
        if not self._is_kept:
            return key, None
        place = self.shown[number] if self.shown else Place()
        return key, Keeping(lambda: self._note_known(key), place, lambda: self._note_prepared(key))

    def _note_prepared(self, key: int) -> None:
        if key in self._unprepared and self._connection is not None:
            self._unprepared.discard(key)
            if not self._unprepared:
                self._connection.prepared()

    def _note_known(self, key: int) -> None:
        self._unknown.discard(key)
        if not self._unknown and self._connection is not None:
            self._connection.claimed()

    def restored(self) -> None:
        """Drop what is written so far: the client has it."""
        if self._connection is not None:
            self._connection.restored()

    async def commit(self, places: Sequence[Place], num_events: int, on_more: Callable[[], None]) -> None:
        """Commit what was written, with the places that the choices are shown up to by it. Where much is not sent, wait: a client that
        reads slowly leaves little of its answer in a row. ``on_more``: it has taken more. Raises: ConnectionResetError."""
        if self._connection is not None:
            self._connection.commit(places, num_events)
            await self._connection.drained(on_more, AHEAD_BYTES)

    async def finish(self, response: web.StreamResponse, on_more: Callable[[], None]) -> None:
        """Commit the end of a stream, and wait until it is sent. Raises: ConnectionResetError."""
        if self._connection is not None:
            self._connection.answered(bool(response.keep_alive))
            await self._connection.drained(on_more)

    def release(self, requests: Sequence[ClientRequest]) -> None:
        """Let the controller know the ends of its requests once the answer is committed, or the client is gone."""

        def tell() -> None:
            for request in requests:
                request.release(time.monotonic())

        if self._connection is not None:
            self._connection.after_answer(tell)
