"""Functions in Ollama's API: calls in messages of the assistant, in a conversation and in answers. Pure."""

from collections.abc import Mapping
from typing import Any

from ....models.text.tool_calls import CallPiece
from ..fields import Fields
from ..harmless import OBJECT, TEXT, Harmless, of_type, one_of, refuse_others
from ..tool_fields import read_name
from ..tool_messages import MAX_ID_CHARS, Call, arguments_as_sent, check_arguments, entries_of_calls

_IGNORED_OF_CALLS: Mapping[str, Harmless] = {"type": one_of("function")}
_IGNORED_OF_FUNCTIONS: Mapping[str, Harmless] = {"index": of_type(int, "an integer", {"type": "integer"}), "description": TEXT}


def read_calls(value: Any, path: str) -> tuple[Call, ...]:
    """Validate ``tool_calls``; empty and absent ones are the same. Clients may leave out the ids. Raises: RequestError."""
    return tuple(_read_call(entry, f"{path}[{at}]", f"call_{at}") for at, entry in enumerate(entries_of_calls(value, path)))


def _read_call(value: Any, path: str, default_id: str) -> Call:
    fields = Fields(value, path)
    id = fields.take_str("id", MAX_ID_CHARS) or default_id
    function = Fields(fields.take_required("function"), fields.path("function"))
    refuse_others(fields, _IGNORED_OF_CALLS)
    name, given = read_name(function), function.take_required("arguments", OBJECT.schema)
    arguments = check_arguments(given, function.path("arguments"))
    refuse_others(function, _IGNORED_OF_FUNCTIONS)
    return Call(id, name, arguments)


def shown_call(call: CallPiece, id: str) -> dict[str, Any]:
    """Return a whole call as answers have it."""
    function = {"index": call.number, "name": call.name, "arguments": arguments_as_sent(call.arguments)}
    return {"id": id, "function": function}
