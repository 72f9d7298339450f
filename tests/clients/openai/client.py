"""openai (Python): chat, media, structured output, functions, log-probabilities, embeddings, transcriptions, Responses, errors."""

import asyncio
import json
from typing import Any

import openai
from served import (
    BASE_URL,
    BEEPS,
    BEEPS_ANSWER,
    COLOUR,
    COLOUR_ANSWER,
    HELLO,
    HELLO_ANSWER,
    LONG,
    MODEL,
    PICTURE_URL,
    SOUND,
    SOUND_FILE,
)
from shape import PAINT, Shape

client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0, timeout=60)
chat: Any = client.chat.completions.create
PICTURE_PART = {"type": "image_url", "image_url": {"url": PICTURE_URL}}


def user(*content: Any) -> list[Any]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return [{"role": "user", "content": parts}]


def whole_and_streamed() -> None:
    asked = {"model": MODEL, "messages": user(HELLO), "temperature": 0}
    whole = chat(**asked)
    assert whole.choices[0].message.content == HELLO_ANSWER and whole.choices[0].finish_reason == "stop"
    chunks = list(chat(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO_ANSWER
    counts = (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens)
    assert counts == (whole.usage.prompt_tokens, whole.usage.completion_tokens) and min(counts) > 1
    helper = client.chat.completions.stream(**asked)
    with helper as stream:
        assert stream.get_final_completion().choices[0].message.content == HELLO_ANSWER
    raw = client.chat.completions.with_raw_response.create(**asked)
    assert raw.status_code == 200 and raw.parse().choices[0].message.content == HELLO_ANSWER


def media() -> None:
    assert chat(model=MODEL, messages=user(PICTURE_PART, COLOUR), temperature=0).choices[0].message.content == COLOUR_ANSWER
    sound = {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}
    assert chat(model=MODEL, messages=user(sound, BEEPS), temperature=0).choices[0].message.content == BEEPS_ANSWER


def structured_output_and_functions() -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=user("A red circle."), response_format=Shape)
    assert isinstance(parsed.choices[0].message.parsed, Shape)
    tool = openai.pydantic_function_tool(Shape)
    parsed = client.chat.completions.parse(
        model=MODEL, messages=user("Draw."), tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, Shape)
    named = {"type": "function", "function": {"name": "paint"}}
    called = chat(model=MODEL, messages=user("Draw."), tools=[PAINT], tool_choice=named, parallel_tool_calls=False)
    (call,) = called.choices[0].message.tool_calls
    Shape.model_validate_json(call.function.arguments)
    history = [*user("Draw."), called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert chat(model=MODEL, messages=history, tools=[PAINT]).choices[0].finish_reason == "stop"
    pieces = chat(model=MODEL, messages=user("Draw."), tools=[PAINT], tool_choice=named, parallel_tool_calls=False, stream=True)
    deltas = [call for chunk in pieces for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert deltas[0].function.name == "paint"
    Shape.model_validate_json("".join(delta.function.arguments or "" for delta in deltas))


def several_choices_and_log_probabilities() -> None:
    answer = chat(model=MODEL, messages=user(HELLO), n=3, logprobs=True, top_logprobs=2, max_tokens=8, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs.content and all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    text = client.completions.create(model=MODEL, prompt=["A red", "A green"], max_tokens=0, echo=True, logprobs=0)
    assert [choice.text for choice in text.choices] == ["A red", "A green"]


def other_routes() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    vectors = client.embeddings.create(model=MODEL, input=["a red circle", "a blue square"])
    assert len(vectors.data) == 2 and abs(sum(number**2 for number in vectors.data[0].embedding) - 1) < 1e-4
    with SOUND_FILE.open("rb") as file:
        assert client.audio.transcriptions.create(model=MODEL, file=file).text
    with SOUND_FILE.open("rb") as file:
        events = list(client.audio.transcriptions.create(model=MODEL, file=file, stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text == "".join(event.delta for event in events[:-1])


def responses() -> None:
    create: Any = client.responses.create
    first = create(model=MODEL, input=HELLO, temperature=0)
    assert first.output_text == HELLO_ANSWER and first.usage.output_tokens > 1
    events = list(create(model=MODEL, input=HELLO, temperature=0, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == HELLO_ANSWER
    content = [{"type": "input_image", "image_url": PICTURE_URL}, {"type": "input_text", "text": COLOUR}]
    seen = create(model=MODEL, input=[{"role": "user", "content": content}], temperature=0)
    assert seen.output_text == COLOUR_ANSWER
    again = create(model=MODEL, input="What shape is yellow?", previous_response_id=seen.id, temperature=0)
    assert again.output_text == "A star."
    assert isinstance(client.responses.parse(model=MODEL, input="A shape.", text_format=Shape).output_parsed, Shape)
    called = create(
        model=MODEL, input="Draw.", tools=[{**PAINT["function"], "type": "function"}], tool_choice="required", parallel_tool_calls=False
    )
    assert {item.type for item in called.output} == {"function_call"}
    assert all(Shape.model_validate(json.loads(item.arguments)) for item in called.output)


def responses_in_the_background() -> None:
    create: Any = client.responses.create
    began = []
    stream = create(model=MODEL, input=HELLO, temperature=0, background=True, stream=True)
    for event in stream:
        began.append(event)
        if len(began) == 4:
            break
    stream.close()
    id = began[0].response.id
    rest = list(client.responses.retrieve(id, stream=True, starting_after=began[-1].sequence_number))
    events = [*began, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events))) and events[-1].response.output_text == HELLO_ANSWER
    assert list(client.responses.retrieve(id, stream=True)) == events and client.responses.retrieve(id).status == "completed"
    long = create(model=MODEL, input=HELLO, background=True, max_output_tokens=4000, extra_body={"ignore_eos": True})
    assert long.status in ("queued", "in_progress") and client.responses.cancel(long.id).status == "cancelled"
    client.responses.delete(long.id)


def unknown_fields() -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=user(HELLO), temperature=0, extra_body={"frobnicate": 1}
    )
    assert "frobnicate" in answer.headers["x-mmrt-ignored"]
    assert answer.parse().choices[0].message.content == HELLO_ANSWER


def errors() -> None:
    for options, error, param in [
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"stop_strings": ["x"]}, openai.BadRequestError, "stop_strings"),
        ({"max_tokens": 1_000_000}, openai.BadRequestError, "max_tokens"),
    ]:
        try:
            chat(model=MODEL, messages=user(HELLO), extra_body=options)
        except error as raised:
            assert raised.param == param, raised
        else:
            raise AssertionError(f"{options} was not refused")
    try:
        chat(model="gpt-9", messages=user(HELLO))
    except openai.NotFoundError as raised:
        assert "gpt-9" in raised.message
    else:
        raise AssertionError("a model that is not there answered")


async def cancelled() -> None:
    """A stream that is closed, one whose task is cancelled, and a request that times out."""
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0) as later:
        asked: Any = {"model": MODEL, "messages": user(HELLO), "extra_body": LONG}
        stream = await later.chat.completions.create(**asked, stream=True)
        await anext(aiter(stream))
        await stream.close()
        task = asyncio.ensure_future(later.chat.completions.create(**asked))
        await asyncio.sleep(0.5)
        task.cancel()
        try:
            await later.with_options(timeout=0.5).chat.completions.create(**asked)
        except openai.APITimeoutError:
            pass
        else:
            raise AssertionError("2,000 tokens in half a second")


whole_and_streamed()
media()
structured_output_and_functions()
several_choices_and_log_probabilities()
other_routes()
responses()
responses_in_the_background()
unknown_fields()
errors()
asyncio.run(cancelled())
