"""The simulated run: the controller's unchanged machine among modelled actors. A message takes a measured time, and nothing is lost.

As in ``actors/controller/serve``, messages are recorded when they come and a tick follows them; while the controller is at it,
further ones join. A timer adds ticks.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from mmrt.actors.controller.limits import limits_of
from mmrt.actors.host.media_rules import for_run
from mmrt.models.config import facts_of, weight_bytes
from mmrt.runtime.bus.messages import Admit, Hello, PlanDone, Run, Skipped, ToActor, ToController, Welcome
from mmrt.runtime.bus.plans import Analyse, Encode, Plan, Prefill
from mmrt.runtime.bus.wire import encode
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.controller.machine import Controller
from mmrt.runtime.controller.plans.policy_calls import swap
from mmrt.runtime.controller.rows.progress import IdSpan, NewIds, Progress
from mmrt.runtime.controller.scheduling.guidance import num_pages
from mmrt.runtime.controller.scheduling.page_keys import Positions
from mmrt.runtime.controller.scheduling.policy import Policy
from mmrt.runtime.controller.scheduling.types import Limits
from mmrt.runtime.controller.state.effects import AppendPages, BeginRow, ClearPlan, Effect, Send, WritePlan
from mmrt.runtime.controller.state.request import Request
from mmrt.runtime.observe.breakdown import Work
from mmrt.runtime.process.device_room import DeviceRoom
from mmrt.runtime.process.memory_layout import plan_layout
from mmrt.runtime.stage_table import STAGES, WORKERS, InstanceId, stage_of
from mmrt.schema.gap_buckets import NUM_BUCKETS
from mmrt.schema.media import ItemShape, MediaSpan
from mmrt.schema.rows import Phase

from .costs import Costs, prefill_squares
from .decode import Decode
from .delays import DrawnDelays
from .devices import Arrival, Devices
from .events import NS, EventQueue, to_ns
from .first_tokens import FirstTokens
from .gateway import Client, Gateway
from .jitter import Jitter
from .links import Link
from .processors import Processors
from .recomputing import Recomputing
from .requests import answer_ids
from .rows import Rows
from .step_log import StepLog
from .turns import Turns
from .workers import Worker

DEVICE_BYTES = {"H200": 141 * 10**9, "H20": 96 * 10**9}  # memory of devices that rooflines are made for


def simulated_limits(config: RuntimeConfig, costs: Costs, num_devices: int = 1) -> Limits:
    """The machine's limits in a run of this configuration with the costs' model. Pools that are not configured have their least sizes,
    on known devices what they have room for: ``num_devices`` hold KV pages, and one pool has the pages of all. Plans have no breaks
    here, so a prompt alone is cut as beside others. Raises: ConfigError."""
    model = for_run(costs.model, config.media)
    total = num_devices * DEVICE_BYTES.get(costs.device, 0)
    room = DeviceRoom(total, total - num_devices * weight_bytes(model)) if config.model.on_cuda and total else None
    limits = limits_of(config, plan_layout(config, facts_of(model, config.memory.kv_page_tokens), model.dtype, room), model)
    return replace(limits, positions=remembered(limits.positions), has_breaks=False)


def remembered(positions: Positions, most_bytes: int = 64 << 20) -> Positions:
    """Positions of prompts: a load has many with media of the same sizes at the same places. Those used last are kept, of at most so
    many bytes together: a token has 24."""
    known: OrderedDict[tuple[int, bytes], tuple[bytes, int]] = OrderedDict()
    num_bytes = 0

    def find(num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[bytes, int]:
        nonlocal num_bytes
        key = num_tokens, encode(spans)
        if key in known:
            known.move_to_end(key)
            return known[key]
        found = known[key] = positions(num_tokens, spans)
        num_bytes += len(key[1]) + len(found[0])
        while num_bytes > most_bytes:
            (_, oldest), (its_positions, _) = known.popitem(last=False)
            num_bytes -= len(oldest) + len(its_positions)
        return found

    return find


class SimulationError(Exception):
    """The simulation cannot go on."""


class Simulation:
    """All actors of a run. ``policy`` None: the configuration's. ``works``: on each request, by its key, if they are kept. ``link``:
    see ``links``. ``seed``: of what varies about the costs."""

    def __init__(
        self,
        config: RuntimeConfig,
        costs: Costs,
        limits: Limits,
        policy: Policy | None = None,
        *,
        keeps_works: bool = False,
        link: Link | None = None,
        seed: int = 0,
    ) -> None:
        if (ranks := limits.prefill_ranks) > 1:  # each stage of a pipeline has its share of the layers
            costs = msgspec.structs.replace(costs, prefill=costs.prefill.times(1 / ranks))
        if link is not None:
            limits = replace(limits, first_tokens=False)  # a process has a device of its own, where prefill draws nothing
        self.queue = queue = EventQueue()
        self.controller = Controller.start(limits, 1)
        if policy is not None:
            swap(self.controller.state, policy)
        self.rows = Rows(self.controller)
        self.plans: dict[int, Plan] = {}
        self.works: dict[int, list[Work]] | None = {} if keeps_works else None
        self.num_ticks = 0
        self.devices = Devices(costs, limits, link)
        self.timeout_s = config.server.request_timeout_s
        self.seed = seed
        self._jitter = Jitter(costs.spreads, seed)
        self._delays = DrawnDelays(costs, queue, self._is_decoding, seed, config.num_gateways)
        self.gateway = Gateway(costs.overheads, self._delays, queue, self.post, self.timeout_s)
        self.decodes: dict[InstanceId, Decode] = {}
        self.workers: dict[InstanceId, Worker] = {}
        self.gap_counts = [0] * NUM_BUCKETS  # of times between tokens, by bucket
        self.logs: list[StepLog] = []  # of decodes, in the order in which they were started
        self.first_tokens = FirstTokens(queue, self.rows, self.gateway, limits.prefill_ranks)
        self._costs = costs
        self._recomputes = link is not None and link.recomputes
        self._takes_turns = config.actors.turns == "plans"
        self._turns: dict[Processors, Turns] = {}
        self._moves_ns: dict[int, int] = {}  # with several devices, by plan: from its message to when what it reads is on its device
        self._slots: dict[int, int] = {}
        self._soon = False  # a tick is coming
        self._look_ns = 0  # when a tick comes without a message
        self._timer_ns: int | None = None  # of the event that looks then, or earlier
        self._takers: dict[str, Callable[[ToActor], None]] = {"gateway": self.gateway.take}
        self._performers: dict[type[Effect], Callable[[Any], None]] = {  # the others concern words and files that are not modelled
            Send: self._send,
            BeginRow: self._begin_row,
            AppendPages: self._append_pages,
            WritePlan: self._write_plan,
            ClearPlan: self._clear_plan,
        }
        self._receive(InstanceId("gateway"), Hello("gateway", 1, 1, True), queue.now_ns)
        processes = {actor: InstanceId(config.process_of(actor)) for actor in limits.actors}
        decodes = {actor: process for actor, process in processes.items() if stage_of(actor) == "decode"}
        self.start(decodes)
        self.start({actor: process for actor, process in processes.items() if stage_of(actor) in WORKERS})

    def start(self, actors: Mapping[InstanceId, InstanceId]) -> None:
        """Start these actors of stages that compute, each in this process."""
        for actor, process in actors.items():
            processors = self.devices.place(actor, process)
            has_turns = self._takes_turns and STAGES[stage_of(actor)].has_device
            self._make(actor, processors, self._turns.setdefault(processors, Turns()) if has_turns else None)
        for actor in actors:
            self._receive(actor, Hello(actor, 1, 1, True), self.queue.now_ns)

    def stop(self, actors: Iterable[InstanceId]) -> None:
        """Stop these actors, of which the controller has been told that they leave, and which hold nothing."""
        for actor in actors:
            del self._takers[actor]
            self.decodes.pop(actor, None)
            self.workers.pop(actor, None)

    def _make(self, actor: InstanceId, processors: Processors, turns: Turns | None) -> None:
        costs, queue, rows, gateway = self._costs, self.queue, self.rows, self.gateway
        if stage_of(actor) == "decode":
            take_stretch = partial(gateway.take_stretch, len(self.logs))
            decode = Decode(
                actor, costs, queue, processors, rows, self.gap_counts, self.post, take_stretch, gateway.take_end, self._jitter, turns
            )
            self.logs.append(decode.log)
            self.decodes[actor], self._takers[actor] = decode, decode.take
            return
        draw = self.first_tokens.draw
        worker = Worker(actor, costs, queue, processors, rows, self.plans, self._find_shape, draw, self.post, self._jitter, turns)
        self.workers[actor], self._takers[actor] = worker, worker.take

    # ------------------------------------------------------------------------------------------------------ messages

    def post(self, actor: str, message: ToController) -> None:
        """Send to the controller."""
        queue = self.queue
        queue.at(self._delays.arrival_ns(f"from {actor}"), self._receive, InstanceId(actor), message, queue.now_ns)

    def _receive(self, actor: InstanceId, message: ToController, sent_ns: int) -> None:
        if isinstance(message, PlanDone):
            self._note_done(message, sent_ns)
        controller, now_s = self.controller, self.queue.now_s
        if ended := controller.ended_by(message):
            words = self._progress(ended)
            ids = self._ids(controller.wanted_ids(words, all_of_them=True))
            self._perform(controller.on_message(actor, 1, message, now_s, words, ids))
        else:
            self._perform(controller.on_message(actor, 1, message, now_s))
        if not self._soon:
            self._soon = True
            self.queue.after(self._delays.tick_ns(), self._tick_after_messages)

    def _look(self) -> None:
        """Tick if no other tick has put that off since this event was added, or has put it before."""
        if self.queue.now_ns != self._timer_ns:
            return
        self._timer_ns = None
        if self.queue.now_ns >= self._look_ns:
            self._tick()
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer_ns is None or self._look_ns < self._timer_ns:
            self._timer_ns = self._look_ns
            self.queue.at(self._look_ns, self._look)

    def _tick_after_messages(self) -> None:
        self._soon = False
        self._tick()

    def _tick(self) -> None:
        """Decide."""
        self.num_ticks += 1
        controller, now_ns = self.controller, self.queue.now_ns
        progress = self._progress(controller.watched())
        new_ids = self._ids(controller.wanted_ids(progress))
        self._perform(controller.tick(now_ns / NS, progress, new_ids, self.gap_counts))
        self._look_ns = now_ns + to_ns(controller.next_tick_s())
        self._set_timer()

    def _progress(self, watched: Sequence[tuple[int, int]]) -> list[Progress]:
        for decode in self.decodes.values():
            decode.advance()
        return self.rows.progress(watched)

    def _ids(self, spans: Sequence[IdSpan]) -> NewIds:
        found = []
        for span in spans:
            request = self.controller.state.rows[span.row]
            assert request is not None
            found.append((span, answer_ids(request.key, span.first, span.last)))
        return found

    def _note_done(self, done: PlanDone, end_ns: int) -> None:
        """A plan has ended: note which pages it has filled and, if works are kept, that it worked for its requests."""
        plan = self.plans.get(done.plan_id)
        if not self.devices.is_one and isinstance(plan, Prefill) and self._is_last(plan):
            self.devices.fill(self._pages_of(plan), to_ns(done.elapsed_s), end_ns, self.queue.now_ns)
        if self.works is None or plan is None or isinstance(done.result, Skipped):
            return
        known_ns = self.queue.now_ns
        work = Work("prefill" if plan.STAGE == "prefill" else "encode", end_ns - to_ns(done.elapsed_s), end_ns, known_ns)
        for row, generation in dict.fromkeys(plan.rows):
            if (request := self.rows.request(row, generation)) is not None:
                self.works.setdefault(request.key, []).append(work)

    def _find_shape(self, plan: Analyse) -> ItemShape | None:
        request = self.rows.request(plan.row, plan.row_generation)
        client = self.gateway.client(request.key) if request is not None else None
        return client.asked.shapes[plan.item] if client is not None else None

    def _perform(self, effects: Sequence[Effect]) -> None:
        """Do effects in order, at once; messages arrive later."""
        performers = self._performers
        for effect in effects:
            if (perform := performers.get(type(effect))) is not None:
                perform(effect)

    def _begin_row(self, effect: BeginRow) -> None:
        self.rows.begin(effect.row)

    def _append_pages(self, effect: AppendPages) -> None:
        for decode in self.decodes.values():
            decode.pages_added(effect.row)
        request = None if self.devices.is_one else self.controller.state.rows[effect.row]
        if request is not None and request.phase == Phase.DECODE and request.ownership.decode is not None:
            self.devices.write("kv", effect.pages, request.ownership.decode)

    def _write_plan(self, effect: WritePlan) -> None:
        self._slots[effect.slot] = effect.plan_id
        self.plans[effect.plan_id] = plan = self.controller.state.plans[effect.plan_id].plan
        if not self.devices.is_one:
            self._moves_ns[effect.plan_id] = self._move(plan, effect.actor) - self.queue.now_ns

    def _clear_plan(self, effect: ClearPlan) -> None:
        plan_id = self._slots.pop(effect.slot)
        del self.plans[plan_id]
        self._moves_ns.pop(plan_id, None)

    def _send(self, effect: Send) -> None:
        """Send to an actor. It gets a plan or a row once what it reads is on its device: it pulls once it has the message (TI6)."""
        actor, message = effect.actor, effect.message
        taker = self._takers.get(actor)
        if taker is None or isinstance(message, Welcome):
            return
        arrival_ns = self._delays.arrival_ns(actor)
        if isinstance(message, Run):
            arrival_ns += self._moves_ns.get(message.plan_id, 0)
        elif isinstance(message, Admit) and (request := self.rows.request(message.row, message.row_generation)) is not None:
            self._admit(request, actor, message, arrival_ns)
            return
        self.queue.at(arrival_ns, taker, message)

    def _admit(self, request: Request, actor: InstanceId, message: Admit, arrival_ns: int) -> None:
        """Send a row to decode, with its prompt."""
        members = range(0 if self.devices.is_one else len(request.kv.lengths))
        found = [self._bring_prompt(request, member, actor, arrival_ns) for member in members]
        ready_ns = max([arrival.ready_ns for arrival in found], default=arrival_ns)
        taker = self._takers[actor]

        def hand_over(now_ns: int) -> None:
            there_ns = max(now_ns, ready_ns)
            if self.works and (works := self.works.get(request.key)):
                works[-1] = works[-1]._replace(known_ns=max(works[-1].known_ns, there_ns))
            self.queue.at(there_ns, taker, message)

        if recompute_s := sum([arrival.recompute_s for arrival in found]):
            Recomputing(self.queue, self.devices.processors_of(actor), recompute_s, arrival_ns, hand_over)
        else:
            hand_over(ready_ns)

    def _bring_prompt(self, request: Request, member: int, actor: InstanceId, pulled_ns: int) -> Arrival:
        """Bring the pages of a prompt to decode's device. Those of media are copied whole: without embeddings none is computed anew."""
        page_tokens, table = self.rows.page_tokens, request.kv.tables[member]
        committed = request.answer.committed
        end = max(request.kv.prefilled[member], request.kv.lengths[member] + committed - 1 if committed else 0)

        def recompute(count: int) -> float:
            start = max(0, end - count * page_tokens)
            return self._costs.prefill.seconds(end - start, prefill_squares(start, end))

        can = self._recomputes and request.media.tracker is None
        num_filled = num_pages(end, page_tokens)
        self.devices.write("kv", table[num_filled:], actor)
        message_ns = pulled_ns - self.queue.now_ns
        return self.devices.bring_prompt(table[:num_filled], actor, pulled_ns, message_ns, recompute if can else None)

    def _move(self, plan: Plan, actor: InstanceId) -> int:
        """Note where a plan's output will lie. Returns when all that it reads is on the actor's device. Stages of a pipeline
        keep the keys and values of their layers; decode pulls all as if the last stage had them. Streams between them cost nothing."""
        devices, now_ns = self.devices, self.queue.now_ns
        ready_ns = now_ns
        if isinstance(plan, Encode):
            for part in plan.parts:
                devices.write("embedding", part.target.pages, actor)
        elif isinstance(plan, Prefill):
            for chunk in plan.chunks:
                request = self.controller.state.rows[chunk.row]
                assert request is not None
                before = request.kv.tables[chunk.member][: chunk.start // self.rows.page_tokens]
                if plan.relay < 0:
                    ready_ns = max(ready_ns, devices.bring("kv", before, actor, now_ns))
                for span in chunk.spans if not plan.rank else ():
                    ready_ns = max(ready_ns, devices.bring("embedding", span.source.pages, actor, now_ns))
            if self._is_last(plan):
                devices.write("kv", self._pages_of(plan), actor)
        return ready_ns

    def _is_last(self, plan: Prefill) -> bool:
        return plan.rank == self.controller.state.limits.prefill_ranks - 1

    def _pages_of(self, plan: Prefill) -> Iterator[int]:
        """Yield the pages that a plan writes, of rows that are alive."""
        page_tokens = self.rows.page_tokens
        for chunk in plan.chunks:
            if (request := self.rows.request(chunk.row, chunk.row_generation)) is not None:
                yield from request.kv.tables[chunk.member][chunk.start // page_tokens : num_pages(chunk.end, page_tokens)]

    def has_token(self, client: Client) -> bool:
        """A token of this request is committed."""
        request = self.controller.state.requests.get(client.key)
        if client.record.stretches or request is None or not request.has_row:
            return bool(client.record.stretches)
        [(_, _, committed, _)] = self._progress([request.key_in_table])
        return committed > 0

    def _is_decoding(self) -> bool:
        for decode in self.decodes.values():
            if decode.is_running:
                return True
        return False

    # ----------------------------------------------------------------------------------------------------------- end

    @property
    def is_idle(self) -> bool:
        """No request is under way, and every row, page and plan is given back."""
        state = self.controller.state
        if self.gateway.num_open or state.requests or state.plans or len(state.free_rows) < len(state.rows):
            return False
        return all(pool.num_used == 0 for pool in state.pools.values())
