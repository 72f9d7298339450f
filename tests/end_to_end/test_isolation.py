"""A decoder for each item in a real run: the tokens are right, also while decoders and their template are killed."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrt.runtime.supervisor.processes import pss_bytes
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_media import check, image_part, picture, sample, sound, text, video

Launch = Callable[..., Server]


@pytest.fixture(scope="module")
def isolated(launch: Launch) -> Server:
    return launch(settings='[media]\nisolation = "process"\n')


def below(server: Server, name: str) -> list[int]:
    """The processes of this name that the video process has begun, directly or not."""
    found, waiting = [], [server.pid("video")]
    while waiting:
        pid = waiting.pop()
        try:
            if Path(f"/proc/{pid}/comm").read_text() == f"mmrt-{name}\n":
                found.append(pid)
            waiting += [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def contents() -> list[tuple[list[dict[str, Any]], Media]]:
    """A question with each kind of medium, and with all."""
    pixels = picture(1, 150, 213)
    clip, frames = video(30, 96, 128, 10)
    noise, samples = sound(2.0, 440)
    wanted = (frames[sample(30, 10)], 2.0)
    return [
        ([image_part(pixels), text("What is it?")], Media(images=[pixels])),
        ([clip, text("What moves?")], Media(videos=[wanted])),
        ([noise, text("What sounds?")], Media(audios=[samples])),
        ([image_part(pixels), clip, text("Compare.")], Media(images=[pixels], videos=[wanted])),
    ]


def test_tokens_are_right(isolated: Server, oracle: Oracle) -> None:
    for content, media in contents():
        check(isolated, oracle, content, media)
    isolated.wait(lambda _: len(below(isolated, "decoder")) <= 1, "one decoder ahead, and the end of those that are done", timeout_s=90)
    status = {found["name"]: found for found in isolated.status()["actors"]}
    assert status["video"]["memory_bytes"] > (pss_bytes(isolated.pid("video")) or 0), "its template's and decoders' count"


def test_tokens_are_right_while_decoders_and_template_are_killed(isolated: Server) -> None:
    asked = [content for content, _ in contents()]
    expected = [isolated.chat(content) for content in asked]
    generation = next(found["generation"] for found in isolated.status()["actors"] if found["name"] == "video")
    random, ended = np.random.default_rng(), threading.Event()
    kills = {"decoder": 0, "template": 0}

    def kill() -> None:
        for name in ["decoder"] * 6 + ["template", "decoder", "template"]:
            time.sleep(random.uniform(0.05, 0.3))
            for pid in below(isolated, name)[:1]:
                os.kill(pid, signal.SIGKILL)
                kills[name] += 1
        ended.set()

    thread = threading.Thread(target=kill)
    thread.start()
    with ThreadPoolExecutor(2) as pool:
        while not ended.is_set():
            assert list(pool.map(isolated.chat, asked)) == expected
    thread.join()
    assert list(map(isolated.chat, asked)) == expected
    assert kills["decoder"] >= 3 and kills["template"] >= 1
    assert next(found["generation"] for found in isolated.status()["actors"] if found["name"] == "video") > generation
    isolated.wait_until_empty()
