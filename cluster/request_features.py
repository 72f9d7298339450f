"""The features of a request that decide which node gets it (pure): its size, and keys of its beginnings (MS2, TI7).

Keys are a hash chain over the messages in blocks of 1 KiB, so that a later turn of a conversation has the keys of the turns before
it, and requests with an equal beginning share keys. The chain starts from the caller's credentials and ``cache_salt``, as the nodes'
own caches do. Media count with a fixed number of tokens, since nothing is decoded here. Ids of tokens count as they are. Of a body of
more than ``MAX_VALUES`` values the rest counts by its bytes: others wait while a body is read.
"""

import hashlib
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ..actors.gateway.apis.openai.responses_answer import response_of

BLOCK_BYTES = 1024
BYTES_PER_TOKEN = 4
MEDIA_TOKENS = {"image": 1000, "video": 8000, "audio": 500}
DEFAULT_ANSWER_TOKENS = 256
MAX_KEYS = 512  # of one request; the beginnings beyond them are not told apart
MAX_MEDIA = 64  # of one request; those beyond them count, and are not told apart
MAX_DEPTH = 16
MAX_VALUES = 1 << 16  # of one request; those beyond them are not told apart
MAX_ANSWER_TOKENS = 1 << 20  # no model gives more

_decode, _encode = msgspec.json.Decoder().decode, msgspec.json.encode
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Features(NamedTuple):
    """``keys``: of each beginning, with the tokens up to its end; ``media``: a digest and the tokens of each of the first media;
    ``response``: the id of a stored response, or of a stream, that the request goes on with."""

    text_tokens: int = 0
    media_tokens: int = 0
    answer_tokens: int = 0
    keys: tuple[tuple[bytes, int], ...] = ()
    media: tuple[tuple[bytes, int], ...] = ()
    response: str = ""


class _Medium(NamedTuple):
    digest: bytes
    tokens: int
    num_bytes: int


def read_features(body: bytes | bytearray, credentials: str) -> Features:
    """Return the features of a request's body. One that is no JSON object, or of another shape, has none: the node will answer."""
    try:
        fields = _decode(body)
        if not isinstance(fields, dict):
            return Features()
        digest = hashlib.sha256(_encode(credentials) + _encode(fields.get("cache_salt"))).digest()
    except (msgspec.MsgspecError, RecursionError):
        return Features()
    keys: list[tuple[bytes, int]] = []
    media: list[tuple[bytes, int]] = []
    num_bytes = media_tokens = media_bytes = 0
    reader = _Reader()
    for message in _messages(fields):
        if reader.num_left <= 0:
            break
        text = bytearray()
        for part in reader.parts(message):
            if isinstance(part, _Medium):
                media += [(part.digest, part.tokens)] if len(media) < MAX_MEDIA else []
                media_tokens += part.tokens
                media_bytes += part.num_bytes
                text += part.digest
            else:
                text += part
        for start in range(0, len(text), BLOCK_BYTES)[: MAX_KEYS - len(keys)]:
            block = text[start : start + BLOCK_BYTES]
            digest = hashlib.sha256(digest + block).digest()
            keys.append((digest, (num_bytes + start + len(block)) // BYTES_PER_TOKEN + media_tokens))
        num_bytes += len(text)
    if reader.num_left <= 0:
        num_bytes = max(num_bytes, len(body) - media_bytes)
    limit = next((fields[name] for name in _LIMITS if type(fields.get(name)) is int), DEFAULT_ANSWER_TOKENS)
    return Features(
        text_tokens=num_bytes // BYTES_PER_TOKEN,
        media_tokens=media_tokens,
        answer_tokens=max(0, min(limit, MAX_ANSWER_TOKENS)),
        keys=tuple(keys),
        media=tuple(media),
        response=_response_named(fields),
    )


def _response_named(fields: dict[str, Any]) -> str:
    """Return the id of the stored response that the request goes on with, or that the first item which it names is of."""
    if isinstance(id := fields.get("previous_response_id"), str):
        return id
    items = fields.get("input")
    for item in items if isinstance(items, list) else ():
        is_named = isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})
        if is_named and isinstance(item.get("id"), str):
            return response_of(item["id"])
    return ""


def _messages(fields: dict[str, Any]) -> Iterator[object]:
    """The parts of a prompt in order, in any of the endpoint's APIs."""
    for name in ("system", "instructions", "tools", "prompt"):
        if name in fields:
            yield fields[name]
    for name in ("messages", "input"):
        value = fields.get(name)
        yield from value if isinstance(value, list) else () if value is None else (value,)


class _Reader:
    """Reads messages. ``num_left``: values that it still looks at."""

    def __init__(self) -> None:
        self.num_left = MAX_VALUES

    def parts(self, message: object) -> list[bytes | _Medium]:
        """The texts, ids and media within a message, in order."""
        found: list[bytes | _Medium] = []
        self._read(message, 0, "image", found)
        return found

    def _read(self, value: object, depth: int, kind: str, found: list[bytes | _Medium]) -> None:
        """``kind`` is that of media below."""
        self.num_left -= 1
        if isinstance(value, str):
            found.append(_medium(value, kind) if value.startswith("data:") else value.encode())
        elif isinstance(value, list) and depth < MAX_DEPTH:
            if ids := _ids_in(value):
                found.append(ids)
                return
            for item in value[: max(0, self.num_left)]:
                self._read(item, depth + 1, kind, found)
        elif isinstance(value, dict) and depth < MAX_DEPTH:
            name = str(value.get("type", ""))
            kind = next((known for known in MEDIA_TOKENS if known in name), kind)
            for key, item in value.items():
                if self.num_left <= 0:
                    break
                if key in ("url", "image_url", "data", "images") and not isinstance(item, dict):
                    texts = item[: self.num_left] if isinstance(item, list) else [item]
                    self.num_left -= len(texts)
                    found += [_medium(text, kind) for text in texts if isinstance(text, str)]
                elif key not in ("type", "id"):
                    self._read(item, depth + 1, kind, found)


def _ids_in(values: list[Any]) -> bytes:
    """Return ids of tokens in as many bytes as tokens of a text have; nothing for other lists."""
    try:
        return array("I", values).tobytes()
    except (TypeError, OverflowError):
        return b""


def _medium(text: str, kind: str) -> _Medium:
    return _Medium(hashlib.sha256(text.encode()).digest(), MEDIA_TOKENS[kind], len(text))
