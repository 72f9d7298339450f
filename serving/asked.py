"""What the front reads of a request (pure): the model, whether the answer is a stream, and Ollama's ``keep_alive``.

The body goes to the run as it came, which reads all of it. Here other fields are passed over without being taken apart.
"""

import math
import re
from typing import Any, NamedTuple

import msgspec

from ..actors.gateway.reading.fields import kind_of, refuse
from ..runtime.errors import RequestError

_STREAMED_BY_DEFAULT = ("/api/chat", "/api/generate")
_PARTS = re.compile(r"([0-9]+(?:\.[0-9]+)?)(h|ms|m|s|us|µs|ns)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


class Asked(NamedTuple):
    """``model``: None where the request names none. ``keep_s``: how long its client wants the model to stay without requests; None:
    it does not say, or nothing that can be read. ``is_empty``: there is nothing to answer, as when Ollama's clients load a model."""

    model: str | None = None
    is_stream: bool = False
    keep_s: float | None = None
    is_empty: bool = False


class _Fields(msgspec.Struct):
    model: Any = None
    name: Any = None  # of older clients of Ollama
    stream: Any = None
    keep_alive: Any = None
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Fields).decode
_NOTHING = (b"", b"[]", b'""', b"null")


def read_asked(path: str, body: bytes | bytearray) -> Asked:
    """Read a body of JSON. Raises: RequestError for one that is no JSON object, or names a model by something else than a text."""
    try:
        fields = _decode(body)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {str(error)[:200]}") from None
    path = path.rstrip("/")
    is_ollamas = path.startswith("/api/")
    field, model = ("name", fields.name) if fields.model is None and is_ollamas else ("model", fields.model)
    if model is not None and not isinstance(model, str):
        raise refuse(field, f"expected a string, got {kind_of(model)}")
    return Asked(
        model=model or None,
        is_stream=fields.stream is True or fields.stream is None and path in _STREAMED_BY_DEFAULT,
        keep_s=keep_alive_s(fields.keep_alive) if is_ollamas else None,
        is_empty=path in _STREAMED_BY_DEFAULT and bytes(fields.messages) in _NOTHING and bytes(fields.prompt) in _NOTHING,
    )


def keep_alive_s(value: object) -> float | None:
    """Return the seconds of Ollama's ``keep_alive``: a number of them, or a duration as "1h30m"; below 0 is for ever. None if it is
    neither."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return math.inf if value < 0 else float(value)
    if not isinstance(value, str):
        return None
    text = value.strip()
    sign, digits = text[:1] == "-", text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) < 16:
        return math.inf if sign and int(digits) else float(digits)
    parts = _PARTS.findall(digits)
    if not parts or "".join(number + unit for number, unit in parts) != digits:
        return None
    return math.inf if sign else sum(float(number) * _SECONDS[unit] for number, unit in parts)
