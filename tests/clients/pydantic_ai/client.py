"""pydantic-ai: agents over chat completions, Responses and Anthropic's Messages: text, pictures, output types, tools, errors."""

import asyncio
from typing import Any

from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from served import BASE_URL, COLOUR, COLOUR_ANSWER, HELLO, HELLO_ANSWER, MODEL, PICTURE_FILE, URL
from shape import Shape


def models() -> dict[str, Any]:
    provider = OpenAIProvider(base_url=BASE_URL, api_key="none")
    return {
        "chat": OpenAIChatModel(MODEL, provider=provider),
        "responses": OpenAIResponsesModel(MODEL, provider=provider),
        "anthropic": AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
    }


async def drive(name: str, model: Any) -> None:
    settings: Any = {"max_tokens": 256, "temperature": 0, "parallel_tool_calls": False}
    agent = Agent(model, model_settings=settings)
    whole = await agent.run(HELLO)
    assert whole.output == HELLO_ANSWER and whole.usage.output_tokens > 1, name
    async with agent.run_stream(HELLO) as stream:
        assert [piece async for piece in stream.stream_text()][-1] == HELLO_ANSWER, name
    picture = BinaryContent(PICTURE_FILE.read_bytes(), media_type="image/png")
    assert (await agent.run([picture, COLOUR])).output == COLOUR_ANSWER, name
    native = [] if name == "anthropic" else [NativeOutput(Shape)]  # the client allows it to Anthropic's own models only
    for output in (ToolOutput(Shape), *native):
        typed = Agent(model, output_type=output, model_settings=settings)
        assert isinstance((await typed.run("A red circle.")).output, Shape), (name, output)
    for options, named in (({"temperature": 9}, "temperature"),):
        try:
            await agent.run(HELLO, model_settings=options)  # type: ignore[arg-type]
        except ModelHTTPError as raised:
            assert raised.status_code == 400 and named in str(raised.body), name
        else:
            raise AssertionError(f"{name}: {options} was not refused")
    endless: Any = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    task = asyncio.ensure_future(agent.run(HELLO, model_settings=endless))
    await asyncio.sleep(0.5)
    task.cancel()


async def main() -> None:
    for name, model in models().items():
        await drive(name, model)


asyncio.run(main())
