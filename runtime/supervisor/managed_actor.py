"""The supervisor's view of one actor: its processes, one after another or two at once during a hand-over, and its state.

``SupervisedActor.run`` is the actor's task in the supervisor's event loop; it starts a process, waits for its end, and lets
``restart_policy`` decide what follows; ``handover`` replaces the process while it runs. Nothing here does I/O: the ``CrewApi``
protocol starts processes and is told what happens, ``Process`` takes signals, and the event loop has the clock. So tests run the
same code in a simulated world (tests/runtime/supervisor/crew_world.py).
"""

import asyncio
import random
import signal
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from ..errors import RunError
from ..process.exit_status import describe_exit
from ..process.json_log import readable
from ..process.notify import Notification
from .processes import Process, now_s
from .restart_policy import CONFIGURATION_STATUS, Broken, Cause, RestartHistory, RestartPolicy, decide

_SETTLE_POLL_S = 0.05

State = Literal[
    "waiting", "starting", "standby", "active", "debugged", "restarting", "backoff", "broken", "failed", "stopping", "stopped"
]


class ActorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings to start and stop one actor."""

    name: str
    command: tuple[str, ...]  # the plain way
    others: tuple[str, ...] = ()  # other actors in the same process
    needs: str | None = None  # the zygote's import stage after which it can be forked; None: always start plainly
    entry: str = ""  # the function that the fork calls with the actor's name, "module:function"
    requires: frozenset[str] = frozenset()  # actors that must be ready before this one counts as ready
    threads: int = 1
    nice: int = 0  # of its one actor once it serves, on top of the run's; several see to theirs (actors/host/shared_process)
    stop_grace_s: float = 5.0  # between SIGTERM and SIGKILL
    handover_grace_s: float = 5.0  # the same if a successor waits: the current step is finished, and the watchdog handles hangs
    ready_timeout_s: float = 180.0
    watchdog_s: float = 30.0
    is_essential: bool = False  # the run cannot go on without it
    stop_rank: int = 0  # the lowest are told to end first
    listens: bool = False  # inherits the sockets for clients
    handover_signal: signal.Signals = signal.SIGTERM  # tells it to end because a successor is ready

    @property
    def roles(self) -> tuple[str, ...]:
        """The actors in its process."""
        return (*self.others, self.name)


class Step(NamedTuple):
    """The step that an actor has declared to be in; CLOCK_MONOTONIC."""

    start_s: float
    deadline_s: float


class Outage(NamedTuple):
    """An outage: why the run does without an actor, and when it is tried again; CLOCK_MONOTONIC."""

    reason: str
    next_probe_s: float


class Output(Protocol):
    """A process's output."""

    @property
    def tail(self) -> Sequence[str]: ...
    def finish(self) -> None: ...


class CrewApi(Protocol):
    """An actor's interface to all actors of the run (``crew``), and through them to the supervisor."""

    policy: RestartPolicy

    async def start_process(self, actor: "SupervisedActor") -> "Instance": ...
    def is_ready(self, names: frozenset[str]) -> bool: ...
    def on_started(self, actor: "SupervisedActor", instance: "Instance") -> None: ...
    def on_ended(self, actor: "SupervisedActor", instance: "Instance", unexpected: bool) -> None: ...
    def on_active(self, actor: "SupervisedActor", instance: "Instance") -> None: ...
    def on_state(self, actor: "SupervisedActor") -> None: ...
    def on_message(self, actor: str, text: str) -> None: ...
    def can_do_without(self, actor: "SupervisedActor", is_misconfigured: bool) -> bool: ...
    def on_outage(self, actor: "SupervisedActor") -> None: ...
    def on_failed(self, actor: "SupervisedActor", reason: str) -> None: ...


class Instance:
    """One process of an actor, and the state that it has reported.

    A *debugger* runs in a user's terminal (``mmrt debug``): it is no child of the supervisor, which neither reads its output nor
    watches it.
    """

    def __init__(self, process: Process, output: Output | None, *, oom_kills: int = 0, is_debugger: bool = False) -> None:
        self.process = process
        self.output = output
        self.is_debugger = is_debugger
        self.generation = 0
        self.ready = asyncio.Event()
        self.active = asyncio.Event()
        self.status = ""
        self.waiting_since_s = process.started_s  # for readiness; moves while what it requires is not ready itself
        self.beat_s = process.started_s
        self.extended_until_s = 0.0
        self.excused_until_s = 0.0
        self.killed_because = ""
        self.suspects: list[str] = []  # actors of the process whose work ended it, if known
        self.is_standby = False  # it waits for the death of the one before, and for nothing else
        self.is_relieved = False  # told to end because its successor is ready
        self.obeys = False  # it has reported that it ends on request
        self.oom_kills = oom_kills  # the machine's counter at its start
        self.cause: Cause = "itself"  # of its end, once known

    def kill(self, reason: str) -> None:
        """Send SIGKILL, and remember the reason."""
        if self.process.alive and not self.killed_because:
            self.killed_because = reason
            self.process.signal(signal.SIGKILL)

    async def ended(self) -> None:
        """Wait for the process and the end of its output."""
        await self.process.wait()
        if self.output is not None:
            self.output.finish()

    @property
    def tail(self) -> list[str]:
        """Return the last lines that it printed, as people read them."""
        return [] if self.output is None else [one for line in self.output.tail for one in readable(line)]

    def describe_exit(self) -> str:
        text = describe_exit(self.process.exit_status)
        return f"{text} ({self.killed_because})" if self.killed_because else text


class SupervisedActor:
    """State and processes of one actor. ``current`` is the working generation, ``candidate`` its replacement."""

    def __init__(self, spec: ActorSpec, host: CrewApi) -> None:
        self.spec = spec
        self.state: State = "waiting"
        self.current: Instance | None = None
        self.candidate: Instance | None = None
        self.num_starts = 0
        self.last_exit = ""
        self.last_tail: list[str] = []
        self.stopping = asyncio.Event()
        self.retry_now = asyncio.Event()
        self.hurried = asyncio.Event()  # while it stops: it must stop draining
        self.came = asyncio.Event()  # a process was started and is ``current``, or none could be
        self.outage: Outage | None = None  # while it is broken, until one of its processes serves
        self._host = host
        self._history = RestartHistory()
        self.is_being_restarted = False  # by a command; its state may say otherwise if the process before dies meanwhile
        self._is_forced = False
        self._starting = asyncio.Lock()  # one process starts at a time

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def ready(self) -> bool:
        """True if some generation serves, and all actors that this one requires are ready too."""
        current = self.current
        return current is not None and current.process.alive and current.active.is_set() and self._host.is_ready(self.spec.requires)

    @property
    def instances(self) -> list[Instance]:
        return [instance for instance in (self.current, self.candidate) if instance is not None]

    @property
    def debugger(self) -> Instance | None:
        """The process under a debugger that has this actor's role, or waits at its first prompt before it takes it."""
        return next((instance for instance in self.instances if instance.is_debugger), None)

    @property
    def status(self) -> str:
        """The status in one line for users."""
        if self.debugger is not None:
            return f"{'debugged' if self.debugger is self.current else 'about to be debugged'} by pid {self.debugger.process.pid}"
        if self.outage is not None:
            wait_s = self.outage.next_probe_s - now_s()
            return f"{self.outage.reason}; {'is being tried' if self.current else f'is tried again in {max(0.0, wait_s):.0f} s'}"
        return self.current.status if self.current else ""

    def say(self, text: str) -> None:
        """Make the supervisor report something about this actor to users."""
        self._host.on_message(self.name, text)

    async def run(self) -> None:
        """Keep the actor running until ``stop`` or until the policy gives up."""
        while not self.stopping.is_set():
            if self.current is None and self.candidate is not None and self.candidate.process.alive:
                self.current = self._successor()  # it came while nobody had the role
            if self.current is None:
                try:
                    self.current = await self.start()
                except RunError:
                    break
                except OSError as error:  # no such program; no more processes, no memory
                    self.last_exit, self.last_tail = f"cannot start {self.spec.command[0]}: {error.strerror}", []
                    self.came.set()
                    await self._recover(lifetime_s=0.0, status=1, cause="itself")
                    continue
            instance = self.current
            self.came.set()
            self.follow(instance)
            await instance.ended()
            if not instance.is_debugger:
                # A process told to make room has not failed: do not report it.
                handed_over = instance.is_relieved and instance.process.returncode == 0
                self.last_exit = "" if handed_over else instance.describe_exit()
                self.last_tail = instance.tail
            expected = self.stopping.is_set() or instance.is_relieved or instance.is_debugger
            self._host.on_ended(self, instance, not expected)
            self.current = self._successor()
            if self.stopping.is_set():
                break
            lifetime_s = instance.process.lifetime_s if instance.active.is_set() else 0.0  # a failed start has no running time
            if self.current is not None and self.current.is_standby and not expected:
                await self._follow_a_death(instance, lifetime_s)
            elif self.current is not None or instance.is_debugger:
                self._history = self._history.aged(lifetime_s, self._host.policy.window_s)
            else:
                await self._recover(lifetime_s=lifetime_s, status=instance.process.exit_status, cause=instance.cause)
        if self.state != "failed":
            self.set_state("stopped")

    async def _follow_a_death(self, instance: Instance, lifetime_s: float) -> None:
        """Let the standby go on, unless the actor is broken with this death: then it ends, too."""
        standby, status = self.current, instance.process.exit_status
        assert standby is not None
        standby.is_standby = False
        decision, history = decide(
            self._host.policy, self._history, lifetime_s=lifetime_s, status=status, jitter=random.random(), cause=instance.cause
        )
        if isinstance(decision, Broken):
            standby.kill("the actor is broken")
            await standby.ended()
            self.current = None
            await self._recover(lifetime_s=lifetime_s, status=status, cause=instance.cause)
        else:
            self._history = history
            self._host.on_message(self.name, f"ended with {self.last_exit}; its standby takes over")

    def _successor(self) -> Instance | None:
        """Return the candidate, now that the previous process has ended."""
        if self.candidate is not None and self.candidate.is_debugger and not self.candidate.ready.is_set():
            return None  # a user is at its first prompt: until it continues, a supervised process serves
        successor, self.candidate = self.candidate, None
        return successor

    async def _recover(self, *, lifetime_s: float, status: int, cause: Cause) -> None:
        """Wait until the next start. If the run cannot do without the actor, the run ends instead."""
        decision, self._history = decide(
            self._host.policy, self._history, lifetime_s=lifetime_s, status=status, jitter=random.random(), cause=cause
        )
        if isinstance(decision, Broken):
            reason = f"{self.last_exit}; {decision.reason}"
            if not self._host.can_do_without(self, status == CONFIGURATION_STATUS):
                self.set_state("failed")
                self.stopping.set()
                self._host.on_failed(self, reason)
                return
            self.outage = Outage(reason, now_s() + decision.delay_s)
            self._host.on_message(
                self.name, f"is broken: {reason}; it is tried again in {decision.delay_s:.0f} s, or by mmrt restart {self.name}"
            )
            self._host.on_outage(self)
        else:
            when = f"in {decision.delay_s:.2f} s" if decision.delay_s else "at once"
            self._host.on_message(self.name, f"ended with {self.last_exit}; starts again {when}")
        self.set_state("backoff" if self.outage is None else "broken")
        self.retry_now.clear()
        await first(decision.delay_s, self.stopping, self.retry_now)

    async def start(self) -> Instance:
        """Start one process; the caller decides its part. Raises: OSError if that is impossible; RunError if the actor is ending."""
        async with self._starting:
            if self.stopping.is_set():
                raise RunError(f"{self.name} is {self.state}")
            instance = await self._host.start_process(self)
            self.num_starts += 1
            self._host.on_started(self, instance)
            if self.stopping.is_set():  # while it started: nobody else will end it
                await instance.process.stop(0.0 if self._is_forced else self.spec.stop_grace_s)
        return instance

    async def settle(self, timeout_s: float) -> None:
        """Wait until the process that follows one which has died serves: it has taken over what that had begun, and can finish it."""
        end_s = now_s() + timeout_s
        while self._follows_a_death and now_s() < end_s and not self.hurried.is_set():
            await first(_SETTLE_POLL_S, self.stopping, self.hurried)

    @property
    def _follows_a_death(self) -> bool:
        serves = self.current is not None and self.current.process.alive and self.current.active.is_set()
        return bool(self.last_exit) and not serves and self.outage is None and not self.stopping.is_set()

    async def stop(self, grace_s: float | None = None, *, hurry_after_s: float | None = None) -> None:
        """End every process: SIGTERM, again after ``hurry_after_s`` (a gateway then stops draining), SIGKILL after ``grace_s``."""
        self.stopping.set()
        if self.state in ("stopped", "failed") and not self.instances:
            return
        self.set_state("stopping")
        grace_s = self.spec.stop_grace_s if grace_s is None else grace_s
        await asyncio.gather(*(self._stop_one(instance, grace_s, hurry_after_s) for instance in self.instances))

    async def starts_ended(self) -> None:
        """Wait, after ``stop``, until a process that was starting, for a restart too, has ended."""
        async with self._starting:
            pass

    async def _stop_one(self, instance: Instance, grace_s: float, hurry_after_s: float | None) -> None:
        if hurry_after_s is not None:
            instance.process.signal(signal.SIGTERM)
            ended = asyncio.create_task(instance.process.wait(hurry_after_s))
            hurried = asyncio.create_task(self.hurried.wait())
            await asyncio.wait({ended, hurried}, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            if ended.done() and ended.result() is not None:
                return
            ended.cancel()
        await instance.process.stop(grace_s)

    def kill(self) -> None:
        """Send SIGKILL to every process and start none again."""
        self._is_forced = True
        self.stopping.set()
        for instance in self.instances:
            instance.kill("forced")

    def on_notification(self, instance: Instance, notification: Notification) -> None:
        """Handle the report of one of this actor's processes about itself."""
        instance.generation = notification.generation or instance.generation
        instance.beat_s = now_s()
        said = notification.status is not None and notification.status != instance.status
        instance.status = notification.status or instance.status
        if notification.extend_s is not None:
            instance.extended_until_s = instance.beat_s + notification.extend_s
        instance.obeys |= notification.stopping
        if notification.ready:
            instance.ready.set()
        if notification.active:
            if not instance.active.is_set():
                self._host.on_active(self, instance)
            instance.ready.set()
            instance.active.set()
            self._mended()
        before = self.state
        if instance is self.current and self.state != "restarting":
            self.follow(instance)
        if said and self.state == before:
            self._host.on_state(self)

    def excuse(self, now_s: float) -> None:
        """Count every process as heard of now: the cause that stopped the supervisor may have stopped it too, in a step."""
        for instance in self.instances:
            instance.beat_s = instance.waiting_since_s = now_s
            instance.excused_until_s = now_s + self.spec.watchdog_s

    def check(self, now_s: float, steps_of: Mapping[int, Mapping[str, Step]]) -> None:
        """Kill processes that are not ready in time, miss their step's deadline, or have stopped sending watchdog beats.

        ``steps_of``: for each process, the steps that its actors are in.
        """
        for instance in self.instances:
            if instance.is_debugger or not instance.process.alive or now_s < instance.extended_until_s:
                continue
            steps = steps_of.get(instance.process.pid, {})
            if steps or instance.active.is_set():
                self._check_active(instance, now_s, steps)
            if instance.active.is_set():
                continue
            # A standby may wait for its predecessor without limit: the predecessor's stop is bounded.
            replacing = instance is self.candidate and instance.ready.is_set()
            if replacing or not self._host.is_ready(self.spec.requires):
                instance.waiting_since_s = now_s
            if now_s > instance.waiting_since_s + self.spec.ready_timeout_s:
                instance.kill(f"not ready within {self.spec.ready_timeout_s:g} s")

    def _check_active(self, instance: Instance, now_s: float, steps: Mapping[str, Step]) -> None:
        if steps:
            instance.beat_s = now_s
            first_s = min(step.deadline_s for step in steps.values())
            if now_s > max(first_s, instance.excused_until_s) and not instance.killed_because:
                # Any step in progress at the deadline may have delayed the other.
                instance.suspects = [actor for actor, step in steps.items() if step.start_s < first_s]
                instance.kill(f"hang: a step is {now_s - first_s:.1f} s past its deadline")
        elif now_s > instance.beat_s + self.spec.watchdog_s:
            instance.kill(f"hang: no sign of life for {self.spec.watchdog_s:g} s")

    def _mended(self) -> None:
        """Clear the outage: one of its processes serves."""
        if self.outage is not None:
            self.outage = None
            self._history = self._history.mended()  # also where a debugger's process served
            self._host.on_message(self.name, "serves again")
            self._host.on_outage(self)

    def follow(self, instance: Instance) -> None:
        """Set the actor's state to that of its process; a broken actor stays broken until a process serves."""
        if self.stopping.is_set():
            return
        if instance.active.is_set():
            self.set_state("debugged" if instance.is_debugger else "active")
        elif self.outage is not None:
            self.set_state("broken")
        else:
            self.set_state("standby" if instance.ready.is_set() else "starting")

    def set_state(self, state: State) -> None:
        if state != self.state:
            self.state = state
            self._host.on_state(self)


async def first(timeout_s: float, *events: asyncio.Event) -> None:
    """Wait until one of the events is set or the time is over."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
