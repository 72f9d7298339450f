"""A run with two gateways behind one listening socket: streams at both, deaths, limits that count once, and answers that one keeps."""

import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_gateway_deaths import PROMPT, Client, answers_of

GATEWAYS = ("gateway", "gateway.1")
KINDS = ("stream", "whole", "responses", "messages")
FREE, LIMITED = "sk-of-who-may-all", "sk-of-who-may-three"
KEYS = f'''[[key]]
name = "free"
key = "{FREE}"
[[key]]
name = "limited"
key = "{LIMITED}"
max_requests = 3
'''
SETTINGS = """[actors]
layout = "2G+EPD"
[supervisor]
restart_limit = 50
backoff_s = 0.02
[server]
api_keys_file = "{keys}"
"""


@pytest.fixture(scope="module")
def two(launch: Callable[..., Server], source: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.touch(0o600)
    keys.write_text(KEYS)
    server = launch(settings=SETTINGS.format(keys=keys), source=source)
    server.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=FREE, max_retries=0, timeout=60)
    return server


def connections(server: Server) -> Counter[str]:
    """The open connections of each gateway, by /metrics of one of them."""
    text = httpx2.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {FREE}"}).text
    found = re.findall(r'^mmrt_connections{gateway="(.*?)"} (\S+)$', text, re.MULTILINE)
    return Counter({name: int(float(number)) for name, number in found})


def test_no_answer_notices_the_death_of_either(two: Server) -> None:
    expected = answers_of(two, FREE)
    clients = [(kind, Client(two, FREE)) for kind in KINDS * 2]
    counts = connections(two)
    assert counts.keys() == {*GATEWAYS} and max(counts.values()) - min(counts.values()) <= 1, "each has half of them"
    wrong: list[str] = []

    def ask(kind: str, client: Client) -> None:
        try:
            for _ in range(2):
                if (found := client.ask(kind)) != expected[kind]:
                    wrong.append(f"{kind}: {found}")
        except Exception as error:
            wrong.append(f"{kind}: {error!r}")

    threads = [threading.Thread(target=ask, args=asked) for asked in clients]
    for thread in threads:
        thread.start()
    for name in GATEWAYS:
        threads[0].join(0.7)
        two.kill(name)
    for thread in threads:
        thread.join(120)
    for _, client in clients:
        client.close()
    assert wrong == []
    two.wait(lambda status: bool(status["ready"]), "both gateways")
    two.wait_until_empty()


def test_limits_of_a_key_count_once(two: Server) -> None:
    """Four connections are two at each gateway, and the fourth request is one too many, wherever it comes."""
    clients = [openai.OpenAI(base_url=f"{two.url}/v1", api_key=LIMITED, max_retries=0, timeout=60) for _ in range(4)]

    def begin(client: openai.OpenAI) -> Any:
        messages = [{"role": "user", "content": PROMPT}]
        return client.chat.completions.create(model=two.checkpoint.name, messages=messages, stream=True, max_tokens=400)

    streams = [begin(client) for client in clients[:3]]
    counts = connections(two)
    assert min(counts[name] for name in GATEWAYS) >= 1
    with pytest.raises(openai.RateLimitError, match="3 requests at a time"):
        begin(clients[3])
    for stream in streams:
        stream.close()
    two.wait_until_empty()
    begin(clients[3]).close()
    for client in clients:
        client.close()


def test_the_first_keeps_answers_whoever_is_asked(two: Server) -> None:
    clients = [openai.OpenAI(base_url=f"{two.url}/v1", api_key=FREE, max_retries=0, timeout=60) for _ in range(4)]
    for client in clients:
        client.models.list()  # opens its connection, at one gateway or the other
    made = clients[0].responses.create(model=two.checkpoint.name, input=PROMPT, max_output_tokens=4)
    assert [client.responses.retrieve(made.id) for client in clients] == [made] * 4
    assert connections(two)["gateway"] >= 4, "the connections are the first one's from then on"
    two.kill("gateway")
    assert [client.responses.retrieve(made.id) for client in clients] == [made] * 4
    for client in clients:
        assert client.models.list().data, "they serve all else as well"
        client.close()
    done = two.mmrt("restart", "gateway.1")
    assert done.returncode == 0, done.stderr
    two.wait(lambda status: bool(status["ready"]), "both gateways")


def test_more_gateways_need_another_start(two: Server) -> None:
    done = two.mmrt("layout", "set", "3G+EPD")
    assert done.returncode != 0 and "gateway.2 would come or go: that needs another start" in done.stderr
