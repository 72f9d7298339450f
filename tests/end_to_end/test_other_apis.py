"""Clients of other APIs on a real run: what they get is what OpenAI's client gets for the same prompt."""

import base64
from typing import Any

import ollama
import pytest

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_media import image_part, picture, text
from mmrt.tests.settings import ImportedLater

anthropic: Any = ImportedLater("anthropic")
PICTURE = image_part(picture(1, 150, 200))
BASE64 = PICTURE["image_url"]["url"].partition("base64,")[2]
QUESTION = [PICTURE, text("What is it?")]


@pytest.fixture(scope="module")
def expected(server: Server) -> Any:
    """OpenAI's answer, greedy."""
    answer = server.client.chat.completions.create(
        model=server.checkpoint.name,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],  # type: ignore[list-item]
        max_tokens=24,
        temperature=0,
    )
    assert answer.choices[0].message.content
    return answer


def test_anthropics_client(server: Server, expected: Any) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}
    asked: Any = {
        "model": server.checkpoint.name,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [image, text("What is it?")]}],
        "max_tokens": 24,
        "extra_body": {"temperature": 0},
    }
    counted = {name: asked[name] for name in ("model", "system", "messages")}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        whole: Any = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            pieces = list(stream.text_stream)
            streamed: Any = stream.get_final_message()
        count = client.messages.count_tokens(**counted)
        words = whole.content[0].text
        stop = words[len(words) // 2 :][:3]
        more_than_fits = {**asked, "max_tokens": 1_000_000}
        stopped: Any = client.messages.create(**more_than_fits, stop_sequences=["never in an answer", stop])
    reasons = {"length": "max_tokens", "stop": "end_turn"}
    for answer in (whole, streamed):
        assert answer.content[0].text == expected.choices[0].message.content
        assert answer.stop_reason == reasons[expected.choices[0].finish_reason]
        usage = answer.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
        assert usage.output_tokens == expected.usage.completion_tokens
    assert "".join(pieces) == streamed.content[0].text
    assert count.input_tokens == expected.usage.prompt_tokens, "with all tokens of the picture"
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == words[: words.index(stop)]
    server.wait_until_empty()


def test_ollamas_client(server: Server, expected: Any) -> None:
    model, options, picture = server.checkpoint.name, {"temperature": 0, "num_predict": 24}, base64.b64decode(BASE64)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?", "images": [picture]}]
    with ollama.Client(server.url, timeout=60) as client:
        whole = client.chat(model, messages, options=options)
        lines: list[Any] = list(client.chat(model, messages, options=options, stream=True))
        generated = client.generate(model, "What is it?", system="Be brief.", images=[picture], options=options)
        (found,) = client.list().models
        shown = client.show(model)
    texts = [whole.message.content, "".join(line.message.content for line in lines), generated.response]
    assert texts == [expected.choices[0].message.content] * 3
    for end in (whole, lines[-1], generated):
        counts = (end.prompt_eval_count, end.eval_count, end.done_reason)
        assert counts == (expected.usage.prompt_tokens, expected.usage.completion_tokens, expected.choices[0].finish_reason)
        assert end.total_duration >= end.prompt_eval_duration + end.eval_duration > 0
    assert found.model == model and shown.capabilities == ["completion", "tools", "vision", "audio"]
    assert found.size == sum(file.stat().st_size for file in server.checkpoint.glob("*.safetensors")) > 0
    server.wait_until_empty()


def test_openais_client_with_responses(server: Server, expected: Any) -> None:
    create: Any = server.client.responses.create
    asked = {"model": server.checkpoint.name, "instructions": "Be brief.", "max_output_tokens": 24, "temperature": 0}
    content = [{"type": "input_image", "image_url": PICTURE["image_url"]["url"]}, {"type": "input_text", "text": "What is it?"}]
    first = create(input=[{"role": "user", "content": content}], **asked)
    events = list(create(input=[{"role": "user", "content": content}], **asked, stream=True))
    for answer in (first, events[-1].response):
        assert answer.output_text == expected.choices[0].message.content
        assert answer.usage.input_tokens == expected.usage.prompt_tokens
        assert answer.usage.output_tokens == expected.usage.completion_tokens
    second = create(input="Why?", previous_response_id=first.id, **asked)
    history: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Why?"},
    ]
    same = server.client.chat.completions.create(model=server.checkpoint.name, messages=history, max_tokens=24, temperature=0)
    assert same.usage is not None
    assert (second.output_text, second.usage.input_tokens) == (same.choices[0].message.content, same.usage.prompt_tokens)
    asked, answered, why = server.client.responses.input_items.list(second.id, order="asc", limit=2)
    assert (asked.content[0].image_url, answered.id, why.content[0].text) == (content[0]["image_url"], first.output[0].id, "Why?")
    server.wait_until_empty()
