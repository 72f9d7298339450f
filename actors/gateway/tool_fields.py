"""Fields of a chat request for functions that the model may call: ``tools``, ``tool_choice`` and ``parallel_tool_calls``. Pure.

The calls of an answer are always valid, by a grammar, where they are required, where a function is ``strict``, and where there may be
one at most; otherwise the model is free to write what it likes.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...models.errors import GrammarError
from ...models.grammar.call_form import CallForm, Function, source_of_calls
from ...models.grammar.source import source_of_schema
from ...models.text.tool_calls import NAME
from .fields import Fields, kind_of, refuse, show
from .grammar_fields import AskedGrammar

MAX_TOOLS = 128
_SHOWN_NAMES = 8


class ToolUse(NamedTuple):
    """Functions that may be called. ``shown``: in OpenAI's form, for the chat template."""

    shown: tuple[dict[str, Any], ...]
    names: frozenset[str]


class _Tool(NamedTuple):
    shown: dict[str, Any]
    name: str
    schema: dict[str, Any]
    is_strict: bool


class _Choice(NamedTuple):
    """``name``: of the one function that must be called."""

    mode: str
    name: str | None = None


def read_tools(fields: Fields, answer: AskedGrammar | None) -> tuple[ToolUse | None, AskedGrammar | None]:
    """Take the fields. Returns the functions, None if none may be called, and the grammar of the answer. ``answer``: the grammar of one
    that calls none.

    Raises: RequestError.
    """
    tools = _read_tools(fields.take("tools"))
    choice = _read_choice(fields.take("tool_choice"), [tool.name for tool in tools])
    parallel = fields.take("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise refuse("parallel_tool_calls", f"expected true or false, got {show(parallel)}")
    if choice.mode == "required" and not tools:
        raise refuse("tool_choice", 'is "required", but there are no tools')
    if choice.mode == "none" or not tools:
        return None, answer
    use = ToolUse(tuple(tool.shown for tool in tools), frozenset(tool.name for tool in tools))
    is_required = choice.mode == "required"
    if not (is_required or parallel is False or answer is not None or any(tool.is_strict for tool in tools)):
        return use, None
    form = CallForm(
        functions=[
            Function(f"/{at}/function/parameters", tool.name, tool.schema if is_required or tool.is_strict else {"type": "object"})
            for at, tool in enumerate(tools)
            if choice.name in (None, tool.name)
        ],
        is_required=is_required,
        is_single=parallel is False or choice.name is not None,
        answer=None if answer is None or is_required else answer.source,
    )
    try:
        return use, AskedGrammar(source_of_calls(form), "tools", answer)
    except GrammarError as error:
        raise refuse("tools", f"{error.message}, all functions together") from None


def _read_tools(value: Any) -> list[_Tool]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise refuse("tools", f"expected an array, got {kind_of(value)}")
    if len(value) > MAX_TOOLS:
        raise refuse("tools", f"has {len(value)} entries, the limit is {MAX_TOOLS}")
    tools: list[_Tool] = []
    places: dict[str, int] = {}
    for at, entry in enumerate(value):
        tool = _read_tool(entry, f"tools[{at}]")
        if (first := places.setdefault(tool.name, at)) != at:
            raise refuse(f"tools[{at}].function.name", f"is {show(tool.name)}, as that of tools[{first}]")
        tools.append(tool)
    return tools


def _read_tool(value: Any, path: str) -> _Tool:
    fields = Fields(value, path)
    fields.take_choice("type", ("function",))
    function = Fields(fields.take_required("function"), fields.path("function"))
    fields.refuse_leftover()
    name = read_name(function)
    description = function.take_str("description")
    schema, is_strict = function.take("parameters"), function.take_bool("strict")
    function.refuse_leftover()
    shown: dict[str, Any] = {"name": name}
    if description is not None:
        shown["description"] = description
    if schema is not None:
        _check_schema(schema, function.path("parameters"))
        shown["parameters"] = schema
    return _Tool({"type": "function", "function": shown}, name, {"type": "object", "properties": {}, **(schema or {})}, is_strict)


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
    name = function.take_required("name")
    if not isinstance(name, str) or re.fullmatch(NAME, name) is None:
        raise refuse(function.path("name"), f"is {show(name)}, expected 1 to 64 letters, digits, _ and -")
    return name


def _read_choice(value: Any, names: Sequence[str]) -> _Choice:
    if value is None or isinstance(value, str):
        if value not in (None, "auto", "none", "required"):
            raise refuse("tool_choice", f"is {show(value)}, allowed are none, auto, required, and a function of tools as an object")
        return _Choice(value or "auto")
    fields = Fields(value, "tool_choice")
    fields.take_choice("type", ("function",))
    function = Fields(fields.take_required("function"), fields.path("function"))
    fields.refuse_leftover()
    name = read_name(function)
    function.refuse_leftover()
    if name not in names:
        known = ", ".join(names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")
        raise refuse(function.path("name"), f"is {show(name)}, but tools has {known or 'no function'}")
    return _Choice("required", name)
