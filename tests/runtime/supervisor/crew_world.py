"""A simulated machine for the supervisor's decisions: processes that start, serve, hang, die and obey, and people who command.

The code under test is the shipped one, from ``Commands`` to the last SIGKILL. The world is ``Outside`` of the crew. Its clock is the
loop's, its randomness a seed's, and times lie on a grid, so that things coincide. It checks while it runs; each rule says its promise.
"""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.errors import RunError
from mmrt.runtime.process.notify import Notification
from mmrt.runtime.supervisor.commands import Commands, Loan
from mmrt.runtime.supervisor.control import DebugRequest, DownRequest, KillRequest, Request, RestartReply, RestartRequest
from mmrt.runtime.supervisor.control_server import WithDescriptors
from mmrt.runtime.supervisor.crew import Crew
from mmrt.runtime.supervisor.managed_actor import Instance, Step, SupervisedActor
from mmrt.runtime.supervisor.processes import Process, now_s
from mmrt.runtime.supervisor.restart_policy import CONFIGURATION_STATUS, PROBE_MAX_S
from mmrt.runtime.supervisor.run_report import RunReport
from mmrt.runtime.supervisor.scaling import Scaling
from mmrt.runtime.supervisor.specs import HURRY_GRACE_S, actor_specs
from mmrt.schema.outage import Outage
from mmrt.tests.runtime.supervisor.simulated_loop import SimulatedLoop

GRID_S = 0.05
NAMES = ("memory", "controller", "gateway", "encoder", "decode")
SETTINGS = """[supervisor]
ready_timeout_s = 20
watchdog_s = 5
drain_s = 4
restart_limit = {limit}
gateway_standby = {standby}
"""
READY_S, WATCHDOG_S, DRAIN_S = 20.0, 5.0, 4.0
SLACK_S = 1.0  # for a tick, and for the time that SIGKILL takes
CLI_PID = 9  # of a person's command


@dataclass
class Fate:
    """A process's life as far as it depends on itself. Times in seconds; ``end_s`` after it is active, before that if ``is_early``."""

    load_s: float = 0.5
    end_s: float | None = None
    status: int = 1
    is_early: bool = False
    is_work: bool = False  # it dies of a request
    hang_s: float | None = None  # after it is active it stops reporting
    in_step: bool = False  # it hangs in a step
    is_deaf: bool = False  # to SIGTERM
    obey_s: float = 0.1
    busy_s: float = 0.0  # a gateway's streams at SIGTERM


@dataclass
class Ledger:
    """What an actor has gone through, noted apart from the policy: its failures by time that its processes have served."""

    served_s: float = 0.0
    failures: list[float] = field(default_factory=list)
    is_misconfigured: bool = False
    missing_until_s: float = 0.0  # until then its program cannot be started
    was_broken: bool = False
    last_cause: str = ""
    without_since_s: float | None = None


class Machine(Process):
    """A simulated process."""

    def __init__(self, world: "World", actor: SupervisedActor, fate: Fate, *, is_debugger: bool = False) -> None:
        super().__init__(world.next_pid())
        self.world, self.actor, self.fate = world, actor, fate
        self.is_debugger = is_debugger
        self.is_ready = self.is_active = self.is_hung = self.is_doomed = self.obeys = False
        self.is_killed_from_outside = self.is_killed_by_us = self.is_told = False
        self.terms = 0
        self.active_s = 0.0
        self.tail: list[str] = []
        self.unread: list[str] = []
        world.processes.append(self)
        if fate.is_early and fate.end_s is not None:
            self._later(fate.end_s, self.end, fate.status)
        else:
            self._later(fate.load_s, self._load)
        self._later(1.0, self._beat)

    def _later(self, delay_s: float, call: Callable[..., None], *arguments: object) -> None:
        at_s = now_s() + max(GRID_S, round(delay_s / GRID_S) * GRID_S)
        asyncio.get_running_loop().call_at(at_s, self._if_alive, call, arguments)

    def _if_alive(self, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if self.alive:
            call(*arguments)

    def _load(self) -> None:
        self.is_ready = True
        self.world.note(self, ready=True)
        self.world.give_role(self.actor)

    def take_role(self) -> None:
        """Be the one that works."""
        self.is_active, self.active_s = True, now_s()
        self.world.note(self, ready=True, active=True)
        if self.fate.end_s is not None:
            self._later(self.fate.end_s, self.end, self.fate.status)
        if self.fate.hang_s is not None:
            self._later(self.fate.hang_s, self._hang)

    def _hang(self) -> None:
        self.is_hung = True

    def _beat(self) -> None:
        if not self.is_hung:
            self.world.note(self, ready=self.is_ready, active=self.is_active, watchdog=True)
        self._later(1.0, self._beat)

    @property
    def step(self) -> Step | None:
        """The step that it declares."""
        if self.is_hung and self.fate.in_step:
            return Step(self.active_s + (self.fate.hang_s or 0.0), self.active_s + (self.fate.hang_s or 0.0) + 2.0)
        return None

    def _send(self, number: signal.Signals) -> None:
        self.world.on_signal(self, number)
        if number == signal.SIGKILL:
            if not self.is_doomed:
                self.is_doomed = True
                self._later(0.0, self.end, -signal.SIGKILL)
        elif self.is_debugger:
            if number == signal.SIGTERM:
                self._later(self.fate.obey_s, self.end, 0)
        elif not self.fate.is_deaf and not self.is_hung:
            self.terms += number == signal.SIGTERM
            self.obeys = True
            self.world.note(self, stopping=True)
            drains = self.actor.spec.listens and number == signal.SIGTERM and self.terms == 1
            self._later(self.fate.obey_s + (self.fate.busy_s if drains else 0.0), self.end, 0)

    def end(self, status: int) -> None:
        """End, with last words."""
        self.unread.append(f"{self.pid} ends with {status}")
        self._finish(status)
        self.world.on_death(self)

    def finish(self) -> None:
        """Output: read what is left in the pipe."""
        self.tail += self.unread
        self.unread = []


class World:
    """One machine with one run. ``live`` spans it. Every broken promise raises AssertionError, in ``broken`` if it cannot."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        random.seed(seed)  # the jitter of backoffs
        limit, standby = self.random.choice((3, 5)), self.random.random() < 0.5
        self.config: RuntimeConfig = parse_config(SETTINGS.format(limit=limit, standby=str(standby).lower()))
        specs = [msgspec.structs.replace(spec, handover_grace_s=8.0) for spec in actor_specs(self.config) if spec.name in NAMES]
        self.crew = Crew(specs, self.config, self)
        self.commands = Commands(self.crew, self)
        self.scaling = Scaling(None, None, self.crew)  # type: ignore[arg-type]
        self.processes: list[Machine] = []
        self.targets = self.random.choice((NAMES, self.random.sample(NAMES, 2), ["gateway"], ["encoder"]))
        self.ledgers = {name: Ledger() for name in NAMES}
        self.gone: dict[str, SupervisedActor] = {}  # actors that left the run
        self.moods: dict[str, tuple[float, Callable[[], Fate]]] = {}
        self.mail: list[Notification] = []
        self.outages: tuple[Outage, ...] = ()
        self.stands_in = self.is_listening_over = self.starts_no_more = self.is_stopping = False
        self.num_ready = 0
        self.paused_until_s = 0.0  # after a stop of the supervisor itself nothing is in time
        self.told_to_end_s: float | None = None
        self.broken: list[str] = []
        self.happened: Counter[str] = Counter()
        self.said: list[str] = []
        self.tasks: list[asyncio.Task[object]] = []
        self._pid = 100

    # ----------------------------------------------------------------------------------------------------- the machine

    def next_pid(self) -> int:
        self._pid += 1
        return self._pid

    def expect(self, is_kept: bool, promise: str) -> None:
        if not is_kept:
            self.broken.append(f"at {now_s() - 1000:.2f} s: {promise}")

    def alive(self, actor: SupervisedActor) -> list[Machine]:
        return [one for one in self.processes if one.actor is actor and one.alive]

    def note(self, process: Machine, **what: bool) -> None:
        """A process says something of itself."""
        self.mail.append(Notification(process.pid, process.actor.name, process.pid, status=f"{process.pid}", **what))  # type: ignore[arg-type]
        asyncio.get_running_loop().call_soon(self.crew.hear)

    def give_role(self, actor: SupervisedActor) -> None:
        """The lock: the first that is ready gets the role once nobody has it."""
        living = self.alive(actor)
        if not any(one.is_active for one in living):
            for one in living:
                if one.is_ready and not one.is_doomed:
                    one.take_role()
                    return

    def on_signal(self, process: Machine, number: signal.Signals) -> None:
        process.is_told = True
        if number == signal.SIGKILL:
            process.is_killed_by_us = True
        actor = process.actor
        if actor.spec.listens and not process.is_debugger and number == signal.SIGTERM:
            self.expect(actor.stopping.is_set(), "a gateway drains only at its end: at a hand-over it gives its connections on")

    def on_death(self, process: Machine) -> None:
        asyncio.get_running_loop().call_soon(self.give_role, process.actor)

    # -------------------------------------------------------------------------------------------------------- Outside

    async def start_process(self, actor: SupervisedActor) -> Instance:
        if not actor.spec.listens:  # a fork takes time; a plain start does not
            await asyncio.sleep(self.random.choice((0.0, GRID_S, 4 * GRID_S)))
        if self.starts_no_more:
            raise RunError("the run is ending")
        ledger = self.ledgers[actor.name]
        ledger.without_since_s = now_s()
        if now_s() < ledger.missing_until_s:
            task = asyncio.current_task()
            if task is not None and task.get_name() == actor.name:  # not a restart's
                ledger.failures.append(ledger.served_s)
                ledger.last_cause = "itself"
            raise OSError(12, "Cannot allocate memory")
        process = Machine(self, actor, self.fate(actor))
        self.happened["start"] += 1
        self.expect(not (actor.spec.listens and self.is_listening_over), "no gateway starts with closed sockets")
        known = [one for one in self.alive(actor) if not one.is_doomed and not one.is_debugger]
        self.expect(len(known) <= 2, f"{actor.name} has no more than two processes: {known}")
        return Instance(process, process)

    def fate(self, actor: SupervisedActor) -> Fate:
        until_s, make = self.moods.get(actor.name, (0.0, Fate))
        fate = make() if now_s() < until_s else Fate(load_s=self.random.choice((0.1, 0.5, 2.0)))
        if actor.spec.listens:
            fate.busy_s = self.random.choice((0.0, 1.0, 30.0))
        return fate

    def hear(self) -> Iterable[Notification]:
        mail, self.mail = self.mail, []
        return mail

    def steps_of(self, actor: SupervisedActor, instance: Instance) -> Mapping[str, Step]:
        assert isinstance(instance.process, Machine)
        step = instance.process.step
        return {actor.name: step} if step is not None else {}

    def started(self, instance: Instance, pids: Iterable[int]) -> None: ...

    def ended(self, actor: SupervisedActor, instance: Instance, unexpected: bool) -> None:
        process = instance.process
        assert isinstance(process, Machine)
        if process.is_debugger:
            self.ledgers[actor.name].served_s += process.lifetime_s if instance.active.is_set() else 0.0
            return
        self.expect(not process.unread, "what a process printed is read before its end is judged")
        if instance.killed_because:
            instance.cause = "itself"
        elif process.is_killed_from_outside or (process.returncode == 0 and process.obeys):
            instance.cause = "outside"
        elif process.fate.is_work and process.returncode == process.fate.status:
            instance.cause = "work"
        self.judge_watchdog(instance, process)
        ledger = self.ledgers[actor.name]
        ledger.last_cause = instance.cause
        ledger.served_s += process.lifetime_s if instance.active.is_set() else 0.0
        ledger.is_misconfigured = process.returncode == CONFIGURATION_STATUS and instance.cause != "outside"
        heir = actor.candidate  # a debugger takes over once a user has let it go on
        follows = heir is not None and not heir.is_standby and (not heir.is_debugger or heir.ready.is_set())
        if unexpected and instance.cause == "itself" and not follows:
            ledger.failures.append(ledger.served_s)

    def judge_watchdog(self, instance: Instance, process: Machine) -> None:
        reason = instance.killed_because
        if reason.startswith("hang"):
            self.happened["hang"] += 1
            self.expect(process.is_hung, f"only what hangs is killed for it: {process.actor.name}, {reason}")
        elif reason.startswith("not ready within"):
            self.happened["late"] += 1
            self.expect(not process.is_ready or instance.is_relieved, f"only what is late is killed for it: {process.actor.name}")

    def serves(self, actor: SupervisedActor, instance: Instance) -> None: ...
    def tick(self) -> None:
        self.check()

    def say(self, text: str) -> None:
        self.said.append(f"{now_s() - 1000:.2f} {text}")

    def progress(self, actor: SupervisedActor) -> None: ...

    def run_ready(self) -> None:
        self.num_ready += 1
        self.expect(self.num_ready == 1, "the run is said to be ready once")
        self.expect(not self.crew.is_ending, "a run that ends is not said to be ready")
        self.expect(all(actor.ready for actor in self.crew.actors.values()), "all serve when the run is said to be ready")

    def run_failed(self, failure: str, tail: Sequence[str]) -> None:
        self.happened["run failed"] += 1
        self.told_to_end_s = self.told_to_end_s or now_s()

    def run_stopping(self) -> None:
        self.is_stopping = True

    def publish(self, outages: tuple[Outage, ...]) -> None:
        self.outages = outages
        for name, actor in self.crew.actors.items():
            ledger, policy = self.ledgers[name], self.crew.policy
            if actor.outage is not None and not ledger.was_broken:
                self.happened["broken"] += 1
                num_recent = sum(ledger.served_s - one <= policy.window_s + 1e-6 for one in ledger.failures)
                enough = num_recent >= policy.limit or ledger.is_misconfigured
                self.expect(enough, f"{name} is broken after {policy.limit} failures within the window, not {num_recent}")
            ledger.was_broken = actor.outage is not None

    def stand_in(self, next_probe_s: float | None) -> None:
        self.stands_in = next_probe_s is not None

    def stop_listening(self) -> None:
        gateway = self.crew.actors.get("gateway") or self.gone["gateway"]
        self.expect(not self.alive(gateway), "sockets are closed when no gateway needs them any more")
        self.is_listening_over, self.stands_in = True, False

    def start_no_more(self) -> None:
        self.starts_no_more = True

    def write_config(self, config: RuntimeConfig) -> None: ...

    # ---------------------------------------------------------------------------------------------------------- Asked

    def report(self) -> RunReport:
        raise AssertionError("nobody in this world asks for a report")

    def may_ask(self, pid: int) -> str:
        return ""

    def is_descendant(self, pid: int) -> bool:
        return False

    def lend(self, actor: SupervisedActor, pid: int) -> Loan:
        self.ledgers[actor.name].without_since_s = now_s()
        debugger = Machine(self, actor, Fate(load_s=self.random.choice((0.1, 3.0))), is_debugger=True)
        debugger._later(self.random.choice((0.1, 5.0, 20.0)), debugger.end, 0)
        return Loan(Instance(debugger, None, is_debugger=True), {}, (), lambda: None)

    # ----------------------------------------------------------------------------------------------------- what holds

    def check(self) -> None:
        """Check what holds at every tick."""
        time_s = now_s()
        is_late = time_s < self.paused_until_s
        policy = self.crew.policy
        published = {outage.actor for outage in self.outages}
        self.expect(published == {name for name, actor in self.crew.actors.items() if actor.outage}, f"outages are told: {published}")
        gateway = self.crew.actors.get("gateway")
        if gateway is not None and not self.is_listening_over:
            self.expect(self.stands_in == (gateway.outage is not None), "clients are answered for a broken gateway, and only then")
        for name, actor in self.crew.actors.items():
            ledger = self.ledgers[name]
            recent = [one for one in ledger.failures if ledger.served_s - one < policy.window_s - GRID_S]
            if actor.outage is None and actor.state == "backoff" and ledger.last_cause == "itself":
                self.expect(len(recent) < policy.limit, f"{name} is broken after {policy.limit} failures: {len(recent)}")
            living = [one for one in self.alive(actor) if not one.is_debugger]
            if living or actor.stopping.is_set() or actor.debugger is not None or is_late:
                ledger.without_since_s = time_s
            else:
                since_s = ledger.without_since_s = ledger.without_since_s or time_s
                most_s = (PROBE_MAX_S if actor.outage is not None else policy.backoff_max_s) + SLACK_S
                self.expect(time_s - since_s <= most_s, f"{name} is started again after {most_s} s at most")
            for one in living:
                ours = any(instance.process is one for instance in actor.instances)
                if not ours and not one.is_doomed and time_s - one.started_s > SLACK_S and not is_late:
                    self.expect(one.is_told, f"{name} has no process that nobody knows: {one.pid}")
        self.check_end(time_s)

    def check_end(self, time_s: float) -> None:
        if self.told_to_end_s is None:
            return
        most_s = DRAIN_S + HURRY_GRACE_S + 3 * 5.0 + 4 * SLACK_S  # the gateway's time, and three groups of actors
        self.expect(time_s - max(self.told_to_end_s, self.paused_until_s) <= most_s, f"a run ends within {most_s} s")

    # ---------------------------------------------------------------------------------------------------------- people

    async def ask(self, request: Request, limit_s: float) -> object:
        """Ask as ``mmrt`` does: an answer or a refusal comes in time."""
        answer, began_s = asyncio.create_task(self.commands.answer(request, CLI_PID)), now_s()
        await asyncio.wait({answer}, timeout=limit_s)
        while not answer.done() and self.paused_until_s > began_s:  # once more for each pause
            began_s = max(now_s(), self.paused_until_s)
            await asyncio.wait({answer}, timeout=limit_s + SLACK_S)
        self.expect(answer.done(), f"{request} is answered within {limit_s} s")
        try:
            reply = await answer
        except RunError as error:
            return error
        if isinstance(reply, WithDescriptors):
            reply.on_sent()
        return reply

    async def restart(self, name: str) -> None:
        reply = await self.ask(RestartRequest(name), 2 * READY_S + self.crew.actors[name].spec.handover_grace_s + 5 * SLACK_S)
        if isinstance(reply, RestartReply):
            self.happened["restarted" if reply.ok else "restart failed"] += 1
            self.expect(bool(reply.ok or reply.message), "a failed restart says why")

    async def leave(self, name: str) -> None:
        """``mmrt scale`` down: the actor leaves the run, and comes again."""
        actor = self.crew.actors[name]
        if self.gone.get(name) is actor:
            return  # told twice at once; ``mmrt scale`` lets one wait for the other
        self.gone[name] = actor
        await self.scaling._remove([name])
        self.happened["left"] += 1
        self.expect(not [one for one in self.alive(actor) if not one.is_doomed], "what left the run has no process")
        if not self.crew.is_ending:
            self.ledgers[name] = Ledger()
            self.scaling._add([actor.spec])

    def end(self, drain_s: float | None = None) -> "asyncio.Task[object]":
        self.told_to_end_s = self.told_to_end_s or now_s()
        return asyncio.create_task(self.ask(DownRequest(drain_s), 60.0))

    def kill(self, name: str) -> None:
        """Somebody kills a process of an actor."""
        actor = self.crew.actors.get(name)  # None: it left the run just now
        living = [] if actor is None else [one for one in self.alive(actor) if not one.is_debugger]
        if living:
            victim = self.random.choice(living)
            victim.is_killed_from_outside = victim.is_killed_from_outside or not victim.is_killed_by_us
            victim.end(-signal.SIGKILL)

    def pause(self, seconds: float) -> None:
        """The supervisor itself is stopped; all others go on."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        loop.pause(seconds)
        self.paused_until_s = now_s() + 2 * SLACK_S + WATCHDOG_S

    def order(self, name: str, what: str) -> None:
        """Ask in a task of its own."""
        self.happened[what] += 1
        if what == "restart":
            self._spawn(self.restart(name))
        elif what == "kill by command":
            self._spawn(self.ask(KillRequest(name), SLACK_S))
        elif what == "debug":
            self._spawn(self.ask(DebugRequest(name), SLACK_S))
        elif what == "leave":
            self._spawn(self.leave(name))

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        self.tasks.append(asyncio.create_task(work))
