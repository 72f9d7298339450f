"""Scheduling policies replaced while a real run serves: no token changes, and a user's file harms nobody."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mmrt
from mmrt.cli.policy import set_policy
from mmrt.tests.end_to_end.conftest import Server, also_slow
from mmrt.tests.end_to_end.test_media import image_part, picture, text

EXAMPLE = Path(mmrt.__file__).parent / "examples" / "shortest_first.py"
CONTENTS: list[Any] = [
    "Tell me a long story.",
    "Count the stars in the sky, one after the other, and do not stop. " * 8,
    [image_part(picture(5, 120, 160)), text("What is it?")],
    [text("Look twice."), image_part(picture(6, 200, 90)), image_part(picture(7, 60, 60))],
]
NUM_TOKENS = 60
HEAD = """\
import os
from mmrt.runtime.controller.scheduling.unified import Unified
class Mine(Unified):
    ages = True
    def rank(self, request, facts):
        return (-request.arrival,)
    def plan(self, view, limits, memory):
"""


@pytest.fixture(scope="module")
def run(server: Server) -> Iterator[Server]:
    yield server
    set_policy(server.run_path, "unified")


@pytest.fixture(scope="module")
def expected(run: Server) -> list[list[int]]:
    return [run.chat(content, max_tokens=NUM_TOKENS)[1] for content in CONTENTS]


@contextmanager
def streaming(run: Server, expected: list[list[int]]) -> Iterator[list["Future[tuple[str, list[int]]]"]]:
    """Streams that go on inside; at the end all of them have the expected ids."""
    with ThreadPoolExecutor(len(CONTENTS)) as pool:
        answers = [pool.submit(run.chat, content, max_tokens=NUM_TOKENS) for content in CONTENTS]
        yield answers
    assert [answer.result()[1] for answer in answers] == expected


def policy(run: Server) -> dict[str, Any]:
    found: dict[str, Any] = run.status()["policy"]
    return found


def write(path: Path, body: str) -> str:
    part = path.with_suffix(".part")
    part.write_text(HEAD + f"        {body}\n        return super().plan(view, limits, (memory or 0) + 1)\npolicy = Mine()\n")
    part.replace(path)
    return str(path)


def test_twenty_swaps_change_no_token(run: Server, expected: list[list[int]], tmp_path: Path) -> None:
    policies = ("auto", "unified", write(tmp_path / "mine.py", "pass"), str(EXAMPLE))
    num_swaps = 0
    while num_swaps < 20:
        with streaming(run, expected) as answers:
            while num_swaps < 20 and not all(answer.done() for answer in answers):
                wanted = policies[num_swaps % len(policies)]
                set_policy(run.run_path, wanted)
                assert policy(run)["name"] == Path(wanted).name
                num_swaps += 1
    assert policy(run)["overruled"] == 0
    run.wait_until_empty()


def test_an_order_is_answered_once_its_file_is_loaded(run: Server, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    write(path, "pass")
    path.write_text("import time\ntime.sleep(0.3)\n" + path.read_text())
    assert set_policy(run.run_path, str(path)).startswith("mine.py (version ")
    assert set_policy(run.run_path, "unified") == "unified"


@pytest.mark.slow
def test_a_file_is_edited_under_load(run: Server, expected: list[list[int]], tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    done = run.mmrt("policy", "set", write(path, "pass"))
    first = policy(run)["version"]
    assert done.returncode == 0 and done.stdout == f"mine.py (version {first})\n", done.stderr
    for body, error in (("1 / 0", "plan: mine.py:8: ZeroDivisionError"), ("while True: pass", "plan: mine.py:8: took more than 50 ms")):
        before = policy(run)["version"]
        with streaming(run, expected):
            write(path, body)
            run.wait(lambda status, before=before: status["policy"]["version"] != before, "another version")
            run.chat(CONTENTS[0], max_tokens=2)
            run.wait(lambda status, error=error: error in status["policy"]["error"], "a failure")
        assert policy(run)["version"] != first
    assert "last because of plan: mine.py:8: took more" in " ".join(run.mmrt("status").stdout.split())
    path.write_text("policy = Nothing()\n")
    found = run.wait(lambda status: bool(status["policy"]["refused"]), "a refusal")["policy"]
    assert "mine.py:1: NameError" in found["refused"]
    last = write(path, "'the end'")
    run.wait(lambda status: status["policy"]["name"] == "mine.py" and not status["policy"]["refused"], "the last version")
    with streaming(run, expected):
        pass
    shown = run.mmrt("policy", "show").stdout
    assert f"set         {last}" in shown and "P99" in shown and "overruled   0 times" in shown
    assert f"*  {last}" in run.mmrt("policy", "list").stdout
    assert "policy: mine.py (version" in run.mmrt("inspect").stdout
    assert run.mmrt("policy", "set", "unified").stdout == "unified\n"


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("os._exit(3)", "the controller ended with status 3 in a call of it"),
        *also_slow(("sum(range(10**13))", "in a call of it")),  # by SIGPROF, or by the watchdog on a busy machine
    ],
)
def test_one_that_ends_the_controller(run: Server, expected: list[list[int]], tmp_path: Path, deed: str, reason: str) -> None:
    trigger = tmp_path / "trigger"
    file = write(tmp_path / "mine.py", f"os.path.exists({str(trigger)!r}) and {deed}")
    set_policy(run.run_path, file)
    before = run.pid("controller")
    with streaming(run, expected):
        trigger.touch()
        run.wait(lambda status: reason in status["policy"]["set_aside"], "a condemned version")
    assert run.pid("controller") != before and policy(run)["name"] == "unified" and policy(run)["wanted"] == file
    trigger.unlink()
    run.kill("controller")
    with streaming(run, expected):
        run.wait(lambda status: status["ready"], "another controller")
    assert reason in policy(run)["set_aside"], "no later controller loads it"
    set_policy(run.run_path, file)
    assert policy(run)["name"] == "mine.py", "it was set again"
    set_policy(run.run_path, "unified")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def plan(:\n", "bad.py:1: SyntaxError: invalid syntax"),
        ("import os\nos._exit(0)\n", "ends its process (exit status 0)"),
        (HEAD + "        return 7\npolicy = Mine()\n", "plan: bad.py: TypeError: cannot unpack non-iterable int object"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_changes(run: Server, tmp_path: Path, source: str, words: str) -> None:
    before = policy(run)
    (tmp_path / "bad.py").write_text(source)
    done = run.mmrt("policy", "set", str(tmp_path / "bad.py"))
    assert done.returncode == 2 and words in done.stderr
    time.sleep(0.2)
    assert (policy(run)["name"], policy(run)["number"]) == (before["name"], before["number"])
