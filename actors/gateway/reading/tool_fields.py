"""Functions that the model may call: ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat request, and what the other
APIs' fields of that kind have in common with them. Pure.

The calls of an answer are always valid, by a grammar, where they are required, where a function is ``strict``, and where there may be
one at most; otherwise the model is free to write what it likes.
"""

import re
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from ....models.errors import GrammarError
from ....models.grammar.call_form import CallForm, Function, source_of_calls
from ....models.grammar.source import source_of_schema
from ....models.text.tool_calls import NAME
from .field_rules import passes_over, settle
from .field_table import chat as table
from .field_table.common import CHOICE
from .fields import AT_LEAST_ONE, OBJECT, Fields, Schema, kind_of, refuse, show
from .grammar_fields import AskedGrammar

CHOICES = ("function", "allowed_tools")  # of tool_choice as an object
MODES: Schema = {"enum": ["auto", "none", "required"]}
_SHOWN_NAMES = 8
_encode = msgspec.json.Encoder().encode


class ToolUse(NamedTuple):
    """Functions that may be called. ``shown``: in OpenAI's form, for the chat template."""

    shown: tuple[dict[str, Any], ...]
    names: frozenset[str]


class Tool(NamedTuple):
    """A function. ``schema``: of its arguments. ``name_path``: the field of its name; ``pointer``: the place of its schema in
    ``tools``."""

    shown: dict[str, Any]
    name: str
    schema: dict[str, Any]
    is_strict: bool
    name_path: str
    pointer: str


class ToolChoice(NamedTuple):
    """``mode``: "auto", "none" or "required". ``names``: of the functions that may be called; None: of all. ``is_single``: one call at
    most."""

    mode: str
    names: frozenset[str] | None = None
    is_single: bool = False


def read_tools(fields: Fields, answer: AskedGrammar | None, max_bytes: int) -> tuple[ToolUse | None, AskedGrammar | None]:
    """Take the fields of chat completions. Returns and raises: as ``allow_calls``."""
    tools = take_list(fields, _read_tool, max_bytes)
    choice = _read_choice(fields.take("tool_choice", MODES), tools)
    return allow_calls(tools, choice, read_is_single(fields), answer)


def allow_calls(
    tools: Sequence[Tool], choice: ToolChoice, is_single: bool, answer: AskedGrammar | None
) -> tuple[ToolUse | None, AskedGrammar | None]:
    """Return the functions, None if none may be called, and the grammar of the answer. ``is_single``: one call at most. ``answer``:
    the grammar of one that calls none.

    Raises: RequestError.
    """
    if choice.mode == "required" and not tools:
        raise refuse("tool_choice", "requires a call, but there are no tools")
    if choice.mode == "none" or not tools:
        return None, answer
    allowed = [tool for tool in tools if choice.names is None or tool.name in choice.names]
    use = ToolUse(tuple(tool.shown for tool in tools), frozenset(tool.name for tool in allowed))
    is_required = choice.mode == "required"
    is_free = choice.names is None and not any(tool.is_strict for tool in allowed)
    if is_free and not (is_required or is_single or answer is not None):
        return use, None
    form = CallForm(
        functions=[
            Function(tool.pointer, tool.name, tool.schema, tool.is_strict)
            if is_required or tool.is_strict
            else Function(tool.pointer, tool.name, {"type": "object"})
            for tool in allowed
        ],
        is_required=is_required,
        is_single=is_single or choice.is_single,
        answer=None if answer is None or is_required else answer.source,
    )
    try:
        return use, AskedGrammar(source_of_calls(form), "tools", answer, leaves_text=not is_required and answer is None)
    except GrammarError as error:
        raise refuse("tools", f"{error.message}, all functions together") from None


def take_list(fields: Fields, read_entry: Callable[[Any, int], Sequence[Tool]], max_bytes: int) -> list[Tool]:
    """Take ``tools``, each entry with its index by ``read_entry``. ``max_bytes``: of all together, as JSON. Raises: RequestError."""
    value = fields.take("tools", {"type": "array"})
    if value is None:
        return []
    if not isinstance(value, list):
        raise refuse("tools", f"expected an array, got {kind_of(value)}")
    tools: list[Tool] = []
    places: dict[str, int] = {}
    for at, entry in enumerate(value):
        for tool in read_entry(entry, at):
            if tool.name in places:
                raise refuse(tool.name_path, f"is {show(tool.name)}, as that of tools[{places[tool.name]}]")
            places[tool.name] = at
            tools.append(tool)
    if (num_bytes := len(_encode([tool.shown for tool in tools]))) > max_bytes:
        raise refuse("tools", f"has {num_bytes} bytes of functions, the limit is {max_bytes} (server.max_tool_schema_kib)")
    return tools


def _read_tool(value: Any, at: int) -> Sequence[Tool]:
    fields = Fields(value, f"tools[{at}]")
    kinds = table.TOOL_KINDS
    if passes_over(kinds, fields.take_required("type", {"enum": list(kinds.used)}), fields.path("")[:-1]):
        return ()
    function = Fields(fields.take_required("function"), fields.path("function"))
    settle(fields, table.TOOL)
    tool = read_function(function, "parameters", f"/{at}/function")
    settle(function, table.FUNCTION)
    return (tool,)


def read_function(function: Fields, schema_field: str, pointer: str, needs_schema: bool = False) -> Tool:
    """Take name, description, schema and ``strict`` of a function. ``pointer``: its place in ``tools``. Raises: RequestError."""
    name = read_name(function)
    description = function.take_str("description")
    schema = (function.take_required if needs_schema else function.take)(schema_field, OBJECT)
    is_strict = function.take_bool("strict")
    shown: dict[str, Any] = {"name": name}
    if description is not None:
        shown["description"] = description
    if schema is not None:
        _check_schema(schema, function.path(schema_field))
        shown["parameters"] = schema
    arguments = {"type": "object", **(schema or {"properties": {}})}
    form = {"type": "function", "function": shown}
    return Tool(form, name, arguments, is_strict, function.path("name"), f"{pointer}/{schema_field}")


def _check_schema(schema: Any, path: str) -> None:
    """Check size and depth, and that it describes an object. Raises: RequestError."""
    if not isinstance(schema, dict):
        raise refuse(path, f"expected an object, got {kind_of(schema)}")
    if (kind := schema.get("type", "object")) != "object":
        raise refuse(f"{path}.type", f'is {show(kind)}, arguments are an object: only "object" is supported')
    try:
        source_of_schema(schema)
    except GrammarError as error:
        raise refuse(path, error.message) from None


def read_name(function: Fields) -> str:
    """Take the ``name`` of a function. Raises: RequestError."""
    name = function.take_required("name", {"type": "string", "pattern": f"^{NAME}$"})
    if not isinstance(name, str) or re.fullmatch(NAME, name) is None:
        raise refuse(function.path("name"), f"is {show(name)}, expected 1 to 128 letters, digits, _, - and .")
    return name


def read_is_single(fields: Fields) -> bool:
    """Take ``parallel_tool_calls``. Returns whether there may be one call at most. Raises: RequestError."""
    return fields.take_flag("parallel_tool_calls") is False


def _read_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    if value is None or isinstance(value, str):
        return read_mode(value)
    fields = Fields(value, "tool_choice")
    if fields.take_choice("type", CHOICES) == "function":
        function = Fields(fields.take_required("function"), fields.path("function"))
        settle(fields, CHOICE)
        return read_named(function, tools)
    allowed = Fields(fields.take_required("allowed_tools"), fields.path("allowed_tools"))
    settle(fields, CHOICE)
    return read_allowed(allowed, lambda entry: Fields(entry.take_required("function"), entry.path("function")), tools)


def read_mode(value: str | None) -> ToolChoice:
    """Read a choice that is a word. Raises: RequestError."""
    if value is not None and value not in MODES["enum"]:
        raise refuse("tool_choice", f"is {show(value)}, allowed are none, auto, required, and objects of a function or allowed_tools")
    return ToolChoice(value or "auto")


def read_named(function: Fields, tools: Sequence[Tool]) -> ToolChoice:
    """Take the name of the function that must be called, all that is in ``function``. Raises: RequestError."""
    return ToolChoice("required", frozenset((_take_known(function, _names_of(tools)),)), is_single=True)


def read_allowed(allowed: Fields, function_of: Callable[[Fields], Fields], tools: Sequence[Tool]) -> ToolChoice:
    """Take the functions that may be called, all that is in ``allowed``. ``function_of`` takes from an entry what holds its name.
    Raises: RequestError."""
    mode = allowed.take_choice("mode", ("auto", "required"))
    entries, path = allowed.take_required("tools", AT_LEAST_ONE), allowed.path("tools")
    settle(allowed, CHOICE)
    if not isinstance(entries, list):
        raise refuse(path, f"expected an array, got {kind_of(entries)}")
    if not 1 <= len(entries) <= len(tools):
        raise refuse(path, f"has {len(entries)} entries, allowed are 1 to {len(tools)}, the number of tools")
    names, known = set[str](), _names_of(tools)
    for at, value in enumerate(entries):
        entry = Fields(value, f"{path}[{at}]")
        entry.take_choice("type", ("function",))
        function = function_of(entry)
        names.add(_take_known(function, known))
        settle(entry, CHOICE)
    return ToolChoice(mode, frozenset(names))


def _names_of(tools: Sequence[Tool]) -> dict[str, None]:
    """Return the names of tools in their order."""
    return dict.fromkeys(tool.name for tool in tools)


def _take_known(function: Fields, names: Collection[str]) -> str:
    """Take one of these names of tools, all that is in ``function``. Raises: RequestError."""
    name = read_name(function)
    settle(function, CHOICE)
    if name not in names:
        known = ", ".join(islice(names, _SHOWN_NAMES)) + (", …" if len(names) > _SHOWN_NAMES else "")
        raise refuse(function.path("name"), f"is {show(name)}, but tools has {known or 'no function'}")
    return name
