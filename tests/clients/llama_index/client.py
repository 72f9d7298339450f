"""LlamaIndex (openai-like): chat, complete, streams, pictures, structured output, tools, embeddings, errors."""

from typing import Any, Literal

import openai
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from served import BASE_URL, COLOUR, COLOUR_ANSWER, HELLO, HELLO_ANSWER, MODEL, PICTURE_FILE
from shape import Shape

SETTINGS: Any = {"model": MODEL, "api_base": BASE_URL, "api_key": "none", "max_retries": 0, "temperature": 0, "timeout": 60}
chat = OpenAILike(**SETTINGS, is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=True)


def paint(colour: Literal["red", "green"]) -> str:
    """Paint the picture."""
    return f"painted {colour}"


hello = [ChatMessage(role="user", content=HELLO)]
whole = chat.chat(hello)
assert whole.message.content == HELLO_ANSWER and whole.raw.usage.completion_tokens > 1
assert "".join(chunk.delta or "" for chunk in chat.stream_chat(hello)) == HELLO_ANSWER
assert chat.complete(HELLO).text == HELLO_ANSWER
assert OpenAILike(**SETTINGS, is_chat_model=False).complete(HELLO, max_tokens=4).raw.usage.completion_tokens == 4
seen = ChatMessage(role="user", blocks=[ImageBlock(path=PICTURE_FILE), TextBlock(text=COLOUR)])
assert chat.chat([seen]).message.content == COLOUR_ANSWER
structured = chat.as_structured_llm(Shape)
assert isinstance(structured.chat(hello).raw, Shape)
assert isinstance(list(structured.stream_chat(hello))[-1].raw, Shape)
tool = FunctionTool.from_defaults(paint)
called = chat.chat_with_tools([tool], "Draw.", tool_required=True, allow_parallel_tool_calls=False)
(call,) = chat.get_tool_calls_from_response(called)
assert call.tool_name == "paint" and call.tool_kwargs["colour"] in ("red", "green")
vectors = OpenAILikeEmbedding(model_name=MODEL, api_base=BASE_URL, api_key="none").get_text_embedding_batch(["red", "blue"])
assert len(vectors) == 2 and abs(sum(number**2 for number in vectors[0]) - 1) < 1e-4
try:
    chat.chat(hello, temperature=9)
except openai.BadRequestError as raised:
    assert raised.param == "temperature"
else:
    raise AssertionError("a temperature of 9 was not refused")
left = chat.stream_chat(hello, max_tokens=2000, extra_body={"ignore_eos": True})
next(left)
left.close()  # type: ignore[attr-defined]
