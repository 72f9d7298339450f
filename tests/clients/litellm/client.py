"""litellm: its OpenAI, hosted_vllm, Anthropic and Ollama routes, Responses, pictures, structured output, tools, embeddings, errors."""

from typing import Any

import litellm
from served import BASE_URL, COLOUR, COLOUR_ANSWER, HELLO, HELLO_ANSWER, MODEL, PICTURE_URL, SOUND_FILE, URL
from shape import PAINT, Shape

ROUTES: dict[str, Any] = {
    f"openai/{MODEL}": {"api_base": BASE_URL, "api_key": "none"},
    f"hosted_vllm/{MODEL}": {"api_base": BASE_URL, "api_key": "none"},
    f"anthropic/{MODEL}": {"api_base": URL, "api_key": "none", "max_tokens": 64},
    f"ollama_chat/{MODEL}": {"api_base": URL},
}
PICTURE_PART = {"type": "image_url", "image_url": {"url": PICTURE_URL}}


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def ask(model: str, content: Any, **options: Any) -> Any:
    return litellm.completion(model, user(content), temperature=0, num_retries=0, timeout=60, **{**ROUTES[model], **options})


for model in ROUTES:
    whole = ask(model, HELLO)
    assert whole.choices[0].message.content == HELLO_ANSWER and whole.usage.completion_tokens > 1, model
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(model, HELLO, stream=True) if chunk.choices]
    assert "".join(pieces) == HELLO_ANSWER, model
    assert ask(model, [PICTURE_PART, {"type": "text", "text": COLOUR}]).choices[0].message.content == COLOUR_ANSWER, model
    try:
        ask(model, HELLO, top_p=7)
    except litellm.BadRequestError as raised:
        assert "top_p" in str(raised), model
    except litellm.APIConnectionError as raised:  # litellm's for every error of Ollama
        assert model.startswith("ollama") and "top_p" in str(raised), model
    else:
        raise AssertionError(f"{model}: a top_p of 7 was not refused")
    left = ask(model, HELLO, stream=True, max_tokens=2000, min_tokens=2000)
    next(iter(left))
    del left

for model in ROUTES:
    for stream in (False, True):
        try:
            list(ask(model, "word " * 40_000, stream=stream)) if stream else ask(model, "word " * 40_000)
        except litellm.ContextWindowExceededError:
            pass
        except (litellm.APIConnectionError, litellm.BadRequestError) as raised:  # it has no class for those of Ollama
            assert model.startswith("ollama") and "prompt is too long" in str(raised), model
        else:
            raise AssertionError(f"{model}: a prompt that is too long was not refused")

for model in list(ROUTES)[:3]:
    Shape.model_validate_json(ask(model, "A red circle.", response_format=Shape).choices[0].message.content)
    if model.startswith("hosted_vllm"):
        continue  # litellm takes additionalProperties out of functions: arguments have no end that the schema bounds
    forced = {"type": "function", "function": {"name": "paint"}}
    call = ask(model, "Draw.", tools=[PAINT], tool_choice=forced, parallel_tool_calls=False).choices[0].message.tool_calls[0]
    Shape.model_validate_json(call.function.arguments)

openai_route = ROUTES[f"openai/{MODEL}"]
answer = litellm.responses(model=f"openai/{MODEL}", input=HELLO, temperature=0, **openai_route)
assert answer.output[0].content[0].text == HELLO_ANSWER
events = list(litellm.responses(model=f"openai/{MODEL}", input=HELLO, temperature=0, stream=True, **openai_route))
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == HELLO_ANSWER
try:
    litellm.responses(model=f"openai/{MODEL}", input="word " * 40_000, **openai_route)
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("responses: a prompt that is too long was not refused")
vectors = litellm.embedding(f"openai/{MODEL}", input=["red", "blue"], **openai_route).data
assert len(vectors) == 2 and abs(sum(number**2 for number in vectors[0]["embedding"]) - 1) < 1e-4
with SOUND_FILE.open("rb") as file:
    assert litellm.transcription(f"openai/{MODEL}", file, response_format="json", **openai_route).text
