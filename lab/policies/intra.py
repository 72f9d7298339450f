"""Prefill one request at a time: RServe's "RServe-intra" on a pipeline (RS6, RS7), whose stages hold chunks of one request alone.

It is the policy ``overlap``, but no chunk of another request enters the pipeline before the last of this one has left it.
"""

from msgspec.structs import replace

from mmrt.runtime.controller.scheduling.overlap import Gathering, Overlap
from mmrt.runtime.controller.scheduling.types import StepLimits, StepPlan, View


class Intra(Overlap):
    """Plans as ``Overlap`` does, but prefills nothing of a request before the one before it is done."""

    name = "intra"

    def plan(self, view: View, limits: StepLimits, memory: Gathering | None) -> tuple[StepPlan, Gathering | None]:
        """Plan one round; of the prefill plan, the chunks of the request in work stay, or of the first if none is."""
        step, memory = super().plan(view, limits, memory)
        begun = [one.key for one in view.requests if any(part.cached < part.next < part.target for part in one.members)]
        if not begun and view.prefill_in_flight:
            return replace(step, prefill=()), memory
        key = begun[0] if begun else step.prefill[0].key if step.prefill else -1
        return replace(step, prefill=tuple([chunk for chunk in step.prefill if chunk.key == key])), memory


policy = Intra()
