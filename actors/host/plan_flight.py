"""Flight-recorder entries of an actor that works on plans: each plan, with its waits and its result."""

import time

from ...runtime.bus.messages import ItemError, Result, Skipped
from ...runtime.bus.plans import Plan
from ...runtime.observe.flight import Kind, pack_plan
from ...shm.flight_recorder import FlightWriter

UNWANTED = 499  # of a skipped plan: no row wanted it any more


class PlanFlight:
    """The plans of one actor: when they arrived, when they were done, for how long and with what result."""

    def __init__(self, flight: FlightWriter) -> None:
        self._flight = flight
        self._arrived: dict[int, int] = {}

    def arrived(self, plan_id: int) -> None:
        """Record that the plan waits in the actor's queue from now on."""
        self._arrived[plan_id] = time.monotonic_ns()

    def skipped(self, plan_id: int) -> None:
        """Record that the plan will not be done."""
        self._arrived.pop(plan_id, None)

    def done(self, plan_id: int, plan: Plan, began_ns: int, result: Result, num_queued: int) -> None:
        """Record that the plan has just been done."""
        now_ns = time.monotonic_ns()
        wait_ns = max(0, began_ns - self._arrived.pop(plan_id, began_ns))
        status = result.status if isinstance(result, ItemError) else UNWANTED if isinstance(result, Skipped) else 0
        a = pack_plan(plan.KIND, status, num_queued)
        self._flight.record(Kind.PLAN, began_ns, now_ns - began_ns, plan_id, a, plan.units_done(result), wait_ns)
