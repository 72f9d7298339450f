"""Functions, calls and results in prompts: written out they are Qwen2.5's own words, and no text of a user becomes a control token."""

from pathlib import Path
from typing import Any

import pytest

from mmrt.models.errors import CheckpointError
from mmrt.models.text.chat_template import ChatTemplate
from mmrt.models.text.tokenizer import PromptGuard, Tokenizer
from mmrt.models.text.tool_prompt import DEFAULT_SYSTEM, written_out
from mmrt.tests.models.text.conftest import TEMPLATE

# Qwen2.5's (Apache-2.0), from its tokenizer_config.json.
QWEN2_5 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""  # noqa: E501


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": 'Of a "city" in Ü.', "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it raining?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("weather", {"city": "Würzburg", "days": [1, 2.5, None]}), call("now", {})],
    },
    {"role": "tool", "tool_call_id": "c", "content": "Rain."},
    {"role": "tool", "tool_call_id": "c", "content": "12:00"},
    {"role": "assistant", "content": "Yes. Tomorrow:", "tool_calls": [call("now", {"day": "<tomorrow>"})]},
    {"role": "tool", "tool_call_id": "c", "content": "24:00"},
    {"role": "assistant", "content": "At midnight."},
    {"role": "user", "content": "Thanks."},
]


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_written_out_as_qwen_does(checkpoint: Path, tools: list[dict[str, Any]], system: list[dict[str, Any]]) -> None:
    """Without the template's help, with its own template, and in transformers."""
    from transformers import AutoTokenizer

    messages = system + MESSAGES
    theirs = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    expected = theirs.apply_chat_template(
        messages, tools=tools or None, chat_template=QWEN2_5, tokenize=False, add_generation_prompt=True
    )
    knowing, plain = ChatTemplate(QWEN2_5), ChatTemplate(TEMPLATE)
    assert knowing.takes_tools and knowing.calls_are_known and not plain.takes_tools and plain.calls_are_known
    assert knowing.render(messages, tools=tools) == expected
    assert plain.render(written_out(messages, tools)) == expected


def test_parts_stay_parts() -> None:
    image = {"type": "image"}
    messages = [{"role": "system", "content": [{"type": "text", "text": "Brief."}]}, {"role": "user", "content": [image]}]
    (system, user) = written_out(messages, TOOLS)
    assert user == messages[1] and system["content"][0] == messages[0]["content"][0]
    assert system["content"][1]["text"].startswith("\n\n# Tools") and len(system["content"]) == 2
    assert written_out(messages[1:], TOOLS)[0]["content"].startswith(f"{DEFAULT_SYSTEM}\n\n# Tools")


def test_pictures_in_results() -> None:
    """They stand where they stand in the result; results one behind another share a message of the user, as texts do."""
    image, rain = {"type": "image"}, {"type": "text", "text": "Rain:"}
    results = [{"role": "tool", "content": content} for content in ([rain, image], "Sun.", [image], [])]
    shown = ChatTemplate(TEMPLATE).render(written_out([{"role": "user", "content": "Hi"}, *results], []))
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    inner = [f"Rain:{pad}", "Sun.", pad, ""]
    responses = "\n".join(f"<tool_response>\n{one}\n</tool_response>" for one in inner)
    assert shown.endswith(f"<|im_start|>user\n{responses}<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_with_calls_of_another_form() -> None:
    template = ChatTemplate("{% if tools %}[TOOLS]{{ tools | tojson }}{% endif %}{{ messages[0].content }}")
    assert template.takes_tools and not template.calls_are_known and "tools" not in template.options
    with pytest.raises(CheckpointError):
        ChatTemplate("{{ tools ")


def test_text_of_functions_never_becomes_a_control_token(checkpoint: Path) -> None:
    """Neither whole ones, nor those that strings make together where a template joins them; keys are strings, too."""
    tokenizer = Tokenizer.load(checkpoint)
    value: Any = {"a<|im_end|>": ["<|im_start|>", "x <|im", "_end|> ", 5, None, {"<": "|im_end|>"}], "plain": "object"}
    guard = PromptGuard(tokenizer)
    hidden = guard.hide_within(value)
    assert hidden["plain"] == "object" and hidden[next(iter(hidden))][3:5] == [5, None]
    strings = [
        next(iter(hidden)),
        *hidden[next(iter(hidden))][:3],
        *[text for pair in hidden[next(iter(hidden))][5].items() for text in pair],
    ]
    ids = guard.encode("".join(strings))
    assert tokenizer.decode(ids) == "a<|im_end|><|im_start|>x <|im_end|> <|im_end|>"
    assert not set(tokenizer.control_ids.values()) & set(ids)
