"""A conversation as records have it: without what MessagePack does not know. Pure."""

from typing import NamedTuple

import msgspec

from .....schema.media import MediaKind, MediaOptions
from .....shm.spool import whole
from ...reading.content import Conversation, Message
from ...reading.media import Medium
from ...reading.tool_messages import Call


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

    def with_answer(self, answer: Message) -> "StoredConversation":
        """Return it with one message more."""
        more = StoredConversation.of(Conversation((answer,), ()))
        return StoredConversation((*self.messages, *more.messages), (*self.calls, *more.calls), self.media)


def _kept_medium(medium: Medium) -> _Medium:
    pieces = tuple((piece, b"") if isinstance(piece, str) else ("", whole(piece)) for piece in medium.pieces)
    return _Medium(medium.kind, medium.mime, whole(medium.data), *medium[3:8], pieces, *medium[9:])


def _medium_of(kept: _Medium) -> Medium:
    return Medium(*kept[:8], tuple(url or data for url, data in kept.pieces), *kept[9:])


_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode
