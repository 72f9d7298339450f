"""Responses of OpenAI's Responses API that clients may ask for or go on with, in the run's kept answers."""

import logging
from typing import NamedTuple

import msgspec

from .....schema.media import MediaKind, MediaOptions
from .....shm.spool import whole
from ...keeping.kept_answers import KeptAnswers
from ...reading.content import Conversation, Message
from ...reading.fields import show
from ...reading.media import Medium
from ...reading.tool_messages import Call
from .input_items import Item

log = logging.getLogger(__name__)

NO_OUTPUT = b'{"output":[]}'


class StoredResponse(NamedTuple):
    """A response: the conversation that ends with it, its JSON, and the items before it."""

    conversation: Conversation
    body: bytes
    items: tuple[Item, ...]


class _Call(NamedTuple):
    """``arguments``: their JSON, which has numbers that records have not."""

    id: str
    name: str
    arguments: bytes


class _Medium(NamedTuple):
    """As ``Medium``; each of ``pieces`` is a URL, or bytes."""

    kind: MediaKind
    mime: str
    data: bytes
    options: MediaOptions
    path: str
    content: bytes
    num_pixels: int
    work: int
    pieces: tuple[tuple[str, bytes], ...]
    rate: float
    num_pictures: int


class StoredConversation(msgspec.Struct, array_like=True, frozen=True):
    """A conversation as records have it. ``calls``: of each message."""

    messages: tuple[Message, ...]
    calls: tuple[tuple[_Call, ...], ...]
    media: tuple[_Medium, ...]

    @classmethod
    def of(cls, conversation: Conversation) -> "StoredConversation":
        messages, media = conversation
        return cls(
            tuple(message._replace(calls=()) for message in messages),
            tuple(tuple(_Call(id, name, _encode_json(given)) for id, name, given in message.calls) for message in messages),
            tuple(_kept_medium(medium) for medium in media),
        )

    def restored(self) -> Conversation:
        calls = (tuple(Call(id, name, _decode_json(given)) for id, name, given in one) for one in self.calls)
        return Conversation(
            tuple(message._replace(calls=found) for message, found in zip(self.messages, calls, strict=True)),
            tuple(_medium_of(medium) for medium in self.media),
        )


def _kept_medium(medium: Medium) -> _Medium:
    pieces = tuple((piece, b"") if isinstance(piece, str) else ("", whole(piece)) for piece in medium.pieces)
    return _Medium(medium.kind, medium.mime, whole(medium.data), *medium[3:8], pieces, *medium[9:])


def _medium_of(kept: _Medium) -> Medium:
    return Medium(*kept[:8], tuple(url or data for url, data in kept.pieces), *kept[9:])


class _Stored(msgspec.Struct, array_like=True, frozen=True):
    conversation: StoredConversation
    body: bytes
    items: tuple[Item, ...]


_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Stored).decode


class StoredResponses:
    """Responses by tenant and id. Media count in each response whose conversation has them. Threads may share it."""

    def __init__(self, kept: KeptAnswers) -> None:
        self._kept = kept

    def put(self, tenant: bytes, id: str, conversation: Conversation, body: bytes = NO_OUTPUT, items: tuple[Item, ...] = ()) -> None:
        """Keep a new response, unless it alone is too large."""
        if sum(len(medium.data) for medium in conversation.media) > self._kept.max_bytes:
            return
        self._kept.put(tenant, id, _encode(_Stored(StoredConversation.of(conversation), body, items)))

    def get(self, tenant: bytes, id: str) -> StoredResponse | None:
        """Return a response, None if it is not there."""
        if (answer := self._kept.get(tenant, id)) is None or answer.is_open or (data := self._kept.body(answer)) is None:
            return None
        try:
            stored = _decode(data)
        except msgspec.DecodeError as error:
            log.error("%s cannot be read: %s", id, error)
            return None
        return StoredResponse(stored.conversation.restored(), stored.body, stored.items)

    def remove(self, tenant: bytes, id: str) -> bool:
        """Forget a response. Returns whether it was there."""
        return self._kept.remove(tenant, id)

    def why_unknown(self, id: str) -> str:
        """Return words for a client that names a response that is not there."""
        limit, hours = self._kept.max_bytes >> 20, self._kept.kept_s / 3600
        return f"{show(id)} is unknown: the latest {limit} MiB of conversations are kept, for {hours:g} h, until the run ends"
