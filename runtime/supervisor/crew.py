"""All actors of a run, and the decisions about them: start, watchdog, readiness, outages, and the end in order. Part of the supervisor.

Nothing here does I/O. ``Outside`` is what a crew asks for: the ``Supervisor`` does it with processes, sockets and files; in tests a
simulated world does (tests/runtime/supervisor/crew_world.py), so that thousands of runs of the same code take seconds.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ...schema.outage import Outage
from ..config.runtime_config import RuntimeConfig
from ..process.notify import Notification
from .actor_tasks import ActorTasks
from .managed_actor import ActorSpec, Instance, Step, SupervisedActor
from .processes import now_s
from .restart_policy import RestartPolicy
from .roster import Roster
from .specs import HURRY_GRACE_S, stop_order
from .standby import keep_standby

TICK_S = 0.5
LATE_S = 1.0  # a tick later than this means that this process was stopped or starved


class Outside(Protocol):
    """What a crew asks of the process that it lives in. No method waits but ``start_process``."""

    async def start_process(self, actor: SupervisedActor) -> Instance:
        """Start a process of the actor. Raises: OSError if that is impossible; RunError if the run is ending."""
        ...

    def hear(self) -> Iterable[Notification]:
        """Return what processes have said of themselves since the last call."""
        ...

    def steps_of(self, actor: SupervisedActor, instance: Instance) -> Mapping[str, Step]:
        """Return the steps that the actors of a process are in."""
        ...

    def started(self, instance: Instance, pids: Iterable[int]) -> None: ...  # pids: of all processes
    def ended(self, actor: SupervisedActor, instance: Instance, unexpected: bool) -> None: ...  # sets instance.cause
    def serves(self, actor: SupervisedActor, instance: Instance) -> None: ...
    def tick(self) -> None: ...
    def say(self, text: str) -> None: ...
    def progress(self, actor: SupervisedActor) -> None: ...
    def run_ready(self) -> None: ...
    def run_failed(self, failure: str, tail: Sequence[str]) -> None: ...
    def run_stopping(self) -> None: ...
    def publish(self, outages: tuple[Outage, ...]) -> None: ...
    def stand_in(self, next_probe_s: float | None) -> None: ...  # answers clients for the gateway until then; None: no more
    def stop_listening(self) -> None: ...
    def start_no_more(self) -> None: ...
    def write_config(self, config: RuntimeConfig) -> None: ...  # raises OSError


class Crew:
    """The actors of one run. ``run`` spans its life. ``can_be_edited``: a change of the code may mend what does not start."""

    def __init__(self, specs: Sequence[ActorSpec], config: RuntimeConfig, outside: Outside, *, can_be_edited: bool = False) -> None:
        settings = config.supervisor
        self.policy = RestartPolicy(
            limit=settings.restart_limit,
            window_s=settings.restart_window_s,
            backoff_s=settings.backoff_s,
            backoff_max_s=settings.backoff_max_s,
        )
        self.config = config  # with the layout of now
        self.actors = {spec.name: SupervisedActor(spec, self) for spec in specs}
        self.was_ready = False
        self.is_forced = False
        self.failure = ""
        self._outside = outside
        self._can_be_edited = can_be_edited
        self._roster = Roster()
        self._drain_s = settings.drain_s
        self._end = asyncio.Event()
        self._gone = asyncio.Event()
        self.tasks = ActorTasks(self._end.set)

    # ------------------------------------------------------------------------------------------------------ the run

    async def run(self, beside: Sequence[Coroutine[Any, Any, None]] = ()) -> None:
        """Keep all actors running until the run is to end, then end them. ``beside`` starts first, and ends with the actors."""
        ending = asyncio.create_task(self._end.wait())
        background: set[asyncio.Task[Any]] = {asyncio.create_task(one) for one in beside}
        try:
            await asyncio.sleep(0)  # the zygote takes longest to become ready
            background.add(asyncio.create_task(self._watch()))
            for actor in self.actors.values():
                self.tasks.begin(actor)
                if actor.spec.listens and self.config.supervisor.gateway_standby:
                    background.add(asyncio.create_task(keep_standby(actor)))
            for task in background:
                self.tasks.watch(task)
            await ending
            self.tasks.raise_bugs(background)
        finally:
            ending.cancel()
            await self._stop_actors()
            self._outside.start_no_more()
            await self.tasks.all_ended()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    def gone(self) -> None:
        """Take note that nothing of the run is left."""
        self._gone.set()

    async def end(self, drain_s: float | None) -> None:
        """End the run, with at most ``drain_s`` for running requests, and return when nothing is left."""
        if drain_s is not None and drain_s < self._drain_s:
            self._drain_s = drain_s
            if self._end.is_set():  # the actors have been given a longer one
                for actor in self.actors.values():
                    asyncio.get_running_loop().call_later(drain_s, actor.hurried.set)
        self._end.set()
        await self._gone.wait()

    def interrupt(self) -> None:
        """End the run; at the second time kill every process."""
        if not self._end.is_set():
            self._end.set()
            return
        self.is_forced = True
        self.say("forced: killing every actor")
        for actor in self.actors.values():
            actor.kill()

    async def _stop_actors(self) -> None:
        self.say("stopping" if not self.failure else "stopping, since an actor failed")
        self._outside.run_stopping()
        actors = dict(self.actors)  # one that leaves the run may be gone from it before its turn
        for specs in stop_order([actor.spec for actor in actors.values()]):
            members = [actors[spec.name] for spec in specs]
            await asyncio.gather(*(self._stop(actor) for actor in members))
            if any(actor.spec.listens for actor in members):
                self._outside.stop_listening()

    async def _stop(self, actor: SupervisedActor) -> None:
        if self.is_forced:
            actor.kill()
        if actor.spec.listens:
            if not self.failure:
                await actor.settle(self._drain_s)
            # The first SIGTERM lets it drain, the second ends its streams with an error frame.
            await actor.stop(HURRY_GRACE_S, hurry_after_s=max(0.1, self._drain_s))
        else:
            await actor.stop()

    async def _watch(self) -> None:
        """Run the periodic checks: watchdog and orphans, for which there is no event."""
        last_s = now_s()
        while True:
            await asyncio.sleep(TICK_S)
            time_s = now_s()
            # Unread notifications do not count against an actor, nor does time in which this process was stopped (Ctrl-Z).
            self.hear()
            late, last_s = time_s - last_s > TICK_S + LATE_S, time_s
            for actor in self.actors.values():
                if late:
                    actor.excuse(time_s)
                actor.check(time_s, {} if late else {one.process.pid: self._outside.steps_of(actor, one) for one in actor.instances})
            self._outside.tick()

    # ------------------------------------------------------------------------------------------ what actors tell

    def hear(self) -> None:
        """Pass on what processes have said of themselves."""
        self._roster.pass_on(self._outside.hear())

    async def start_process(self, actor: SupervisedActor) -> Instance:
        """Start a process of an actor. Raises: OSError; RunError if the run is ending."""
        return await self._outside.start_process(actor)

    def on_started(self, actor: SupervisedActor, instance: Instance) -> None:
        """Take note of a new process."""
        self._roster.add(actor, instance)
        self._outside.started(instance, self._roster.pids)

    def on_active(self, actor: SupervisedActor, instance: Instance) -> None:
        """Take note that a process has its role."""
        self._outside.serves(actor, instance)

    def on_ended(self, actor: SupervisedActor, instance: Instance, unexpected: bool) -> None:
        """Take note of a process's end, after its last words."""
        self.hear()
        self._outside.ended(actor, instance, unexpected)

    def is_ready(self, names: frozenset[str]) -> bool:
        """Return whether all of these actors serve."""
        return all(self.actors[name].ready for name in names if name in self.actors)

    def on_message(self, actor: str, text: str) -> None:
        """Report a message about an actor."""
        self.say(f"{actor} {text}")

    def on_state(self, actor: SupervisedActor) -> None:
        """Report that an actor's state or status line has changed, and the first time that all serve."""
        self._outside.progress(actor)
        if not self.was_ready and not self._end.is_set() and self.is_ready(frozenset(self.actors)):
            self.was_ready = True
            self._outside.run_ready()

    def can_do_without(self, actor: SupervisedActor, is_misconfigured: bool) -> bool:
        """Return whether the run goes on while this actor is broken. Not during the start: no client is served yet, and a caller waits
        for the outcome. With reloading it does, since the next edit may fix anything except the configuration."""
        if self._can_be_edited and not is_misconfigured:
            return True
        return self.was_ready and not actor.spec.is_essential

    def on_outage(self, actor: SupervisedActor) -> None:
        """Publish that an actor is broken, or serves again."""
        if actor.spec.listens:
            outages = [one.outage for one in self.actors.values() if one.spec.listens]
            probes = [outage.next_probe_s for outage in outages if outage is not None]
            self._outside.stand_in(min(probes) if probes and len(probes) == len(outages) else None)
        self._outside.publish(
            tuple(
                Outage(role, broken.outage.reason, broken.outage.next_probe_s)
                for broken in self.actors.values()
                if broken.outage is not None
                for role in broken.spec.roles
            )
        )

    def on_failed(self, actor: SupervisedActor, reason: str) -> None:
        """End the run: an actor cannot be kept running."""
        if self.failure:
            return
        self.failure = f"{actor.name} failed: {reason}"
        self._drain_s = 0.0
        self._outside.run_failed(self.failure, actor.last_tail)
        self._end.set()

    def say(self, text: str) -> None:
        """Report to users and write to the log."""
        self._outside.say(text)

    # ------------------------------------------------------------------------------------------------- another layout

    @property
    def is_ending(self) -> bool:
        """True once the run is told to end."""
        return self._end.is_set()

    @property
    def can_scale(self) -> bool:
        """True while the run serves, and goes on."""
        return self.was_ready and not self.is_ending

    def set_config(self, config: RuntimeConfig) -> None:
        """Let processes that start from now on have another configuration. Raises: OSError, and it stays as it was."""
        self._outside.write_config(config)
        self.config = config
