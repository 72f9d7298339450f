"""Responses of OpenAI's Responses API that clients may ask for or go on with, in the run's kept answers."""

import logging
from typing import NamedTuple

import msgspec

from ...keeping.kept_answers import KeptAnswers
from ...reading.content import Conversation
from ...reading.fields import show
from .background import Played
from .input_items import Item
from .stored_conversation import StoredConversation

log = logging.getLogger(__name__)

NO_OUTPUT = b'{"output":[]}'


class StoredResponse(NamedTuple):
    """A response: the conversation that ends with it, its JSON, and the items before it. ``played``: of one in the background."""

    conversation: Conversation
    body: bytes
    items: tuple[Item, ...]
    played: Played | None = None


class _Stored(msgspec.Struct, array_like=True, frozen=True):
    conversation: StoredConversation
    body: bytes
    items: tuple[Item, ...]
    played: Played | None = None


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

    def put_played(self, tenant: bytes, conversation: StoredConversation, body: bytes, items: tuple[Item, ...], played: Played) -> bool:
        """Keep one that was in the background, in place of what is kept of it so far. Returns whether there was room."""
        return self._kept.put(tenant, played.form.id, _encode(_Stored(conversation, body, items, played)))

    def get(self, tenant: bytes, id: str) -> StoredResponse | None:
        """Return a response, None if it is not there."""
        if (answer := self._kept.get(tenant, id)) is None or answer.is_open or (data := self._kept.body(answer)) is None:
            return None
        try:
            stored = _decode(data)
        except msgspec.DecodeError as error:
            log.error("%s cannot be read: %s", id, error)
            return None
        return StoredResponse(stored.conversation.restored(), stored.body, stored.items, stored.played)

    def remove(self, tenant: bytes, id: str) -> bool:
        """Forget a response. Returns whether it was there."""
        return self._kept.remove(tenant, id)

    def why_unknown(self, id: str, tenant: bytes | None = None) -> str:
        """Return words for a client that names a response that is not there, or, of its ``tenant``, has not ended."""
        if tenant is not None and self._kept.get(tenant, id) is not None:
            return f"{show(id)} has not ended: wait until its status is completed"
        limit, hours = self._kept.max_bytes >> 20, self._kept.kept_s / 3600
        return f"{show(id)} is unknown: the latest {limit} MiB of conversations are kept, for {hours:g} h, until the run ends"
