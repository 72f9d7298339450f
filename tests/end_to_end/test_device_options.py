"""Two devices in a run with files of pages and with turns: one file has the pages of both, and each has a turn of its own."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from mmrt.runtime.stage_table import stage_of
from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.test_outages import TIMEOUT_S, Asking
from mmrt.tests.end_to_end.test_restart import PROMPT, Streams

pytestmark = pytest.mark.slow  # two devices serve in test_devices, too
SETTINGS = """[actors]
layout = "EPD@left+EPD@right"
turns = "plans"
[[devices]]
name = "left"
[[devices]]
name = "right"
[cache]
dir = "{}"
[supervisor]
backoff_s = 0.05
"""
STORY = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
HOLD = """
import sys, time
from pathlib import Path
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.turns import Turns

assert Turns.attach(RunDirectory.attach(Path(sys.argv[1]))).turn.enter(30)
print("in", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def both(launch: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    return launch(settings=SETTINGS.format(tmp_path_factory.mktemp("pages")))


@contextmanager
def held_turn(run: Path) -> Iterator[None]:
    """A process has the turn of the first device, and is killed in it."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "in\n"
        yield
    finally:
        holder.kill()
        holder.communicate()


def steps(server: Server) -> list[int]:
    """Of the decodes."""
    found = {actor["name"]: int(actor["steps"]) for actor in server.status()["actors"] if stage_of(actor["name"]) == "decode"}
    return [found["decode"], found["decode.1"]]


def test_the_turn_of_a_device_is_no_other_devices(both: Server, server: Server) -> None:
    expected = server.chat(PROMPT, **STORY)[1]
    with held_turn(both.run_path):
        waiting = Asking(both, PROMPT, **STORY)
        both.wait(lambda status: status["requests"]["preparing"] > 0, "a request on the first device")
        other = Asking(both, PROMPT, **{**STORY, "extra_body": {**STORY["extra_body"], "cache_salt": "other"}})
        other.join(TIMEOUT_S)
        assert (other.error, other.ids) == (None, expected) and waiting.ids == []
        assert steps(both)[0] == 0 < steps(both)[1]
    waiting.join(TIMEOUT_S)
    assert (waiting.error, waiting.ids) == (None, expected), "the turn of a process that was killed is free"
    both.wait_until_empty()


def test_a_device_goes_on_while_the_other_starts_again(both: Server, server: Server) -> None:
    expected, before = server.chat(PROMPT, **STORY)[1], steps(both)
    with Streams(both, 4, STORY) as streams:
        both.kill("decode")
    assert streams.errors == [] and streams.ids == [expected] * 4
    assert steps(both)[1] > before[1]
    both.wait_until_empty()


def ask(server: Server, prompt: list[int], salt: str, max_tokens: int) -> tuple[list[int], int]:
    """Return the answer, and how many tokens of the prompt were found in a cache."""
    extra = {"cache_salt": salt, "return_token_ids": True, "ignore_eos": True}
    answer = server.client.completions.create(
        model=server.checkpoint.name, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=extra
    )
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    ids: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return ids, answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.slow
def test_the_next_run_has_the_pages_of_both_devices(both: Server, server: Server) -> None:
    """Of prompts and of answers."""
    prompts = {"one": list(range(5, 45)), "two": list(range(50, 90))}
    before = steps(both)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ask, both, prompts["one"], "one", 800)  # more than "two" takes to begin
        both.wait(lambda status: status["requests"]["running"] > 0, "an answer on a device")
        answers = {"two": ask(both, prompts["two"], "two", 100)[0], "one": first.result()[0]}
    assert all(now > then for now, then in zip(steps(both), before, strict=True))
    both.wait_until_empty()
    both.down()
    both.up()
    for salt, prompt in prompts.items():
        turn = [*prompt, *answers[salt], *range(5, 15)]
        again, num_cached = ask(both, turn, salt, 8)
        assert num_cached == (len(prompt) + len(answers[salt]) - 1) // 16 * 16
        assert again == ask(server, turn, salt, 8)[0]
    both.wait_until_empty()
