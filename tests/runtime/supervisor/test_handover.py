"""Roles that go from one live process to another: several restarts at once, and guests, as ``mmrt debug`` makes them."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mmrt.runtime.errors import RunError
from mmrt.runtime.supervisor.commands import Commands
from mmrt.runtime.supervisor.control import DownRequest, KillReply, KillRequest, RestartReply, RestartRequest
from mmrt.runtime.supervisor.handover import expect_free, restart
from mmrt.runtime.supervisor.managed_actor import ActorSpec, Instance, SupervisedActor
from mmrt.tests.settings import also_slow

if TYPE_CHECKING:
    from .conftest import ToyRun

HERE = Path(__file__).parent


class Guest:
    """One process that has borrowed a role."""

    def __init__(self, toy: "ToyRun", name: str, *words: str) -> None:
        command = [sys.executable, str(HERE / "toy_debugger.py"), str(toy.run), name, *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.answer = self.process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self.process.pid

    def go_on(self) -> None:
        """Continue from the first prompt."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        return self.process.returncode


@pytest.fixture
def up(toy: "ToyRun") -> "ToyRun":
    toy.start("memory", "decode", watchdog_s=0.5)
    toy.wait_for("ready")
    return toy


@pytest.fixture
def debugger(up: "ToyRun") -> Iterator[Guest]:
    debugger = Guest(up, "decode")
    assert debugger.answer == "borrowed"
    yield debugger
    debugger.end()


def take_role(toy: "ToyRun", debugger: Guest) -> None:
    toy.forget()
    debugger.go_on()
    toy.wait_for_state("decode", "debugged")
    toy.behave("decode")


def wait_for_standby(toy: "ToyRun") -> None:
    """A process of the supervisor's waits behind the guest."""
    toy.wait_for("lines", lambda event: event["actor"] == "decode" and "decode begins" in event["lines"])


@pytest.mark.parametrize(
    ("actor", "asked"), [("decode", "kill"), ("gateway", "down"), *also_slow(("decode", "debug"), ("gateway", "debug"))]
)
def test_a_process_of_the_run_gets_no_role_and_no_sockets(toy: "ToyRun", actor: str, asked: str) -> None:
    toy.behave(actor, f"asks-{asked}")
    toy.start("gateway", "decode")
    answer = toy.wait_for("lines", lambda event: any("type" in line for line in event["lines"]))
    pid = toy.pid(actor)
    assert answer["lines"] == [f'{{"type":"error","message":"process {pid} belongs to the run and may not command it"}}']


@pytest.mark.parametrize(
    ("asker", "asked"),
    [("child", "kill"), ("orphan", "down"), *also_slow(("child", "debug"), ("child", "down"), ("orphan", "debug"), ("orphan", "kill"))],
)
def test_a_process_that_an_actor_has_started_commands_nothing(toy: "ToyRun", asker: str, asked: str) -> None:
    """Nor may one of the gateway's, which has the two commands of its page."""
    toy.behave("gateway", f"{asker}-asks-{asked}")
    toy.start("gateway", "decode")
    answer = toy.wait_for("lines", lambda event: any("type" in line for line in event["lines"]))
    (line,) = [line for line in answer["lines"] if "type" in line]
    pid = re.fullmatch(r'{"type":"error","message":"process (\d+) belongs to the run and may not command it"}', line)
    assert pid and int(pid[1]) not in toy.pids()


@pytest.mark.parametrize("asked", ["kill", "restart"])
def test_the_gateway_may_kill_and_restart_for_its_page(toy: "ToyRun", asked: str) -> None:
    toy.behave("gateway", "slow", f"asks-{asked}")
    toy.start("gateway", "decode")
    toy.wait_for_state("decode", "active")
    pid = toy.pid("decode")
    (toy.toys / "gateway.go").write_text("")
    answer = toy.wait_for("lines", lambda event: any(f'"type":"{asked}"' in line for line in event["lines"]))["lines"]
    if asked == "kill":
        assert answer == [f'{{"type":"kill","pid":{pid}}}']
        toy.wait_for("message", lambda event: event["text"] == f"decode: pid {pid} is killed by a command")
        toy.wait_for("message", lambda event: "starts again at once" in event["text"])  # as after a kill from outside
        toy.wait_for_states("decode", "backoff", "active")
    else:
        assert '"ok":true' in answer[0] and '"generation":2' in answer[0]
    assert toy.history().count("start decode") == 2


def test_without_a_page_the_gateway_commands_nothing() -> None:
    gateway = SimpleNamespace(
        spec=SimpleNamespace(listens=True), instances=[SimpleNamespace(process=SimpleNamespace(pid=7), is_debugger=False)]
    )
    crew: Any = SimpleNamespace(actors={"gateway": gateway}, config=SimpleNamespace(server=SimpleNamespace(page=False)))
    commands = Commands(crew, SimpleNamespace(may_ask=lambda pid: ""))  # type: ignore[arg-type]
    for request in (KillRequest("decode"), RestartRequest("decode")):
        with pytest.raises(RunError, match="process 7 belongs to the run and may not command it"):
            asyncio.run(commands.answer(request, 7))


def test_what_cannot_be_killed(toy: "ToyRun") -> None:
    toy.start("memory", "decode")
    toy.wait_for("ready")
    with pytest.raises(RunError, match="no actor 'decoder'; there are memory, decode"):
        toy.call(KillRequest("decoder"))
    pid = toy.pid("decode")
    assert toy.call(KillRequest("decode")) == KillReply(pid)
    toy.wait_for_states("decode", "backoff", "active")
    guest = Guest(toy, "decode")
    try:
        take_role(toy, guest)
        with pytest.raises(RunError, match="decode is debugged: no process of it can be killed"):
            toy.call(KillRequest("decode"))
    finally:
        guest.end()


def test_restarts_of_several_actors_at_once(toy: "ToyRun") -> None:
    toy.start()
    toy.wait_for("ready")
    replies: dict[str, RestartReply] = {}

    def restart(name: str) -> None:
        replies[name] = toy.restart(name)

    threads = [threading.Thread(target=restart, args=(name,)) for name in ("controller", "gateway", "decode")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(reply.ok and reply.generation == 2 for reply in replies.values()) and len(replies) == 3
    assert toy.report().ready


def test_a_restart_that_was_asked_for_leaves_no_last_exit(up: "ToyRun") -> None:
    assert up.restart("decode").ok
    assert up.actor("decode").last_exit == ""


def test_a_restart_for_which_no_process_can_be_started_changes_nothing() -> None:
    """Out of descriptors, for example: what was running goes on, and can be restarted later."""

    class Process:
        pid = 1
        started_s = 0.0
        alive = True

    class CrewApi:
        def on_state(self, actor: SupervisedActor) -> None: ...

        async def start_process(self, actor: SupervisedActor) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    async def attempt() -> None:
        actor = SupervisedActor(ActorSpec(name="decode", command=("x",)), CrewApi())  # type: ignore[arg-type]
        actor.current = Instance(Process(), None)  # type: ignore[arg-type]
        actor.current.active.set()
        actor.follow(actor.current)
        with pytest.raises(OSError, match="Too many open files"):
            await restart(actor)
        assert (actor.state, actor.candidate) == ("active", None)
        expect_free(actor)

    asyncio.run(attempt())


@pytest.mark.parametrize("is_relieved", [False, True])
def test_a_death_while_a_successor_loads_is_not_what_was_asked_for(is_relieved: bool) -> None:
    """It is recorded like any other, though somebody is there to take over."""
    ends: list[tuple[bool, str]] = []

    class Process:
        pid = 1
        started_s = 0.0
        alive = False
        returncode = exit_status = 0

        async def wait(self) -> int:
            return 0

    class CrewApi:
        def on_state(self, actor: SupervisedActor) -> None: ...

        def on_ended(self, actor: SupervisedActor, instance: Instance, unexpected: bool) -> None:
            ends.append((unexpected, actor.last_exit))
            actor.stopping.set()

    async def die() -> None:
        actor = SupervisedActor(ActorSpec(name="decode", command=("x",)), CrewApi())  # type: ignore[arg-type]
        actor.current, actor.candidate = (Instance(Process(), None) for _ in range(2))  # type: ignore[arg-type]
        actor.current.is_relieved = is_relieved
        await actor.run()

    asyncio.run(die())
    assert ends == [(False, "") if is_relieved else (True, "exit status 0")]


def test_a_guest_takes_the_role_and_gives_it_back(up: "ToyRun", debugger: Guest) -> None:
    before = up.actor("decode")
    assert (before.state, before.status) == ("active", f"about to be debugged by pid {debugger.pid}")
    assert before.pid != debugger.pid
    take_role(up, debugger)
    during = up.actor("decode")
    assert (during.pid, during.generation, during.status) == (debugger.pid, 2, f"debugged by pid {debugger.pid}")
    assert up.report().ready
    wait_for_standby(up)
    up.forget()
    debugger.end()
    up.wait_for_state("decode", "active")
    after = up.actor("decode")
    assert after.pid not in (before.pid, debugger.pid) and after.generation == 3 and after.last_exit == ""
    up.wait_for("message", lambda event: event["text"] == f"decode is not debugged any more: pid {debugger.pid} has gone")


def test_no_watchdog_looks_at_a_guest(up: "ToyRun") -> None:
    debugger = Guest(up, "decode", "hang")
    try:
        take_role(up, debugger)
        # Time passes by the watchdog of another actor, which hangs from its next start on.
        up.behave("memory", "hang")
        assert up.restart("memory").ok
        up.forget()
        up.wait_for_state("memory", "backoff")
        assert debugger.process.poll() is None
        assert up.actor("decode").status == f"debugged by pid {debugger.pid}"
    finally:
        debugger.end()


def test_one_guest_at_a_time_and_no_restart_meanwhile(up: "ToyRun", debugger: Guest) -> None:
    second = Guest(up, "decode")
    assert second.answer == f"refused: decode is being debugged by pid {debugger.pid}"
    assert second.process.wait() == 1
    third = Guest(up, "decoed")
    assert third.answer == "refused: no actor 'decoed'; there are memory, decode"
    for refused in (second, third):
        refused.end()
    with pytest.raises(RunError, match=f"decode is being debugged by pid {debugger.pid}"):
        up.restart("decode")


def test_a_guest_that_leaves_at_its_first_prompt_changes_nothing(up: "ToyRun", debugger: Guest) -> None:
    before = up.pid("decode")
    debugger.end()
    up.wait_for("message", lambda event: event["text"] == f"decode debugger (pid {debugger.pid}) exited before taking over")
    assert up.pid("decode") == before
    assert up.restart("decode").ok


def test_a_death_behind_the_first_prompt_is_made_good(up: "ToyRun", debugger: Guest) -> None:
    up.forget()
    os.kill(up.pid("decode"), signal.SIGKILL)
    up.wait_for_state("decode", "backoff")
    up.wait_for_state("decode", "active")
    assert up.actor("decode").pid != debugger.pid
    take_role(up, debugger)


def test_a_guest_takes_over_from_a_crash_loop(toy: "ToyRun") -> None:
    up = toy
    up.start("memory", "decode", backoff_s=60.0, backoff_max_s=60.0)
    up.wait_for("ready")
    up.behave("decode", "crash")
    up.forget()
    os.kill(up.pid("decode"), signal.SIGKILL)
    up.wait_for_state("decode", "backoff")
    debugger = Guest(up, "decode")
    assert debugger.answer == "borrowed"
    try:
        take_role(up, debugger)
        assert up.report().ready
    finally:
        debugger.end()


def test_the_end_of_the_run_ends_the_guest(up: "ToyRun", debugger: Guest) -> None:
    take_role(up, debugger)
    wait_for_standby(up)
    up.call(DownRequest(drain_s=0.0))
    assert debugger.process.wait() == 0
    assert up.end() == 0
    up.assert_nothing_left()


def test_a_killed_supervisor_ends_the_guest(up: "ToyRun", debugger: Guest) -> None:
    take_role(up, debugger)
    assert up.process is not None
    up.process.kill()
    up.process.wait()
    assert debugger.process.wait() == 0, "the connection is its lifeline"
    up.wait_until_gone()
