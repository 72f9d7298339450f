"""Actors that work on plans, simulated: one plan after the other, each for the time that the cost model gives it.

As in ``actors/host/plan_loop``, a repeated command is harmless, plans for rows that have ended are skipped, and video does large work
one plan at a time beside the small.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

from mmrt.runtime.bus.messages import Analysed, Done, PlanDone, Result, Run, Skipped, ToActor
from mmrt.runtime.bus.plans import Analyse, Plan, Prefill
from mmrt.runtime.stage_table import InstanceId, stage_of
from mmrt.schema.media import ItemShape

from .costs import Costs, plan_seconds
from .events import NS, EventQueue, to_ns
from .jitter import Jitter
from .processors import Processors
from .rows import Rows
from .turns import Turns

KEPT_RESULTS = 256

Post = Callable[[InstanceId, PlanDone], None]
FindShape = Callable[[Analyse], ItemShape | None]


class Lane:
    """A thread that does plans in order, where its process takes ``turns``, in its turn. ``finish``: takes a plan's number, its result
    and the nanoseconds that it took."""

    def __init__(
        self,
        stage: str,
        costs: Costs,
        queue: EventQueue,
        processors: Processors,
        begin: Callable[[Run, Plan], Plan | None],
        finish: Callable[[int, Plan | None, int], None],
        turns: Turns | None,
        jitter: Jitter,
    ) -> None:
        self.stage = stage
        self.waiting: deque[tuple[Run, Plan]] = deque()
        self._costs, self._queue, self._processors = costs, queue, processors
        self._begin, self._finish, self._turns, self._jitter = begin, finish, turns, jitter
        self._plan: tuple[int, Plan] | None = None
        self._rate = 1.0
        self._began_ns = self._left_ns = self._since_ns = 0
        self._version = 0

    def put(self, run: Run, plan: Plan) -> None:
        """Do this plan after those that wait."""
        self.waiting.append((run, plan))
        if self._plan is None:
            self._next()

    def _next(self) -> None:
        """Begin the next plan that is still wanted, or go idle."""
        was_busy, self._plan = self._plan is not None, None
        while self.waiting and self._plan is None:
            run, plan = self.waiting.popleft()
            wanted = self._begin(run, plan)
            if wanted is None:
                self._finish(run.plan_id, None, 0)
            else:
                self._plan = run.plan_id, wanted
        if was_busy and (self._plan is None or self._turns is not None):
            self._processors.stop(self)
            was_busy = False
            if self._turns is not None:
                self._turns.end()
        if self._plan is not None and (self._turns is None or self._turns.ask(lambda: self._work(False))):
            self._work(was_busy)

    def _work(self, is_busy: bool) -> None:
        """Begin the plan's work."""
        assert self._plan is not None
        self._began_ns = self._since_ns = self._queue.now_ns
        factor = self._jitter.factor(self.stage, self._processors.together)
        self._left_ns = to_ns(factor * plan_seconds(self._costs, self._plan[1]))
        if is_busy:
            self._schedule()
        else:
            self._processors.start(self)

    def set_rate(self, rate: float) -> None:
        """See ``processors.Server``."""
        now_ns = self._queue.now_ns
        self._left_ns = max(0, self._left_ns - round((now_ns - self._since_ns) * self._rate))
        self._since_ns, self._rate = now_ns, rate
        self._schedule()

    def _schedule(self) -> None:
        self._version += 1
        self._queue.at(self._since_ns + round(self._left_ns / self._rate), self._done, self._version)

    def _done(self, version: int) -> None:
        if version == self._version and self._plan is not None:
            plan_id, plan = self._plan
            self._finish(plan_id, plan, self._queue.now_ns - self._began_ns)
            self._next()


class Worker:
    """One actor of video, encoder or prefill."""

    def __init__(
        self,
        name: InstanceId,
        costs: Costs,
        queue: EventQueue,
        processors: Processors,
        rows: Rows,
        plans: dict[int, Plan],
        find_shape: FindShape,
        draw: Callable[[Prefill], None],
        post: Post,
        jitter: Jitter,
        turns: Turns | None = None,
    ) -> None:
        """``plans``: the plan table, by number. ``find_shape``: what an analysis finds. ``draw``: of a plan that has ended."""
        self.name = name
        self.num_plans = 0
        self.busy_ns = self.num_units = 0  # of its plans
        self._queue, self._rows, self._plans = queue, rows, plans
        self._find_shape, self._draw, self._post = find_shape, draw, post
        self._stage = stage_of(name)
        num_lanes = 2 if self._stage == "video" else 1
        self._lanes = [Lane(self._stage, costs, queue, processors, self._begin, self._finish, turns, jitter) for _ in range(num_lanes)]
        self._taken: set[int] = set()
        self._results: OrderedDict[int, PlanDone] = OrderedDict()

    def take(self, run: ToActor) -> None:
        """Take a command. One that is done is answered again."""
        assert isinstance(run, Run)
        if run.plan_id in self._results:
            self._post(self.name, self._results[run.plan_id])
        elif run.plan_id not in self._taken and (plan := self._plans.get(run.plan_id)) is not None:
            self._taken.add(run.plan_id)
            lanes = self._lanes
            lanes[-1 if len(lanes) > 1 and plan.is_large else 0].put(run, plan)

    def _begin(self, run: Run, plan: Plan) -> Plan | None:
        """What of the plan is still wanted."""
        if 0 < run.deadline_s <= self._queue.now_s:
            return None
        return plan.only(self._rows.is_alive)

    def _finish(self, plan_id: int, plan: Plan | None, elapsed_ns: int) -> None:
        result: Result = Done()
        if plan is None:
            result = Skipped()
        elif isinstance(plan, Analyse):
            shape = self._find_shape(plan)
            result = Skipped() if shape is None else Analysed(shape)
        elif isinstance(plan, Prefill):
            self._draw(plan)
        if plan is not None:
            self.num_plans += 1
            self.busy_ns += elapsed_ns
            self.num_units += plan.units
        self._taken.discard(plan_id)
        done = self._results[plan_id] = PlanDone(self.name, 1, plan_id, elapsed_ns / NS, result)
        if len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)
        self._post(self.name, done)
