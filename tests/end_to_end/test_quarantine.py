"""Requests that kill, in a real run: the code of the actors is a copy in which certain requests end the process that works on them.

A request is poison by how many tokens it asks for. It gets an error after two deaths, others get every token, and the run goes on.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mmrt.tests.end_to_end.conftest import Server, also_slow
from mmrt.tests.end_to_end.test_media import image_part, picture, text, video

DECODE, PREFILL, DETOKENIZER, HANGS, EXITS, RAISES = 71, 72, 73, 74, 75, 76
WATCHDOG_S = 3.0

DIE = "__import__('os').kill(__import__('os').getpid(), 11)"
ENCODER_GRID, VIDEO_GRID = (1, 6, 6), (1, 6, 8)  # of pictures of 84 x 84 and 84 x 112 pixels
BUG_HEIGHT = 140  # of pictures that find an error in how they are decoded
CLIP_WIDTH, CLIP_PTS = 168, 15 * 16384  # of a clip that kills only once it is decoded far ahead
CHANGES = {
    "media/decoding_job.py": [
        (
            "                yield position, self._convert(",
            f"                if (frame.width, frame.pts) == ({CLIP_WIDTH}, {CLIP_PTS}):\n"
            f"                    {DIE}\n"
            "                yield position, self._convert(",
        )
    ],
    "media/image.py": [
        (
            "            pixels = _decode_jpeg(",
            f"            if image.height == {BUG_HEIGHT}:\n"
            "                raise ValueError('an error of ours')\n"
            "            pixels = _decode_jpeg(",
        )
    ],
    "actors/encoder.py": [
        (
            "        outputs = self._towers",
            f"        if any(part.shape.grid == {ENCODER_GRID} for part in plan.parts):\n"
            f"            {DIE}\n"
            "        outputs = self._towers",
        )
    ],
    "actors/video/worker.py": [
        (
            "        self._patches.check(plan.target",
            f"        if plan.shape.grid == {VIDEO_GRID}:\n            {DIE}\n        self._patches.check(plan.target",
        )
    ],
    "actors/decode/running_set.py": [
        (
            "        number_S, member_S = batch.number_B",
            f"        if ((batch.max_new_N == {DECODE}) & (batch.count_N > 2)).any():\n"
            f"            {DIE}\n"
            f"        if {HANGS} in batch.max_new_N.tolist():\n"
            "            __import__('time').sleep(1000)\n"
            "        number_S, member_S = batch.number_B",
        )
    ],
    "actors/prefill.py": [
        (
            "        if live:\n",
            "        for chunk in live:\n"
            "            max_new = decode_sequence_spec(self._table.read_spec(chunk.row)).max_new_tokens\n"
            f"            if max_new == {PREFILL}:\n"
            f"                {DIE}\n"
            f"            if max_new == {EXITS}:\n"
            "                __import__('os')._exit(0)\n"
            f"            if max_new == {RAISES}:\n"
            "                raise MemoryError\n"
            "        if live:\n",
        )
    ],
    "actors/detokenizer.py": [
        (
            "        self.generation = generation\n",
            f"        self.generation = generation\n        self.is_poison = row.max_new_tokens == {DETOKENIZER}\n",
        ),
        (
            '        text, before = "", self.num_ids\n',
            f'        text, before = "", self.num_ids\n        if self.is_poison:\n            {DIE}\n',
        ),
    ],
}


@pytest.fixture(scope="module")
def poisoned(launch: Callable[..., Server], source: Path) -> Iterator[Server]:
    for name, changes in CHANGES.items():
        path = source / name
        text = path.read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{name} has {text.count(old)} of {old!r}"
            text = text.replace(old, new)
        path.write_text(text)
    server = launch(settings=f"[supervisor]\nwatchdog_s = {WATCHDOG_S}\nrestart_limit = 6\n", source=source)
    yield server
    server.wait_until_empty()


class Background:
    """Streams beside whatever happens: each must come to the same end."""

    def __init__(self, server: Server, count: int, max_tokens: int = 250) -> None:
        self.server = server
        self.max_tokens = max_tokens
        self.expected = self.ask()
        self.answers: list[list[int] | Exception] = []
        self.began = threading.Barrier(count + 1)
        self.threads = [threading.Thread(target=self.run) for _ in range(count)]

    def ask(self, began: Callable[[], object] = lambda: None) -> list[int]:
        ids: list[int] = []
        for chunk in self.server.stream("Tell me more.", max_tokens=self.max_tokens, extra_body={"ignore_eos": True}):
            ids += [token for choice in chunk.choices for token in (getattr(choice, "token_ids", None) or [])]
            if ids:
                began()
                began = lambda: None  # noqa: E731
        return ids

    def run(self) -> None:
        try:
            self.answers.append(self.ask(self.began.wait))
        except Exception as error:
            self.answers.append(error)

    def __enter__(self) -> None:
        for thread in self.threads:
            thread.start()
        self.began.wait(30)

    def __exit__(self, *_: object) -> None:
        for thread in self.threads:
            thread.join(120)
        assert self.answers == [self.expected] * len(self.threads)


def starts(server: Server) -> dict[str, int]:
    return {actor["name"]: actor["restarts"] for actor in server.status()["actors"]}


def poison(server: Server, max_tokens: int) -> str:
    """The error that the request ends with."""
    with pytest.raises(openai.APIError) as error:
        for _ in server.stream("Tell me more.", max_tokens=max_tokens, extra_body={"ignore_eos": True}):
            pass
    return str(error.value)


@pytest.mark.parametrize(
    ("max_tokens", "actor"),
    [
        pytest.param(DECODE, "decode", id="decode"),
        pytest.param(PREFILL, "prefill", id="prefill", marks=pytest.mark.slow),
        pytest.param(DETOKENIZER, "detokenizer", id="detokenizer", marks=pytest.mark.slow),
        pytest.param(EXITS, "prefill", id="prefill exits", marks=pytest.mark.slow),
        pytest.param(RAISES, "prefill", id="prefill without memory", marks=pytest.mark.slow),
    ],
)
def test_who_kills_is_given_up_after_two_deaths_and_others_go_on(poisoned: Server, max_tokens: int, actor: str) -> None:
    before = starts(poisoned)
    with Background(poisoned, 3):
        message = poison(poisoned, max_tokens)
    assert "the model failed" in message or "given up" in message
    poisoned.wait(lambda status: bool(status["ready"]), "ready")
    after = starts(poisoned)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {actor: 2}


@pytest.mark.parametrize(("width", "actor"), [(84, "encoder"), *also_slow((112, "video"))])
def test_pictures_that_kill(poisoned: Server, width: int, actor: str) -> None:
    """Other pictures that come at the same time are encoded."""
    good = [image_part(picture(1, 56, 56)), text("What is it?")]
    expected, before = poisoned.chat(good)[1], starts(poisoned)
    answers: list[object] = []
    threads = [threading.Thread(target=lambda: answers.append(poisoned.chat(good)[1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    with pytest.raises(openai.APIError, match=f"ended the {actor} process 2 times and is given up"):
        poisoned.chat([image_part(picture(2, 84, width)), text("And this?")])
    for thread in threads:
        thread.join(60)
    assert answers == [expected] * 4
    after = starts(poisoned)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {actor: 2}


def test_an_error_of_ours_is_no_fault_of_the_picture(poisoned: Server) -> None:
    """500 with the request's id, by which the log has the traceback; the process lives on. Pillow has the same errors."""
    before = starts(poisoned)
    with pytest.raises(openai.InternalServerError, match="plan [0-9a-f]+ of video failed, and the log says why") as caught:
        poisoned.chat([image_part(picture(3, BUG_HEIGHT, 56)), text("And this?")])
    plan = re.search("plan [0-9a-f]+ of video failed", str(caught.value))
    assert plan is not None
    logs = poisoned.mmrt("logs").stdout
    assert f"{plan[0]}: it was for {caught.value.response.headers['x-request-id']}" in logs
    assert f"{plan[0]} (Analyse)" in logs and "ValueError: an error of ours" in logs and "Traceback" in logs
    assert starts(poisoned) == before


@pytest.mark.parametrize("num_others", also_slow(0, 4))
def test_a_clip_that_kills_while_it_is_decoded_ahead(poisoned: Server, num_others: int) -> None:
    """At first the process dies in plans of pictures, whose requests are not to blame, or in none."""
    good = [image_part(picture(1, 56, 56)), text("What is it?")]
    expected, before = poisoned.chat(good)[1], starts(poisoned)
    answers: list[object] = []
    clip, _ = video(100, 112, CLIP_WIDTH, 2)
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            try:
                answers.append(poisoned.chat(good)[1])
            except openai.APIError as error:
                answers.append(error)

    threads = [threading.Thread(target=ask) for _ in range(num_others)]
    for thread in threads:
        thread.start()
    try:
        with pytest.raises(openai.APIError, match="ended the video process 2 times and is given up"):
            poisoned.chat([clip, text("What moves?")])
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
    assert answers == [expected] * len(answers) and len(answers) >= num_others
    assert starts(poisoned)["video"] - before["video"] in (2, 3)


@pytest.mark.parametrize("actor", ["decode", *also_slow("encoder", "prefill", "video", "detokenizer", "controller")])
def test_a_stopped_process_is_found_and_replaced(poisoned: Server, actor: str) -> None:
    good = [image_part(picture(1, 56, 56)), text("What is it?")]
    expected, before = poisoned.chat(good)[1], poisoned.pid(actor)
    with Background(poisoned, 2):
        poisoned.kill(actor, signal.SIGSTOP)
        assert poisoned.chat(good)[1] == expected
    poisoned.wait(lambda status: bool(status["ready"]) and pid(status, actor) != before, "a new process")


@pytest.mark.parametrize("actor", also_slow("decode", "prefill", "encoder"))
def test_a_process_that_was_stopped_for_a_moment_goes_on(poisoned: Server, actor: str) -> None:
    before = poisoned.pid(actor)
    with Background(poisoned, 2):
        os.kill(before, signal.SIGSTOP)  # not by name: asking who that is takes time, too
        time.sleep(WATCHDOG_S / 3)  # what is waited for is that nothing happens
        os.kill(before, signal.SIGCONT)
    assert poisoned.pid(actor) == before


@pytest.mark.slow
def test_many_of_them_do_not_end_the_run(poisoned: Server) -> None:
    """Eight deaths within the window: the restart limit is for actors that fail by themselves."""
    for _ in range(4):
        assert "given up" in poison(poisoned, PREFILL)
    poisoned.wait(lambda status: bool(status["ready"]), "ready")
    assert len(poisoned.chat("Are you there?", max_tokens=8)[1]) > 0


@pytest.mark.slow
def test_who_hangs_is_given_up_too(poisoned: Server) -> None:
    poisoned.chat("Tell me more.", max_tokens=8)  # so that steps have a measured cost
    before, began_s = starts(poisoned), time.monotonic()
    with Background(poisoned, 2):
        assert "the model failed" in poison(poisoned, HANGS)
    assert 2 * WATCHDOG_S < time.monotonic() - began_s
    after = starts(poisoned)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {"decode": 2}


@pytest.mark.slow
def test_kills_from_outside_condemn_nobody(poisoned: Server) -> None:
    with Background(poisoned, 3):
        for _ in range(4):
            before = poisoned.pid("decode")
            poisoned.kill("decode")
            poisoned.wait(lambda status, before=before: bool(status["ready"]) and pid(status) != before, "a new decode")  # type: ignore[misc]


def pid(status: dict[str, Any], name: str = "decode") -> int | None:
    return next(actor["pid"] for actor in status["actors"] if actor["name"] == name)
