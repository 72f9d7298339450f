"""A plan in the plan table, as the controller sees it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from ..bus.copy_plans import Load, Transfer
from ..bus.plans import Plan, Prefill
from ..pools import PoolName
from ..stage_table import STAGES, InstanceId
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

    @property
    def disturbs_decode(self) -> bool:
        """True if it lengthens decode's steps on a shared device."""
        return bool(STAGES[self.plan.STAGE].letter)

    def pages(self) -> Iterator[tuple[PoolName, list[int]]]:
        """Yield the pages that it names; for one that follows its rows' block tables also *all* their KV pages, of both
        pools: tables are emptied before their pages are free."""
        yield from self.plan.reads().items()
        yield from self.plan.writes().items()
        for request in self.requests if isinstance(self.plan, Prefill | Load | Transfer) else ():
            yield request.kv_pool, list(chain(*request.block_tables))
            if request.record.source_pool is not None:
                yield request.record.source_pool, list(chain(*request.source_tables))
