"""The encoding of messages and records: the bases of their types, and what reads and writes them."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec

_Arguments = ParamSpec("_Arguments")
_Message = TypeVar("_Message")


class Wire(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages: tagged, positional, immutable."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Base of the parts of messages and shared-memory records."""


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


def checked(decode: Callable[_Arguments, _Message]) -> Callable[_Arguments, _Message]:
    """Wrap ``decode`` to raise DecodeError for every invalid message: msgspec raises other errors for bad UTF-8 and deep nesting."""

    def decode_checked(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Message:
        try:
            return decode(*arguments, **options)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from None

    return decode_checked
