"""Two nodes behind Ray Serve, with real clients: a conversation stays at its node, and a lost node harms no stream of the other.

`pytest -m ray`, in an environment with the extra ``ray``.
"""

import asyncio
import contextlib
import os
import signal
import socket
import statistics
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mmrt.runtime.errors import ConfigError

# Read when Ray is imported. The second leaves a busy machine the time.
os.environ.update(RAY_SERVE_ENABLE_HA_PROXY="1", RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="60")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]
QUESTION = "Tell a long story, number {}."
NUM_TURNS = 100


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    ray = pytest.importorskip("ray")
    from ray import serve

    from mmrt.cluster.app import build

    def make_floor() -> Any:
        """An application beside the front, which shows what Ray's way to it costs."""

        async def answer_at_once(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            if scope["type"] == "lifespan":
                await send({"type": "lifespan.startup.complete"})
                await receive()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
            event = b'data: {"id":"1","object":"c","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"x"}}]}'
            await send({"type": "http.response.body", "body": event + b"\n\ndata: [DONE]\n\n"})

        return answer_at_once

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, namespace="serve")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build({"replicas": 2}), name="mmrt", route_prefix="/")
        floor = serve.deployment(serve.ingress(make_floor)(), name="floor", ray_actor_options={"num_cpus": 0})
        serve.run(floor.bind(), name="floor", route_prefix="/floor")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        serve.shutdown()
        ray.shutdown()
    assert not _supervisors(), "a run has outlived its node"


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


async def stream(asked: openai.AsyncOpenAI, number: int, begun: asyncio.Event, **more: Any) -> str:
    """Return the text of an answer, or the error that has ended it."""
    text = ""
    messages: Any = [{"role": "user", "content": QUESTION.format(number)}]
    body = {"ignore_eos": True, **more}
    try:
        events = await asked.chat.completions.create(
            model="demo", messages=messages, max_tokens=1500, stream=True, extra_body=body, temperature=0
        )
        async for event in events:
            text += (event.choices and event.choices[0].delta.content) or ""
            begun.set()
    except openai.APIError as error:
        return f"error: {error}"
    return text


def test_a_conversation_stays_at_its_node(url: str) -> None:
    async def turns() -> list[int]:
        asked, hits = client(url), []
        for chat in range(4):
            messages: list[Any] = []
            for turn in range(5):
                messages.append({"role": "user", "content": f"Conversation {chat}, question {turn}: " + "why? " * 30})
                answer = await asked.chat.completions.create(model="demo", messages=messages, max_tokens=16)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                assert answer.usage is not None
                details = answer.usage.prompt_tokens_details
                if turn:
                    hits.append(int(bool(details and details.cached_tokens)))
        return hits

    hits = asyncio.run(turns())
    assert sum(hits) >= 0.9 * len(hits), "later turns find their beginnings in the caches of their nodes"


def test_a_lost_node_harms_no_stream_of_the_other_and_comes_back(url: str) -> None:
    async def lose() -> tuple[list[str], list[str]]:
        asked = client(url)
        begun = [asyncio.Event() for _ in range(6)]
        undisturbed = await asyncio.gather(*(stream(asked, number, asyncio.Event()) for number in range(6)))
        tasks = [asyncio.create_task(stream(asked, number, begun[number], cache_salt="again")) for number in range(6)]
        await asyncio.gather(*(event.wait() for event in begun))
        for victim in _tree(min(_supervisors())):
            os.kill(victim, signal.SIGKILL)
        return undisturbed, await asyncio.gather(*tasks)

    undisturbed, texts = asyncio.run(lose())
    lost = [text for text in texts if text.startswith("error")]
    assert 1 <= len(lost) <= 5 and all("lost" in text for text in lost)
    for text, whole in zip(texts, undisturbed, strict=True):
        assert text == whole or text.startswith("error")
    deadline_s = time.monotonic() + 300
    while len(_supervisors()) < 2:
        assert time.monotonic() < deadline_s, "the lost node has not come back"
        time.sleep(0.5)
    assert len(asyncio.run(stream(client(url), 1, asyncio.Event()))) > 100


def test_a_client_that_goes_ends_its_request_at_the_node(url: str) -> None:
    async def go() -> None:
        events = await client(url).chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": QUESTION.format(7)}],
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in events:
            if num_running():
                await events.close()
                return
        raise AssertionError("the metrics did not show the request")

    def num_running() -> int:
        texts = [urllib.request.urlopen(f"{node}/metrics", timeout=10).read().decode() for node in nodes_of().values()]
        lines = [line for text in texts for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        return sum(int(float(line.split()[-1])) for line in lines)

    asyncio.run(go())
    deadline_s = time.monotonic() + 5  # the whole answer takes longer
    while num_running():
        assert time.monotonic() < deadline_s, "the node still answers"
        time.sleep(0.05)


def nodes_of() -> dict[str, str]:
    """The URL of each node."""
    import ray

    from mmrt.cluster.app import DIRECTORY, NAMESPACE

    found: dict[str, str] = ray.get(ray.get_actor(f"{DIRECTORY}-mmrt", namespace=NAMESPACE).nodes.remote())
    return found


def test_what_the_front_adds_to_ttft(url: str) -> None:
    """Requests one after another, in turns through the front, to a node, and to an application that answers at once. The figures of
    docs/cluster.md; the bound is the goal, with room for a busy machine."""
    from ray import serve

    deadline_s = time.monotonic() + 300
    while serve.status().applications["mmrt"].status != "RUNNING":  # the test before has killed a node
        assert time.monotonic() < deadline_s, "the nodes do not come back"
        time.sleep(0.5)
    nodes = nodes_of()
    assert nodes

    async def turns() -> dict[str, list[float]]:
        direct = [client(f"{node}/v1") for node in nodes.values()]
        front, floor = client(url), client(url.replace("/v1", "/floor/v1"))
        for number in range(5):  # connections are there
            await asyncio.gather(*(ttft_s(asked, f"{number}") for asked in (front, floor, *direct)))
        times: dict[str, list[float]] = {"front": [], "node": [], "floor": []}
        for n in range(NUM_TURNS):
            for (name, those), asked in zip(times.items(), (front, direct[n % len(direct)], floor), strict=True):
                those.append(await ttft_s(asked, f"{name}{n}"))
        return {name: sorted(those) for name, those in times.items()}

    before = os.getloadavg()[0]
    times = asyncio.run(turns())
    figures = {
        name: [round(1000 * those[int(share * (NUM_TURNS - 1))], 1) for share in (0.1, 0.5, 0.9)] for name, those in times.items()
    }
    print(f"TTFT P10, P50, P90 in ms: {figures}, load {before:.1f}")
    assert statistics.median(times["front"]) - statistics.median(times["node"]) <= 0.01, figures


async def ttft_s(asked: openai.AsyncOpenAI, salt: str) -> float:
    """Seconds until the first token of a short answer."""
    messages: Any = [{"role": "user", "content": "Hello"}]
    began_s = time.monotonic()
    events = await asked.chat.completions.create(
        model="demo", messages=messages, max_tokens=2, stream=True, extra_body={"cache_salt": salt, "ignore_eos": True}
    )
    first_s = 0.0
    async for event in events:
        if not first_s and event.choices and event.choices[0].delta.content:
            first_s = time.monotonic() - began_s
    return first_s


def test_a_stored_response_is_gone_on_with_at_its_node(url: str) -> None:
    async def turns() -> list[str]:
        asked, texts = client(url), []
        for chat in range(4):
            first = await asked.responses.create(model="demo", input=f"My number is {chat}.", max_output_tokens=8)
            second = await asked.responses.create(model="demo", input="So?", previous_response_id=first.id, max_output_tokens=8)
            assert second.previous_response_id == first.id
            texts += [(await asked.responses.retrieve(one.id)).output_text for one in (first, second)]
        return texts

    assert all(asyncio.run(turns()))


def test_arguments_that_are_refused() -> None:
    pytest.importorskip("ray")
    from mmrt.cluster.app import build

    refused: list[tuple[dict[str, Any], str]] = [
        ({"replica": 2}, "replica is no argument; there are config, replicas"),
        ({"replicas": 0}, "replicas = 0 must be a whole number from 1 to 1000"),
        ({"replicas": "1.5"}, "replicas = 1.5 must be"),
        ({"gpus": "many"}, "gpus = 'many' is no number"),
        ({"config": "/nowhere.toml"}, "/nowhere.toml"),
    ]
    for arguments, complaint in refused:
        with pytest.raises(ConfigError, match=complaint):
            build(arguments)


def _tree(root: int) -> list[int]:
    """A process and all below it, parents first."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found


def _supervisors() -> list[int]:
    """The processes ``mmrt up`` of nodes."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if b"up" in words and any(word.startswith(b"node-") for word in words) and b"mmrt.cluster.node" not in words:
                found.append(int(entry.parent.name))
    return found
