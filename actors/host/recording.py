"""What actors put into their flight recorders, beyond what one line does: plans with their waits, and all that a controller decides.

The controller's records are made of the effects that it performs, where they are performed: the pure machine knows nothing of them.
"""

import time

from ...runtime.bus.messages import POOLS, Filled, ItemError, PlanDone, RequestSpec, Result, Skipped, ToController
from ...runtime.bus.plans import Plan
from ...runtime.config import ACTORS
from ...runtime.controller.effects import BeginRow, Effect, Send, SetPhase, WriteJournal, WritePlan, WriteSpec
from ...runtime.controller.records import Refused, Submitted
from ...runtime.controller.request import Request
from ...runtime.controller.state import ControllerState, InflightPlan
from ...runtime.observe.flight import Kind, pack_id, pack_pair, pack_plan
from ...schema.rows import Phase
from ...shm.flight_recorder import FlightWriter

UNWANTED = 499  # of a plan that was skipped: nobody wanted it any more
_SLOW_TICK_NS = 2_000_000  # a tick that did nothing is worth a record when it took so long


class PlanFlight:
    """The plans of one actor: when they arrived, when they were done, for how long and with what result."""

    def __init__(self, flight: FlightWriter) -> None:
        self._flight = flight
        self._arrived: dict[int, int] = {}

    def arrived(self, plan_id: int) -> None:
        """The plan waits in the actor's queue from now on."""
        self._arrived[plan_id] = time.monotonic_ns()

    def skipped(self, plan_id: int) -> None:
        """The plan will not be done."""
        self._arrived.pop(plan_id, None)

    def done(self, plan_id: int, plan: Plan, began_ns: int, result: Result, num_queued: int) -> None:
        """The plan has just been done."""
        now_ns = time.monotonic_ns()
        wait_ns = max(0, began_ns - self._arrived.pop(plan_id, began_ns))
        status = result.status if isinstance(result, ItemError) else UNWANTED if isinstance(result, Skipped) else 0
        a = pack_plan(plan.KIND, status, num_queued)
        self._flight.record(Kind.PLAN, began_ns, now_ns - began_ns, plan_id, a, plan.units, wait_ns)


class ControllerFlight:
    """The controller's records, from messages, effects and ticks."""

    def __init__(self, flight: FlightWriter, state: ControllerState) -> None:
        self._flight = flight
        self._state = state
        self._counters: dict[tuple[int, int], tuple[int, int, int, int]] = {}

    def message(self, message: ToController) -> None:
        """A message has come, before it is handled."""
        if isinstance(message, PlanDone):
            if message.plan_id in self._state.plans:
                self._flight.event(Kind.ACKNOWLEDGED, message.plan_id)
        elif isinstance(message, Filled):
            request = self._state.requests.get(message.key)
            if request is not None and request.has_row and not request.record.filled:
                self._flight.event(Kind.FILLED, message.key)

    def effect(self, effect: Effect) -> None:
        """An effect was performed."""
        if isinstance(effect, Send):
            return
        if isinstance(effect, WritePlan):
            self._issued(effect)
        elif isinstance(effect, WriteJournal):
            self._journaled(effect)
        elif isinstance(effect, BeginRow | SetPhase | WriteSpec):
            request = self._state.rows[effect.row]
            if request is not None:
                self._row(effect, request)

    def unsent(self, actor: str) -> None:
        """A message to this actor did not leave."""
        self._flight.event(Kind.UNSENT, 0, ACTORS.index(actor))

    def tick(self, began_ns: int, num_effects: int) -> None:
        """A tick is over, its effects included."""
        duration_ns = time.monotonic_ns() - began_ns
        if num_effects or duration_ns > _SLOW_TICK_NS:
            self._flight.record(Kind.TICK, began_ns, duration_ns, 0, num_effects)

    def counters(self) -> None:
        """Use of pools, queues and budgets, where they are not what they were."""
        state = self._state
        for index, name in enumerate(POOLS):
            pool = state.pools[name]
            self._count(Kind.POOL, 0, index, pool.num_used, pool.num_pages)
        num_preparing = len(state.preparing())
        self._count(Kind.QUEUES, len(state.plans), len(state.waiting), num_preparing, state.num_decoding)
        steering = state.steering
        self._count(Kind.BUDGETS, 0, steering.prefill.units, steering.encode.units, int(1e9 * (steering.tbt_s or 0.0)))

    def _count(self, kind: Kind, key: int, a: int, b: int, c: int) -> None:
        place = kind, a if kind is Kind.POOL else 0
        if self._counters.get(place) != (key, a, b, c):
            self._counters[place] = key, a, b, c
            self._flight.event(kind, key, a, b, c)

    def _issued(self, effect: WritePlan) -> None:
        inflight: InflightPlan | None = self._state.plans.get(effect.plan_id)
        if inflight is None:
            return
        plan = inflight.plan
        self._flight.event(Kind.ISSUED, effect.plan_id, ACTORS.index(effect.actor), plan.KIND, len(inflight.requests))
        for request in inflight.requests:
            self._flight.event(Kind.PLAN_REQUEST, request.key, effect.plan_id, pack_pair(*plan.share(request.row)))

    def _journaled(self, effect: WriteJournal) -> None:
        record = effect.record
        if isinstance(record, Submitted):
            spec = record.spec
            self._flight.event(Kind.SUBMITTED, record.key, len(spec.prompt_ids), len(spec.items), record.arrival)
        elif isinstance(record, Refused):
            self._flight.event(Kind.FAILED, record.key, record.failure.status)
        else:
            self._flight.event(Kind.ENDED, record.key)

    def _row(self, effect: BeginRow | SetPhase | WriteSpec, request: Request) -> None:
        flight, key = self._flight, request.key
        if isinstance(effect, BeginRow):
            flight.event(Kind.ROW, key, effect.row, effect.generation)
        elif isinstance(effect, SetPhase):
            if request.ending or effect.phase != Phase.ENDING:  # else the row has been given away in the same turn
                flight.event(Kind.PHASE, key, effect.row, request.row_generation, effect.phase)
        else:
            lengths = [*map(len, effect.prompts), 0]
            flight.event(Kind.PREPARED, key, lengths[0], lengths[1], request.record.max_new_tokens)


class GatewayFlight:
    """The gateway's part of each request. ``flight`` None: nothing is recorded (tests)."""

    def __init__(self, flight: FlightWriter | None) -> None:
        self._flight = flight

    def received(self, key: int, spec: RequestSpec) -> None:
        """The request was read and goes to the controller."""
        self._event(Kind.RECEIVED, key, *pack_id(spec.request_id), sum(item.num_bytes for item in spec.items))

    def now_ns(self) -> int:
        """For ``written``: the registry has no clock."""
        return time.monotonic_ns()

    def written(self, key: int, began_ns: int, num_bytes: int) -> None:
        """Its media were written into their pages, just now."""
        if self._flight is not None:
            self._flight.record(Kind.WRITTEN, began_ns, time.monotonic_ns() - began_ns, key, 0, 0, num_bytes)

    def first_text(self, key: int) -> None:
        """Its first text is there."""
        self._event(Kind.FIRST_TEXT, key)

    def sent(self, key: int, num_tokens: int) -> None:
        """Its client has been sent the text of so many tokens."""
        self._event(Kind.SENT, key, num_tokens)

    def over(self, key: int, num_tokens: int, status: int) -> None:
        """It is over for the client: with an error of this status, or well (0)."""
        self._event(Kind.OVER, key, num_tokens, status)

    def _event(self, kind: Kind, key: int, a: int = 0, b: int = 0, c: int = 0) -> None:
        if self._flight is not None:
            self._flight.event(kind, key, a, b, c)
