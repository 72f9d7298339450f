"""The first tokens that prefill draws with the plan that ends a row's prompt, as in ``actors/decode/first_tokens``.

A draw takes no time here: it reads the matrix of the vocabulary alone.
"""

from mmrt.runtime.bus.plans import Prefill
from mmrt.schema.rows import EndCode

from .events import EventQueue
from .gateway import DRAWN, Gateway
from .rows import Rows
from .step_log import StepLog


class FirstTokens:
    """Those of all prefills, of a pipeline of ``num_ranks`` those of the last. ``log``: a plan that draws some is a step of it."""

    def __init__(self, queue: EventQueue, rows: Rows, gateway: Gateway, num_ranks: int) -> None:
        self.log = StepLog(queue.now_ns)
        self._queue, self._rows, self._gateway, self._num_ranks = queue, rows, gateway, num_ranks

    def draw(self, plan: Prefill) -> None:
        """Commit the tokens that a plan draws, which ends now."""
        if plan.rank < self._num_ranks - 1:
            return
        drawn = []
        for chunk in plan.chunks:
            request = self._rows.request(chunk.row, chunk.row_generation)
            if request is None or not request.answer.begins_in_prefill or chunk.end != request.kv.lengths[0]:
                continue
            if not self._rows.committed[chunk.row]:
                self._rows.committed[chunk.row] = 1
                drawn.append(request)
        if not drawn:
            return
        step = self.log.num_steps
        self.log.add(self._queue.now_ns)
        for request in drawn:
            self._gateway.take_stretch(DRAWN, request.key, step, step)
            if request.record.max_new_tokens == 1:
                self._rows.end_codes[request.row] = EndCode.LENGTH
                self._gateway.take_end(request.key)
