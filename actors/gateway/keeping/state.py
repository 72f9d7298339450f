"""The state of a connection, as its gateway commits it for a successor (``shm/connection_records``). Pure.

All offsets count from the connection's beginning, over all its requests.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

_FORMAT = 1
_Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]


class RecordError(ValueError):
    """The record of a connection cannot be gone on with."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The place up to which a choice has been read for the client: bytes of its text (the last may be held back), tokens with
    log-probabilities, and ids."""

    num_bytes: _Offset = 0
    num_tokens: _Offset = 0
    num_ids: _Offset = 0
    has_begun: bool = False
    has_ended: bool = False


class OpenAnswer(msgspec.Struct, frozen=True, array_like=True):
    """An answer under way: its identity, and the keys of its requests at the controller. ``places``: of the choices, once bytes of it
    are committed; ``num_events``: that were numbered. Without keys it cannot be gone on with. ``is_prepared``: the controller has all
    that it needs of the media."""

    id: str
    created: int
    deadline_s: float
    keys: list[int]
    places: list[Place] = []
    num_events: int = 0
    is_prepared: bool = False

    @property
    def has_begun(self) -> bool:
        """Return whether the client has, or will get, a part of it."""
        return bool(self.places)


class ConnectionState(msgspec.Struct, array_like=True):
    """``received_from``, ``sent_from``: the offsets at the bases of the rings. ``request_at``: of the current request's first byte.
    ``written``: of the last byte for the client. ``closes``: the connection ends with these. ``is_told_to_continue``: the client of the
    current request is. ``answer``: to the current request. ``strikes``: deaths of gateways that it may have caused."""

    format: int = _FORMAT
    received_from: _Offset = 0
    sent_from: _Offset = 0
    request_at: _Offset = 0
    written: _Offset = 0
    closes: bool = False
    is_told_to_continue: bool = False
    answer: OpenAnswer | None = None
    strikes: int = 0

    def check(self, num_put: int, num_taken: int, sent_bytes: int, received_bytes: int) -> None:
        """Check it against the kernel's counts and the sizes of the rings. Raises: RecordError."""
        if not self.sent_from <= num_put <= self.written <= num_put + sent_bytes:
            raise RecordError(f"{num_put} bytes were sent, {self.written} from {self.sent_from} on are recorded")
        if not self.received_from <= min(num_taken, self.request_at) or num_taken > self.request_at + received_bytes:
            raise RecordError(f"{num_taken} bytes were received, a request at {self.request_at} is recorded")


encode_state = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ConnectionState).decode


def decode_state(data: bytes) -> ConnectionState:
    """Return the state of a record; that of a new connection for b"". Raises: RecordError."""
    if not data:
        return ConnectionState()
    try:
        state = _decode(data)
    except msgspec.DecodeError as error:
        raise RecordError(f"its state cannot be read: {error}") from None
    if state.format != _FORMAT:
        raise RecordError(f"its state has format {state.format}, this gateway's is {_FORMAT}")
    return state
