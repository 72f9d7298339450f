"""The controller as a pure machine: messages, progress and time in, effects out, in the order in which they must be done.

``actors/controller/serve.py`` runs it against the bus and shared memory; tests and simulators run the very same thing against theirs.
``on_message`` only takes note; ``tick`` decides. A controller that is killed between any two effects is continued by
``recovery.recover`` from the journal, the rows and the plan table.
"""

from collections.abc import Collection, Mapping, Sequence

from ...schema.outage import Outage
from ...schema.rows import Phase
from ..bus.messages import (
    Cancel,
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
from .effects import Effect, PoolName, Send
from .intake import admit, break_silence, cancel_older_gateways, check_deadlines, flush_answers, load, prepare_analysed, submit
from .kv_manager import Progress, admit_to_decode, grant_kv, grow, kv_need, make_room, needs_kv, observe, reserve, show_ended, watched
from .lifecycle import end, failed_message, on_dropped, send_drops
from .outages import fail_stranded
from .plan_results import finish_plan
from .planner import issue
from .request import Request
from .scheduling.admission import Granter, overloaded
from .scheduling.types import Limits
from .state import LONG_AGO_S, Core

__all__ = ["Controller", "Progress"]

IDLE_S = 1.0
FAST_RATE = 500.0  # tokens/s that a row may have before its rate is measured


class Controller:
    """One generation of the controller. ``epoch`` is that generation; every message that it sends carries it."""

    def __init__(self, core: Core) -> None:
        """Use ``start`` for an empty run or ``recovery.recover``."""
        self.core = core

    @classmethod
    def start(cls, limits: Limits, epoch: int, page_generations: Mapping[PoolName, Sequence[int]] | None = None) -> "Controller":
        """A controller of a run that has no requests."""
        return cls(Core(limits, epoch, page_generations or {}))

    # ------------------------------------------------------------------------------------------------------ messages

    def on_message(self, actor: str, generation: int, message: ToController, now: float) -> list[Effect]:
        """Take note of a message from ``actor``'s generation. Stale, repeated and unknown ones change nothing."""
        core = self.core
        core.now = now
        if isinstance(message, Hello):
            self._hello(actor, generation, message)
        elif generation == core.actors.get(actor):
            self._from_active(actor, generation, message, now)
        return self._take_effects()

    def _hello(self, actor: str, generation: int, message: Hello) -> None:
        core = self.core
        known = core.actors.get(actor, 0)
        if generation < known:
            return
        if message.active and generation > known:
            core.actors[actor] = generation
            for outstanding in core.plans.values():
                if outstanding.actor == actor:
                    outstanding.sent_s = outstanding.begun_s = LONG_AGO_S
            if actor == "decode":
                for request in core.rows:
                    if request is not None:
                        request.drop_sent_s = LONG_AGO_S
            elif actor == "gateway":
                cancel_older_gateways(core)
        core.emit(Send(actor, generation, Welcome(core.epoch)))

    def _from_active(self, actor: str, generation: int, message: ToController, now: float) -> None:
        core = self.core
        if isinstance(message, PlanDone):
            outstanding = core.plans.get(message.plan_id)
            if outstanding is not None and outstanding.actor == actor:
                finish_plan(core, outstanding, message.result, message.elapsed_s)
        elif isinstance(message, Dropped):
            if actor == "decode":
                on_dropped(core, message.row, message.row_generation, message.ticket)
        elif isinstance(message, SequenceEnded):
            pass  # a hint: tick looks at the rows
        elif actor == "gateway" and not isinstance(message, Hello):
            self._from_gateway(generation, message, now)

    def _from_gateway(self, generation: int, message: Submit | Filled | Cancel | Delivered | Query, now: float) -> None:
        core = self.core
        if isinstance(message, Submit):
            submit(core, generation, message.key, message.definition, now)
            return
        request = core.requests.get(message.key)
        if request is not None:
            request.heard_s = now
        if request is None or request.gateway_generation != generation:
            if isinstance(message, Cancel | Delivered):
                core.remember_end(message.key)  # its Submit may still come
            gone = message.key in core.ended or not isinstance(message, Query)
            answer = Released(core.epoch, message.key) if gone else Unknown(core.epoch, message.key)
            core.send("gateway", answer)
        elif isinstance(message, Cancel | Delivered):
            end(core, request)
        elif isinstance(message, Filled):
            if request.has_row and not request.ending and not request.record.filled:
                request.record.filled = True
                core.save(request)
            elif request.failure is not None or request.record.prepared:
                core.ask(message.key, generation)
        else:
            core.ask(message.key, generation)

    def not_journaled(self, key: int, reason: str) -> list[Effect]:
        """The effect of a Submit could not be done, and no effect since: the request was never accepted."""
        core = self.core
        del core.requests[key], core.waiting[key]
        core.asked.pop(key, None)
        core.send("gateway", failed_message(core.epoch, key, overloaded(reason, core.limits, load(core))))
        return self._take_effects()

    # --------------------------------------------------------------------------------------------------------- time

    def set_outages(self, outages: Collection[Outage]) -> None:
        """These actors are broken, and no others: what needs them is refused from now on, and ended by the next ``tick``."""
        self.core.outages = {outage.actor: outage for outage in outages}

    def watched(self) -> list[tuple[int, int]]:
        """Rows whose words ``tick`` wants to see, as (row, generation)."""
        return watched(self.core)

    def tick(self, now: float, progress: Sequence[Progress] = ()) -> list[Effect]:
        """Decide: deadlines, pages, admission, plans, decode, commands that were not answered, answers to the gateway."""
        core = self.core
        core.now = now
        observe(core, progress, now)
        show_ended(core)
        check_deadlines(core, now)
        fail_stranded(core)
        break_silence(core, now)
        prepare_analysed(core)
        grow(core)
        self._grant(now)
        issue(core, now)
        admit_to_decode(core)
        for outstanding in core.plans.values():
            if now - outstanding.sent_s >= core.limits.resend_s:
                core.send_plan(outstanding, now)
        send_drops(core, now)
        flush_answers(core)
        return self._take_effects()

    def next_tick_s(self) -> float:
        """Seconds until ``tick`` should be called again if no message comes."""
        core = self.core
        wait_s = core.limits.resend_s if core.plans else IDLE_S
        for request in core.rows:
            if request is not None:
                wait_s = min(wait_s, core.limits.resend_s)
                if request.phase == Phase.DECODE and not request.is_finished:
                    wait_s = min(wait_s, _until_look_s(core, request))
        return wait_s

    def _grant(self, now: float) -> None:
        """Rows and pages in order of arrival, over rows without KV pages and waiting requests alike."""
        core = self.core
        granter = Granter(
            rows=len(core.free_rows),
            media=core.pools["media"].num_free,
            kv=max(0, core.pools["kv"].num_free - reserve(core)),
        )
        rows = [request for request in core.rows if request is not None and request.record.prepared and not request.ending]
        oldest = min((request.arrival for request in rows if not request.is_finished), default=-1)
        texts = [request.arrival for request in core.waiting.values() if not request.definition.items]  # these wait for KV pages, too
        is_passed = min(texts, default=oldest) < oldest
        for request in sorted([*filter(needs_kv, rows), *core.waiting.values()], key=lambda request: request.arrival):
            if not request.has_row:
                admit(core, granter, request, now)
                continue
            need = kv_need(core, request)
            if request.arrival == oldest:  # it does not leave room for the growth of younger ones, but for an older text that waits
                if (not is_passed or granter.take(kv=need)) and grant_kv(core, request):
                    if not is_passed:
                        granter.charge("kv", need)
                else:
                    granter.block("kv")
                    make_room(core, request, now)
            elif granter.take(kv=need):
                granted = grant_kv(core, request)
                assert granted, "the granter gave KV pages that are not free"

    def _take_effects(self) -> list[Effect]:
        effects, self.core.effects = self.core.effects, []
        return effects


def _until_look_s(core: Core, request: Request) -> float:
    """Half the time in which the row could use up the pages that it has."""
    tokens = len(request.block_tables[0]) * core.limits.kv_page_tokens - request.lengths[0] - request.committed
    return min(0.2, max(0.01, tokens / (2 * (request.rate or FAST_RATE))))
