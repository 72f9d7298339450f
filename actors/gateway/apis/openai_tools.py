"""Functions in OpenAI's Responses API: ``tools``, ``tool_choice``, and items of calls and of their results. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..content import Message
from ..fields import Fields, refuse
from ..grammar_fields import AskedGrammar
from ..harmless import OBJECT, TEXT, Harmless, one_of, refuse_others
from ..media import MediaIntake
from ..tool_fields import (
    MODES,
    Tool,
    ToolChoice,
    ToolUse,
    allow_calls,
    read_function,
    read_is_single,
    read_mode,
    read_name,
    read_named,
    take_list,
)
from ..tool_messages import MAX_CALLS, Call, arguments_of, check_known, read_id
from .openai_parts import read_content

_IGNORED_OF_TOOLS: Mapping[str, Harmless] = {
    "allowed_callers": one_of(["direct"]),
    "async": one_of(False),
    "defer_loading": one_of(False),
    "output_schema": OBJECT,
}
_IGNORED_OF_CALLS: Mapping[str, Harmless] = {"id": TEXT, "status": TEXT, "caller": one_of({"type": "direct"})}
_IGNORED_OF_RESULTS: Mapping[str, Harmless] = {**_IGNORED_OF_CALLS, "name": TEXT}


def read_tools(fields: Fields, answer: AskedGrammar | None) -> tuple[ToolUse | None, AskedGrammar | None]:
    """Take the fields. Returns and raises: as ``allow_calls``."""
    tools = take_list(fields, _read_tool)
    choice = _read_choice(fields.take("tool_choice", MODES), tools)
    return allow_calls(tools, choice, read_is_single(fields), answer)


def _read_tool(value: Any, at: int) -> Tool:
    fields = Fields(value, f"tools[{at}]")
    fields.take_choice("type", ("function",))
    tool = read_function(fields, "parameters", f"/{at}")
    refuse_others(fields, _IGNORED_OF_TOOLS)
    return tool


def _read_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    if value is None or isinstance(value, str):
        return read_mode(value)
    fields = Fields(value, "tool_choice")
    fields.take_choice("type", ("function",))
    return read_named(fields, tools)


class CallItems:
    """Reads the items of calls and of their results into ``messages``, a conversation that goes on. ``intake`` reads media."""

    def __init__(self, earlier: Sequence[Message], intake: MediaIntake) -> None:
        self.messages = list(earlier)
        self._intake = intake
        self._call_ids = {call.id for message in earlier for call in message.calls}

    def read(self, kind: Any, item: Fields) -> bool:
        """Read an item. Returns whether its ``kind`` is one of these. Raises: RequestError."""
        if kind == "function_call":
            self._add(_read_call(item), item)
        elif kind == "function_call_output":
            id = read_id(item, "call_id")
            check_known(id, self._call_ids, item.path("call_id"))
            output = read_content(item.take_required("output"), item.path("output"), "tool", self._intake)
            refuse_others(item, _IGNORED_OF_RESULTS)
            self.messages.append(Message("tool", output or "", call_id=id))
        else:
            return False
        return True

    def _add(self, call: Call, item: Fields) -> None:
        """Add a call to the answer that it is a part of: the assistant's message before it, or one without text."""
        self._call_ids.add(call.id)
        if not self.messages or self.messages[-1].role != "assistant":
            self.messages.append(Message("assistant", ""))
        last = self.messages[-1]
        if len(last.calls) == MAX_CALLS:
            raise refuse(item.path("type"), f"is the {MAX_CALLS + 1}th function_call of one answer, the limit is {MAX_CALLS}")
        self.messages[-1] = last._replace(calls=(*last.calls, call))


def _read_call(item: Fields) -> Call:
    id, name, arguments = read_id(item, "call_id"), read_name(item), arguments_of(item.take_required_str("arguments"))
    refuse_others(item, _IGNORED_OF_CALLS)
    return Call(id, name, arguments)
