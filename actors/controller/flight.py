"""The controller's records in its flight recorder: everything it decides.

The records are made where effects are performed, so the pure machine knows nothing of them.
"""

import math
import time
from collections.abc import Sequence
from hashlib import blake2b

from ...runtime.bus.messages import Filled, PlanDone, Prepared, ToController
from ...runtime.controller.state.effects import BeginRow, Effect, Send, SetPhase, WriteJournal, WritePlan, WriteSpec
from ...runtime.controller.state.inflight_plan import InflightPlan
from ...runtime.controller.state.records import Ended, Refused, Submitted
from ...runtime.controller.state.request import Request
from ...runtime.controller.state.state import ControllerState
from ...runtime.observe.flight import POOL_NAMES, Kind, pack_item, pack_pair
from ...runtime.observe.prompt_blocks import block_hashes
from ...runtime.stage_table import InstanceId
from ...schema.media import ItemShape
from ...schema.rows import Phase
from ...shm.controller_stats import StatsSnapshot
from ...shm.flight_recorder import FlightWriter

_POOL_NUMBERS = {name: number for number, name in enumerate(POOL_NAMES)}
_SLOW_TICK_NS = 2_000_000  # a tick that did nothing is worth a record when it took so long


class ControllerFlight:
    """The controller's records, from messages, effects and ticks."""

    def __init__(self, flight: FlightWriter, state: ControllerState, actors: Sequence[InstanceId]) -> None:
        """``actors``: those of the run, in the order of their numbers. More may come behind them."""
        self.actors = actors
        self._flight = flight
        self._state = state
        self._counters: dict[tuple[int, int], tuple[int, int, int, int]] = {}

    def message(self, message: ToController) -> None:
        """Record that a message arrived; called before it is handled."""
        if isinstance(message, PlanDone):
            if message.plan_id in self._state.plans:
                self._flight.event(Kind.ACKNOWLEDGED, message.plan_id)
        elif isinstance(message, Filled):
            request = self._state.requests.get(message.key)
            if request is not None and request.has_row and not request.record.filled:
                self._flight.event(Kind.FILLED, message.key)

    def effect(self, effect: Effect) -> None:
        """Record an effect that was performed."""
        if isinstance(effect, Send):
            if isinstance(effect.message, Prepared) and effect.message.num_cached_tokens > 0:
                self._flight.event(Kind.CACHED, effect.message.key, effect.message.num_cached_tokens)
        elif isinstance(effect, WritePlan):
            self._issued(effect)
        elif isinstance(effect, WriteJournal):
            self._journaled(effect)
        elif isinstance(effect, BeginRow | SetPhase | WriteSpec):
            request = self._state.rows[effect.row]
            if request is not None:
                self._row(effect, request)

    def unsent(self, actor: InstanceId) -> None:
        """Record that a message to this actor was not sent. The command line is none, and may have left."""
        if actor in self.actors:
            self._flight.event(Kind.UNSENT, 0, self.actors.index(actor))

    def tick(self, began_ns: int, num_effects: int) -> None:
        """Record the end of a tick, effects included."""
        duration_ns = time.monotonic_ns() - began_ns
        if num_effects or duration_ns > _SLOW_TICK_NS:
            self._flight.record(Kind.TICK, began_ns, duration_ns, 0, num_effects)

    def counters(self, stats: StatsSnapshot) -> None:
        """Record the use of pools, queues and budgets where it has changed."""
        for name, pool in stats.pools.items():
            self._count(Kind.POOL, pool.evictable, _POOL_NUMBERS[name], pool.used, pool.pages)
        self._count(Kind.QUEUES, stats.plans, stats.waiting, stats.preparing, stats.running)
        self._count(Kind.BUDGETS, 0, stats.prefill_budget, stats.encode_budget, int(1e9 * stats.tbt_s))

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
        self._flight.event(Kind.ISSUED, effect.plan_id, self.actors.index(effect.actor), plan.KIND, len(inflight.requests))
        for request in inflight.requests:
            self._flight.event(Kind.PLAN_REQUEST, request.key, effect.plan_id, pack_pair(*plan.share(request.row)))

    def _journaled(self, effect: WriteJournal) -> None:
        record = effect.record
        if isinstance(record, Submitted):
            spec = record.spec
            self._flight.event(Kind.SUBMITTED, record.key, len(spec.prompt_ids), len(spec.items), record.arrival)
        elif isinstance(record, Refused):
            self._flight.event(Kind.FAILED, record.key, record.failure.status)
        elif isinstance(record, Ended):
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
            self._prompt(effect.prompts[0], request)

    def _prompt(self, prompt: Sequence[int], request: Request) -> None:
        """Under the run's secret: whoever reads a recording cannot try guesses of what was asked."""
        flight, key, spec, media = self._flight, request.key, request.spec, []
        root = blake2b(spec.salt, digest_size=16, key=self._state.secret).digest()
        for index, item in enumerate(spec.items):
            shape, tracker = request.record.items[index].shape, request.media.tracker
            assert shape is not None and tracker is not None
            content = item.content or b"%d/%d" % (key, index)
            media.append((tracker.part(index, 0).start, content))
            name = int.from_bytes(blake2b(root + content, digest_size=8).digest())
            count = shape.grid[0]
            length = round(1000 * count * shape.second_per_grid_s) if shape.kind == "video" else count
            flight.event(Kind.ITEM, key, pack_item(shape.kind, length, shape.num_tokens), pack_pair(*_sides(shape)), name)
        hashes = block_hashes(root, prompt, media)
        for first in range(0, len(hashes), 3):
            flight.event(Kind.BLOCKS, key, *hashes[first : first + 3])


def _sides(shape: ItemShape) -> tuple[int, int]:
    """Height and width in patches; of a picture that is cut into views, of the largest size that they are cut from."""
    _, height, width = shape.grid
    views = [view for segment in shape.segments for view in segment.views]
    if not views:
        return height, width
    patch = max(1, views[0].size[0] // max(1, height))
    height, width = max((view.sizes[-1] for view in views), key=math.prod)
    return height // patch, width // patch
