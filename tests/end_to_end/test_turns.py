"""Stages that compute one at a time, a layer of a plan between two steps: the same answers, whoever is killed or stopped."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_media import check, image_part, picture, sound, text
from mmrt.tests.end_to_end.test_restart import LONG, PROMPT, Streams
from mmrt.tests.end_to_end.test_tools import trace_of

pytestmark = pytest.mark.slow  # turns are tested in tests/shm/test_turns.py and tests/actors/host/test_turns.py

SETTINGS = '[actors]\nturns = "layers"\n[scheduling]\ntbt_target_ms = 0.1\n'  # quanta of one layer
CONTENT = [image_part(picture(1, 140, 140)), text("What is it?")]


@pytest.fixture(scope="module")
def turning(launch: Callable[..., Server], source: Path) -> Server:
    return launch(settings=SETTINGS, source=source)


@pytest.fixture(scope="module")
def story(turning: Server) -> list[int]:
    """The answer of a stream that nothing disturbs."""
    return turning.chat(PROMPT, **LONG)[1]


def test_answers_are_those_of_a_model_that_is_not_interrupted(turning: Server, oracle: Oracle, story: list[int]) -> None:
    part, samples = sound(2.5, 440)
    with Streams(turning, 2) as streams:
        for seed in range(3):
            pixels = picture(seed, 56, 84)
            check(turning, oracle, [image_part(pixels), part, text("What is it?")], Media(images=[pixels], audios=[samples]))
    assert streams.errors == [] and streams.ids == [story] * 2
    turning.wait_until_empty()
    spans: dict[str, list[tuple[float, float]]] = {"encode": [], "prefill": [], "step": []}
    for event in trace_of(turning)[1]:
        if event["ph"] == "X" and event["name"] in spans:
            spans[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
    plans, steps = spans["encode"] + spans["prefill"], spans["step"]
    assert any(begin < first and last < end for begin, end in plans for first, last in steps), "no plan was interrupted for a step"


def test_killed_and_stopped_among_turns(turning: Server, story: list[int]) -> None:
    expected = turning.chat(CONTENT)[1]
    with ThreadPoolExecutor() as pool:
        with Streams(turning, 2) as streams:
            for victim in ("encoder", "prefill", "decode"):
                answers = [pool.submit(turning.chat, CONTENT) for _ in range(3)]
                turning.kill(victim)
                assert [answer.result()[1] for answer in answers] == [expected] * 3
            answers = [pool.submit(turning.chat, CONTENT) for _ in range(3)]
            turning.kill("encoder", signal.SIGSTOP)
        assert streams.errors == [] and streams.ids == [story] * 2
        turning.kill("encoder", signal.SIGCONT)
        assert [answer.result()[1] for answer in answers] == [expected] * 3
    turning.wait_until_empty()
