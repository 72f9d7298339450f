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
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if after_result:
                written[-1]["content"] += f"\n{text}"
            else:
                written.append({"role": "user", "content": text})
        else:
            written.append(_with_calls(message))
        after_result = is_result
    return _with_tools(written, tools) if tools else written


def _with_calls(message: Message) -> dict[str, Any]:
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [_call_text(call["function"]) for call in message.get("tool_calls", ())]
    return {**plain, "content": _appended(message["content"], "\n", "\n".join(calls))} if calls else plain


def _call_text(function: Mapping[str, Any]) -> str:
    return f'{OPENING}\n{{"name": "{function["name"]}", "arguments": {_json(function["arguments"])}}}\n{CLOSING}'


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]
    text = _BEFORE + "\n".join(map(_json, tools)) + _AFTER
    return [{**messages[0], "content": _appended(messages[0]["content"], "\n\n", text)}, *messages[1:]]


def _appended(content: Any, between: str, text: str) -> Any:
    """``content``, a string or a list of parts, with ``text`` at its end."""
    if isinstance(content, str):
        return f"{content}{between}{text}" if content else text
    return [*content, {"type": "text", "text": f"{between}{text}"}]


def _json(value: Any) -> str:
    """As ``tojson`` in a chat template."""
    return json.dumps(value, ensure_ascii=False)
