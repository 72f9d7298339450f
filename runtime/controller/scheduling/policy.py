"""What a policy is, and which there are (``scheduling.policy``).

A policy says in which order requests get what is scarce (rows, pages, places in batches; the reverse is the order of victims), and
what video, encoder and prefill do next. The core owns the facts: it grants all or nothing, checks every plan (``legality``), and
overrules a policy that raises or that plans nothing while something could run (``policy_calls``).
"""

from typing import Any, Protocol

from .types import Candidate, Rank, StepLimits, StepPlan, View
from .unified import Unified


class Policy(Protocol):
    """Pure: no clock and no state but ``memory``, which is the policy's own, None at first, and lost with the controller."""

    @property
    def name(self) -> str: ...

    @property
    def ages(self) -> bool:
        """Whether ranks change with time. Else a request is ranked once."""
        ...

    def rank(self, request: Candidate, now: float) -> Rank:
        """Of all requests, waiting or in rows. Equal ranks go in order of arrival. Whoever is passed for ever starves: let it age."""
        ...

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        """One round: what is sent now, and the memory for the next. Called again until it plans nothing."""
        ...


UNIFIED: Policy = Unified()
POLICIES: dict[str, Policy] = {UNIFIED.name: UNIFIED}
