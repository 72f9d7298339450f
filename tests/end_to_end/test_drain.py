"""The end of a run, point by point: not ready, nothing new, time for what runs, an error frame, processes in reverse order, exit 0."""

import json
import os
import select
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mmrt.tests.end_to_end.conftest import MMRT, Server

DRAIN_S = 1.0
LONG_S = 600.0
JSON = {"Content-Type": "application/json"}


class Foreground:
    """``mmrt up`` as a user runs it in a terminal."""

    def __init__(self, server: Server) -> None:
        self.server = server
        command = [*MMRT, "up", "--model", str(server.checkpoint), "--port", "0", "--config", str(server.config)]
        self.process = subprocess.Popen(command, env=server.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.output: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._ready.wait(100)
        if self.process.poll() is not None or not any("ready after" in line for line in self.output):
            self.process.kill()
            self.end()
            raise AssertionError(self.output)
        server.url = str(server.status()["endpoint"])
        server.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if "ready after" in line:
                self._ready.set()
        self._ready.set()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        status = self.process.wait(60)
        self._reader.join(10)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.end()
        self.server.client.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path: Path, checkpoints: Callable[[str], Path]) -> Iterator[Callable[[float], Foreground]]:
    """``start(drain_s)``: a run."""
    started: list[Foreground] = []

    def begin(drain_s: float) -> Foreground:
        started.append(Foreground(Server(tmp_path, checkpoints("qwen2_5_omni"), f"[supervisor]\ndrain_s = {drain_s}\n")))
        return started[-1]

    yield begin
    for run in started:
        run.close()


def answer(server: Server, path: str, body: dict[str, Any] | None = None) -> tuple[int, str | None, str]:
    """(status, Retry-After, body)."""
    request = urllib.request.Request(server.url + path, None if body is None else json.dumps(body).encode(), JSON)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.headers["Retry-After"], response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Retry-After"], error.read().decode()


def chat_body(server: Server, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Go on."}]
    return {"model": server.checkpoint.name, "messages": messages, "stream": True, "temperature": 0, **options}


class RawStream(threading.Thread):
    """The lines of one stream, exactly as they come."""

    def __init__(self, server: Server, **options: Any) -> None:
        super().__init__()
        self.events: list[str] = []
        self.flowing = threading.Event()
        body = json.dumps(chat_body(server, ignore_eos=True, **options)).encode()
        self._request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, JSON)
        self.start()
        assert self.flowing.wait(30)

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=60) as response:
            for line in response:
                if line.startswith(b"data: "):
                    self.events.append(line[6:].decode().strip())
                    if '"content"' in self.events[-1]:
                        self.flowing.set()


@pytest.mark.slow
def test_what_does_not_end_in_time_ends_with_an_error(start: Callable[[float], Foreground]) -> None:
    run = start(DRAIN_S)
    server = run.server
    endless = RawStream(server, max_tokens=3000)
    pids = {found["name"]: os.pidfd_open(found["pid"]) for found in server.status()["actors"]}
    began_s = time.monotonic()
    run.terminate()
    endless.join(30)
    ended_s = time.monotonic() - began_s
    *_, error, done = endless.events
    assert done == "[DONE]" and json.loads(error)["error"]["message"] == "the server is shutting down"
    assert ended_s > DRAIN_S - 0.5, "not before it was late"
    assert order_of_ends(pids) == ["gateway", "workers", "controller", "memory"]
    assert run.end() == 0, run.output
    assert not server.run_path.exists()


def order_of_ends(pids: dict[str, int]) -> list[str]:
    """Wait for all processes; the groups that they end in, in order."""
    groups = {"gateway": "gateway", "controller": "controller", "memory": "memory"}
    order: list[str] = []
    names = {fd: name for name, fd in pids.items()}
    while names:
        ended = select.select(list(names), [], [], 30)[0]
        assert ended, f"still there: {list(names.values())}"
        for group in ("gateway", "workers", "controller", "memory"):
            for fd in [fd for fd in ended if fd in names and groups.get(names[fd], "workers") == group]:
                if not order or order[-1] != group:
                    order.append(group)
                del names[fd]
                os.close(fd)
    return order


@pytest.mark.slow
def test_what_can_finish_finishes(start: Callable[[float], Foreground]) -> None:
    run = start(LONG_S)
    stream = RawStream(run.server, max_tokens=40)
    run.terminate()
    stream.join(30)
    assert stream.events[-1] == "[DONE]"
    assert any(json.loads(event)["choices"][0]["finish_reason"] == "length" for event in stream.events[:-1])
    assert run.end() == 0, run.output


def test_a_drain_takes_nothing_new_and_a_second_sigterm_forces(start: Callable[[float], Foreground]) -> None:
    run = start(LONG_S)
    server = run.server
    stream = iter(server.stream("Go on.", max_tokens=3000, extra_body={"ignore_eos": True}))
    next(stream)
    server.kill("decode", signal.SIGSTOP)  # so that it lasts until all is asked
    run.terminate()
    while (found := answer(server, "/ready"))[0] == 200:
        assert run.process.poll() is None
    status, retry_after, body = found
    assert (status, "shutting down" in body) == (503, True) and retry_after is not None
    assert answer(server, "/health")[0] == 200, "it lives, and is not ready"
    status, retry_after, body = answer(server, "/v1/chat/completions", chat_body(server, max_tokens=1))
    assert status == 503 and retry_after is not None and "error" in json.loads(body)
    run.terminate()
    assert run.end() == 130, run.output
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    assert not server.run_path.exists()
