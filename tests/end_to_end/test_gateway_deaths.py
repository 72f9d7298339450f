"""The gateway is killed again and again under answers of all kinds: every one ends as if nothing had happened, on its connection."""

import http.client
import itertools
import json
import os
import random
import signal
import socket
import threading
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mmrt.runtime.supervisor.control import DownRequest, call
from mmrt.tests.end_to_end.conftest import Server

PROMPT = "Tell a long story."
STORM = "[supervisor]\nrestart_limit = 50\nbackoff_s = 0.02\nbackoff_max_s = 0.05\ngateway_standby = true\n"
LONG = {"ignore_eos": True, "temperature": 0, "seed": 3, "stream": True}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 450, **LONG}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}, "return_token_ids": True}),
    "whole": ("/v1/chat/completions", {**CHAT, "stream": False}),
    "choices": ("/v1/chat/completions", {**CHAT, "n": 2, "max_tokens": 400, "temperature": 1}),
    "logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "max_tokens": 400}),
    "text": ("/v1/completions", {"prompt": PROMPT, "echo": True, "max_tokens": 450, **LONG}),
    "responses": ("/v1/responses", {"input": PROMPT, "max_output_tokens": 450, **LONG}),
    "messages": ("/v1/messages", {"messages": CHAT["messages"], "model": "", "max_tokens": 450, **LONG}),
    "ollama": ("/api/chat", {"messages": CHAT["messages"], "options": {"num_predict": 450, "temperature": 0, "seed": 3}}),
}
DELTAS = ("response.output_text.delta", "content_block_delta")


class Client:
    """Asks on one connection, which is to live as long as it does."""

    def __init__(self, server: Server, key: str = "") -> None:
        address = urllib.parse.urlsplit(server.url)
        self._model = server.checkpoint.name
        self._head = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=90)
        self._connection.connect()
        self._connection.auto_open = 0  # type: ignore[attr-defined]  # a second connection would be a second request

    def ask(self, kind: str) -> dict[str, Any]:
        path, body = ASKED[kind]
        self._connection.request("POST", path, json.dumps({**body, "model": self._model, "cache_salt": kind}), self._head)
        response = self._connection.getresponse()
        data = response.read()
        assert response.status == 200, data
        return content(data)

    def close(self) -> None:
        self._connection.close()


def content(data: bytes) -> dict[str, Any]:
    """What an answer says, however its text was cut into events: names of its parts, and what they add up to."""
    found: dict[str, Any] = defaultdict(str)
    numbers = itertools.count()
    for line in data.decode().splitlines():
        line = line.removeprefix("data: ")
        if not line.startswith("{"):
            found["done"] += line if line == "[DONE]" else ""
            continue
        event = json.loads(line)
        if "sequence_number" in event:
            assert event["sequence_number"] == next(numbers)
        found["kinds"] += (
            "" if event.get("type") in (None, "response.output_text.delta", "content_block_delta") else event["type"] + " "
        )
        for choice in event.get("choices", ()):
            said = choice.get("delta") or choice.get("message") or choice
            name = f"choice {choice['index']}"
            found[name] += said.get("content") or said.get("text") or ""
            found[f"{name} ends"] += choice["finish_reason"] or ""
            found[f"{name} begins"] += said.get("role", "")
            found[f"{name} has"] += "".join(f"{one} " for one in choice.get("token_ids") or ())
            found[f"{name} likely"] += "".join(f"{one['token']} " for one in (choice.get("logprobs") or {}).get("content") or ())
        delta = event.get("delta")
        found["text"] += delta if isinstance(delta, str) else (delta or {}).get("text", "")
        found["message"] += event["message"]["content"] if "done" in event else ""
        usage = event.get("usage")
        found["usage"] += (
            "" if usage is None else f"{usage.get('prompt_tokens')} {usage.get('completion_tokens', usage.get('output_tokens'))} "
        )
        found["last"] += str(event.get("done_reason") or "")
        found["error"] += json.dumps(event["error"]) if event.get("error") else ""
    return dict(found)


@pytest.fixture(scope="module")
def undisturbed(own: Server) -> dict[str, dict[str, Any]]:
    return answers_of(own)


def answers_of(server: Server, key: str = "") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}

    def ask(kind: str) -> None:
        client = Client(server, key)
        found[kind] = client.ask(kind)
        client.close()

    with ThreadPoolExecutor(len(ASKED)) as threads:
        list(threads.map(ask, ASKED))
    return found


def asking(own: Server, kind: str, errors: list[str], expected: dict[str, Any], is_over: threading.Event) -> None:
    client = Client(own)
    try:
        while True:
            found = client.ask(kind)
            if found != expected:
                others = [(name, found.get(name), expected[name]) for name in expected if found.get(name) != expected[name]]
                errors.append(f"{kind}: {found.get('error')} {others}")
            if is_over.is_set():
                return
    except Exception as error:
        errors.append(f"{kind}: {error!r}")
    finally:
        client.close()


def killed(own: Server, num_kills: int) -> Iterator[int]:
    """Kill the gateway whenever one serves, at any time after that."""
    chance, before = random.Random(num_kills), 0
    for number in range(num_kills):
        status = own.wait(lambda status, before=before: gateway_of(status, before) is not None, "another gateway")
        gateway = gateway_of(status, before)
        assert gateway is not None
        time.sleep(chance.random() * 0.6)
        os.kill(gateway["pid"], signal.SIGKILL)
        before = gateway["generation"]
        yield number


def gateway_of(status: dict[str, Any], before: int) -> dict[str, Any] | None:
    """The gateway, if it serves and is a later one."""
    found: dict[str, Any] = next(found for found in status["actors"] if found["name"] == "gateway")
    return found if found["state"] == "active" and found["generation"] > before else None


def test_no_answer_notices(own: Server, undisturbed: dict[str, dict[str, Any]]) -> None:
    storm(own, undisturbed, 3)


@pytest.mark.slow
@pytest.mark.timeout(7200)  # a start takes a second of two processors
def test_no_answer_notices_500_kills(launch: Callable[..., Server], own_source: Path) -> None:
    """With a standby, which some of them hit, and some of its adoptions."""
    server = launch(settings=STORM, source=own_source)
    storm(server, answers_of(server), 500)


def storm(own: Server, undisturbed: dict[str, dict[str, Any]], num_kills: int) -> None:
    errors: list[str] = []
    is_over = threading.Event()
    threads = [threading.Thread(target=asking, args=(own, kind, errors, undisturbed[kind], is_over)) for kind in ASKED]
    for thread in threads:
        thread.start()
    try:
        for _ in killed(own, num_kills):
            if errors:
                break
    finally:
        is_over.set()
        for thread in threads:
            thread.join(120)
    assert errors == []
    own.wait_until_empty()


def test_restarting_it_drops_nothing_and_drains_nothing(own: Server, undisturbed: dict[str, dict[str, Any]]) -> None:
    errors: list[str] = []
    once = threading.Event()
    once.set()
    thread = threading.Thread(target=asking, args=(own, "stream", errors, undisturbed["stream"], once))
    address = urllib.parse.urlsplit(own.url)
    body = json.dumps({**ASKED["whole"][1], "model": own.checkpoint.name, "max_tokens": 4}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((address.hostname, address.port), timeout=60) as upload:
        upload.sendall(head + body[: len(body) // 2])
        thread.start()
        time.sleep(0.5)
        assert own.mmrt("restart", "gateway").returncode == 0
        upload.sendall(body[len(body) // 2 :])
        assert upload.recv(65536).startswith(b"HTTP/1.1 200 OK")
        upload.sendall(head + body)
        assert upload.recv(65536).startswith(b"HTTP/1.1 200 OK"), "the connection goes on"
    thread.join(60)
    assert errors == []


def test_a_run_that_is_told_to_end_after_a_death_finishes_its_answers(launch: Callable[..., Server], own_source: Path) -> None:
    """The order comes while the next gateway starts."""
    server, errors, once = launch(settings="", source=own_source), list[str](), threading.Event()
    expected = answers_of(server)
    once.set()
    asked = [threading.Thread(target=asking, args=(server, kind, errors, expected[kind], once)) for kind in ("stream", "responses")]
    for thread in asked:
        thread.start()
    time.sleep(0.5)
    gateway = server.pid("gateway")
    os.kill(gateway, signal.SIGKILL)
    server.wait(lambda _: server.pid("gateway") != gateway, "another gateway")
    call(server.run_path, DownRequest(60.0), timeout_s=None)
    for thread in asked:
        thread.join(90)
    assert errors == [] and not server.run_path.exists()


def test_a_client_that_goes_while_there_is_no_gateway_costs_no_row(own: Server) -> None:
    stream = own.stream(PROMPT, max_tokens=5000, extra_body={"ignore_eos": True})
    next(iter(stream))
    own.kill("gateway")
    stream.close()
    own.wait(lambda status: bool(status["ready"]) and not any(status["requests"].values()), "a new gateway and no requests")
    own.wait_until_empty()


def test_a_conversation_goes_on_with_another_gateway(own: Server) -> None:
    responses = own.client.responses
    first = responses.create(model=own.checkpoint.name, input="My name is Ada.", max_output_tokens=4)
    own.kill("gateway")
    own.wait(lambda status: bool(status["ready"]), "a new gateway")
    assert responses.retrieve(first.id) == first
    second = responses.create(model=own.checkpoint.name, input="And?", max_output_tokens=4, previous_response_id=first.id)
    assert second.usage is not None and first.usage is not None and second.usage.input_tokens > first.usage.total_tokens


def test_an_answer_in_the_background_outlives_its_client_and_the_gateway(own: Server, undisturbed: dict[str, dict[str, Any]]) -> None:
    """One client streams it on one connection through all kills, one goes and comes back, and in between nobody is there."""
    responses, asked = own.client.responses, {**ASKED["responses"][1], "model": own.checkpoint.name}
    asked.update(background=True, extra_body={name: asked.pop(name) for name in ("ignore_eos", "seed")} | {"cache_salt": "responses"})
    stream = responses.create(**asked)
    first = [next(stream).to_dict() for _ in range(5)]
    stream.close()
    id = first[0]["response"]["id"]
    seen: list[Any] = []
    reader = threading.Thread(target=lambda: seen.extend(event.to_dict() for event in responses.retrieve(id, stream=True)))
    reader.start()
    for number in killed(own, 3):
        if number == 1:
            own.kill(random.Random(number).choice(["controller", "detokenizer", "decode"]))
    reader.join(90)
    assert [event["sequence_number"] for event in seen] == list(range(len(seen))) and seen[:5] == first
    assert seen[-1]["type"] == "response.incomplete", "it has as many tokens as it may have"
    text = "".join(event["delta"] for event in seen if event["type"] == "response.output_text.delta")
    assert text == undisturbed["responses"]["text"] == seen[-1]["response"]["output"][0]["content"][0]["text"]
    assert [event.to_dict() for event in responses.retrieve(id, stream=True, starting_after=7)] == seen[8:]
    assert responses.retrieve(id).to_dict() == seen[-1]["response"]
    own.wait_until_empty()


def test_an_answer_in_the_background_is_cancelled_by_another_gateway(own: Server) -> None:
    responses = own.client.responses
    asked: dict[str, Any] = {"model": own.checkpoint.name, "input": PROMPT, "extra_body": {"ignore_eos": True}}
    made = responses.create(**asked, background=True)
    own.wait(lambda _: responses.retrieve(made.id).status == "in_progress", "a response that is in progress")
    own.kill("gateway")
    assert responses.cancel(made.id).status == "cancelled"
    assert responses.retrieve(made.id).status == "cancelled"
    own.wait_until_empty()


def test_a_stream_that_names_its_conversation_outlives_its_client_and_the_gateway(
    own: Server, undisturbed: dict[str, dict[str, Any]]
) -> None:
    """A client that reads it through a kill, and one that comes back afterwards, have the same bytes: those of the answer."""
    body = {**ASKED["stream"][1], "model": own.checkpoint.name, "cache_salt": "stream"}
    head = {"X-Conversation-Id": "a-chat"}
    with httpx2.Client(base_url=own.url, timeout=90) as http:
        with http.stream("POST", "/v1/chat/completions", json=body, headers=head) as response:
            first = next(response.iter_bytes())
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(http.get("/v1/stream/a-chat").content))
        reader.start()
        for _ in killed(own, 2):
            pass
        reader.join(90)
        (whole,) = found
        assert whole.startswith(first) and content(whole) == undisturbed["stream"]
        assert http.get(f"/v1/stream/a-chat?from={len(first)}").content == whole[len(first) :]
        assert http.get("/v1/stream/a-chat", headers={"Last-Event-ID": str(len(first))}).content == whole[len(first) :]
    own.wait_until_empty()
