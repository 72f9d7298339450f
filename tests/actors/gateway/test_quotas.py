"""The limits of one key, by a clock of the test's own."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmrt.actors.gateway.keeping.connection import KeptConnection
from mmrt.actors.gateway.keeping.state import OpenAnswer
from mmrt.actors.gateway.keys.api_keys import CLIENT
from mmrt.actors.gateway.keys.authentication import limit
from mmrt.actors.gateway.keys.key_file import ApiKey
from mmrt.actors.gateway.keys.quotas import Quota, duration
from mmrt.actors.gateway.keys.shared_counts import counts_in
from mmrt.runtime.errors import RequestError
from mmrt.shm.key_use import KeyUse
from mmrt.shm.run_directory import RunDirectory

HOLDER = """
import sys, time
from pathlib import Path
from mmrt.shm.key_use import KeyUse
from mmrt.shm.run_directory import RunDirectory

with KeyUse.attach(RunDirectory.attach(Path(sys.argv[1]))).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def key(**limits: int) -> ApiKey:
    return ApiKey(name="alice", digest=b"", salt=b"", **limits)


def refusal(quota: Quota, now_s: float) -> RequestError:
    with pytest.raises(RequestError) as caught:
        quota.begin(now_s)
    assert caught.value.status == 429 and caught.value.type == "rate_limit_error" and "'alice'" in caught.value.message
    return caught.value


def test_requests_come_back_evenly() -> None:
    quota = Quota(key(requests_per_minute=6), 100.0)
    for _ in range(6):
        quota.begin(100.0)
    error = refusal(quota, 101.0)
    assert "may use 6 requests per minute (requests_per_minute)" in error.message and error.retry_after_s == 9
    assert quota.headers(101.0) == {
        "X-RateLimit-Limit-Requests": "6",
        "X-RateLimit-Remaining-Requests": "0",
        "X-RateLimit-Reset-Requests": "59s",
    }
    quota.begin(110.0)
    assert refusal(quota, 110.0).retry_after_s == 10 and quota.refused == {"requests_per_minute": 2}
    for _ in range(6):
        quota.begin(1000.0)
    refusal(quota, 1000.0)


def test_tokens_are_owed_and_paid_back() -> None:
    quota = Quota(key(tokens_per_minute=600), 0.0)
    quota.begin(0.0)
    quota.spend(500, 400, 0.0)
    quota.end()
    error = refusal(quota, 0.0)
    assert "may use 600 tokens per minute (tokens_per_minute)" in error.message and error.retry_after_s == 31
    assert quota.headers(0.0)["X-RateLimit-Remaining-Tokens"] == "0"
    assert quota.headers(0.0)["X-RateLimit-Reset-Tokens"] == "1m30s"
    quota.begin(31.0)
    assert (quota.prompt_tokens, quota.completion_tokens) == (500, 400)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(tmp_path / "run", {}) as directory:
        yield directory


def test_the_limits_of_two_gateways_are_one(run: RunDirectory) -> None:
    """Either lets in what the other has left; one that dies leaves nothing under way, and what it has spent."""
    KeyUse.create(run)
    limited = key(max_requests=3, requests_per_minute=6, tokens_per_minute=600)

    def gateway(number: int) -> Quota:
        use = KeyUse.attach(run)
        use.begin(number)
        return Quota(limited, 0.0, counts_in(use, number)("alice"))

    first, second = gateway(0), gateway(1)
    first.begin(0.0)
    second.begin(0.0)
    first.begin(0.0)
    assert "3 requests at a time" in refusal(second, 0.0).message and first.num_open == 3
    first.end()
    second.begin(0.0)
    second.spend(100, 400, 0.0)
    assert first.headers(0.0)["X-RateLimit-Remaining-Tokens"] == "100" and first.headers(0.0)["X-RateLimit-Remaining-Requests"] == "2"
    second = gateway(1)
    assert first.num_open == second.num_open == 1
    for _ in range(2):
        second.begin(0.0)
    second.end()
    assert "6 requests per minute" in refusal(first, 0.0).message
    assert Quota(limited, 0.0, counts_in(KeyUse.attach(run), 2)("bob")).num_open == 0, "another key has its own"


def test_a_gateway_waits_for_another_ones_change_but_not_beyond_its_death(run: RunDirectory) -> None:
    KeyUse.create(run)
    quota = Quota(key(requests_per_minute=6), 0.0, counts_in(KeyUse.attach(run), 0)("alice"))
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        beginning = threading.Thread(target=quota.begin, args=(0.0,))
        beginning.start()
        beginning.join(0.1)
        has_waited = beginning.is_alive() and quota.num_open == 0
        holder.kill()
        beginning.join(20)
    assert has_waited and not beginning.is_alive() and quota.num_open == 1


def test_what_a_gateway_before_has_let_in_breaks_no_limit() -> None:
    class Request(dict[Any, Any]):
        method, path = "POST", "/v1/completions"

        def __init__(self, quota: Quota, recorded: OpenAnswer | None) -> None:
            super().__init__({CLIENT: SimpleNamespace(quota=quota)})
            self.transport = KeptConnection.__new__(KeptConnection)
            self.transport.recorded = recorded

    async def handle(request: Any) -> int:
        return int(request[CLIENT].quota.num_open)

    async def test() -> None:
        quota = Quota(key(requests_per_minute=1, max_requests=1), 0.0)
        for recorded in (None, OpenAnswer("id", 1, 1.0, [5]), OpenAnswer("id", 1, 1.0, [6])):
            assert await limit(Request(quota, recorded), handle) == 1 and quota.num_open == 0  # type: ignore[arg-type, comparison-overlap]
        with pytest.raises(RequestError):
            await limit(Request(quota, None), handle)  # type: ignore[arg-type]

    asyncio.run(test())


def test_requests_at_a_time() -> None:
    quota = Quota(key(max_requests=2), 0.0)
    quota.begin(0.0)
    quota.begin(0.0)
    error = refusal(quota, 0.0)
    assert "2 requests at a time (max_requests)" in error.message and error.retry_after_s == 1
    quota.end()
    quota.begin(0.0)
    assert quota.headers(0.0) == {}


def test_a_refused_request_costs_nothing() -> None:
    quota = Quota(key(requests_per_minute=1, max_requests=1), 0.0)
    quota.begin(0.0)
    for _ in range(5):
        refusal(quota, 30.0)
    quota.end()
    assert refusal(quota, 30.0).retry_after_s == 30
    quota.begin(60.0)


def test_new_limits_hold_at_once_and_old_ones_are_not_forgotten() -> None:
    quota = Quota(key(requests_per_minute=2, max_requests=9), 0.0)
    quota.begin(0.0)
    quota.begin(0.0)
    quota.limit(key(requests_per_minute=2, max_requests=2), 0.0)
    assert "max_requests" in refusal(quota, 0.0).message
    quota.limit(key(requests_per_minute=2), 0.0)
    assert "requests_per_minute" in refusal(quota, 0.0).message
    quota.limit(key(requests_per_minute=3), 0.0)
    quota.begin(0.0)
    quota.limit(key(), 0.0)
    for _ in range(100):
        quota.begin(0.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0004, "1ms"), (0.25, "250ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (123.4, "2m3s"), (119.7, "2m0s")],
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
