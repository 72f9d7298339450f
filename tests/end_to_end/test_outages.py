"""Actors whose code crashes in a loop, in a real run: it goes on without them, says so everywhere, and takes them back when mended."""

import json
import os
import select
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from mmrt.runtime.stage_table import STAGES, stage_of
from mmrt.tests.end_to_end.conftest import BREAKABLE, Server
from mmrt.tests.end_to_end.test_media import image_part, picture, text

CONTENT = [image_part(picture(1, 56, 56)), text("What is it?")]
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def own(breakable: Server) -> Iterator[Server]:
    yield breakable
    breakable.wait(lambda status: bool(status["ready"]), "a whole run")


@pytest.fixture(scope="module")
def source(breakable_source: Path) -> Path:
    return breakable_source


@contextmanager
def broken(server: Server, source: Path, actor: str) -> Iterator[dict[str, Any]]:
    """``actor``'s code on disk raises, and its process is killed: the run is without it. Its report. Then its code is mended."""
    file = source / "actors" / f"{STAGES[stage_of(actor)].module.replace('.', '/')}.py"
    before = file.read_text()
    file.write_text(f"raise RuntimeError('{actor} was edited badly')\n")
    try:
        server.kill(actor)
        status = server.wait(lambda status: report(status, actor)["state"] == "broken", f"{actor} broken", TIMEOUT_S)
        yield report(status, actor)
    finally:
        file.write_text(before)


def report(status: dict[str, Any], actor: str) -> dict[str, Any]:
    return next(found for found in status["actors"] if found["name"] == actor)


def get(server: Server, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{server.url}{path}", timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def wait_for_answer(server: Server, path: str, condition: Callable[[int, str], bool]) -> str:
    """The controller looks every second while nothing is asked of it."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition(*(answer := get(server, path))):
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
    return answer[1]


class Asking(threading.Thread):
    """One request in a thread; ``error`` or ``ids`` when it has ended."""

    def __init__(self, server: Server, content: Any, **options: Any) -> None:
        super().__init__()
        self.began = threading.Event()
        self.error: openai.APIError | None = None
        self.ids: list[int] = []
        self._ask = lambda: server.stream(content, **options)
        self.start()

    def run(self) -> None:
        try:
            for chunk in self._ask():
                self.ids += [token for choice in chunk.choices for token in (getattr(choice, "token_ids", None) or [])]
                self.began.set()
        except openai.APIError as error:
            self.error = error


def refused(server: Server, content: Any) -> openai.InternalServerError:
    """How a request that needs what is broken ends: at once."""
    with pytest.raises(openai.InternalServerError) as caught:
        server.chat(content)
    assert caught.value.status_code == 503
    assert 1 <= int(caught.value.response.headers["Retry-After"]) <= 61
    return caught.value


def test_text_goes_on_while_video_crashes_in_a_loop(own: Server, source: Path) -> None:
    answer, words = own.chat(CONTENT)[1], own.chat("Hello")[1]
    pid = own.pid("video")
    os.kill(pid, signal.SIGSTOP)
    caught_in_it = Asking(own, CONTENT)
    own.wait(lambda status: status["requests"]["preparing"] > 0, "a picture that waits for video")
    with broken(own, source, "video") as video:
        caught_in_it.join(TIMEOUT_S)
        assert isinstance(caught_in_it.error, openai.APIStatusError) and caught_in_it.error.status_code == 503
        assert "video is broken" in str(caught_in_it.error)
        assert "2 failures within 30 s of running" in video["broken"] and video["broken"] in video["status"]
        assert video["next_probe_s"] is None or video["next_probe_s"] <= 60
        assert "video is broken" in str(refused(own, CONTENT))
        assert own.chat("Hello")[1] == words
        ready = wait_for_answer(own, "/ready", lambda status, _: status == 200)
        assert json.loads(ready) == {"status": "ready", "degraded": ["video"]}
        assert get(own, "/health")[0] == 200
        wait_for_answer(own, "/metrics", lambda _, text: 'mmrt_actor_broken{actor="video"} 1.0' in text)
        own.wait(lambda status: status["pools"]["kv"]["used"] == 0, "no KV page is held by who was refused")
    own.wait(lambda status: bool(status["ready"]), "a probe that serves", TIMEOUT_S)
    assert own.chat(CONTENT)[1] == answer
    assert json.loads(get(own, "/ready")[1]) == {"status": "ready"}
    wait_for_answer(own, "/metrics", lambda _, text: 'mmrt_actor_broken{actor="video"} 0.0' in text)
    own.wait_until_empty()


def test_nothing_is_served_while_decode_crashes_in_a_loop(own: Server, source: Path) -> None:
    words = own.chat("Hello")[1]
    story = Asking(own, "A long story.", max_tokens=1000, extra_body={"ignore_eos": True})
    assert story.began.wait(TIMEOUT_S)
    with broken(own, source, "decode"):
        story.join(TIMEOUT_S)
        assert story.error is not None and "decode is broken" in str(story.error), "an error frame ends its stream"
        assert 0 < len(story.ids) < 1000
        assert "decode is broken" in str(refused(own, "Hello"))
        assert "decode (broken: " in wait_for_answer(own, "/ready", lambda status, text: status == 503 and "broken" in text)
        assert get(own, "/health")[0] == 200
    assert own.mmrt("restart", "decode").returncode == 0
    assert own.status()["ready"] and own.chat("Hello")[1] == words
    own.wait_until_empty()


@pytest.mark.slow
def test_clients_are_told_so_while_the_gateway_crashes_in_a_loop(own: Server, source: Path) -> None:
    words = own.chat("Hello")[1]
    with broken(own, source, "gateway"):
        assert "the gateway is broken" in str(refused(own, "Hello"))
        assert get(own, "/health")[0] == get(own, "/ready")[0] == 503
    own.wait(lambda status: bool(status["ready"]), "a probe that serves", TIMEOUT_S)
    assert own.chat("Hello")[1] == words
    own.wait_until_empty()


@pytest.mark.slow
def test_a_controller_that_crashes_in_a_loop_ends_the_run(launch: Callable[..., Server], source: Path) -> None:
    """The reason is the last line of the log."""
    server = launch(settings=BREAKABLE, source=source)
    supervisor = server.status()["supervisor_pid"]
    file = source / "actors" / "controller" / "serve.py"
    before = file.read_text()
    file.write_text("raise RuntimeError('edited badly')\n")
    try:
        gone = os.pidfd_open(supervisor)
        server.kill("controller")
        assert select.select([gone], [], [], TIMEOUT_S)[0]
        os.close(gone)
    finally:
        file.write_text(before)
    assert not server.run_path.exists()
    log = Path(server.environment["XDG_STATE_HOME"]) / "mmrt" / server.run_path.name / "supervisor.log"
    assert "the run is over: controller failed: exit status 1; 2 failures within 30 s" in log.read_text().splitlines()[-1]
    server.client.close()
