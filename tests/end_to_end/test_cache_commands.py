"""What users see of the caches on a real run: usage, metrics, ``mmrt cache``, ``inspect`` and ``trace``."""

import contextlib
import json
import urllib.request
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mmrt.cli.cache import read_caches
from mmrt.shm.controller_stats import ControllerStats
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_embedding_cache import NEW, Asked, work
from mmrt.tests.end_to_end.test_media import image_part, picture, text
from mmrt.tests.end_to_end.test_tools import trace_of

LONG = "Say what you know of rivers and stones and of the winter light. " * 6


def num_finished(server: Server) -> int:
    """The requests that the controller has finished, by the counts that all others are published with."""
    with (
        RunDirectory.attach(server.run_path, timeout_s=0.5) as run,
        contextlib.closing(ControllerStats.attach(run)) as stats,
    ):
        return stats.read().finished_total


def ask(server: Server, content: Any, is_streamed: bool = False) -> tuple[str, int, int]:
    """(id, prompt tokens, those of them from the cache), once the controller has counted the request and knows its pages."""
    before = num_finished(server)
    asked: dict[str, Any] = {"model": server.checkpoint.name, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    if is_streamed:
        *_, answer = server.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    else:
        answer = server.client.chat.completions.create(**asked)
    usage = answer.usage
    server.wait(lambda _: num_finished(server) > before, "a request that is counted")
    return answer.id, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def caches(server: Server) -> dict[str, dict[str, int]]:
    """The caches by name, once all pages are back."""
    server.wait_until_empty()
    return {cache.name: msgspec.to_builtins(cache) for cache in read_caches(server.run_path)}


def metrics(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_a_prompt_that_is_known(own: Server) -> None:
    server, page = own, 16
    before = caches(server)["prefix"]
    _, num_tokens, cached = ask(server, LONG)
    assert cached == 0 and num_tokens > 3 * page
    for is_streamed in (False, True):
        request, again, cached = ask(server, LONG, is_streamed)
        assert again == num_tokens and cached == (num_tokens - 1) // page * page, "all whole pages before the last token"
    after = caches(server)["prefix"]
    assert json.loads(server.mmrt("cache", "show", "--json").stdout)[0] == after
    assert after["used_pages"] == 0 and after["evictable_pages"] == after["cached_pages"] >= cached // page
    assert after["queries"] - before["queries"] == 3 * num_tokens and after["hits"] - before["hits"] == 2 * cached
    found = metrics(server)
    assert found[f'vllm:prefix_cache_hits_total{{model_name="{server.checkpoint.name}"}}'] == after["hits"]
    assert found['mmrt_pool_pages_evictable{pool="kv"}'] == after["evictable_pages"]
    shown = server.mmrt("inspect", request).stdout
    assert f"{cached} tokens of the prompt were in pages of earlier requests" in shown and f"{cached} tokens cached" in shown
    events = trace_of(server)[1]
    (args,) = [event["args"] for event in events if event["ph"] == "b" and event["name"] == request]
    assert args["cached_tokens"] == cached
    assert "cached: " in server.mmrt("inspect").stdout


def test_a_medium_that_is_known(own: Server) -> None:
    server = own
    medium = image_part(picture(1, 150, 200))
    before = caches(server)["media"]
    for question in ("What is it?", "Where is it?"):
        ask(server, [text(f"{question} Look at this."), medium, text("Well?")])
    after = caches(server)["media"]
    assert after["queries"] - before["queries"] == 2 and after["hits"] - before["hits"] == 1
    assert after["used_pages"] == 0 and after["evictable_pages"] > 0
    assert metrics(server)["mmrt_media_cache_hits_total"] == after["hits"]


def test_clear_forgets_everything(own: Server) -> None:
    server = own
    ask(server, LONG)
    assert ask(server, LONG)[2] > 0
    server.wait_until_empty()
    done = server.mmrt("cache", "clear")
    assert done.returncode == 0 and "kv: " in done.stdout and "pages forgotten" in done.stdout, done.stderr
    server.wait(lambda _: not any(cache["cached_pages"] for cache in caches(server).values()), "empty caches")
    assert ask(server, LONG)[2] == 0
    server.wait_until_empty()
    server.mmrt("cache", "clear")
    server.kill("controller")
    assert ask(server, LONG)[2] == 0, "a new controller reads no keys of pages that were forgotten"
    server.wait_until_empty()


@pytest.mark.slow
def test_switched_off(launch: Callable[..., Server]) -> None:
    server = launch(settings="[memory]\nprefix_cache = false\nembedding_cache = false\n")
    medium = [image_part(picture(2, 150, 200)), text(LONG)]
    assert [ask(server, medium)[2] for _ in range(2)] == [0, 0]
    for cache in caches(server).values():
        assert (cache["cached_pages"], cache["queries"], cache["hits"]) == (0, 0, 0)
    for _ in range(2):
        assert work(server, Asked(server, [text("Is"), image_part(picture(7, 84, 84)), text("new?")])) == NEW
    server.down()
