"""A prompt that is too long is told from a malformed request by what clients look for: they shorten the conversation and ask again."""

import json
import re
from typing import Any

import openai
import pytest

from mmrt.runtime.errors import RequestError, answer_too_long, prompt_too_long
from mmrt.tests.settings import ImportedLater

anthropic: Any = ImportedLater("anthropic")
LONG = "word " * 3000  # the context has 2048 tokens
USER: Any = [{"role": "user", "content": LONG}]
# What classifiers look for, by the names of their projects. Each list is enough by itself: most see the text alone.
PHRASES = {
    "opencode, Cline, pi": [r"prompt is too long", r"maximum context length is \d+ tokens", r"exceeds the context window"],
    "litellm": [r"[Tt]his model's maximum context length is"],
    "LangChain, of a stream": [r"exceeds the context window"],
    "Claude Code": [r"prompt is too long: (\d+) tokens > (\d+) maximum"],
    "clients of vLLM": [r"maximum context length is (\d+) tokens"],
}
ROUTES = [
    ("/v1/chat/completions", {"messages": USER}, "messages"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/messages", {"max_tokens": 5, "messages": USER}, "messages"),
    ("/v1/messages/count_tokens", {"messages": USER}, "messages"),
    ("/api/chat", {"model": "tiny", "messages": USER}, "messages"),
    ("/api/generate", {"model": "tiny", "prompt": LONG}, "prompt"),
    ("/v1/embeddings", {"input": LONG}, "input"),
]


def is_recognised(text: str) -> bool:
    return all(re.search(phrase, text) for phrases in PHRASES.values() for phrase in phrases)


@pytest.mark.parametrize("stream", [False, True])
def test_all_apis_say_it_in_the_words_of_clients(stage: Any, stream: bool) -> None:
    """Before anything is computed: as a status, also where a stream was asked for."""

    async def test(scene: Any) -> None:
        for path, body, field in ROUTES:
            asked = body if path in ("/v1/embeddings", "/v1/messages/count_tokens") else {**body, "stream": stream}
            answer = await scene.http.post(path, json=asked)
            assert answer.status_code == 400 and is_recognised(answer.text), (path, answer.text)
            error = answer.json()["error"]
            assert f"{field}: prompt is too long" in (error if isinstance(error, str) else error["message"]), path
            if path.startswith("/v1/") and "/messages" not in path:
                assert (error["code"], error["param"]) == ("context_length_exceeded", field)

    stage.run(test)


def test_media_that_make_a_prompt_too_long(stage: Any) -> None:
    """The controller finds it, before the headers or behind them: then it is an event with the same words."""
    stage.configure("server", keep_alive_s=0.05)

    async def test(scene: Any) -> None:
        for late in (False, True):

            async def script(play: Any, is_late: bool = late) -> None:
                play.queue()
                if is_late:
                    await scene.until(lambda: scene.received)
                found = prompt_too_long("messages", 5000, 2048)
                play.fail(400, found.message, param=found.param, code=found.code)

            scene.controller.script = script
            for path, body, field in ROUTES:
                if path in ("/v1/embeddings", "/v1/messages/count_tokens"):
                    continue
                scene.received = b""
                short = json.loads(json.dumps({**body, "stream": True}).replace(LONG, "hi"))
                async with scene.http.stream("POST", path, json=short) as answer:
                    async for data in answer.aiter_bytes():
                        scene.received += data
                assert answer.status_code == (200 if late else 400)
                text = scene.received.decode()
                assert is_recognised(text) and f"{field}: prompt is too long: 5000 tokens > 2047 maximum" in text, (path, text)
                if path.startswith("/v1/") and path != "/v1/messages":
                    assert '"code":"context_length_exceeded"' in text

    stage.run(test)


def test_a_client_that_knows_failures_of_responses_by_events_alone(stage: Any) -> None:
    """Codex, which says so in Accept: OpenAI's server answers with a stream. Any other refusal is a status for it, too."""

    async def test(scene: Any) -> None:
        ask = {"headers": {"Accept": "text/event-stream"}}
        answer = await scene.http.post("/v1/responses", json={"input": LONG, "stream": True}, **ask)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert answer.status_code == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
        (failed,) = [event for event in events if event["type"] == "response.failed"]
        assert failed["response"]["error"]["code"] == "context_length_exceeded" and is_recognised(
            failed["response"]["error"]["message"]
        )
        for body, status in (({"input": LONG}, 400), ({"input": "hi", "stream": True, "temperature": 9}, 400)):
            assert (await scene.http.post("/v1/responses", json=body, **ask)).status_code == status

    stage.run(test)


def test_clients_own_errors(stage: Any) -> None:
    async def test(scene: Any) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            await scene.client.chat.completions.create(model="tiny", messages=USER)
        assert raised.value.code == "context_length_exceeded"
        async with anthropic.AsyncAnthropic(base_url=scene.url, api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2047 maximum"):
                await client.messages.create(model="tiny", max_tokens=5, messages=USER)

    stage.run(test)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "hi"}]}, 404, "model_not_found"),
        ("/v1/chat/completions", {"messages": []}, 400, 400),
    ],
)
def test_the_code_is_openai_s_where_clients_look_for_it(stage: Any, path: str, body: Any, status: int, code: str | int) -> None:
    async def test(scene: Any) -> None:
        answer = await scene.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)

    stage.run(test)


def test_an_answer_that_is_too_long() -> None:
    """Its words have all numbers: what there is, and what was asked for."""
    error = answer_too_long("max_tokens", 4096, 20, 4096)
    assert isinstance(error, RequestError) and (error.param, error.code) == ("max_tokens", "context_length_exceeded")
    assert re.search(r"maximum context length is 4096 tokens.*requested 4116 tokens \(20 in the prompt, 4096", error.message)
