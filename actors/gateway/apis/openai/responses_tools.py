"""Functions in OpenAI's Responses API: ``tools``, ``tool_choice``, and items of answers: calls, their results, thoughts. Pure."""

import re
from collections.abc import Sequence
from typing import Any

from .....models.text.tool_calls import NAME
from ...reading.content import Message
from ...reading.field_rules import passes_over, settle
from ...reading.field_table import responses as table
from ...reading.fields import AT_LEAST_ONE, Fields, kind_of, refuse
from ...reading.grammar_fields import AskedGrammar
from ...reading.ignored import note
from ...reading.media import MediaIntake
from ...reading.tool_fields import (
    CHOICES,
    MODES,
    Tool,
    ToolChoice,
    ToolUse,
    allow_calls,
    read_allowed,
    read_function,
    read_is_single,
    read_mode,
    read_name,
    read_named,
    take_list,
)
from ...reading.tool_messages import MAX_CALLS, Call, arguments_of, check_known, read_id
from .responses_parts import read_content

_NAMESPACE = "namespace"


def read_tools(fields: Fields, answer: AskedGrammar | None, max_bytes: int) -> tuple[ToolUse | None, AskedGrammar | None]:
    """Take the fields. Returns and raises: as ``allow_calls``."""
    tools = take_list(fields, _read_entry, max_bytes)
    choice = _read_choice(fields.take("tool_choice", MODES), tools)
    return allow_calls(tools, choice, read_is_single(fields), answer)


def _read_entry(value: Any, at: int) -> Sequence[Tool]:
    """Read an entry of ``tools``: a function, the functions of a namespace, or a search, which this server does not have."""
    fields = Fields(value, path := f"tools[{at}]")
    kind = fields.take_required("type", {"enum": [*table.TOOL_KINDS.used, *table.SEARCHES]})
    if kind not in table.SEARCHES and passes_over(table.TOOL_KINDS, kind, path, ", ".join([*table.TOOL_KINDS.used, table.SEARCHES[0]])):
        return ()
    if kind in table.SEARCHES:  # with strict fields as well: Codex offers one by default
        note(f"{path}.{kind}", table.TOOL_KINDS.without[kind])
        return ()
    return _read_namespace(fields, path, at) if kind == _NAMESPACE else (_read_tool(fields, f"/{at}"),)


def _read_tool(fields: Fields, pointer: str) -> Tool:
    tool = read_function(fields, "parameters", pointer)
    settle(fields, table.FUNCTION)
    return tool


def _read_namespace(fields: Fields, path: str, at: int) -> list[Tool]:
    """Read the functions of a namespace. The model knows them as NAMESPACE.NAME; the first is described with the namespace."""
    namespace, about = read_name(fields), fields.take_str("description")
    entries = fields.take_required("tools", AT_LEAST_ONE)
    settle(fields, table.NAMESPACE)
    if not isinstance(entries, list):
        raise refuse(f"{path}.tools", f"expected an array, got {kind_of(entries)}")
    tools: list[Tool] = []
    for number, value in enumerate(entries):
        entry = Fields(value, f"{path}.tools[{number}]")
        entry.take_choice("type", ("function",))
        tool = _read_tool(entry, f"/{at}/tools/{number}")
        shown = {**tool.shown["function"], "name": joined(namespace, tool.name, tool.name_path)}
        if about and not tools:
            shown["description"] = f"{about}\n\n{shown.get('description', '')}".rstrip()
        tools.append(tool._replace(name=shown["name"], shown={"type": "function", "function": shown}))
    return tools


def joined(namespace: str, name: str, path: str) -> str:
    """Return the name by which the model knows a function of a namespace. Raises: RequestError about ``path`` if it is too long."""
    if re.fullmatch(NAME, whole := f"{namespace}.{name}") is None:
        raise refuse(path, f"has {len(whole)} characters with its namespace, the limit is 128")
    return whole


def namespaces_of(tools: Any) -> dict[str, tuple[str, str]]:
    """Return namespace and name of each function in a namespace of valid ``tools``, by the name that the model knows."""
    spaces = [tool for tool in tools or () if tool["type"] == _NAMESPACE]
    return {f"{space['name']}.{one['name']}": (space["name"], one["name"]) for space in spaces for one in space["tools"]}


def offered(tools: Any) -> list[Any]:
    """Return those of valid ``tools`` that the model sees."""
    return [tool for tool in tools or () if tool["type"] in table.TOOL_KINDS.used]


def _read_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    if value is None or isinstance(value, str):
        return read_mode(value)
    fields = Fields(value, "tool_choice")
    if fields.take_choice("type", CHOICES) == "function":
        return read_named(fields, tools)
    return read_allowed(fields, lambda entry: entry, tools)


class AnswerItems:
    """Reads the items of calls, of their results and of thoughts into ``messages``, a conversation that goes on. Thoughts belong to
    what the assistant says next. ``intake`` reads media."""

    def __init__(self, earlier: Sequence[Message], intake: MediaIntake) -> None:
        self.messages = list(earlier)
        self._intake = intake
        self._call_ids = {call.id for message in earlier for call in message.calls}
        self._thoughts: list[str] = []  # of an answer whose other items are to come

    def read(self, kind: Any, item: Fields) -> bool:
        """Read an item. Returns whether its ``kind`` is one of these. Raises: RequestError."""
        if kind == "function_call":
            self._add_call(_read_call(item), item)
        elif kind == "reasoning":
            self._thoughts += _read_thoughts(item)
        elif kind == "function_call_output":
            id = read_id(item, "call_id")
            check_known(id, self._call_ids, item.path("call_id"))
            output = read_content(item.take("output"), item.path("output"), "tool", self._intake)
            settle(item, table.RESULT)
            self.messages.append(Message("tool", output or "", call_id=id))
        else:
            return False
        return True

    def add(self, message: Message) -> None:
        """Add a message. Thoughts behind which the assistant says nothing are an answer."""
        if message.role == "assistant":
            message = self._with_thoughts(message)
        elif self._thoughts:
            self.messages.append(self._with_thoughts(Message("assistant", "")))
        self.messages.append(message)

    def _with_thoughts(self, message: Message) -> Message:
        """Return the message with the thoughts that came before it."""
        field = "input[].content" if any(self._thoughts) else message.thoughts_field
        told, self._thoughts = [message.thoughts, *self._thoughts], []
        return message._replace(thoughts="\n".join(filter(None, told)), thoughts_field=field)

    def _add_call(self, call: Call, item: Fields) -> None:
        """Add a call to the answer that it is a part of: the assistant's message before it, or one without text."""
        self._call_ids.add(call.id)
        if not self.messages or self.messages[-1].role != "assistant":
            self.messages.append(Message("assistant", ""))
        last = self._with_thoughts(self.messages[-1])
        if len(last.calls) == MAX_CALLS:
            raise refuse(item.path("type"), f"is the {MAX_CALLS + 1}th function_call of one answer, the limit is {MAX_CALLS}")
        self.messages[-1] = last._replace(calls=(*last.calls, call))


def _read_thoughts(item: Fields) -> list[str]:
    """Read the parts of an item of thoughts. Those of other servers' answers have none: a summary says something else."""
    texts, value = list[str](), item.take("content")
    if not isinstance(value, list | None):
        raise refuse(item.path("content"), f"expected an array of parts, got {kind_of(value)}")
    for at, one in enumerate(value or ()):
        part = Fields(one, f"{item.path('content')}[{at}]")
        part.take_choice("type", ("reasoning_text",))
        texts.append(part.take_required_str("text"))
        settle(part, table.THOUGHT)
    settle(item, table.REASONING)
    return texts


def _read_call(item: Fields) -> Call:
    id, name, arguments = read_id(item, "call_id"), read_name(item), arguments_of(item.take_required_str("arguments"))
    if namespace := item.take_str("namespace"):
        name = joined(namespace, name, item.path("namespace"))
    settle(item, table.CALL)
    return Call(id, name, arguments)
