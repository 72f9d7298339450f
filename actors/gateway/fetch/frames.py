"""The messages between the gateway and its fetch process, in frames: a length, and MessagePack. Bytes of media follow their frame."""

import asyncio
import struct
from typing import Annotated

import msgspec
from msgspec import Meta

from ....runtime.config.fetch import FetchSection

MAX_FETCHES = 64  # at a time
MAX_FETCHED_BYTES = 1 << 16  # of the message, without the medium
_LENGTH = struct.Struct("<I")


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Fetch a URL, the ``number``th; without one, forget that number: nobody waits for it any more."""

    number: int
    url: str = ""
    max_bytes: int = 0


class Fetched(msgspec.Struct, frozen=True, array_like=True):
    """The end of a fetch: so many bytes follow, or an error and its status. Number 0 says that the process is ready."""

    number: int
    num_bytes: Annotated[int, Meta(ge=0)] = 0
    error: str = ""
    status: int = 0


decode_ask = msgspec.msgpack.Decoder(Ask).decode
decode_fetched = msgspec.msgpack.Decoder(Fetched).decode
decode_rules = msgspec.msgpack.Decoder(FetchSection).decode


def frame(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


async def read_frame(source: asyncio.StreamReader, max_bytes: int | None = None) -> bytes:
    """Raises: EOFError, also for a longer frame than ``max_bytes``; OSError."""
    (num_bytes,) = _LENGTH.unpack(await source.readexactly(_LENGTH.size))
    if max_bytes is not None and num_bytes > max_bytes:
        raise EOFError(f"a frame of {num_bytes} bytes, the limit is {max_bytes}")
    return await source.readexactly(num_bytes)
