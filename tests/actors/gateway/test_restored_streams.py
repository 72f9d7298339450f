"""A stream that another gateway goes on with: what a client gets does not depend on where, and how often, the first one died."""

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from mmrt.actors.gateway.answers.choices import Choice
from mmrt.actors.gateway.answers.client_request import ClientRequest
from mmrt.actors.gateway.answers.link import Keeping, Link
from mmrt.actors.gateway.apis.anthropic.answers import MessageFormat
from mmrt.actors.gateway.apis.ollama.answers import CHAT as OLLAMA
from mmrt.actors.gateway.apis.openai.answers import CHAT, TEXT
from mmrt.actors.gateway.apis.openai.responses import Exchange
from mmrt.actors.gateway.apis.openai.stored import StoredResponses
from mmrt.actors.gateway.apis.streams import Stream
from mmrt.actors.gateway.keeping.kept_answers import KeptAnswers
from mmrt.actors.gateway.keeping.state import Place
from mmrt.actors.gateway.reading.output_fields import Output
from mmrt.models.text.thoughts import ThoughtReader
from mmrt.models.text.tool_calls import CallReader
from mmrt.runtime.bus.messages import Delta, Generation, Prepared, RequestSpec, ToController
from mmrt.shm.kept_records import KeptRecords
from mmrt.tests.actors.gateway.test_requests import Words
from mmrt.tests.settings import examples

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
WORDS = ("hello ", "<", "<think>", "</think>", "{", '"', "é😀", "\n", "</tool")
BITS = (*WORDS, CALL, "<tool_call>", '\n{"name": "f", "arguments": {"a": 1}}\n', "</tool_call>")
NOTHING: Any = SimpleNamespace(
    received=lambda *_: None, first_text=lambda *_: None, over=lambda *_: None, sent=lambda *_: None,
    on_first_text=lambda *_: None, on_text=lambda *_: None, check=lambda *_: None, write_bytes=lambda *_: None,
)  # fmt: skip


def responses() -> Any:
    exchange = Exchange(StoredResponses(KeptAnswers(KeptRecords.own())))
    exchange._shown = {"tools": [], "store": False, "text": None}
    return exchange


FORMATS: dict[str, Callable[[], Any]] = {
    "chat": lambda: CHAT, "text": lambda: TEXT, "messages": MessageFormat, "responses": responses, "ollama": lambda: OLLAMA,
}  # fmt: skip


class Record:
    """As the connection's: each commit with the bytes before it."""

    def __init__(self, shown: Sequence[Place] = (), num_events: int = 0) -> None:
        self.shown, self.num_events = list(shown), num_events
        self.sent = b""
        self.commits: list[tuple[int, list[Place], int]] = []

    async def write(self, data: bytes) -> None:
        self.sent += data

    async def commit(self, places: Sequence[Place], num_events: int, on_more: Callable[[], None]) -> None:
        self.commits.append((len(self.sent), list(places), num_events))


class Answer:
    """A gateway's part of an answer: requests, choices and their stream."""

    def __init__(self, format: str, options: dict[str, Any], num_choices: int, record: Record) -> None:
        self.record = record
        self.event = asyncio.Event()
        self.sent: list[ToController] = []
        link = Link(1, lambda message: self.sent.append(message) is None, NOTHING, NOTHING, Words())  # type: ignore[arg-type]
        output = Output(n=num_choices, best_of=num_choices, logprobs=options["logprobs"])
        spec = RequestSpec(Generation("x", return_token_ids=options["ids"]), [1, 2, 3], [], 100).asking()
        spec = spec.asking(sampling=type(spec.generation.sampling)(logprobs=options["logprobs"]))
        self.requests = [
            ClientRequest(key, spec, [], self.event.set, link, 0.0, Keeping(lambda: None)) for key in range(1, num_choices + 1)
        ]
        entries = SimpleNamespace(answer=lambda tokens: {"content": [] if tokens is None else tokens.ids.tolist()})
        choices = [
            Choice(
                index, request, self.requests[0], output, None, entries if options["logprobs"] is not None else None,  # type: ignore[arg-type]
                reader=CallReader(["f", "g"]) if options["tools"] else None,
                thoughts=ThoughtReader(False) if options["thinks"] else None,
            )
            for index, request in enumerate(self.requests)
        ]  # fmt: skip
        asked: Any = SimpleNamespace(include_usage=True, continuous_usage=False, return_token_ids=options["ids"])
        chunks = FORMATS[format]().begin("id-1", 5, "m", "fp").chunks(asked)
        executor = ThreadPoolExecutor(1)
        fields: Any = SimpleNamespace(field_names={})
        self.stream = Stream(None, self.event, fields, choices, chunks, NOTHING, 100.0, executor, record)  # type: ignore[arg-type]
        for request in self.requests:
            request.submit(0.0)
            request.on_message(Prepared(1, request.key, 3, 0), 0.0)

    async def take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.requests[delta.key - 1].on_delta(delta, 1.0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def deltas_of(chance: random.Random, texts: Sequence[str], ids: bool) -> list[Delta]:
    """Cut each text anywhere between characters; of several in turn. A token for each cut."""
    found = []
    for key, text in enumerate(texts, 1):
        cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randrange(8))))
        offset, own = 0, []
        for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(text)], strict=True), 1):
            data = text[start:end].encode()
            count = len(text[:end])
            new = list(range(len(text[:start]), count)) if ids else []
            own.append(Delta(key, 1, offset, count, data, "stop" if number == len(cuts) + 1 else None, new, 0, ""))
            offset += len(data)
        found.append(own)
    order = [key for key, own in enumerate(found) for _ in own]
    chance.shuffle(order)
    return [found[key].pop(0) for key in order]


def joined(data: bytes) -> dict[str, Any]:
    """What the events add up to."""
    found: dict[str, Any] = defaultdict(str)
    numbers = []
    for line in data.decode().split("\n"):
        line = line.removeprefix("data: ")
        if not line.startswith("{"):
            found["other"] += line if line == "[DONE]" else ""
            continue
        event = json.loads(line)
        numbers += [event["sequence_number"]] if "sequence_number" in event else []
        kind = str(event.get("type", ""))
        if kind.endswith("delta"):
            delta = event["delta"]
            found["delta"] += (
                delta if isinstance(delta, str) else "".join(str(value) for name, value in delta.items() if name != "type")
            )
        elif kind:
            event.pop("sequence_number", None)
            found["events"] += json.dumps(event)
        if "message" in event and "done" in event:
            found["message"] += event["message"]["content"]
            found["calls"] += json.dumps(event["message"].get("tool_calls") or "").strip('"')
            found["thinking"] += event["message"].get("thinking", "")
            found["done"] += str(event["done"]) if event["done"] else ""
        for choice in event.get("choices", ()):
            delta = choice.get("delta", choice)
            for name, value in (*delta.items(), ("finish", choice["finish_reason"]), ("ids", choice.get("token_ids"))):
                if name == "tool_calls":
                    for call in value:
                        found[f"{choice['index']} call {call['index']}"] += (
                            call["function"].get("name", "") + call["function"]["arguments"]
                        )
                elif name in ("role", "content", "text", "reasoning_content", "finish") and value:
                    found[f"{choice['index']} {name}"] += value
                elif name == "ids" and value:
                    found[f"{choice['index']} ids"] += "".join(f"{id} " for id in value)
            for id in (choice.get("logprobs") or {}).get("content", ()):
                found[f"{choice['index']} likely"] += f"{id} "
        if event.get("usage"):  # how many tokens were of thoughts depends on the cuts
            found["usage"] += json.dumps({name: value for name, value in event["usage"].items() if isinstance(value, int)})
    assert numbers == list(range(len(numbers)))
    return dict(found)


def text_of(chance: random.Random, format: str) -> str:
    """Where events have an order among them, which depends on the cuts where text follows a call, calls are last."""
    if format in ("chat", "text"):
        return "".join(chance.choices(BITS, k=chance.randrange(1, 14)))
    return "".join(chance.choices(WORDS, k=chance.randrange(10))) + CALL * chance.choice((0, 0, 1, 2))


async def whole(format: str, options: dict[str, Any], deltas: Sequence[Delta], number: int) -> Record:
    answer = Answer(format, options, number, Record())
    writing = asyncio.create_task(answer.stream.write(answer.record))  # type: ignore[arg-type]
    await answer.take(deltas)
    await asyncio.wait_for(writing, 10)
    return answer.record


@pytest.mark.parametrize("format", FORMATS)
def test_the_rest_follows_whatever_was_shown(format: str) -> None:
    async def test() -> None:
        chance = random.Random(format)
        num_restored = 0
        for _ in range(examples(60)):
            number = chance.choice((1, 1, 2)) if format in ("chat", "text") else 1
            options = {
                "logprobs": 0 if format == "chat" and chance.random() < 0.4 else None,
                "ids": format in ("chat", "text") and chance.random() < 0.5,
                "tools": format != "text" and chance.random() < 0.6,
                "thinks": format == "chat" and chance.random() < 0.4,
            }
            texts = [text_of(chance, format) for _ in range(number)]
            before = await whole(format, options, deltas_of(chance, texts, options["ids"]), number)
            expected = joined(before.sent)
            for length, places, num_events in before.commits:
                record = Record(places, num_events)
                answer = Answer(format, options, number, record)

                async def go_on(answer: Answer = answer, record: Record = record) -> None:
                    await answer.stream.restore()
                    await answer.stream.write(record)  # type: ignore[arg-type]

                writing = asyncio.create_task(go_on())
                await answer.take(deltas_of(chance, texts, options["ids"]))
                await asyncio.wait_for(writing, 10)
                assert joined(before.sent[:length] + record.sent) == expected, (texts, options, places)
                num_restored += 1
        assert num_restored > examples(60)

    asyncio.run(test())
