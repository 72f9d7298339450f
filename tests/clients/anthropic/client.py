"""anthropic: messages, pictures, structured output, tools, counts, models, errors."""

from typing import Any

import anthropic
from served import COLOUR, COLOUR_ANSWER, HELLO, HELLO_ANSWER, LONG, MODEL, PICTURE, URL
from shape import Shape

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
create: Any = client.messages.create
GREEDY = {"temperature": 0}


def asked(content: Any, **options: Any) -> Any:
    return {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": content}], "extra_body": GREEDY, **options}


whole = create(**asked(HELLO))
assert (whole.content[0].text, whole.stop_reason) == (HELLO_ANSWER, "end_turn")
with client.messages.stream(**asked(HELLO)) as stream:
    assert "".join(stream.text_stream) == HELLO_ANSWER
    final = stream.get_final_message()
for answer in (whole, final):
    assert answer.usage.output_tokens > 1 and answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 1

image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
question = [image, {"type": "text", "text": COLOUR}]
seen = create(**asked(question))
assert seen.content[0].text == COLOUR_ANSWER
count = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": question}])  # type: ignore[typeddict-item]
assert count.input_tokens == seen.usage.input_tokens + seen.usage.cache_read_input_tokens

parsed: Any = client.messages.parse(**asked("A red circle."), output_format=Shape)
assert isinstance(parsed.parsed_output, Shape)

paint = {"name": "paint", "input_schema": Shape.model_json_schema()}
forced = {"tools": [paint], "tool_choice": {"type": "tool", "name": "paint", "disable_parallel_tool_use": True}}
called = create(**asked("Draw.", **forced))
(block,) = called.content
assert (called.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "paint")
Shape.model_validate(block.input)
result = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
history = [
    {"role": "user", "content": "Draw."},
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [result]},
]
assert create(model=MODEL, max_tokens=16, messages=history, tools=[paint]).usage.output_tokens > 0
with client.messages.stream(**asked("Draw.", **forced)) as stream:
    Shape.model_validate(stream.get_final_message().content[0].input)

assert [model.id for model in client.models.list()] == [MODEL]
try:
    create(**asked(HELLO, max_tokens=0))
except anthropic.BadRequestError as raised:
    assert "max_tokens" in raised.message
else:
    raise AssertionError("max_tokens 0 was not refused")
try:
    create(**{**asked(HELLO), "model": "claude-9"})
except anthropic.NotFoundError as raised:
    assert "claude-9" in raised.message
else:
    raise AssertionError("a model that is not there answered")

left: Any = create(**asked(HELLO, max_tokens=2000, stream=True, extra_body={"ignore_eos": LONG["ignore_eos"]}))
next(iter(left))
left.close()
