"""The policy interface, and the available policies (``scheduling.policy``).

A policy orders requests for scarce resources (rows, pages, places in batches; the reverse is the order of victims), and
decides what video, encoder and prefill do next. The core keeps control: it grants all or nothing, checks every plan (``legality``),
and overrules a policy that raises or that plans nothing while something could run (``policy_calls``).
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from .auto import Auto
from .facts import Facts
from .monolithic import Monolithic
from .overlap import Overlap
from .slack import Slack
from .split import Split
from .stage_level import StageLevel
from .types import Candidate, Rank, StepLimits, StepPlan, View
from .unified import Unified
from .weighted import Weighted


class Policy(Protocol):
    """Pure: no clock, and no state except ``memory``, the policy's own: None at first, and lost with the controller."""

    @property
    def name(self) -> str: ...

    @property
    def ages(self) -> bool:
        """True if ranks change with time or with the request's progress. Otherwise a request is ranked once."""
        ...

    def rank(self, request: Candidate, facts: Facts) -> Rank:
        """Rank a request, waiting or in a row. Ties go in order of arrival. Requests that are always passed over starve: use aging."""
        ...

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        """Plan one round: return the work to send now, and the memory for the next. Called again until it plans nothing."""
        ...


UNIFIED: Policy = Unified()
_ALL: tuple[Policy, ...] = (UNIFIED, StageLevel(), Overlap(), Slack(), Weighted(), Monolithic(), Split(), Auto())
POLICIES: dict[str, Policy] = {policy.name: policy for policy in _ALL}


class PolicyFailure(Exception):
    """A policy's call failed. The message is for users: it names the place in the policy's file, if it has one."""


@dataclass(slots=True)
class PolicyRecord:
    """What the policy in charge has done since it took over."""

    plans: int = 0  # with something to do
    overruled: int = 0
    illegal: int = 0  # choices that were dropped
    error: str = ""  # why it was last overruled
    failed_s: list[float] = field(default_factory=list)  # when it was, lately
    rank_length: int = 0  # numbers in each of its ranks, once it has ranked a request
    set_aside: str = ""  # why ``unified`` is in charge in its place for good
