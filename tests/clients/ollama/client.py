"""ollama: chat, generate, pictures, formats, tools, the list of models, errors."""

import base64
from typing import Any

import ollama
from served import COLOUR, COLOUR_ANSWER, HELLO, HELLO_ANSWER, MODEL, PICTURE, PICTURE_FILE, URL
from shape import Shape

client = ollama.Client(URL, timeout=60)
GREEDY = {"temperature": 0, "num_predict": 64}


def user(text: str, **options: Any) -> list[Any]:
    return [{"role": "user", "content": text, **options}]


whole = client.chat(MODEL, user(HELLO), options=GREEDY)
assert whole.message.content == HELLO_ANSWER and whole.done_reason == "stop"
lines: list[Any] = list(client.chat(MODEL, user(HELLO), options=GREEDY, stream=True))
assert "".join(line.message.content for line in lines) == HELLO_ANSWER
assert lines[-1].eval_count == whole.eval_count > 1 and lines[-1].prompt_eval_count == whole.prompt_eval_count > 1
for picture in (str(PICTURE_FILE), base64.b64decode(PICTURE)):
    assert client.chat(MODEL, user(COLOUR, images=[picture]), options=GREEDY).message.content == COLOUR_ANSWER
assert client.generate(MODEL, COLOUR, images=[PICTURE], options=GREEDY).response == COLOUR_ANSWER
assert client.generate(f"{MODEL}:latest", HELLO, options=GREEDY).response == HELLO_ANSWER

Shape.model_validate_json(
    client.chat(MODEL, user("A red circle."), format=Shape.model_json_schema(), options=GREEDY).message.content or ""
)
Shape.model_validate_json(client.generate(MODEL, "A red circle.", format=Shape.model_json_schema(), options=GREEDY).response)


def paint(colour: str) -> str:
    """Paint the picture.

    Args:
        colour: its colour
    """
    return f"painted {colour}"


said = client.chat(MODEL, user("Draw."), tools=[paint], options=GREEDY)
assert said.message.content, "the client cannot force a call: its model decides"
call = {"function": {"name": "paint", "arguments": {"colour": "red"}}}
history = [*user("Draw."), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "painted", "tool_name": "paint"}]
assert client.chat(MODEL, history, tools=[paint], options=GREEDY).eval_count

assert [model.model for model in client.list().models] == [MODEL]
assert "vision" in (client.show(MODEL).capabilities or [])
assert [model.model for model in client.ps().models] == [MODEL]
for options, model, status in (({"temperature": 9}, MODEL, 400), ({}, "llama9", 404)):
    try:
        client.chat(model, user(HELLO), options=options)
    except ollama.ResponseError as raised:
        assert raised.status_code == status and ("temperature" in raised.error or "llama9" in raised.error)
    else:
        raise AssertionError(f"{options} and {model} were not refused")

left = client.chat(MODEL, user(HELLO), options={"num_predict": 2000, "min_tokens": 2000}, stream=True)
next(iter(left))
left.close()  # type: ignore[attr-defined]
