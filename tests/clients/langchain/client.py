"""langchain-openai: chat, streams, batches, pictures, structured output, tools, Responses, embeddings, errors; langchain-anthropic:
prompts that are too long."""

import asyncio
from typing import Any, Literal

import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from served import BASE_URL, COLOUR, COLOUR_ANSWER, HELLO, HELLO_ANSWER, LONG, MODEL, PICTURE_URL, URL
from shape import Shape

SETTINGS: Any = {"model": MODEL, "base_url": BASE_URL, "api_key": "none", "max_retries": 0, "temperature": 0, "timeout": 60}
chat = ChatOpenAI(**SETTINGS)


@tool
def paint(colour: Literal["red", "green"]) -> str:
    """Paint the picture."""
    return f"painted {colour}"


whole = chat.invoke(HELLO)
assert whole.content == HELLO_ANSWER and whole.usage_metadata["output_tokens"] > 1
chunks = list(chat.stream(HELLO, stream_usage=True))
assert "".join(str(chunk.content) for chunk in chunks) == HELLO_ANSWER
assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == whole.usage_metadata["output_tokens"]
assert [answer.content for answer in chat.batch([HELLO, HELLO])] == [HELLO_ANSWER] * 2
for part in ({"type": "image_url", "image_url": {"url": PICTURE_URL}}, {"type": "image", "url": PICTURE_URL}):
    assert chat.invoke([HumanMessage([part, {"type": "text", "text": COLOUR}])]).content == COLOUR_ANSWER

for method in ("json_schema", "function_calling"):
    one = {"parallel_tool_calls": False} if method == "function_calling" else {}
    assert isinstance(chat.with_structured_output(Shape, method=method, **one).invoke("A red circle."), Shape), method
for choice in ("paint", "required"):
    called = chat.bind_tools([paint], tool_choice=choice, parallel_tool_calls=False, strict=True).invoke("Draw.")
    assert isinstance(called, AIMessage) and called.tool_calls[0]["args"]["colour"] in ("red", "green")
    result = paint.invoke(called.tool_calls[0])
    assert isinstance(result, ToolMessage)
    assert chat.bind_tools([paint]).invoke([HumanMessage("Draw."), called, result]).usage_metadata["output_tokens"] > 0
streamed: Any = None
for chunk in chat.bind_tools([paint], tool_choice="paint", parallel_tool_calls=False, strict=True).stream("Draw."):
    streamed = chunk if streamed is None else streamed + chunk
assert streamed.tool_calls[0]["args"]["colour"] in ("red", "green")

responses = ChatOpenAI(**SETTINGS, use_responses_api=True)
assert responses.invoke(HELLO).text == HELLO_ANSWER
assert "".join(chunk.text for chunk in responses.stream(HELLO)) == HELLO_ANSWER
assert isinstance(responses.with_structured_output(Shape).invoke("A red circle."), Shape)

vectors = OpenAIEmbeddings(model=MODEL, base_url=BASE_URL, api_key="none", check_embedding_ctx_length=False).embed_documents(
    ["red", "blue"]
)
assert len(vectors) == 2 and abs(sum(number**2 for number in vectors[0]) - 1) < 1e-4
try:
    chat.invoke(HELLO, temperature=9)
except openai.BadRequestError as raised:
    assert raised.param == "temperature"
else:
    raise AssertionError("a temperature of 9 was not refused")

claude = ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_retries=0, max_tokens=64)
assert claude.invoke(HELLO).text == HELLO_ANSWER
for model in (chat, responses, claude):
    for answered in (model.invoke, lambda text, model=model: list(model.stream(text))):
        try:
            answered("word " * 40_000)
        except ContextOverflowError:
            pass
        else:
            raise AssertionError(f"{model}: a prompt that is too long was not recognised")


async def cancelled() -> None:
    stream = chat.astream(HELLO, extra_body=LONG)
    await anext(stream)
    await stream.aclose()


asyncio.run(cancelled())
