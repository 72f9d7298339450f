"""Calls and their results in a conversation: ``tool_calls`` of an assistant's message, ``tool_call_id`` of a tool's. Pure."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from ....models.errors import GrammarError
from ....models.grammar.source import check_depth
from .field_rules import settle
from .field_table import chat as table
from .fields import Fields, kind_of, refuse, show
from .tool_fields import read_name

MAX_CALLS = 128  # of one message
MAX_ID_CHARS = 256
INVALID_JSON = "INVALID_JSON"
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Call(NamedTuple):
    """A call that an earlier answer has made."""

    id: str
    name: str
    arguments: dict[str, Any]


class _Message(Protocol):
    @property
    def calls(self) -> tuple[Call, ...]: ...
    @property
    def call_id(self) -> str: ...


def read_calls(value: Any, path: str) -> tuple[Call, ...]:
    """Validate ``tool_calls``; empty and absent ones are the same. Raises: RequestError."""
    return tuple(_read_call(entry, f"{path}[{at}]") for at, entry in enumerate(entries_of_calls(value, path)))


def entries_of_calls(value: Any, path: str) -> list[Any]:
    """Return the entries of ``tool_calls``, each of which is still to be read. Raises: RequestError."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise refuse(path, f"expected an array, got {kind_of(value)}")
    if len(value) > MAX_CALLS:
        raise refuse(path, f"has {len(value)} entries, the limit is {MAX_CALLS}")
    return value


def _read_call(value: Any, path: str) -> Call:
    fields = Fields(value, path)
    fields.take("index", {})  # of a stream's deltas, which some clients keep
    fields.take_choice("type", ("function",))
    id = read_id(fields, "id")
    function = Fields(fields.take_required("function"), fields.path("function"))
    settle(fields, table.CALL)
    name = read_name(function)
    arguments = arguments_of(function.take_required_str("arguments"))
    settle(function, table.CALLED)
    return Call(id, name, arguments)


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call that the model has made, for its chat template. Those that are not the JSON of an object, or too
    deep, become one that holds their text, as Anthropic advises: the model may write so, and its client sends them back."""
    try:
        value = msgspec.json.decode(text or "{}")  # which knows neither NaN nor halves of characters
        check_depth(value)
    except (ValueError, RecursionError):  # GrammarErrors are ValueErrors
        return {INVALID_JSON: text}
    return value if isinstance(value, dict) else {INVALID_JSON: text}


def arguments_as_sent(text: str) -> msgspec.Raw | dict[str, str]:
    """Return the arguments of a whole call for an API that has them as an object: as they came if they are one, and otherwise as
    ``arguments_of``."""
    try:
        _decode_object(text)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return {INVALID_JSON: text}
    return msgspec.Raw(text.encode())


def read_id(fields: Fields, name: str) -> str:
    """Take the id of a call. Raises: RequestError."""
    fields.require(name)
    if not (id := fields.take_str(name, MAX_ID_CHARS)):
        raise refuse(fields.path(name), "is empty")
    return id


def check_results(messages: Sequence[_Message]) -> None:
    """Check that each result is of a call in an earlier message. Raises: RequestError."""
    known = set[str]()
    for at, message in enumerate(messages):
        if message.call_id:
            check_known(message.call_id, known, f"messages[{at}].tool_call_id")
        known.update(call.id for call in message.calls)


def check_known(id: str, known: Collection[str], path: str) -> None:
    """Check that a result is of a known call. Raises: RequestError."""
    if id not in known:
        raise refuse(path, f"is {show(id)}, no call before it has this id")


def check_arguments(value: Any, path: str) -> dict[str, Any]:
    """Return the arguments of a call, an object that is not too deep. Raises: RequestError."""
    if not isinstance(value, dict):
        raise refuse(path, f"expected an object, got {kind_of(value)}")
    try:
        check_depth(value)
    except GrammarError as error:
        raise refuse(path, error.message) from None
    return value
