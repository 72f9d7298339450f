"""Functions in Anthropic's Messages API: ``tools``, ``tool_choice`` and blocks of calls. Pure."""

from collections.abc import Sequence
from typing import Any

from ...reading.field_rules import passes_over, settle
from ...reading.field_table import messages as table
from ...reading.fields import Fields
from ...reading.grammar_fields import AskedGrammar
from ...reading.harmless import OBJECT
from ...reading.tool_fields import Tool, ToolChoice, ToolUse, allow_calls, read_function, read_name, read_named, take_list
from ...reading.tool_messages import Call, check_arguments, read_id

_MODES = {"auto": "auto", "any": "required", "none": "none"}


def read_tools(fields: Fields, answer: AskedGrammar | None, max_bytes: int) -> tuple[ToolUse | None, AskedGrammar | None]:
    """Take the fields. Returns and raises: as ``allow_calls``."""
    tools = take_list(fields, _read_tool, max_bytes)
    choice, is_single = _read_choice(fields.take("tool_choice"), tools)
    return allow_calls(tools, choice, is_single, answer)


def _read_tool(value: Any, at: int) -> Sequence[Tool]:
    fields = Fields(value, f"tools[{at}]")
    kind = fields.take("type", {"const": "custom"}) or "custom"
    if passes_over(
        table.TOOL_KINDS, kind, f"tools[{at}]", "custom: tools that the client defines and runs, with name and input_schema"
    ):
        return ()
    tool = read_function(fields, "input_schema", f"/{at}", needs_schema=True)
    settle(fields, table.TOOL)
    return (tool,)


def _read_choice(value: Any, tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    """Return the choice, and whether there may be one call at most."""
    if value is None:
        return ToolChoice("auto"), False
    fields = Fields(value, "tool_choice")
    kind = fields.take_choice("type", (*_MODES, "tool"))
    is_single = fields.take_bool("disable_parallel_tool_use")
    if kind == "tool":
        return read_named(fields, tools), is_single
    settle(fields, table.CHOICE)
    return ToolChoice(_MODES[kind]), is_single


def read_call(block: Fields) -> Call:
    """Take what a block of type ``tool_use`` says. Raises: RequestError."""
    id, name = read_id(block, "id"), read_name(block)
    arguments = check_arguments(block.take_required("input", OBJECT.schema), block.path("input"))
    settle(block, table.CALL)
    return Call(id, name, arguments)
