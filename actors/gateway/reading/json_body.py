"""Parse a body's bytes into a JSON object, or refuse them before they delay other requests.

Pure. msgspec decodes without letting another thread run, the event loop's included, so its input is bounded beforehand by a scan
that lets others run. Base64 costs next to nothing and is not bounded here.
"""

import math
import string
from typing import Any, NamedTuple

import msgspec

from ....runtime.errors import RequestError
from .fields import Example, kind_of

Body = bytes | bytearray | Example  # as received, or an example for the description of the endpoint

_WINDOW_BYTES = 1 << 12  # a medium counts as text by up to two windows, at its ends
_BASE64 = (string.ascii_letters + string.digits + "+/=-_").encode()  # of both alphabets
_BYTES_PER_ESCAPE = 16  # of base64 in lines, at least: with \r\n the shortest that anybody writes have twice as many
_MAX_NUMBER_CHARS = 1000


class BodyLimits(NamedTuple):
    """``elements``: commas and opening brackets, those in strings too. ``text_bytes``: everything except runs of base64."""

    elements: int
    text_bytes: int

    @classmethod
    def of(cls, max_context: int, max_items: int) -> "BodyLimits":
        """Room for a prompt that fills the context, as text with all characters escaped or as ids, and for so many media. The larger
        a body these let through, the longer decoding it keeps the loop: 0.1 s at most with contexts of up to 65536 tokens."""
        return cls(max(1 << 17, 2 * max_context), max(4 << 20, 8 * max_context + 2 * _WINDOW_BYTES * max_items))


def decode_body(body: Body, limits: BodyLimits) -> dict[str, Any]:
    """Parse JSON; an example comes parsed. Raises RequestError for anything except an object within the limits: bad syntax, bad UTF-8,
    nesting too deep, NaN, 1e999."""
    if isinstance(body, Example):
        return body
    _check_size(body, limits)
    if not body or body.isspace():
        raise RequestError("the body is empty, expected a JSON object")
    try:
        value = _decode(body)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason}") from None
    except ValueError as error:  # msgspec's DecodeError, and Python's limit on the digits of an integer
        raise RequestError(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {kind_of(value)}")
    return value


def _check_size(body: bytes | bytearray, limits: BodyLimits) -> None:
    num_bytes = num_elements = 0
    for at in range(0, len(body), _WINDOW_BYTES):
        window = body[at : at + _WINDOW_BYTES]
        others = window.translate(None, _BASE64)
        if not others or (len(others) * _BYTES_PER_ESCAPE <= len(window) and not others.strip(b"\\")):
            continue
        num_bytes += len(window)
        num_elements += window.count(b",") + window.count(b"[") + window.count(b"{")
        if num_bytes > limits.text_bytes:
            raise RequestError(f"the body has more than {limits.text_bytes} bytes of text outside base64")
        if num_elements > limits.elements:
            raise RequestError(f"the body has more than {limits.elements} elements")


def _read_float(text: str) -> float:
    """Read as msgspec does, which takes ten times as long for numbers of many digits and lets no other thread run meanwhile."""
    if len(text) > _MAX_NUMBER_CHARS:
        raise ValueError(f"a number of {len(text)} characters, the limit is {_MAX_NUMBER_CHARS}")
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number out of range: {text[:40]}")
    return value


_decode = msgspec.json.Decoder(float_hook=_read_float).decode
