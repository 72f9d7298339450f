"""Functions, calls and results written out as text, for chat templates that have no place for them: those of Qwen2.5-VL and -Omni.

The words are those of Qwen2.5's own template for text, by which these models learned to call. Pure; the gateway's prompts use it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .tool_calls import CLOSING, OPENING

# Qwen2.5-VL's template puts this before a conversation without a system message.
DEFAULT_SYSTEM = "You are a helpful assistant."
_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_AFTER = f"""
</tools>

For each function call, return a json object with function name and arguments within {OPENING}{CLOSING} XML tags:
{OPENING}
{{"name": <function-name>, "arguments": <args-json-object>}}
{CLOSING}"""

Message = Mapping[str, Any]


def written_out(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with ``tools`` in the system message, calls in the assistant's text, and results as a user's."""
    written: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            result = _joined("<tool_response>\n", message["content"], "\n</tool_response>")
            if after_result:
                written[-1]["content"] = _joined(written[-1]["content"], "\n", result)
            else:
                written.append({"role": "user", "content": result})
        else:
            written.append(_with_calls(message))
        after_result = is_result
    return _with_tools(written, tools) if tools else written


def _with_calls(message: Message) -> dict[str, Any]:
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [_call_text(call["function"]) for call in message.get("tool_calls", ())]
    between = "\n" if message["content"] else ""
    return {**plain, "content": _joined(message["content"], between + "\n".join(calls))} if calls else plain


def _call_text(function: Mapping[str, Any]) -> str:
    return f'{OPENING}\n{{"name": "{function["name"]}", "arguments": {_json(function["arguments"])}}}\n{CLOSING}'


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]
    text = _BEFORE + "\n".join(map(_json, tools)) + _AFTER
    between = "\n\n" if messages[0]["content"] else ""
    return [{**messages[0], "content": _joined(messages[0]["content"], between + text)}, *messages[1:]]


def _joined(*contents: Any) -> Any:
    """Return contents one behind another, each a string or a list of parts: a string if all are."""
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    parts = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents if content]
    return [part for several in parts for part in several]


def _json(value: Any) -> str:
    """As ``tojson`` in a chat template."""
    return json.dumps(value, ensure_ascii=False)
