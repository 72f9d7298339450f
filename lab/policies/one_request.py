"""Give each prefill plan to one request: RServe's "RServe-intra", the policy ``overlap`` without several requests in a plan (RS6, RS7).

Encoder and prefill work on a request at the same time, but the budget of a plan is filled from one request only.
"""

from msgspec.structs import replace

from mmrt.runtime.controller.scheduling.overlap import Gathering, Overlap
from mmrt.runtime.controller.scheduling.types import StepLimits, StepPlan, View


class OneRequest(Overlap):
    """Plans as ``Overlap`` does, but gives a prefill plan to one request."""

    name = "one_request"

    def plan(self, view: View, limits: StepLimits, memory: Gathering | None) -> tuple[StepPlan, Gathering | None]:
        """Plan one round; of the prefill plan, the first request's chunks stay."""
        step, memory = super().plan(view, limits, memory)
        return replace(step, prefill=tuple([chunk for chunk in step.prefill if chunk.key == step.prefill[0].key])), memory


policy = OneRequest()
