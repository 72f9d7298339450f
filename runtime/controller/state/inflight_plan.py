"""A plan in the plan table, as the controller sees it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...bus.plans import Plan
from ...pools import PoolName
from ...stage_table import STAGES, InstanceId
from .request import Request

LONG_AGO_S = float("-inf")


@dataclass(slots=True, eq=False)
class InflightPlan:
    """A plan in the plan table. It is sent again until its result comes, even after its requests are gone."""

    plan_id: int
    slot: int
    actor: InstanceId
    plan: Plan
    requests: list[Request]
    sent_s: float = LONG_AGO_S
    begun_s: float = LONG_AGO_S
    disturbs_decode: bool = field(init=False)  # it lengthens decode's steps on a shared device
    is_large: bool = field(init=False)  # see ``PlanBase``

    def __post_init__(self) -> None:
        self.disturbs_decode = STAGES[self.plan.STAGE].has_device
        self.is_large = self.plan.is_large

    def pages(self) -> Iterator[tuple[PoolName, list[int]]]:
        """Yield the pages that it names; for one that follows its rows' block tables also *all* their KV pages, of both
        pools, and those of recurrent states: tables are emptied before their pages are free."""
        yield from self.plan.reads().items()
        yield from self.plan.writes().items()
        for request in self.requests if self.plan.USES_KV else ():
            yield from request.granted_pages()
