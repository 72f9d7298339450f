"""Responses of OpenAI's Responses API that clients may ask for or go on with: the latest, in the gateway's memory."""

import json
import threading
from collections import OrderedDict
from typing import NamedTuple

from ...reading.content import Conversation
from ...reading.fields import show
from .input_items import Item

MAX_STORED_BYTES = 64 << 20
NO_OUTPUT = b'{"output":[]}'
_VALUE_FACTOR = 64  # bytes of a value in memory, at most, for each of its JSON: a list of empty lists takes 20 to 40
_MESSAGE_BYTES = 1024  # of a message or a call, beside text and media


class StoredResponse(NamedTuple):
    """A response: the conversation that ends with it, its JSON, and the items before it."""

    conversation: Conversation
    body: bytes
    items: tuple[Item, ...]


class StoredResponses:
    """Responses by tenant and id, up to a number of bytes together: the oldest are forgotten first. Media count in each response whose
    conversation has them. Threads may share it."""

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._responses: OrderedDict[tuple[bytes, str], tuple[StoredResponse, int]] = OrderedDict()
        self._num_bytes = 0

    def put(self, tenant: bytes, id: str, conversation: Conversation, body: bytes = NO_OUTPUT, items: tuple[Item, ...] = ()) -> None:
        """Keep a new response, unless it alone is too large."""
        num_bytes = _num_bytes(conversation) + len(body) + sum(_MESSAGE_BYTES + len(item.shown) for item in items)
        if num_bytes > self.max_bytes:
            return
        with self._lock:
            self._responses[tenant, id] = StoredResponse(conversation, body, items), num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > self.max_bytes:
                self._num_bytes -= self._responses.popitem(last=False)[1][1]

    def get(self, tenant: bytes, id: str) -> StoredResponse | None:
        """Return a response, None if it is not there."""
        with self._lock:
            found = self._responses.get((tenant, id))
        return None if found is None else found[0]

    def remove(self, tenant: bytes, id: str) -> bool:
        """Forget a response. Returns whether it was there."""
        with self._lock:
            found = self._responses.pop((tenant, id), None)
            self._num_bytes -= 0 if found is None else found[1]
        return found is not None

    def why_unknown(self, id: str) -> str:
        """Return words for a client that names a response that is not there."""
        return f"{show(id)} is unknown: the latest {self.max_bytes >> 20} MiB of conversations are kept, until the gateway ends"


def _num_bytes(conversation: Conversation) -> int:
    texts = [
        part
        for message in conversation.messages
        for part in (message.thoughts, *((message.content,) if isinstance(message.content, str) else message.content))
    ]
    num_text_bytes = sum(4 * len(text) if isinstance(text, str) else _MESSAGE_BYTES for text in texts)
    calls = [call for message in conversation.messages for call in message.calls]
    num_text_bytes += sum(_MESSAGE_BYTES + _VALUE_FACTOR * len(json.dumps(call.arguments)) for call in calls)
    return num_text_bytes + _MESSAGE_BYTES * len(conversation.messages) + sum(len(medium.data) for medium in conversation.media)
