"""What the controller does with a kind of plan (pure; rules over ``ControllerState``).

A kind is one file: functions that issue its plans, and a ``Kind`` with what their results change. What all processes know of a plan
(pages, amount of work, what can be captured) is in its type, in ``runtime/bus``.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from ....bus.messages import Result
from ....bus.plan_base import Place, PlanBase
from ....stage_table import InstanceId
from ...state.request import Request
from ...state.state import ControllerState

P = TypeVar("P", bound=PlanBase)

Encoded = Sequence[tuple[Request, Place]]
"""Segments whose embedding pages are written."""


class Kind(Generic[P]):
    """The results of one kind of plan. ``live``: of its requests, those that do not end.

    A result is first ``answered``; if the plan was done, its costs are learned and it is applied, or the ``rest`` of it placed; then
    the plan leaves the table, and is ``cleared``. ``plan_results`` handles failures and skipped plans of all kinds alike.
    """

    def answered(self, state: ControllerState, plan: P, live: list[Request], result: Result) -> None:
        """Note what any result says, also a failure."""

    def learn_cost(self, state: ControllerState, num_units: int, elapsed_s: float) -> None:
        """Adjust the budget of such plans by the time of this one."""

    def is_part(self, state: ControllerState, plan: P) -> bool:
        """Return whether more is to be done of the plan, once it is done, before it can be applied."""
        return False

    def rest(self, state: ControllerState, plan: P, live: list[Request]) -> tuple[P, InstanceId] | None:
        """Return that, and the actor to do it; None if nobody wants it any more."""
        return None

    def apply(self, state: ControllerState, plan: P, live: list[Request], result: Result) -> Encoded:
        """Record that the plan was done. Returns the segments that it has encoded."""
        raise NotImplementedError

    def correct_work(self, state: ControllerState, plan: P, request: Request) -> None:
        """Note that the plan is more work than estimated."""
        raise AssertionError("video alone estimates its work")

    def cleared(self, state: ControllerState, plan: P, live: list[Request], encoded: Encoded) -> None:
        """Do what has to wait until the plan has left the table: one that is there may be done again."""
