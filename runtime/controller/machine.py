"""The controller as a pure machine: messages, progress and time in, effects out, in the order in which they must be done.

``actors/controller/serve.py`` runs it on the bus and shared memory; tests and simulators run the same code on their own.
``on_message`` only records; ``tick`` decides. If a controller is killed between any two effects, ``recovery.recover`` continues
it from the journal, the rows and the plan table.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ...schema.outage import Outage
from ...schema.rows import Phase
from ..bus.messages import (
    Cancel,
    ClearCaches,
    Cleared,
    Delivered,
    Dropped,
    Filled,
    Hello,
    PlanDone,
    Query,
    Released,
    SequenceEnded,
    Submit,
    ToController,
    Unknown,
    Welcome,
)
from ..bus.request_keys import gateway_of
from ..pools import PoolName
from ..stage_table import WORKERS, InstanceId, stage_of
from .caches.cache_eras import clear_caches, note_code
from .caches.prefix_cache import PagesToCome
from .caches.snapshots import has_states
from .plans.kinds.transfer import issue_transfers
from .plans.plan_dispatch import send_plan
from .plans.plan_results import finish_plan, skip_plans
from .plans.planner import issue
from .plans.policy_calls import rank_requests
from .rows.absence import leaves_plan, note_absence
from .rows.instances import empty_leaving, set_instances
from .rows.intake import (
    admit,
    cancel_older_gateways,
    check_deadlines,
    load,
    prepare_analysed,
    probe_silent_requests,
    send_replies,
    submit,
)
from .rows.kv_manager import admit_to_decode, grant_kv, grow, make_room, needs_kv, num_grantable, place_row
from .rows.lifecycle import end, failed_message
from .rows.outages import fail_stranded
from .rows.ownership import on_dropped, on_gone, resend_drops, send_drops, undropped
from .rows.placement import leave_pools
from .rows.progress import IdSpan, NewIds, Progress, expose_finished_rows, note_last_words, observe, wanted_ids
from .scheduling.admission import ResourceGate, overloaded
from .scheduling.types import Limits
from .state.effects import Effect, Send
from .state.inflight_plan import LONG_AGO_S
from .state.state import BY_RANK, ControllerState

__all__ = ["Controller", "Progress"]

IDLE_S = 1.0
FILLS_PAGES = frozenset({*WORKERS, "decode"})
LOOK_S, SOON_S = 0.2, 0.01  # between reads of decode's words: at most, at least
FAST_RATE = 500.0  # tokens/s assumed for a row until its rate is measured
_ENDING, _FROM_ALL = (Cancel, Delivered), (Hello, ClearCaches)  # messages


class Controller:
    """One generation of the controller. ``epoch`` is that generation; every message that it sends carries it."""

    def __init__(self, state: ControllerState) -> None:
        """Use ``start`` for an empty run or ``recovery.recover``."""
        self.state = state

    @classmethod
    def start(cls, limits: Limits, epoch: int, page_generations: Mapping[PoolName, Sequence[int]] | None = None) -> "Controller":
        """Make the controller of a run without requests."""
        return cls(ControllerState(limits, epoch, page_generations or {}))

    # ------------------------------------------------------------------------------------------------------ messages

    def ended_by(self, message: ToController) -> list[tuple[int, int]]:
        """Return the rows that this message ends while they decode, as (row, generation), or that decode has dropped for good:
        ``on_message`` takes their last words."""
        if not self.state.limits.prefix_cache:
            return []
        if isinstance(message, Dropped):
            dropped = self.state.rows[message.row] if 0 <= message.row < len(self.state.rows) else None
            gives_up = dropped is not None and (dropped.ending or dropped.record.evicting) and has_states(self.state)
            return [dropped.key_in_table] if dropped is not None and gives_up else []
        if not isinstance(message, _ENDING):
            return []
        request = self.state.requests.get(message.key)
        is_decoding = request is not None and request.phase == Phase.DECODE and not request.ending
        return [request.key_in_table] if request is not None and is_decoding else []

    def on_message(
        self,
        actor: InstanceId,
        generation: int,
        message: ToController,
        now: float,
        last_words: Sequence[Progress] = (),
        last_ids: NewIds = (),
    ) -> list[Effect]:
        """Record a message from ``actor``'s generation. Stale, repeated and unknown ones change nothing."""
        state = self.state
        state.now = now
        if last_words:
            note_last_words(state, last_words, last_ids)
        if isinstance(message, Hello):
            self._hello(actor, generation, message)
        elif isinstance(message, ClearCaches):
            state.emit(Send(actor, generation, Cleared(state.epoch, clear_caches(state))))
        elif generation == state.actors.get(actor):
            self._from_active(actor, generation, message, now)
        return self._take_effects()

    def _hello(self, actor: InstanceId, generation: int, message: Hello) -> None:
        state = self.state
        known = state.actors.get(actor, 0)
        if generation < known:
            return
        if message.active and generation > known:
            state.actors[actor] = generation
            for inflight in state.plans.values():
                if inflight.actor == actor:
                    inflight.sent_s = inflight.begun_s = LONG_AGO_S
            if stage_of(actor) == "decode":
                resend_drops(state, actor)
        if message.active and message.adopted and stage_of(actor) == "gateway":
            cancel_older_gateways(state, actor)
        if message.active and stage_of(actor) in FILLS_PAGES:
            note_code(state, actor, message.code)
        state.emit(Send(actor, generation, Welcome(state.epoch)))

    def _from_active(self, actor: InstanceId, generation: int, message: ToController, now: float) -> None:
        state = self.state
        if isinstance(message, PlanDone):
            inflight = state.plans.get(message.plan_id)
            if inflight is not None and inflight.actor == actor:
                finish_plan(state, inflight, message.result, message.elapsed_s)
        elif isinstance(message, Dropped):
            if stage_of(actor) == "decode":
                on_dropped(state, actor, message.row, message.row_generation, message.ticket)
        elif isinstance(message, SequenceEnded):
            pass  # a hint: tick looks at the rows
        elif stage_of(actor) == "gateway" and not isinstance(message, _FROM_ALL):
            if gateway_of(message.key) == actor:
                self._from_gateway(actor, generation, message, now)

    def _from_gateway(
        self, actor: InstanceId, generation: int, message: Submit | Filled | Cancel | Delivered | Query, now: float
    ) -> None:
        state = self.state
        if isinstance(message, Submit):
            submit(state, generation, message.key, message.spec, now)
            return
        request = state.requests.get(message.key)
        if request is not None:
            request.hear(now)
        if request is None or request.gateway_generation != generation:
            if isinstance(message, _ENDING):
                state.remember_end(message.key)  # its Submit may still come
            gone = message.key in state.ended or not isinstance(message, Query)
            answer = Released(state.epoch, message.key) if gone else Unknown(state.epoch, message.key)
            state.send(actor, answer)
        elif isinstance(message, _ENDING):
            end(state, request)
        elif isinstance(message, Filled):
            if request.has_row and not request.ending and not request.record.filled:
                request.record.fill()
                state.save(request)
            elif request.failure is not None or request.record.prepared:
                state.ask(message.key, generation)
        else:
            state.ask(message.key, generation)

    def not_journaled(self, key: int, reason: str) -> list[Effect]:
        """Handle a failure to journal a Submit: neither its effect nor any later one was done, and the request was never accepted."""
        state = self.state
        del state.requests[key], state.waiting[key]
        state.pending_replies.pop(key, None)
        state.send(gateway_of(key), failed_message(state.epoch, key, overloaded(reason, state.limits, load(state))))
        return self._take_effects()

    # --------------------------------------------------------------------------------------------------------- time

    def set_outages(self, outages: Collection[Outage]) -> None:
        """Set the broken actors. Requests that need them are refused from now on, and ended by the next ``tick``."""
        self.state.outages = {InstanceId(outage.actor): outage for outage in outages}

    def twins(self) -> list[InstanceId]:
        """Return the actors that are not the only ones of their stage, while there are requests: ``set_absent`` needs the dead ones."""
        if not self.state.requests:
            return []
        counts = Counter(map(stage_of, self.state.staying))
        return [actor for actor in self.state.staying if counts[stage_of(actor)] > 1]

    def set_absent(self, actors: Collection[InstanceId]) -> None:
        """Set the ``twins`` that are dead, broken or not: while another one of the stage is there, they get no new work, and soon lose
        what they have (``absence``)."""
        self.state.absent = frozenset(actors)

    def set_saved(self, saved: Mapping[PoolName, Mapping[bytes, int]]) -> None:
        """Set what the files of some pools have from now on: the slots of their pages, by key."""
        for pool, slot_of in saved.items():
            self.state.saved[pool].learn(slot_of)
        self.state.touch_preparing()

    def set_instances(
        self, instances: Sequence[InstanceId], leaving: Collection[InstanceId] = (), devices: Mapping[InstanceId, int] | None = None
    ) -> None:
        """Set the actors that belong to the run from now on, and those of them that leave it: they get no more work. ``devices``: of
        the actors, by number; None: as before."""
        set_instances(self.state, instances, leaving, devices)

    def watched(self) -> list[tuple[int, int]]:
        """Return the rows whose words ``tick`` needs, as (row, generation)."""
        return self.state.watched()

    def wanted_ids(self, progress: Sequence[Progress], *, all_of_them: bool = False) -> list[IdSpan]:
        """Return the committed ids that ``tick`` needs with these words, or ``on_message`` with last words: all of them."""
        return wanted_ids(self.state, progress, all_of_them=all_of_them)

    def unanswering(self) -> set[InstanceId]:
        """Return lost actors that must be seen dead before their rows and plans go to others: ``tick`` takes those whose role lock is
        free now."""
        state = self.state
        if not state.outages and not state.away:
            return set()
        return undropped(state) | {inflight.actor for inflight in state.plans.values() if leaves_plan(state, inflight)}

    def tick(
        self,
        now: float,
        progress: Sequence[Progress] = (),
        new_ids: NewIds = (),
        gaps: Sequence[int] = (),
        gone: Collection[InstanceId] = (),
    ) -> list[Effect]:
        """Decide: deadlines, pages, admission, plans, decode, unanswered commands, answers to the gateway.

        ``gaps``: counts of times between tokens by bucket (``schema.gap_buckets``), since the run began. ``gone``: of ``unanswering``,
        the actors whose role nobody holds, seen after all effects so far were performed.
        """
        state = self.state
        state.begin_tick(now, gaps)
        note_absence(state)
        on_gone(state, gone)
        skip_plans(state, gone)
        rank_requests(state)
        observe(state, progress, new_ids, now)
        expose_finished_rows(state)
        check_deadlines(state, now)
        fail_stranded(state)
        empty_leaving(state)
        leave_pools(state)
        probe_silent_requests(state, now)
        prepare_analysed(state)
        grow(state)
        self._grant(now)
        issue(state, now)
        issue_transfers(state, now)
        admit_to_decode(state)
        for inflight in state.plans.values():
            if now - inflight.sent_s >= state.limits.resend_s:
                send_plan(state, inflight, now)
        send_drops(state, now)
        send_replies(state)
        return self._take_effects()

    def next_tick_s(self) -> float:
        """Return the seconds until ``tick`` should be called again if no message comes."""
        state = self.state
        wait_s = state.limits.resend_s if state.plans else IDLE_S
        if len(state.free_rows) < len(state.rows):
            wait_s = min(wait_s, state.limits.resend_s)
        decoding = state.decoding()
        if decoding:
            wait_s = min(wait_s, LOOK_S)
        page_tokens, never = state.limits.kv_page_tokens, state.limits.max_context
        # half the time in which a row could use up the pages that it has
        for request in [r for r in decoding if r.answer.committed >= r.derived.short_at and r.derived.grow_at < never]:
            tokens = request.kv.reach(0) * page_tokens - request.kv.lengths[0] - request.answer.committed
            tokens_per_s = 2 * (request.answer.rate or FAST_RATE)
            if request.answer.rate:
                request.derived.short_at = request.answer.committed + int(tokens - LOOK_S * tokens_per_s)
            else:  # look soon, to measure it
                tokens = min(tokens, state.limits.ahead_pages * page_tokens)
            if tokens <= wait_s * tokens_per_s:
                wait_s = min(wait_s, max(SOON_S, tokens / tokens_per_s))
        return wait_s

    def _grant(self, now: float) -> None:
        """Grant rows and pages in rank order, to rows without KV pages and to waiting requests alike."""
        state = self.state
        short = [request for request in state.preparing() if request.record.prepared and not request.kv.tables[0] and needs_kv(request)]
        if not short and not (state.waiting and state.free_rows):
            state.waits_for = frozenset({"row"} if state.waiting else ())
            return
        gate = ResourceGate(
            *[{pool: num_grantable(state, pool) for pool in state.pools_beside(kv)} for kv in state.kv_pools],
            rows=len(state.free_rows),
            media=state.pools["media"].num_free,
        )
        first = min([r for r in state.live() if r.record.prepared and not r.answer.end_code], key=BY_RANK) if short else None
        is_passed = first is not None and any(
            not request.spec.items and request.rank < first.rank  # a text request, which also waits for KV pages
            for request in state.waiting.values()
        )
        num_short, to_come = len(short), PagesToCome(state)
        for request in sorted([*short, *state.waiting.values()], key=BY_RANK):
            if not request.has_row:
                if not num_short and gate.is_blocked("row"):
                    break  # all remaining requests need one
                if request.spec.items or not gate.has_no_kv:  # a text request would be refused: it needs KV pages
                    admit(state, gate, to_come, request, now)
                continue
            num_short -= 1
            placement = place_row(state, request, gate)
            if to_come.have_next_of(request, placement.most_hits):
                continue
            if request is first:  # it need not leave room for later ones' growth, only for an earlier waiting text request
                if (not is_passed or gate.take(**placement.needs)) and grant_kv(state, request, placement):
                    to_come.add(request)
                    for pool, need in placement.needs.items() if not is_passed else ():
                        gate.charge(pool, need)
                else:
                    for pool, need in placement.needs.items():
                        gate.block(pool, is_short=need > state.pools[pool].num_free)
                    make_room(state, request, placement, now)
            elif gate.take(**placement.needs):
                granted = grant_kv(state, request, placement)
                assert granted, "the granter gave KV pages that are not free"
                to_come.add(request)
        state.waits_for = gate.short

    def _take_effects(self) -> list[Effect]:
        effects, self.state.effects = self.state.effects, []
        return effects
