"""Prefill in a pipeline of two processes (RS1, RS6): the tokens of one, whatever dies; chunks of one request at both stages at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_media import check, image_part, picture, text
from mmrt.tests.end_to_end.test_restart import Streams, undisturbed
from mmrt.tests.end_to_end.test_text import QUESTIONS, ask
from mmrt.tests.end_to_end.test_tools import trace_of

SETTINGS = (
    '[actors]\nlayout = "E+2P+D"\n[scheduling]\nprefill_pipeline = true\nprefill_budget_tokens = 32\n'
    "[memory]\nprefix_cache = false\n[supervisor]\nrestart_limit = 40\n"
)
LONG = " ".join(QUESTIONS) * 6


@pytest.fixture(scope="module")
def pipeline(launch: Callable[..., Server]) -> Server:
    return launch(settings=SETTINGS)


def test_two_stages_answer_as_one_process_does(pipeline: Server, oracle: Oracle) -> None:
    for question in (QUESTIONS[0], LONG):
        oracle.check_greedy(oracle.inputs(ask(question)), pipeline.chat(question)[1])
    for seed, side in ((3, 56), (4, 168)):
        pixels = picture(seed, side, side)
        check(pipeline, oracle, [image_part(pixels), text(f"What is it? {LONG}")], Media(images=[pixels]))
    pipeline.wait_until_empty()


def test_chunks_of_one_request_are_at_both_stages_at_once(pipeline: Server) -> None:
    pipeline.chat(LONG)
    trace, events = trace_of(pipeline)
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    work: dict[str, list[tuple[float, float]]] = {"prefill": [], "prefill.1": []}
    for event in events:
        if event["ph"] == "X" and event["name"] == "prefill":
            work[names[event["pid"]]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(work["prefill"]) == len(work["prefill.1"]) > 10
    assert any(first[0] < second[1] and second[0] < first[1] for first, second in product(work["prefill"], work["prefill.1"]))


def test_each_stage_is_killed_in_mid_chunk(pipeline: Server) -> None:
    content = [image_part(picture(1, 168, 168)), text(LONG)]
    expected, stream = pipeline.chat(content)[1], undisturbed(pipeline)
    for round_ in range(3):
        with Streams(pipeline, 2) as streams, ThreadPoolExecutor() as pool:
            answers = [pool.submit(pipeline.chat, content) for _ in range(3)]
            for actor in ("prefill", "prefill.1", "controller")[: round_ + 1]:
                pipeline.kill(actor)
            assert [answer.result()[1] for answer in answers] == [expected] * 3
        assert streams.errors == [] and streams.ids == [stream] * 2
    pipeline.wait_until_empty()


def test_its_plans_are_not_captured(pipeline: Server) -> None:
    done = pipeline.mmrt("replay", "--capture", "prefill.1", "--wait", "1")
    assert done.returncode == 1 and "prefill.1 is a stage of scheduling.prefill_pipeline" in done.stderr


def test_a_stage_restarts_in_mid_prompt(pipeline: Server) -> None:
    expected = pipeline.chat(LONG)[1]
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(pipeline.chat, LONG) for _ in range(4)]
        for actor in ("prefill.1", "prefill"):
            done = pipeline.mmrt("restart", actor)
            assert done.returncode == 0, done.stderr
        assert [answer.result()[1] for answer in answers] == [expected] * 4
    pipeline.wait_until_empty()


def test_its_stages_stay_as_many(pipeline: Server) -> None:
    done = pipeline.mmrt("scale", "prefill=3")
    assert done.returncode == 1 and "prefill.2, a stage of a pipeline, would come or go" in done.stderr
