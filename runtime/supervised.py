"""One actor as the supervisor sees it: its processes, one after another or two at once during a hot restart, and its state.

``SupervisedActor.run`` is the actor's task in the supervisor's event loop; it starts a process, waits for its end, and lets
``restart_policy`` decide what follows. The supervisor is reached through the ``Host`` protocol alone.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from .control import RestartReply
from .errors import RunError
from .launcher import pipe_to_logs
from .logs import LogPump
from .notify import Notification
from .processes import Process, describe_exit
from .restart_policy import GiveUp, RestartHistory, RestartPolicy, decide

State = Literal["waiting", "starting", "standby", "active", "restarting", "backoff", "failed", "stopping", "stopped"]


class ActorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How one actor is started and stopped."""

    name: str
    command: tuple[str, ...]  # the plain way
    needs: str | None = None  # the zygote's import stage after which it can be forked; None: always start plainly
    entry: str = ""  # what the fork calls, "module:function", with ``argument``
    argument: str = ""
    requires: frozenset[str] = frozenset()  # actors that must be ready before this one counts as ready
    threads: int = 1
    nice: int = 0
    stop_grace_s: float = 5.0  # between SIGTERM and SIGKILL
    ready_timeout_s: float = 180.0
    watchdog_s: float = 30.0


class Host(Protocol):
    """What an actor needs of the supervisor."""

    policy: RestartPolicy

    async def start_process(self, spec: ActorSpec, output_fd: int) -> Process: ...
    def is_ready(self, names: frozenset[str]) -> bool: ...
    def on_started(self, actor: "SupervisedActor", instance: "Instance") -> None: ...
    def on_lines(self, actor: str, lines: Sequence[str]) -> None: ...
    def on_state(self, actor: "SupervisedActor") -> None: ...
    def on_message(self, actor: str, text: str) -> None: ...
    def on_failed(self, actor: "SupervisedActor", reason: str) -> None: ...


class Instance:
    """One process of an actor, and what it has told about itself."""

    def __init__(self, process: Process, pump: LogPump) -> None:
        self.process = process
        self.pump = pump
        self.generation = 0
        self.ready = asyncio.Event()
        self.active = asyncio.Event()
        self.status = ""
        self.waiting_since_s = process.started_s  # for readiness; moves while what it requires is not ready itself
        self.beat_s = process.started_s
        self.extended_until_s = 0.0
        self.killed_because = ""

    def kill(self, reason: str) -> None:
        """SIGKILL it, and remember why."""
        if self.process.alive and not self.killed_because:
            self.killed_because = reason
            self.process.signal(signal.SIGKILL)

    async def ended(self) -> int:
        """Wait for the process and for the last of its output."""
        status = await self.process.wait()
        assert status is not None
        self.pump.finish()
        return status

    def describe_exit(self) -> str:
        assert self.process.returncode is not None
        text = describe_exit(self.process.returncode)
        return f"{text} ({self.killed_because})" if self.killed_because else text


class SupervisedActor:
    """State and processes of one actor. ``current`` is the generation that does the work, ``candidate`` the one to replace it."""

    def __init__(self, spec: ActorSpec, host: Host) -> None:
        self.spec = spec
        self.state: State = "waiting"
        self.current: Instance | None = None
        self.candidate: Instance | None = None
        self.num_starts = 0
        self.last_exit = ""
        self.last_tail: list[str] = []
        self._host = host
        self._history = RestartHistory()
        self._stopping = asyncio.Event()
        self._retry_now = asyncio.Event()
        self._came = asyncio.Event()  # a process was started and is ``current``

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def ready(self) -> bool:
        """Some generation serves, and everything that this actor requires is ready too."""
        current = self.current
        return current is not None and current.process.alive and current.active.is_set() and self._host.is_ready(self.spec.requires)

    @property
    def instances(self) -> list[Instance]:
        return [instance for instance in (self.current, self.candidate) if instance is not None]

    async def run(self) -> None:
        """Keep the actor running until ``stop`` or until the policy gives up."""
        while not self._stopping.is_set():
            if self.current is None:
                try:
                    self.current = await self.start()
                except RunError:
                    break
                except OSError as error:
                    self._set_state("failed")
                    self._host.on_failed(self, f"cannot start {self.spec.command[0]}: {error.strerror}")
                    return
            instance = self.current
            self._came.set()
            self._follow(instance)
            await instance.ended()
            self.last_exit = instance.describe_exit()
            self.last_tail = list(instance.pump.tail)
            self.current, self.candidate = self.candidate, None
            if self._stopping.is_set():
                break
            if self.current is None:
                await self._recover(instance)
        if self.state != "failed":
            self._set_state("stopped")

    async def _recover(self, dead: Instance) -> None:
        assert dead.process.returncode is not None
        decision, self._history = decide(
            self._host.policy,
            self._history,
            lifetime_s=dead.process.lifetime_s,
            status=dead.process.returncode,
            jitter=random.random(),
        )
        if isinstance(decision, GiveUp):
            self._set_state("failed")
            self._stopping.set()
            self._host.on_failed(self, f"{self.last_exit}; {decision.reason}")
            return
        self._host.on_message(self.name, f"ended with {self.last_exit}; starts again in {decision.delay_s:.2f} s")
        self._set_state("backoff")
        self._retry_now.clear()
        await _first(decision.delay_s, self._stopping, self._retry_now)

    async def start(self) -> Instance:
        """Start one process; the caller says what it is to be."""
        read_end, write_end = pipe_to_logs()
        try:
            process = await self._host.start_process(self.spec, write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self.num_starts += 1
        pump = LogPump(read_end, lambda lines: self._host.on_lines(self.name, lines))
        instance = Instance(process, pump)
        self._host.on_started(self, instance)
        if self._stopping.is_set():
            process.signal(signal.SIGTERM)
        return instance

    async def restart(self) -> RestartReply:
        """Replace the running generation by a new one that is warm before the old one ends.

        If the new one does not come up, the old one goes on as if nothing had been.

        Raises: RunError if a restart is under way or the actor is stopping.
        """
        if self._stopping.is_set():
            raise RunError(f"{self.name} is {self.state}")
        if self.candidate is not None or self.state == "restarting":
            raise RunError(f"{self.name} is being restarted already")
        began_s = time.monotonic()
        if self.current is None:
            self._retry_now.set()
            self._came.clear()
            await _first(self.spec.ready_timeout_s, self._came, self._stopping)
            candidate = self.current
        else:
            self._set_state("restarting")
            candidate = self.candidate = await self.start()
        if candidate is None:
            raise RunError(f"{self.name} is {self.state}")
        if not await self._comes_up(candidate, candidate.ready, "ready"):
            return await self._rejected(candidate)
        old = self.current
        if old is not None and old is not candidate:
            await old.process.stop(self.spec.stop_grace_s)
        if not await self._comes_up(candidate, candidate.active, "active"):
            return RestartReply(
                ok=False,
                message=f"{self.name}: the new process was ready, but ended with {candidate.describe_exit()} when it took over",
                log=list(candidate.pump.tail),
            )
        seconds = time.monotonic() - began_s
        return RestartReply(
            ok=True,
            message=f"{self.name}: generation {candidate.generation} serves after {seconds:.2f} s",
            generation=candidate.generation,
            seconds=seconds,
        )

    async def _comes_up(self, candidate: Instance, event: asyncio.Event, what: str) -> bool:
        waiting = asyncio.create_task(event.wait())
        ended = asyncio.create_task(candidate.ended())
        timeout_s = self.spec.ready_timeout_s
        try:
            await asyncio.wait({waiting, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            ended.cancel()
        if not event.is_set():
            candidate.kill(f"not {what} within {timeout_s:g} s")
            await candidate.ended()
            return False
        return candidate.process.alive

    async def _rejected(self, candidate: Instance) -> RestartReply:
        exit_text, tail = candidate.describe_exit(), list(candidate.pump.tail)
        if self.candidate is candidate:
            self.candidate = None
        serving = self.current is not None and self.current is not candidate and self.current.process.alive
        if serving and self.current is not None:
            self._follow(self.current)
        after = "the old one keeps serving" if serving else "there is no old one"
        return RestartReply(
            ok=False,
            message=f"{self.name}: the new process ended with {exit_text} before it was ready; {after}",
            log=tail,
        )

    async def stop(self, grace_s: float | None = None, *, hurry_after_s: float | None = None) -> None:
        """End every process: SIGTERM, again after ``hurry_after_s`` (a gateway then stops draining), SIGKILL after ``grace_s``."""
        self._stopping.set()
        if self.state in ("stopped", "failed") and not self.instances:
            return
        self._set_state("stopping")
        grace_s = self.spec.stop_grace_s if grace_s is None else grace_s
        await asyncio.gather(*(self._stop_one(instance, grace_s, hurry_after_s) for instance in self.instances))

    async def _stop_one(self, instance: Instance, grace_s: float, hurry_after_s: float | None) -> None:
        if hurry_after_s is not None:
            instance.process.signal(signal.SIGTERM)
            if await instance.process.wait(hurry_after_s) is not None:
                return
        await instance.process.stop(grace_s)

    def kill(self) -> None:
        """SIGKILL every process and start none again."""
        self._stopping.set()
        for instance in self.instances:
            instance.kill("forced")

    def on_notification(self, instance: Instance, notification: Notification) -> None:
        """Take what a process of this actor says about itself."""
        instance.generation = notification.generation or instance.generation
        instance.beat_s = time.monotonic()
        said = notification.status is not None and notification.status != instance.status
        instance.status = notification.status or instance.status
        if notification.extend_s is not None:
            instance.extended_until_s = instance.beat_s + notification.extend_s
        if notification.ready:
            instance.ready.set()
        if notification.active:
            instance.ready.set()
            instance.active.set()
        before = self.state
        if instance is self.current and self.state != "restarting":
            self._follow(instance)
        if said and self.state == before:
            self._host.on_state(self)

    def excuse(self, now_s: float) -> None:
        """Count every process as heard of now."""
        for instance in self.instances:
            instance.beat_s = now_s

    def check(self, now_s: float, step_deadline_s: float) -> None:
        """Kill what does not become ready in time, what misses its step's deadline, and what has stopped beating.

        ``step_deadline_s`` is what the active generation has declared in its status words for the step that it is in; 0 is no step.
        """
        for instance in self.instances:
            if not instance.process.alive or now_s < instance.extended_until_s:
                continue
            if instance.active.is_set():
                self._check_active(instance, now_s, step_deadline_s if instance is self.current else 0.0)
                continue
            # A standby may wait for its predecessor as long as that takes, which is bounded by its stop.
            replacing = instance is self.candidate and instance.ready.is_set()
            if replacing or not self._host.is_ready(self.spec.requires):
                instance.waiting_since_s = now_s
            if now_s > instance.waiting_since_s + self.spec.ready_timeout_s:
                instance.kill(f"not ready within {self.spec.ready_timeout_s:g} s")

    def _check_active(self, instance: Instance, now_s: float, step_deadline_s: float) -> None:
        if step_deadline_s:
            instance.beat_s = now_s
            if now_s > step_deadline_s:
                instance.kill(f"hang: a step is {now_s - step_deadline_s:.1f} s past its deadline")
        elif now_s > instance.beat_s + self.spec.watchdog_s:
            instance.kill(f"hang: no sign of life for {self.spec.watchdog_s:g} s")

    def _follow(self, instance: Instance) -> None:
        """Make the state of the actor that of its process."""
        if not self._stopping.is_set():
            self._set_state("active" if instance.active.is_set() else "standby" if instance.ready.is_set() else "starting")

    def _set_state(self, state: State) -> None:
        if state != self.state:
            self.state = state
            self._host.on_state(self)


async def _first(timeout_s: float, *events: asyncio.Event) -> None:
    """Wait until one of the events is set or the time is over."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
