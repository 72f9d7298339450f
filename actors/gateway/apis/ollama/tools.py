"""Functions in Ollama's API: calls in messages of the assistant, in a conversation and in answers. Pure."""

from typing import Any

from .....models.text.tool_calls import CallPiece
from ...reading.field_rules import settle
from ...reading.field_table import ollama as table
from ...reading.fields import Fields
from ...reading.harmless import OBJECT
from ...reading.tool_fields import read_name
from ...reading.tool_messages import MAX_ID_CHARS, Call, arguments_as_sent, check_arguments, entries_of_calls


def read_calls(value: Any, path: str) -> tuple[Call, ...]:
    """Validate ``tool_calls``; empty and absent ones are the same. Clients may leave out the ids. Raises: RequestError."""
    return tuple(_read_call(entry, f"{path}[{at}]", f"call_{at}") for at, entry in enumerate(entries_of_calls(value, path)))


def _read_call(value: Any, path: str, default_id: str) -> Call:
    fields = Fields(value, path)
    id = fields.take_str("id", MAX_ID_CHARS) or default_id
    function = Fields(fields.take_required("function"), fields.path("function"))
    settle(fields, table.CALL)
    name, given = read_name(function), function.take_required("arguments", OBJECT.schema)
    arguments = check_arguments(given, function.path("arguments"))
    settle(function, table.CALLED)
    return Call(id, name, arguments)


def shown_call(call: CallPiece, id: str) -> dict[str, Any]:
    """Return a whole call as answers have it."""
    function = {"index": call.number, "name": call.name, "arguments": arguments_as_sent(call.arguments)}
    return {"id": id, "function": function}
