"""The main loop of the actors that work on plans (video, encoder, prefill): receive, do one plan, commit, answer.

A plan lies in the plan table; a message only names it. A finished plan is answered with the stored result, so that a repeated
command is harmless; a plan whose slot holds something else is obsolete and dropped; one that raises is answered with an error;
one that the previous process crashed in is answered with Died and not begun: the controller decides what to do.

Plans that would hold up others (video's large ones) are done one at a time in a thread of their own. While the loop has nothing
else to do, that plan is the step in the status words: its deadline is watched, and a death counts against it. Beside another
plan it is not; ``is_aside`` therefore says no for a while after a death.

A plan that arrives while a long one is in work can be done in a break of that one (``do_short``).
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...runtime.bus.messages import Died, ItemError, PlanDone, Result, Run, Skipped
from ...runtime.bus.plans import Plan, decode_plan
from ...runtime.observe.capture import Capture
from ...runtime.observe.replay_capture import DevicePages, PlanCapture
from ...runtime.pools import PoolName
from ...shm.plan_table import PlanTable
from ...shm.sequence_table import SequenceTable
from .actor import Actor
from .device import raise_if_fatal
from .free_turn import FreeTurn
from .plan_checks import still_wanted
from .plan_flight import PlanFlight
from .step_limit import StepLimit

log = logging.getLogger(__name__)

KEPT_RESULTS = 256
NO_PAGES: DevicePages = MappingProxyType({})
IDLE_S = 0.5
IN_NO_TURN = FreeTurn()  # for plans that do not compute
CEILING_UNITS = 4096  # tokens or patch rows, for which the longest time of a step is meant
LEAST_UNITS = 256  # tokens or patch rows: a forward over fewer costs about as much

Execute = Callable[[Plan], Result]


def serve_plans(
    actor: Actor,
    execute: Execute,
    rows: SequenceTable,
    device_pages: DevicePages = NO_PAGES,
    is_aside: Callable[[Plan], bool] | None = None,
) -> None:
    """Become active and do plans until told to end. See ``PlanLoop``."""
    PlanLoop(actor, rows, device_pages).serve(execute, is_aside)


@dataclass(frozen=True)
class _Begun:
    """A plan in work here or in the other thread."""

    plan_id: int
    plan: Plan  # as it was written
    wanted: Plan | None  # what of it is still wanted
    captured: Capture | None
    started_ns: int


@dataclass
class _InWork:
    """A plan in work in the loop's thread. In breaks others of at most ``most_units`` can be done, which so far took ``others_ns``."""

    plan_id: int
    most_units: int
    began_ns: int
    others_ns: int = 0

    @property
    def gives_way(self) -> bool:
        """Return whether it has had as much time as others in its breaks."""
        return 2 * self.others_ns <= time.monotonic_ns() - self.began_ns


class PlanLoop:
    """The loop, and its state between two turns. Once it is made the actor is active and all is open; ``serve`` opens nothing more."""

    def __init__(self, actor: Actor, rows: SequenceTable, device_pages: DevicePages = NO_PAGES) -> None:
        """Become active. ``rows`` tells which plans are still wanted; ``device_pages`` are those that only this process can capture."""
        self._actor = actor
        self._rows = rows
        self._table = PlanTable.attach(actor.run, writable=False)
        self._results: OrderedDict[int, PlanDone] = OrderedDict()
        self._queue: deque[Run] = deque()
        self._later: deque[tuple[Run, Plan]] = deque()  # for the other thread
        self._aside: tuple[_Begun, Future[Result]] | None = None
        self._in_work: list[_InWork] = []  # in this thread: each in a break of the one before it
        self._status = actor.become_active()
        self._status.set_crashes(0)  # the controller knows the cause of their death
        worst_s = self._status.step_cost_ns / 1e9
        ceiling_s = actor.config.step_limit_s(actor.name)
        self._limit = StepLimit(actor.config.supervisor.watchdog_s, ceiling_s, worst_s, LEAST_UNITS, CEILING_UNITS)
        self._flight = PlanFlight(actor.flight)
        self._capture = PlanCapture(actor.run, actor.name, actor.config.memory.kv_page_tokens, device_pages)

    def prepare_captures(self, pools: Iterable[PoolName]) -> None:
        """Open what captures of plans need, for a process that soon may open nothing."""
        self._capture.prepare(pools)

    def serve(self, execute: Execute, is_aside: Callable[[Plan], bool] | None = None) -> None:
        """Do plans until told to end. ``is_aside`` tells, in the loop's thread, which are done in the other thread."""
        self._execute = execute
        actor = self._actor
        with ThreadPoolExecutor(1, f"{actor.name} aside") as self._thread:  # however this ends: nothing is written after that
            actor.serving()
            while not actor.ending:
                self._take()
                self._finish_aside()
                begun = None if self._is_stuck else self._next_plan(is_aside)
                self._begin_aside()
                if begun is not None:
                    self._do(begun)
                elif self._is_stuck or not self._queue:
                    if self._aside is None:
                        actor.turn.rest()
                    actor.wait(IDLE_S)
            self._finish_aside(may_wait=True)

    @property
    def _is_stuck(self) -> bool:
        """Return whether the other thread's plan is late. Its step then stays where the watchdog sees it."""
        return self._aside is not None and 0 < self._status.step_deadline_ns < time.monotonic_ns()

    def _take(self) -> None:
        """Receive commands: queue some, answer others at once."""
        actor, results = self._actor, self._results
        for message in actor.receive():
            if not isinstance(message, Run):
                log.warning("unexpected %s", type(message).__name__)
            elif done := results.get(message.plan_id):
                actor.send(done)
            elif actor.death is not None and message.plan_id == actor.death.step and actor.death.crashed:
                log.error("plan %x is skipped: the previous process %s in it", message.plan_id, actor.death.reason)
                results[message.plan_id] = PlanDone(actor.name, actor.generation, message.plan_id, 0.0, Died())
                actor.send(results[message.plan_id])
            elif not self._holds(message.plan_id):
                self._queue.append(message)
                self._flight.arrived(message.plan_id)

    def _holds(self, plan_id: int) -> bool:
        is_waiting = any(command.plan_id == plan_id for command in (*self._queue, *(command for command, _ in self._later)))
        is_in_work = any(one.plan_id == plan_id for one in self._in_work)
        return is_waiting or is_in_work or (self._aside is not None and self._aside[0].plan_id == plan_id)

    def _next_plan(self, is_aside: Callable[[Plan], bool] | None) -> _Begun | None:
        """Return the next plan of the queue. One for the other thread waits for its turn there."""
        if (plan := self._first()) is None:
            return None
        command = self._queue.popleft()
        if is_aside is None or not is_aside(plan):
            return self._begin(command, plan)
        self._later.append((command, plan))
        return None

    def _first(self) -> Plan | None:
        """Return the first plan of the queue, which stays there; those before it that are obsolete or done do not."""
        while self._queue:
            command = self._queue[0]
            payload = self._table.read(command.slot, command.plan_id)
            if payload is not None and command.plan_id not in self._results:
                plan: Plan = decode_plan(payload)
                return plan
            self._flight.skipped(self._queue.popleft().plan_id)
        return None

    def _begin(self, command: Run, plan: Plan) -> _Begun:
        started_ns = time.monotonic_ns()
        wanted = None if 0 < command.deadline_s <= time.monotonic() else still_wanted(plan, self._rows)
        captured = self._capture.before(command.plan_id, wanted) if wanted is not None else None
        return _Begun(command.plan_id, plan, wanted, captured, started_ns)

    def _do(self, begun: _Begun) -> None:
        """Do one step in this thread, with a deadline from the time of such steps so far."""
        if (plan := begun.wanted) is None:
            self._finish(begun, Skipped())
            return
        units = plan.cost
        turn = self._actor.turn if plan.COMPUTES else IN_NO_TURN
        with turn:
            begun, waited_ns = replace(begun, started_ns=time.monotonic_ns()), turn.waited_ns  # waiting for the turn is no work
            in_work = _InWork(begun.plan_id, plan.units // 2 if plan.units > LEAST_UNITS else 0, begun.started_ns)
            self._in_work.append(in_work)
            with self._status.step(begun.plan_id, self._limit.ceiling_s if units is None else self._limit.limit_s(units)):
                result = self._attempt(begun, plan)
            self._in_work.pop()
            waited_ns = turn.waited_ns - waited_ns + in_work.others_ns
            if units is not None:
                self._limit.took(units, (time.monotonic_ns() - begun.started_ns - waited_ns) / 1e9)
                self._status.set_step_cost(int(1e9 * self._limit.worst_s) or 1)
            self._finish(begun, result, waited_ns)
        self._watch_aside()

    def do_short(self) -> bool:
        """Do plans that have arrived, in a break of the one in work. Each has at most half of its units, and begins when it has had as
        much time as those before: so neither waits for long, as if it were cut. One of ``LEAST_UNITS`` or less has no breaks. Returns
        whether there was one. For ``execute``, where what it computes next depends on no memory that others write."""
        if not self._in_work or not (long := self._in_work[-1]).most_units or self._actor.ending:
            return False
        self._take()
        was_one = False
        while (plan := self._first()) is not None and plan.units <= long.most_units and long.gives_way:
            was_one = True
            self._do_between(long, self._begin(self._queue.popleft(), plan))
        return was_one

    def _do_between(self, long: _InWork, begun: _Begun) -> None:
        """Do a plan as a step of its own within the one in work, which has the rest of its time afterwards."""
        paused_ns, deadline_ns = time.monotonic_ns(), self._status.step_deadline_ns
        self._status.end_step()
        self._do(begun)
        long.others_ns += time.monotonic_ns() - paused_ns
        self._status.begin_step(long.plan_id, max(0, deadline_ns - paused_ns) / 1e9)

    def _begin_aside(self) -> None:
        """Give the other thread a plan if it has none."""
        while self._later and self._aside is None:
            begun = self._begin(*self._later.popleft())
            if (wanted := begun.wanted) is None:
                self._finish(begun, Skipped())
                continue
            self._status.begin_step(begun.plan_id, self._limit.ceiling_s)
            self._actor.turn.work()
            self._aside = begun, self._thread.submit(self._attempt, begun, wanted)
            self._aside[1].add_done_callback(lambda _: self._actor.wake())
            self._watch_aside()

    def _watch_aside(self) -> None:
        """Declare the other thread's plan as the step from now on, with the rest of its time."""
        if self._aside is not None:
            begun, _ = self._aside
            spent_s = (time.monotonic_ns() - begun.started_ns) / 1e9
            self._status.begin_step(begun.plan_id, max(0.0, self._limit.ceiling_s - spent_s))

    def _finish_aside(self, may_wait: bool = False) -> None:
        """Answer the plan of the other thread if it is done, or wait until it is if ``may_wait``."""
        if self._aside is None or not (may_wait or self._aside[1].done()):
            return
        begun, future = self._aside
        if (error := future.exception()) is not None:
            with self._status.step(begun.plan_id, self._limit.ceiling_s):
                raise error
        self._status.end_step()
        self._aside = None
        self._finish(begun, future.result())

    def _finish(self, begun: _Begun, result: Result, waited_ns: int = 0) -> None:
        elapsed_s = (time.monotonic_ns() - begun.started_ns - waited_ns) / 1e9
        done = PlanDone(self._actor.name, self._actor.generation, begun.plan_id, elapsed_s, result)
        self._results[begun.plan_id] = done
        if len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)
        self._flight.done(begun.plan_id, begun.plan, begun.started_ns, result, len(self._queue) + len(self._later))
        self._capture.after(begun.captured, result)
        self._actor.send(done)

    def _attempt(self, begun: _Begun, plan: Plan) -> Result:
        """Do a plan; an error fails its request, not this process, which would meet the plan again after every restart.

        The client is told the plan's name, under which the log has the traceback.

        If memory runs out or the device is lost, this process still ends.
        """
        try:
            return self._execute(plan)
        except MemoryError:
            raise
        except Exception as error:
            raise_if_fatal(error)
            name = f"plan {begun.plan_id:x} of {self._actor.name}"
            log.exception("%s failed (%s)", name, type(plan).__name__)
            return ItemError(500, f"the request could not be processed: {name} failed, and the log says why")
