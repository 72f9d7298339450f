"""The simulated run: the controller's unchanged machine among modelled actors. A message takes a fixed time, and nothing is lost.

As in ``actors/controller/serve``, messages are recorded when they come and a tick follows them; while the controller is at it,
further ones join. A timer adds ticks.
"""

from collections.abc import Callable, Sequence

from ...actors.controller.serve import limits_of
from ...actors.host.media_rules import for_run
from ...actors.host.model_facts import facts_of
from ...models.config import weight_bytes
from ...runtime.bus.messages import Hello, PlanDone, Skipped, ToActor, ToController
from ...runtime.bus.plans import Analyse, Plan
from ...runtime.config import RuntimeConfig
from ...runtime.controller.effects import AppendPages, BeginRow, ClearPlan, Effect, Send, WritePlan
from ...runtime.controller.kv_manager import IdSpan, NewIds
from ...runtime.controller.machine import Controller
from ...runtime.controller.policy_calls import swap
from ...runtime.controller.scheduling.policy import Policy
from ...runtime.controller.scheduling.types import Limits
from ...runtime.observe.breakdown import Work
from ...runtime.process.device_room import DeviceRoom
from ...runtime.process.memory_layout import plan_layout
from ...runtime.stage_table import InstanceId, stage_of
from ...schema.media import ItemShape
from .costs import Costs
from .decode import Decode
from .events import EventQueue, to_ns
from .gateway import Client, Gateway
from .interference import Interference
from .processors import Processors
from .requests import answer_ids
from .rows import Rows
from .turns import Turns
from .workers import Worker

DEVICE_BYTES = {"H200": 141 * 10**9}  # memory of devices that rooflines are made for


def simulated_limits(config: RuntimeConfig, costs: Costs) -> Limits:
    """The machine's limits in a run of this configuration with the costs' model. Pools that are not configured have their least sizes,
    on a known device what it has room for. Raises: ConfigError."""
    model = for_run(costs.model, config.media)
    total = DEVICE_BYTES.get(costs.device, 0)
    room = DeviceRoom(total, total - weight_bytes(model)) if config.model.on_cuda and total else None
    return limits_of(config, plan_layout(config, facts_of(model, config.memory.kv_page_tokens), model.dtype, room), model)


class SimulationError(Exception):
    """The simulation cannot go on."""


class Simulation:
    """All actors of a run. ``policy`` None: the configuration's. ``works``: on each request, by its key, if they are kept."""

    def __init__(
        self, config: RuntimeConfig, costs: Costs, limits: Limits, policy: Policy | None = None, *, keeps_works: bool = False
    ) -> None:
        overheads = costs.overheads
        self.queue = queue = EventQueue()
        self.controller = Controller.start(limits, 1)
        if policy is not None:
            swap(self.controller.state, policy)
        self.rows = rows = Rows(self.controller)
        self.plans: dict[int, Plan] = {}
        self.works: dict[int, list[Work]] | None = {} if keeps_works else None
        self.num_ticks = 0
        processors = Processors(Interference(costs))
        self.timeout_s = config.server.request_timeout_s
        self.gateway = gateway = Gateway(overheads, queue, self.post, self.timeout_s)
        turns = {name: Turns() for name, actors in config.processes.items() if config.actors.turns and len(actors) > 1}
        of = {name: turns.get(InstanceId(config.process_of(name))) for name in limits.actors}
        decode_turns = of[InstanceId("decode")]
        self.decode = Decode(costs, queue, processors, rows, self.post, gateway.take_stretch, gateway.take_end, decode_turns)
        self.workers = {
            name: Worker(name, costs, queue, processors, rows, self.plans, self._find_shape, self.post, of[name])
            for name in limits.actors
            if stage_of(name) in ("video", "encoder", "prefill")
        }
        self._slots: dict[int, int] = {}
        self._message_ns, self._tick_ns = to_ns(overheads.message_s), to_ns(overheads.tick_s)
        self._soon = False  # a tick is coming
        self._timer = 0  # version
        self._takers: dict[str, Callable[[ToActor], None]] = {}
        for name in ("gateway", "decode", *self.workers):
            self._receive(InstanceId(name), Hello(name, 1, 1, True))
        self._takers = {"gateway": gateway.take, "decode": self.decode.take}
        self._takers |= {name: worker.take for name, worker in self.workers.items()}

    # ------------------------------------------------------------------------------------------------------ messages

    def post(self, actor: str, message: ToController) -> None:
        """Send to the controller."""
        self.queue.after(self._message_ns, self._receive, InstanceId(actor), message)

    def _receive(self, actor: InstanceId, message: ToController) -> None:
        controller, now_s = self.controller, self.queue.now_s
        if self.works is not None and isinstance(message, PlanDone):
            self._keep_work(self.works, message)
        ended = controller.ended_by(message)
        words = self.decode.progress(ended) if ended else ()
        ids = self._ids(controller.wanted_ids(words, all_of_them=True)) if words else ()
        self._perform(controller.on_message(actor, 1, message, now_s, words, ids))
        if not self._soon:
            self._soon = True
            self.queue.after(self._tick_ns, self._tick, 0)

    def _tick(self, timer: int) -> None:
        """Decide. ``timer``: 0 for a tick after messages, else the timer's version."""
        if timer and timer != self._timer:
            return
        if not timer:
            self._soon = False
        self.num_ticks += 1
        controller = self.controller
        progress = self.decode.progress(controller.watched())
        new_ids = self._ids(controller.wanted_ids(progress))
        self._perform(controller.tick(self.queue.now_s, progress, new_ids, tuple(self.decode.gap_counts)))
        self._timer += 1
        self.queue.after(to_ns(controller.next_tick_s()), self._tick, self._timer)

    def _ids(self, spans: Sequence[IdSpan]) -> NewIds:
        found = []
        for span in spans:
            request = self.controller.state.rows[span.row]
            assert request is not None
            found.append((span, answer_ids(request.key, span.first, span.last)))
        return found

    def _keep_work(self, works: dict[int, list[Work]], done: PlanDone) -> None:
        """Note a plan for each request that it names."""
        plan = self.plans.get(done.plan_id)
        if plan is None or isinstance(done.result, Skipped):
            return
        known_ns = self.queue.now_ns
        end_ns = known_ns - self._message_ns
        work = Work("prefill" if plan.STAGE == "prefill" else "encode", end_ns - to_ns(done.elapsed_s), end_ns, known_ns)
        for row, generation in dict.fromkeys(plan.rows):
            if (request := self.rows.request(row, generation)) is not None:
                works.setdefault(request.key, []).append(work)

    def _find_shape(self, plan: Analyse) -> ItemShape | None:
        request = self.rows.request(plan.row, plan.row_generation)
        client = self.gateway.client(request.key) if request is not None else None
        return client.asked.shapes[plan.item] if client is not None else None

    def _perform(self, effects: Sequence[Effect]) -> None:
        """Do effects in order, at once; messages arrive later."""
        for effect in effects:
            if isinstance(effect, Send):
                taker = self._takers.get(effect.actor)
                if taker is not None:
                    self.queue.after(self._message_ns, taker, effect.message)
            elif isinstance(effect, BeginRow):
                self.rows.begin(effect.row)
            elif isinstance(effect, AppendPages):
                self.decode.pages_added(effect.row)
            elif isinstance(effect, WritePlan):
                self._slots[effect.slot] = effect.plan_id
                self.plans[effect.plan_id] = self.controller.state.plans[effect.plan_id].plan
            elif isinstance(effect, ClearPlan):
                del self.plans[self._slots.pop(effect.slot)]

    def has_token(self, client: Client) -> bool:
        """decode has committed a token of this request."""
        request = self.controller.state.requests.get(client.key)
        if client.record.stretches or request is None or not request.has_row:
            return bool(client.record.stretches)
        return self.decode.progress([request.key_in_table])[0].committed > 0

    # ----------------------------------------------------------------------------------------------------------- end

    @property
    def is_idle(self) -> bool:
        """No request is under way, and every row, page and plan is given back."""
        state = self.controller.state
        if self.gateway.num_open or state.requests or state.plans or len(state.free_rows) < len(state.rows):
            return False
        return all(pool.num_used == 0 for pool in state.pools.values())
