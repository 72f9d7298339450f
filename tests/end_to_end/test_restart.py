"""Restarts as users do them: several at once, all in turn, with code that is broken on disk, and by editing it under ``--reload``."""

import itertools
import json
import os
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mmrt.runtime.controller.scheduling.budgets import MIN_TOKENS
from mmrt.runtime.stage_table import ACTORS, restart_order
from mmrt.schema.rows import Phase
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.shm.status import ActorState, ActorTable
from mmrt.tests.end_to_end.conftest import BREAKABLE, MMRT, Server
from mmrt.tests.end_to_end.test_outages import CONTENT, broken, wait_for_answer

PROMPT = "A long story, please."
LONG = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}


def processes(server: Server) -> dict[str, tuple[int, int]]:
    """Name -> (pid, generation)."""
    return {found["name"]: (found["pid"], found["generation"]) for found in server.status()["actors"]}


@cache
def undisturbed(server: Server) -> list[int]:
    """The tokens of a long stream to which nothing happens."""
    return server.chat(PROMPT, **LONG)[1]


@contextmanager
def edited(file: Path, text: str) -> Iterator[None]:
    """Add ``text`` to the end of a source file for a while."""
    before = file.read_text()
    file.write_text(f"{before}\n{text}\n")
    try:
        yield
    finally:
        file.write_text(before)


class Streams:
    """Several long streams at once; ``ids`` of each when all are done."""

    def __init__(self, server: Server, count: int, options: dict[str, Any] = LONG, has_begun: Callable[[], bool] | None = None) -> None:
        """Without ``has_begun`` they have begun when each has a few tokens."""
        self._has_begun = has_begun
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self.flowing = threading.Semaphore(0)
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._read, args=(server, ids, options)) for ids in self.ids]

    def _read(self, server: Server, ids: list[int], options: dict[str, Any]) -> None:
        is_flowing = False
        try:
            for chunk in server.stream(PROMPT, **options):
                ids += [token for choice in chunk.choices for token in (getattr(choice, "token_ids", None) or [])]
                if len(ids) > 3 and not is_flowing:
                    is_flowing = True
                    self.flowing.release()
        except Exception as error:
            self.errors.append(error)

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        while self._has_begun is not None and not self._has_begun():
            time.sleep(0.001)
        for _ in self._threads if self._has_begun is None else ():
            assert self.flowing.acquire(timeout=30)
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(60)


def test_several_at_once_under_load(own: Server) -> None:
    expected = undisturbed(own)
    before = processes(own)
    names = ["decode", "prefill", "controller", "detokenizer"]
    with Streams(own, 4) as streams:
        done = own.mmrt("restart", *names, "decode")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == names
    assert streams.errors == [] and streams.ids == [expected] * 4
    after = processes(own)
    assert {name for name in ACTORS if after[name] != before[name]} == set(names)


@pytest.mark.slow
def test_all_in_turn_under_load(own: Server) -> None:
    expected = undisturbed(own)
    before = processes(own)
    with Streams(own, 2) as streams:
        done = own.mmrt("restart", "--all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == restart_order(ACTORS)
    assert streams.errors == [] and streams.ids == [expected] * 2
    after = processes(own)
    assert not [name for name in ACTORS if after[name][0] == before[name][0]]
    for actor in ("encoder", "prefill", "decode"):
        assert "libllvmlite" not in Path(f"/proc/{own.pid(actor)}/maps").read_text(), "kernels are kept"


def test_what_plans_cost_is_known_to_the_next_controller(own: Server) -> None:
    own.chat("Tell me a story about a house. " * 60, max_tokens=2)
    assert own.mmrt("restart", "controller").returncode == 0
    file = Path(own.environment["XDG_STATE_HOME"]) / "mmrt" / "costs.json"
    (setup,) = [setup for setup in json.loads(file.read_text()).values() if "prefill" in setup["stages"]]
    assert setup["stages"]["prefill"]["largest"] >= MIN_TOKENS
    view = json.loads(own.mmrt("inspect", "--json").stdout)
    assert view["prefill_budget_tokens"] > MIN_TOKENS, "without them it begins with the least"


def test_new_rows_go_on_while_a_controller_takes_its_time_to_come_back(own: Server, own_source: Path) -> None:
    """From their first step on they have pages for more than the two that come with their prompts."""
    expected = undisturbed(own)
    own.wait_until_empty()
    pid, generation = processes(own)["controller"]
    slow = edited(own_source / "actors" / "controller" / "serve.py", "import time as _time\n_time.sleep(2)")
    with slow, RunDirectory.attach(own.run_path) as run, ExitStack() as stack:
        table = stack.enter_context(closing(SequenceTable.attach(run, writable=False)))
        actors = stack.enter_context(closing(ActorTable.attach(run, writable=False)))
        with Streams(own, 2, has_begun=lambda: len(table.rows_in(Phase.DECODE)) == 2) as streams:
            os.kill(pid, signal.SIGKILL)
            while actors.read("controller").generation == generation or actors.read("controller").state is not ActorState.ACTIVE:
                time.sleep(0.01)
            num_tokens = min(map(len, streams.ids))
    assert streams.errors == [] and streams.ids == [expected] * 2
    assert num_tokens > 64, "two pages have 32"


def test_code_that_is_broken_on_disk_replaces_nothing(own: Server, own_source: Path) -> None:
    before = processes(own)
    with edited(own_source / "actors" / "prefill.py", "raise RuntimeError('broken on purpose')"):
        done = own.mmrt("restart", "prefill")
        assert done.returncode == 1
        assert "Traceback" in done.stderr and "RuntimeError: broken on purpose" in done.stderr
        assert "the old one keeps serving" in done.stderr
        assert processes(own) == before
        assert own.chat(PROMPT)[0]
        rolling = own.mmrt("restart", "--all")
        assert rolling.returncode == 1
        assert [line.split(":")[0] for line in rolling.stdout.splitlines()] == ["memory", "video", "encoder"]
        assert "broken on purpose" in rolling.stderr
        assert "not restarted: decode, detokenizer, controller, gateway" in rolling.stderr
    assert own.status()["ready"]
    done = own.mmrt("restart", "prefill")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "name actors, or say --all"),
        (("--all", "decode"), "not both"),
        (("decode", "decoed"), "no actor 'decoed'; did you mean decode? There are memory"),
    ],
)
def test_bad_arguments(own: Server, arguments: tuple[str, ...], complaint: str) -> None:
    before = processes(own)
    done = own.mmrt("restart", *arguments)
    assert done.returncode != 0 and complaint in done.stderr
    assert processes(own) == before


class Visitor(threading.Thread):
    """Makes new connections to the gateway, one after another, and notes how each went."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.outcomes: list[str] = []
        self.done = threading.Event()
        self.begun = threading.Event()
        self._url = url

    def run(self) -> None:
        while not self.done.is_set():
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=30) as response:
                    self.outcomes.append(str(response.status))
            except OSError as error:
                self.outcomes.append(repr(getattr(error, "reason", error)))
            self.begun.set()


def visited(server: Server, act: Callable[[], Any]) -> list[str]:
    """How new connections went while something was done."""
    visitors = [Visitor(server.url) for _ in range(3)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        assert visitor.begun.wait(30)
    try:
        act()
    finally:
        for visitor in visitors:
            visitor.done.set()
        for visitor in visitors:
            visitor.join(60)
    return [outcome for visitor in visitors for outcome in visitor.outcomes]


def test_a_restart_of_the_gateway_fails_no_request(own: Server) -> None:
    before = processes(own)
    outcomes = visited(own, lambda: own.mmrt("restart", "gateway"))
    assert processes(own)["gateway"][1] > before["gateway"][1]
    assert set(outcomes) == {"200"}


def test_a_killed_gateway_refuses_no_connection(own: Server) -> None:
    pid = own.pid("gateway")

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        own.wait(lambda status: bool(status["ready"]) and own.pid("gateway") != pid, "a new gateway")

    outcomes = visited(own, kill)
    assert outcomes[-1] == "200"
    assert not [outcome for outcome in outcomes if "Refused" in outcome], "they wait in the queue of the supervisor's socket"


def test_a_stream_finishes_while_the_gateway_hands_over(own: Server) -> None:
    expected = undisturbed(own)
    with Streams(own, 2) as streams:
        assert own.mmrt("restart", "gateway").returncode == 0
    assert streams.errors == [] and streams.ids == [expected] * 2


@pytest.fixture(scope="module")
def reloading(launch: Callable[..., Server], source: Path) -> Server:
    return launch("qwen2_5_omni", BREAKABLE, "--reload", source=source)


_marks = itertools.count()


def edit(file: Path) -> None:
    file.write_text(f"{file.read_text()}# edit {next(_marks)}\n")


def said(server: Server, text: str, timeout_s: float = 30) -> str:
    """What the supervisor has logged, once it contains ``text``."""
    deadline = time.monotonic() + timeout_s
    while text not in (log := server.mmrt("logs", "supervisor").stdout):
        assert time.monotonic() < deadline, f"{text!r} is not in {log}"
        time.sleep(0.2)  # each look is a process
    return log


def check_an_edit_of_decode(server: Server, source: Path) -> None:
    """Who imports the edited file is restarted, and nobody else."""
    expected = undisturbed(server)
    before = processes(server)
    with Streams(server, 2) as streams:
        edit(source / "actors" / "decode" / "running_set.py")
        after = server.wait(lambda status: processes(server)["decode"][1] > before["decode"][1], "a new decode", 60)
    assert after is not None
    said(server, "reload: decode: generation")
    assert streams.errors == [] and streams.ids == [expected] * 2
    assert {name for name, found in processes(server).items() if found != before[name]} == {"decode"}


@pytest.mark.slow  # another run is edited in test_instances
def test_an_edit_restarts_who_imports_it(reloading: Server, source: Path) -> None:
    check_an_edit_of_decode(reloading, source)


@pytest.mark.slow
def test_an_edit_of_two_files_is_one_edit(reloading: Server, source: Path) -> None:
    before = processes(reloading)
    edit(source / "actors" / "encoder.py")
    edit(source / "actors" / "host" / "plan_loop.py")
    said(reloading, "reload: actors/encoder.py, actors/host/plan_loop.py: restarting video, encoder, prefill")
    for name in ("video", "encoder", "prefill"):
        said(reloading, f"reload: {name}: generation {before[name][1] + 1} serves")
    assert {name: found[1] - before[name][1] for name, found in processes(reloading).items() if found != before[name]} == {
        "video": 1,
        "encoder": 1,
        "prefill": 1,
    }


@pytest.mark.slow
def test_what_does_not_compile_is_shown_and_changes_nothing(reloading: Server, source: Path) -> None:
    before = processes(reloading)
    with edited(source / "actors" / "decode" / "loop.py", "x = ("):
        log = said(reloading, "SyntaxError: '(' was never closed")
        assert "reload: actors/decode/loop.py does not compile: the old code keeps serving" in log
        assert processes(reloading) == before
    said(reloading, "reload: actors/decode/loop.py: restarting decode")
    reloading.wait(lambda status: processes(reloading)["decode"][1] > before["decode"][1], "a new decode")


@pytest.mark.slow
def test_what_fails_at_import_is_shown_and_tried_again(reloading: Server, source: Path) -> None:
    before = processes(reloading)
    with edited(source / "actors" / "detokenizer.py", "raise RuntimeError('broken by an edit')"):
        said(reloading, "reload: detokenizer: the new process ended with exit status 1 before it was ready; the old one keeps serving")
        assert "broken by an edit" in reloading.mmrt("logs", "detokenizer").stdout
        assert processes(reloading) == before
        assert reloading.chat(PROMPT)[0]
    reloading.wait(lambda status: processes(reloading)["detokenizer"][1] > before["detokenizer"][1], "a new detokenizer")
    assert reloading.status()["ready"]


@pytest.mark.slow
def test_the_mending_edit_brings_a_broken_stage_back(reloading: Server, source: Path) -> None:
    def num_reloads() -> int:
        return reloading.mmrt("logs", "supervisor").stdout.count("reload: video: generation")

    with broken(reloading, source, "video"):
        ready = wait_for_answer(reloading, "/ready", lambda status, _: status == 200)
        assert json.loads(ready) == {"status": "ready", "degraded": ["video"]}
        before = num_reloads()
    reloading.wait(lambda _: num_reloads() > before, "a video stage that the edit, and no probe, has started")
    assert reloading.status()["ready"] and reloading.chat(CONTENT)[0]
    wait_for_answer(reloading, "/ready", lambda status, text: status == 200 and "degraded" not in text)


@pytest.mark.slow
def test_the_supervisor_keeps_its_own_code_and_says_so(reloading: Server, source: Path) -> None:
    before = processes(reloading)
    (source / "actors" / "decode" / "loop.py").touch()  # no edit
    edit(source / "runtime" / "supervisor" / "supervisor.py")
    said(reloading, "reload: the supervisor uses runtime/supervisor/supervisor.py, too, and keeps the old code until the next mmrt up")
    assert processes(reloading) == before


@pytest.mark.slow
def test_a_debugged_actor_is_renewed_behind_its_debugger(reloading: Server, source: Path) -> None:
    command = [*MMRT, "debug", "prefill", "--no-pdb"]
    with subprocess.Popen(command, env=reloading.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as debugger:
        try:
            reloading.wait(lambda status: any(found["pid"] == debugger.pid for found in status["actors"]), "the debugger's role")
            edit(source / "actors" / "prefill.py")
            said(reloading, f"reload: prefill is being debugged by pid {debugger.pid}, which keeps the code that it has loaded")
            assert reloading.chat(PROMPT)[0]
        finally:
            debugger.kill()
    reloading.wait(lambda status: bool(status["ready"]) and processes(reloading)["prefill"][0] != debugger.pid, "a supervised prefill")
    assert reloading.chat(PROMPT)[0]
