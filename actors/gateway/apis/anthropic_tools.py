"""Functions in Anthropic's Messages API: ``tools``, ``tool_choice`` and blocks of calls. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..fields import Fields, refuse, show
from ..grammar_fields import AskedGrammar
from ..harmless import FLAG, OBJECT, Harmless, of_type, one_of, refuse_others
from ..tool_fields import Tool, ToolChoice, ToolUse, allow_calls, read_function, read_name, read_named, take_list
from ..tool_messages import Call, check_arguments, read_id

_MODES = {"auto": "auto", "any": "required", "none": "none"}
_DIRECT = one_of({"type": "direct"})
_IGNORED_OF_TOOLS: Mapping[str, Harmless] = {
    "allowed_callers": one_of(["direct"]),
    "cache_control": OBJECT,
    "defer_loading": one_of(False),
    "eager_input_streaming": FLAG,  # arguments are always passed on as they come
    "input_examples": of_type(list, "an array", {"type": "array", "items": {}}),
}
_IGNORED_OF_CALLS: Mapping[str, Harmless] = {"cache_control": OBJECT, "caller": _DIRECT}


def read_tools(fields: Fields, answer: AskedGrammar | None) -> tuple[ToolUse | None, AskedGrammar | None]:
    """Take the fields. Returns and raises: as ``allow_calls``."""
    tools = take_list(fields, _read_tool)
    choice, is_single = _read_choice(fields.take("tool_choice"), tools)
    return allow_calls(tools, choice, is_single, answer)


def _read_tool(value: Any, at: int) -> Sequence[Tool]:
    fields = Fields(value, f"tools[{at}]")
    if (kind := fields.take("type", {"const": "custom"})) not in (None, "custom"):
        problem = f'is {show(kind)}, only "custom" is supported: tools that the client defines and runs, with name and input_schema'
        raise refuse(fields.path("type"), problem)
    tool = read_function(fields, "input_schema", f"/{at}", needs_schema=True)
    refuse_others(fields, _IGNORED_OF_TOOLS)
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
    fields.refuse_leftover()
    return ToolChoice(_MODES[kind]), is_single


def read_call(block: Fields) -> Call:
    """Take what a block of type ``tool_use`` says. Raises: RequestError."""
    id, name = read_id(block, "id"), read_name(block)
    arguments = check_arguments(block.take_required("input", OBJECT.schema), block.path("input"))
    refuse_others(block, _IGNORED_OF_CALLS)
    return Call(id, name, arguments)
