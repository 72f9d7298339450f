"""Several decodes in one run: each has rows of its own, and while one is away or gone for good the texts are as those of one decode."""

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from mmrt.runtime.stage_table import MAX_INSTANCES, instance_id
from mmrt.schema.rows import EndCode
from mmrt.shm.controller_stats import ControllerStats
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_outages import TIMEOUT_S, Asking, broken, report
from mmrt.tests.end_to_end.test_restart import PROMPT, Streams, processes

pytestmark = pytest.mark.slow  # two decodes serve in test_scale, too

SETTINGS = '[actors]\nlayout = "E+P+2D"\n[supervisor]\nrestart_limit = 2\nbackoff_s = 0.05\n'
PROMPTS = [f"Tell me about the number {number}." for number in range(6)]
BOTH = {"decode", "decode.1"}
STORY = {"max_tokens": 300, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def two(launch: Callable[..., Server], source: Path) -> Server:
    """A run of a copy of the package, so that its code can be broken."""
    return launch(settings=SETTINGS, source=source)


@pytest.fixture(scope="module")
def expected(two: Server) -> list[int]:
    """The story's tokens, undisturbed."""
    return two.chat(PROMPT, **STORY)[1]


def at_once(server: Server) -> list[list[int]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [answer[1] for answer in pool.map(lambda prompt: server.chat(prompt, max_tokens=60), PROMPTS)]


def owners(server: Server) -> dict[str, int]:
    """How many live rows each decode has."""
    with RunDirectory.attach(server.run_path) as run, closing(SequenceTable.attach(run, writable=False)) as table:
        counts = {instance_id("decode", number): len(table.rows_of(number)) for number in range(MAX_INSTANCES)}
        return {decode: count for decode, count in counts.items() if count}


def under_way(server: Server, count: int) -> list[Asking]:
    """Ask for stories. Half of them are at each decode; the second does not get on, after some tokens of each."""
    for decode in BOTH:
        server.kill(decode, signal.SIGSTOP)
    stories = [Asking(server, PROMPT, **STORY) for _ in range(count)]
    server.wait(lambda _: owners(server) == dict.fromkeys(BOTH, count // 2), "as many rows at each, the fewest first")
    for decode in BOTH:
        server.kill(decode, signal.SIGCONT)
    with RunDirectory.attach(server.run_path) as run, closing(SequenceTable.attach(run, writable=False)) as table:
        while min(table.committed(*row) for row in table.rows_of(1)) < 3:
            time.sleep(0.001)
        server.kill("decode.1", signal.SIGSTOP)
        assert all(table.end(*row) == EndCode.NONE for row in table.rows_of(1))
    return stories


def check(stories: list[Asking], expected: list[int]) -> None:
    for story in stories:
        story.join(TIMEOUT_S)
    assert [story.error for story in stories] == [None] * len(stories)
    assert [story.ids for story in stories] == [expected] * len(stories)


def handed_over(server: Server) -> int:
    with RunDirectory.attach(server.run_path) as run, closing(ControllerStats.attach(run)) as stats:
        return stats.read().handed_over_total


def test_texts_are_those_of_one_decode(two: Server, server: Server) -> None:
    assert at_once(two) == at_once(server) and BOTH < {*processes(two)}
    steps = {actor["name"]: actor["steps"] for actor in two.status()["actors"]}
    assert steps["decode"] and steps["decode.1"]
    two.wait_until_empty()


@pytest.mark.slow
def test_one_serves_while_the_other_is_away(two: Server, expected: list[int]) -> None:
    stories = under_way(two, 2)
    two.wait(lambda status: status["requests"]["running"] == 1, "one story has come to its end")
    two.kill("decode.1")
    check(stories, expected)
    assert handed_over(two) == 0, "each has kept its own"
    two.wait_until_empty()


def test_both_are_killed_under_load(two: Server, expected: list[int]) -> None:
    before = processes(two)
    with Streams(two, 4, STORY) as streams:
        two.kill("decode.1")
        two.kill("decode")
    assert streams.errors == [] and streams.ids == [expected] * 4
    two.wait(lambda status: bool(status["ready"]), "ready")
    after = processes(two)
    assert {name for name in after if after[name] != before[name]} == BOTH
    two.wait_until_empty()


@pytest.mark.slow
def test_the_streams_of_one_that_does_not_come_up_go_on_at_the_other(two: Server, source: Path, expected: list[int]) -> None:
    """It is not broken: it starts, and never gets ready."""
    file, before = source / "actors/decode/loop.py", handed_over(two)
    code, stories = file.read_text(), under_way(two, 4)
    file.write_text("import time\ntime.sleep(600)\n")
    try:
        two.kill("decode.1")
        two.wait(lambda _: handed_over(two) == before + 2, "its rows are at the other", TIMEOUT_S)
        check(stories, expected)
        assert two.chat("Hello")[1], "new ones are served as well"
        assert report(two.status(), "decode.1")["state"] not in ("active", "broken")
    finally:
        file.write_text(code)
        two.kill("decode.1")
    two.wait(lambda status: bool(status["ready"]), "ready", TIMEOUT_S)
    two.wait_until_empty()


def test_the_streams_of_one_that_is_gone_for_good_go_on_at_the_other(two: Server, source: Path, expected: list[int]) -> None:
    before = handed_over(two)
    stories = under_way(two, 4)
    with broken(two, source, "decode.1"):
        two.wait(lambda _: handed_over(two) == before + 2, "its rows are at the other", TIMEOUT_S)
        check(stories, expected)
        assert two.chat("Hello")[1], "new ones are served as well"
    two.wait_until_empty()
    assert two.mmrt("restart", "decode.1").returncode == 0
    stories = under_way(two, 2)
    two.kill("decode.1", signal.SIGCONT)
    check(stories, expected)
    two.wait_until_empty()
