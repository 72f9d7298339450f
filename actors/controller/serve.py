"""The controller process: the pure machine of ``runtime/controller/machine.py`` against the bus, the tables and the journal.

It decides everything and touches no bulk data. The machine gets messages as they arrive; one ``tick`` follows each batch, and a timer
adds more, slowly while nothing is outstanding. Effects are performed in order: after a crash between any two of them, or an orderly
restart, ``runtime/controller/recovery.py`` continues from there.
"""

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import uvloop

from ...runtime.bus.messages import ItemError, PlanDone, Submit, ToActor, ToController
from ...runtime.bus.transport import ControllerSocket, drain_in_loop
from ...runtime.controller.machine import Controller
from ...runtime.controller.recovery import RunSnapshot, recover
from ...runtime.controller.rows.instances import drained
from ...runtime.controller.state.effects import Effect
from ...runtime.controller.state.records import JournalState
from ...runtime.controller.state.state import ControllerState
from ...runtime.environment import read_environment
from ...runtime.process.saved_pages import cache_directory
from ...runtime.process.tuning import read_tuning
from ...runtime.stage_table import InstanceId
from ...schema.policy_report import PolicyReport
from ...shm.controller_stats import ControllerStats
from ...shm.status import ActorState, ActorTable
from ..host.actor import Actor
from ..host.garbage import Garbage, collect_when_quiet
from .costs_file import CostsFile
from .counts import stats_of
from .flight import ControllerFlight
from .io import ControllerIO, perform_all
from .journal import Journal
from .limits import limits_of
from .outage_watch import OutageWatch
from .policy_guard import PolicyGuard
from .policy_switch import PolicySwitch, inherited
from .saved_files import SavedFiles

log = logging.getLogger(__name__)

STATS_S = 0.1
SLOW_TICK_S = 0.25
SAVE_COSTS_S = 30.0


def main(actor: Actor) -> None:
    """Entry of the controller process."""
    uvloop.run(serve(actor))


async def serve(actor: Actor) -> None:
    """Wait as a standby for the role lock, rebuild the state, and decide until told to end."""
    layout = actor.wait_for_layout()
    actors = ActorTable.attach(actor.run, writable=False)
    cache = cache_directory(actor.config)
    names, num_devices = tuple(map(InstanceId, actors.actors)), actor.config.num_kv_pools
    io = ControllerIO(actor.run, names, num_devices, cache, has_states=layout.has_states, has_windows=layout.has_windows)
    files = SavedFiles(actor.run.path, cache)
    saved = files.look()
    status = actor.become_active()
    journal, journaled = Journal.open(actor.run.path)
    limits = limits_of(actor.config, layout, actor.model)
    costs = CostsFile.of_run(read_environment().state_home, actor.config, layout, actor.model_path)
    if layout.has_states:
        members = layout.pools["log"]
        log.info("%d sequences run at once on a device, of which a guidance pair is two: %s", members.num_pages, members.reason)
        if limits.prefix_cache:
            num_snapshots = layout.pools["state"].num_pages - 2 * members.num_pages
            log.info("the prefix cache keeps up to %d recurrent states beside theirs, where prompts part", num_snapshots)
    snapshot = left_in(io, actors, journaled)._replace(known_costs=costs.load())
    controller = recover(limits, actor.generation, snapshot)
    controller.set_saved(saved)
    stats = ControllerStats.attach(actor.run, writable=True)
    policies = _policies(actor, controller.state, stats)
    log.info("epoch %d: %d requests, %d plans", actor.generation, len(controller.state.requests), len(controller.state.plans))
    socket = ControllerSocket(actor.run.path, lambda name: actors.read(name).pid if name in actors.present else 0)
    outages = OutageWatch(actor.run, actor.config.supervisor.restart_window_s, actor.config.instances)
    collect_when_quiet()
    ended = asyncio.Event()
    flight = ControllerFlight(actor.flight, controller.state, io.actors)
    policies.look(time.monotonic())
    serving = Serving(controller, io, journal, socket, stats, outages, flight, policies, actors, ended.set)
    actor.watch_ending(asyncio.get_running_loop(), ended.set)
    following = asyncio.create_task(files.follow(controller.set_saved))
    actor.serving()
    watchdog_s = actor.config.supervisor.watchdog_s / 4
    garbage = Garbage(time.monotonic())
    saved_costs, save_at_s = controller.state.costs.by_stage, time.monotonic() + SAVE_COSTS_S
    while not actor.ending and serving.failure is None:
        actor.notifier.watchdog()
        status.set_queue_depth(len(controller.state.waiting))
        garbage.tick(time.monotonic(), len(controller.state.requests))
        try:
            await asyncio.wait_for(ended.wait(), watchdog_s)
        except TimeoutError:
            pass
        if time.monotonic() >= save_at_s and controller.state.costs.by_stage is not saved_costs:
            saved_costs, save_at_s = controller.state.costs.by_stage, time.monotonic() + SAVE_COSTS_S
            await asyncio.to_thread(costs.save, saved_costs)
    following.cancel()
    serving.close()
    costs.save(controller.state.costs.by_stage)
    outages.close()
    socket.close()
    journal.close()
    if serving.failure is not None:
        raise serving.failure


def _policies(actor: Actor, state: ControllerState, stats: ControllerStats) -> PolicySwitch:
    """Make the choice of the policy, with what is known of the previous controller's end."""
    tuning = read_tuning(actor.run.path)
    number = 0 if tuning is None else tuning.number
    report = inherited(stats.read().policy, number, actor.death, actor.follows_a_death, actor.last_exit)
    guard = PolicyGuard(actor.status, actor.session is not None)
    logs = read_environment().state_home / actor.run.path.name

    def publish(report: PolicyReport) -> None:
        stats.publish(msgspec.structs.replace(stats.read(), policy=report))

    return PolicySwitch(actor.run.path, actor.config.scheduling.policy, state, guard, report, logs, publish)


def active_generations(actors: ActorTable) -> dict[InstanceId, int]:
    """Return the active generations at the time of the call; Hello corrects them."""
    readings = [actors.read(actor) for actor in actors.present]
    return {InstanceId(reading.actor): reading.generation for reading in readings if reading.state == ActorState.ACTIVE}


def left_in(io: ControllerIO, actors: ActorTable, journaled: JournalState) -> RunSnapshot:
    """Return everything that the previous controller left. Actors may have come since ``io`` was made, while this one was a standby."""
    io.actors = tuple(map(InstanceId, actors.actors))
    return io.snapshot(journaled, active_generations(actors))


class Serving:
    """The machine in an event loop.

    An exception ends the actor: the machine is ahead of the effects that were not performed, and only a recovery corrects that.
    """

    def __init__(
        self,
        controller: Controller,
        io: ControllerIO,
        journal: Journal,
        socket: ControllerSocket,
        stats: ControllerStats,
        outages: OutageWatch,
        flight: ControllerFlight,
        policies: PolicySwitch,
        actors: ActorTable,
        on_failure: Callable[[], None],
    ) -> None:
        self.failure: Exception | None = None
        self._on_failure = on_failure
        self._controller = controller
        self._io = io
        self._journal = journal
        self._socket = socket
        self._stats = stats
        self._outages = outages
        self._flight = flight
        self._policies = policies
        self._actors = actors
        self._instances_version = 0
        self._before = stats.read()
        self._stats_at_s = 0.0
        self._num_overruled = 0
        self._loop = asyncio.get_running_loop()
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reader = drain_in_loop(self._loop, socket, self._receive)
        self._tick_soon()

    def close(self) -> None:
        self._reader.close()
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        if self.failure is None:
            self._socket.flush()
            self._publish()

    def _receive(self, received: tuple[InstanceId, int, ToController]) -> None:
        if self.failure is not None:
            return
        try:
            self._take(*received)
        except Exception as error:
            self._fail(error)
            return
        self._tick_soon()

    def _take(self, actor: InstanceId, generation: int, message: ToController) -> None:
        self._flight.message(message)
        now = time.monotonic()
        self._look_for_instances()
        self._look_for_outages(now)
        if isinstance(message, PlanDone) and isinstance(message.result, ItemError) and message.result.status >= 500:
            self._log_failure(message)
        words = self._io.progress(self._controller.ended_by(message))
        ids = self._io.ids(self._controller.wanted_ids(words, all_of_them=True))
        effects = self._controller.on_message(actor, generation, message, now, words, ids)
        try:
            self._perform(effects)
        except OSError as error:
            if error.errno != errno.ENOSPC or not isinstance(message, Submit):
                raise
            log.error("the journal cannot be written: %s", error)
            self._perform(self._controller.not_journaled(message.key, "there is no room to take note of the request"))

    def _log_failure(self, done: PlanDone) -> None:
        """Log which request's plan failed: the actor that logged the cause knows rows, not the clients' request ids."""
        plan = self._controller.state.plans.get(done.plan_id)
        if plan is not None:
            names = ", ".join(sorted({request.spec.generation.request_id for request in plan.requests}))
            log.error("plan %x of %s failed: it was for %s", done.plan_id, done.actor, names)

    def _log_overruled(self) -> None:
        state = self._controller.state
        if state.totals.overruled != self._num_overruled:
            count, self._num_overruled = state.totals.overruled - self._num_overruled, state.totals.overruled
            log.warning("policy %s was overruled %d times, last because of %s", self._policies.name, count, state.overruled_because)

    def _look_for_instances(self) -> None:
        """Take note of actors that have come or leave."""
        table = self._actors
        if (version := table.version) == self._instances_version:
            return
        self._instances_version = version
        self._io.actors = self._flight.actors = tuple(map(InstanceId, table.actors))
        present, leaving = tuple(map(InstanceId, table.present)), tuple(map(InstanceId, table.leaving))
        self._controller.set_instances(present, leaving, {InstanceId(actor): device for actor, device in table.devices.items()})
        self._outages.set_actors(present)
        self._socket.meet(present)
        self._stats_at_s = 0.0
        log.info("actors: %s%s", ", ".join(present), f"; leaving: {', '.join(leaving)}" if leaving else "")

    def _look_for_outages(self, now: float) -> None:
        outages = self._outages.changed(now)
        if outages is not None:
            log.warning("broken: %s", "; ".join(f"{outage.actor}: {outage.reason}" for outage in outages) or "no actor any more")
            self._controller.set_outages(outages)
            self._stats_at_s = now

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._on_failure()

    def _tick_soon(self) -> None:
        """Schedule one tick after everything that has arrived."""
        if self._soon is None:
            self._soon = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        if self._soon is not None:
            self._soon.cancel()  # where the timer came first
            self._soon = None
        if self.failure is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        now, began_ns = time.monotonic(), time.monotonic_ns()
        try:
            self._look_for_instances()
            self._look_for_outages(now)
            if self._policies.look(now):
                self._stats_at_s = now
            progress = self._io.progress(self._controller.watched())
            new_ids = self._io.ids(self._controller.wanted_ids(progress))
            gone = self._outages.gone(self._controller.unanswering(), now)
            self._controller.set_absent(self._outages.absent(self._controller.twins(), now))
            effects = self._controller.tick(now, progress, new_ids, self._io.gaps.read_of_steps(), gone)
            self._perform(effects)
            self._flush()
            self._flight.tick(began_ns, len(effects))
            wait_s = self._controller.next_tick_s()
            if now >= self._stats_at_s:
                self._stats_at_s = now + STATS_S
                self._publish()
            else:  # what has changed does not wait for what comes next
                wait_s = min(wait_s, self._stats_at_s - now)
        except Exception as error:
            self._fail(error)
            return
        self._timer = self._loop.call_later(wait_s, self._tick)
        if (elapsed_s := time.monotonic() - now) > SLOW_TICK_S:
            log.warning("a tick took %.0f ms", 1000 * elapsed_s)

    def _perform(self, effects: Sequence[Effect]) -> None:
        perform_all(effects, self._io, self._journal, self._send, self._flight.effect)

    def _send(self, actor: InstanceId, generation: int, message: ToActor) -> None:
        self._socket.hold(actor, generation, message)  # a tick always follows

    def _flush(self) -> None:
        for actor in self._socket.flush():
            self._flight.unsent(InstanceId(actor))
        self._reader.poke()

    def _publish(self) -> None:
        stats = msgspec.structs.replace(
            stats_of(self._controller.state, self._before, self._policies.report()),
            gaps=self._io.gaps.read(),
            gaps_s=self._io.gaps.sum_s,
            instances_version=self._instances_version,
            drained=drained(self._controller.state),
        )
        self._flight.counters(stats)
        self._log_overruled()
        self._stats.publish(stats)
