"""The controller's state and its basic changes: requests, rows, effects, page grants, replies.

``caches``, ``rows`` and ``plans`` are the rules, as functions over this; ``machine.Controller`` calls them. All of it is either in the
journal, the rows and the plan table, or derived from them, except ``outages``, which the supervisor provides, and ``absent`` with what
follows from it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

from ....schema.outage import Outage
from ....schema.rows import Phase
from ...bus.messages import PageRun, ToActor
from ...pools import PoolName, kind_of_pool, kv_pool, log_pool, state_pool, window_pool
from ...stage_table import InstanceId, instance_id, stage_of
from ..scheduling.budgets import TBT_FACTOR, Budget, allowance_s, encode_budget, objective_s, prefill_budget, retarget
from ..scheduling.costs import Costs
from ..scheduling.facts import Cost, Facts, kind_of
from ..scheduling.gap_window import GapWindow
from ..scheduling.policy import POLICIES, Policy, PolicyRecord
from ..scheduling.routing import Routes
from ..scheduling.types import Device, Limits
from .derived import Derived
from .effects import Effect, Send, SetPageGenerations, SetPageKeys, SetPhase, WriteJournal, WriteState
from .inflight_plan import LONG_AGO_S, InflightPlan
from .known_media import KnownMedia, MediaKey
from .pages import Owner, PageLedger, User
from .records import KEPT_ENDS, JournalRecord, Submitted
from .request import Request
from .row_lists import RowLists
from .row_record import encode_record
from .saved_index import SavedIndex

BY_RANK = attrgetter("rank")
STUCK_S = 5.0  # the actor of a plan this old is absent or hangs: it uses no processor


@dataclass(slots=True)
class Totals:
    """Counts since the controller started."""

    admitted: int = 0
    finished: int = 0
    failed: int = 0
    preempted: int = 0
    handed_over: int = 0  # rows from one decode actor to another
    transferred_bytes: int = 0  # of KV pages, from one pool to another
    evicted: int = 0
    quarantined: int = 0
    overruled: int = 0  # times that the policy was overruled (``policy_calls``)
    illegal: int = 0  # choices of the policy that were dropped
    prompt_tokens: int = 0
    looked_up_tokens: int = 0  # of the prompts, looked up in the cache by first grants
    cached_tokens: int = 0  # of these, found there
    generated_tokens: int = 0
    media_queries: int = 0  # segments with known content that were encoded or taken from the cache
    media_hits: int = 0  # of them, those taken


@dataclass(slots=True)
class Steering:
    """Budgets and the measurements that steer them."""

    prefill: Budget
    encode: Budget
    allowance_s: float  # of a plan, given the rows decoding now
    share: float = 1.0
    tbt_s: float | None = None
    undisturbed_s: float | None = None  # time between tokens while nothing was encoded or prefilled
    disturbed_s: float = LONG_AGO_S  # when one last was
    last: Device = "prefill"
    last_streamed: bool = False  # whether video's last plan of large work was
    steered_s: float = LONG_AGO_S
    service_s: float = 1.0


def _no_generations() -> dict[PoolName, Sequence[int]]:
    return {}


@dataclass(slots=True, eq=False)
class ControllerState:
    """One controller generation (``epoch``). Not shared between threads."""

    limits: Limits
    epoch: int
    page_generations: Mapping[PoolName, Sequence[int]] = field(default_factory=_no_generations)
    secret: bytes = b""  # of the run, for keys of pages
    known_costs: Mapping[str, Cost] = field(default_factory=dict)  # of stages, from earlier runs
    era: bytes = b""  # of the caches: a part of all keys
    kept_era: bytes = b""  # in which later runs with the same files begin
    effects: list[Effect] = field(default_factory=list)
    pools: dict[PoolName, PageLedger] = field(init=False)
    kv_pools: tuple[PoolName, ...] = field(init=False)  # by device number
    requests: dict[int, Request] = field(default_factory=dict)
    waiting: dict[int, Request] = field(default_factory=dict)
    rows: list[Request | None] = field(init=False)
    row_generations: list[int] = field(init=False)
    free_rows: list[int] = field(init=False)
    sharers: dict[MediaKey, list[Request]] = field(default_factory=dict)  # rows by their media: see ``media_sharing``
    known_media: KnownMedia = field(default_factory=KnownMedia)
    saved: dict[PoolName, SavedIndex] = field(
        default_factory=lambda: {kind: SavedIndex() for kind in ("kv", "embedding", "state", "window")}
    )
    codes: dict[InstanceId, int] = field(default_factory=dict)  # of actors that fill pages: see ``cache_eras``
    plans: dict[int, InflightPlan] = field(default_factory=dict)
    num_plans: dict[InstanceId, int] = field(default_factory=dict)  # of these, by actor
    drops: dict[int, Request] = field(default_factory=dict)  # requests that a decode has been asked to drop, by row
    free_slots: list[int] = field(init=False)
    actors: dict[InstanceId, int] = field(default_factory=dict)  # their active generations
    devices: Mapping[InstanceId, int] = field(init=False)  # of the actors, by number
    staying: tuple[InstanceId, ...] = field(init=False)  # the actors that get work
    leaving: frozenset[InstanceId] = frozenset()  # those that belong to the run and get none: see ``instances``
    deadline_s: float = LONG_AGO_S  # the earliest deadline of a request that could miss it, or earlier
    heard_s: float = LONG_AGO_S  # for every request, the gateway's last message was then or later
    ended: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    outages: Mapping[InstanceId, Outage] = field(default_factory=dict)  # by actor: see ``outages``
    absent: frozenset[InstanceId] = frozenset()  # those of ``machine.Controller.twins`` that are dead, until others take their roles
    absent_since_s: dict[InstanceId, float] = field(default_factory=dict)
    away: frozenset[InstanceId] = frozenset()  # those for which work no longer waits: see ``absence``
    pending_replies: dict[int, int] = field(default_factory=dict)  # key -> gateway generation that gets an answer
    next_arrival: int = 0
    routes: Routes = field(init=False)
    now: float = 0.0  # of the message or tick that is being handled
    facts: Facts = Facts()  # of the last tick
    steering: Steering = field(init=False)
    costs: Costs = field(init=False)
    gaps: GapWindow = field(default_factory=GapWindow)
    policy: Policy = field(init=False)
    policy_memory: Any = None  # the policy's own
    policy_record: PolicyRecord = field(default_factory=PolicyRecord)
    guard: Callable[[Policy, Callable[[], Any]], Any] = lambda _, call: call()  # makes the calls of a policy
    ranking: Policy = field(init=False)  # the policy, or ``unified`` once the policy could not rank a request
    waits_for: frozenset[str] = frozenset()  # what requests without a row or without KV pages lack: "row", or names of pools
    unranked: list[Request] = field(default_factory=list)
    ranked_s: float = LONG_AGO_S  # when all were ranked, by a policy that ages
    aged_s: float = LONG_AGO_S  # when old requests were last looked for
    starved_s: float | None = None  # since when the policy wrongly plans nothing
    overruled_because: str = ""
    totals: Totals = field(default_factory=Totals)
    _numbers: int = 0
    windows_s: float = LONG_AGO_S  # when the oldest window of a rate began, or earlier; LONG_AGO_S while a row may have none
    _lists: RowLists = field(init=False)
    _touched: set[int] = field(default_factory=set)  # rows, since the last tick began
    _touched_before: set[int] = field(default_factory=set)  # rows, since the tick before that one began, and until that one

    def __post_init__(self) -> None:
        limits = self.limits
        self.policy = self.ranking = POLICIES[limits.policy]
        self.routes = Routes(limits.routing)
        self.staying, self.devices = limits.actors, limits.devices
        self.kv_pools = tuple(map(kv_pool, range(limits.num_devices)))
        sizes: dict[PoolName, int] = {
            "media": limits.num_media_pages,
            "patch": limits.num_patch_pages,
            "embedding": limits.num_embedding_pages,
            **dict.fromkeys(self.kv_pools, limits.num_kv_pages),
        }
        if limits.num_state_pages:
            sizes |= dict.fromkeys(map(state_pool, self.kv_pools), limits.num_state_pages)
            sizes |= dict.fromkeys(map(log_pool, self.kv_pools), limits.num_log_pages)
        if limits.num_window_pages:
            sizes |= dict.fromkeys(map(window_pool, self.kv_pools), limits.num_window_pages)
        self.pools = {name: PageLedger(size, self.page_generations.get(name)) for name, size in sizes.items()}
        self.tie_snapshots()
        self.rows = [None] * limits.num_rows
        self._lists = RowLists(self.rows)
        self.row_generations = [0] * limits.num_rows
        self.free_rows = list(range(limits.num_rows - 1, -1, -1))
        self.free_slots = list(range(limits.num_plan_slots - 1, -1, -1))
        idle_s = allowance_s(1.0, 0, limits.tbt_target_s)
        self.costs = costs = Costs(self.known_costs)
        encode = encode_budget(limits.encode_budget, limits.rows_per_token, costs.of("encoder"))
        prefill = prefill_budget(limits.prefill_budget, costs.of("prefill"))
        self.steering = Steering(retarget(prefill, idle_s), retarget(encode, idle_s), idle_s)

    @property
    def tbt_target_s(self) -> float:
        """The TBT objective of plans."""
        limits, undisturbed_s = self.limits, self.steering.undisturbed_s
        return limits.tbt_target_s if undisturbed_s is None else objective_s(limits, undisturbed_s)

    @property
    def tbt_objective_s(self) -> float:
        """The tightest objective of the rows that decode; as ``tbt_target_s``, one that a step alone does not meet gives way."""
        own_s = self._lists.tbt_s
        if not own_s:
            return self.tbt_target_s
        least_s = min([s or self.tbt_target_s for s in own_s])
        undisturbed_s = self.steering.undisturbed_s or 0.0
        return least_s if undisturbed_s <= least_s else TBT_FACTOR * undisturbed_s

    # ----------------------------------------------------------------------------------------------------- requests

    def make_request(self, submitted: Submitted) -> Request:
        """Make an accepted request."""
        kind = kind_of(item.kind for item in submitted.spec.items)
        request = Request(
            submitted.key,
            submitted.arrival,
            submitted.gateway_generation,
            submitted.spec,
            submitted.arrived_s,
            kind,
            self.limits.objectives[kind],
        )
        self.requests[submitted.key] = request
        self.unranked.append(request)
        return request

    # --------------------------------------------------------------------------------------------------------- rows

    def requests_in_rows(self) -> Iterator[Request]:
        """Yield requests that have a row, including those leaving it."""
        return (request for request in self.rows if request is not None)

    def live(self) -> list[Request]:
        """Return requests that have a row and keep it. See ``RowLists``."""
        return self._lists.live()

    def preparing(self) -> list[Request]:
        """Return requests whose media or prompts are being processed."""
        return self._lists.preparing()

    def decoding(self) -> list[Request]:
        """Return requests that decode is generating tokens for."""
        return self._lists.decoding()

    def watched(self) -> list[tuple[int, int]]:
        """Return (row, generation) of the rows whose words matter now."""
        return self._lists.watched()

    @property
    def num_decoding(self) -> int:
        return len(self._lists.decoding())

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of a step of decode: two for a guidance pair."""
        return self._lists.num_decode_tokens

    def touch(self, request: Request) -> None:
        """Discard data derived from a row that has changed. ``emit`` calls this for every effect that names a row; code that changes it
        without such an effect (plans, counts, rates) calls it directly. New ids of a row in decode are no change."""
        request.derived = Derived()
        self._touched.add(request.row)

    def is_lost(self, actor: InstanceId) -> bool:
        """Return whether work is taken from an actor: it is broken or away."""
        return actor in self.outages or actor in self.away

    def begin_tick(self, now: float, gaps: Sequence[int]) -> None:
        """Begin a tick. ``gaps``: the histogram of times between tokens since the run began, if it is known."""
        self.now = now
        tbt_s, costs = self.tbt_objective_s, self.costs
        if gaps:
            self.gaps.look(now, gaps, tbt_s)
        self.facts = Facts(
            now,
            costs.of("encoder"),
            costs.of("prefill"),
            costs.by_actor,
            tbt_s,
            self.gaps.late_share,
            self.gaps.p99_s,
            now - self.gaps.began_s,
            self.steering.undisturbed_s,
            costs.of("video"),
        )
        self._touched_before, self._touched = self._touched, set()
        for request in self.unranked:
            if not 0 < request.arrived_s <= now:  # of an older journal, or the machine has been started since
                request.arrived_s = now

    def touch_preparing(self) -> None:
        """Discard what is derived from rows in preparation: it is known anew which of their pages can be loaded."""
        for request in self.preparing():
            self.touch(request)

    def touched(self) -> list[Request]:
        """Return live rows changed since the previous tick began: a rule that checks them in every tick misses no change."""
        found, rows = self._touched | self._touched_before, self.rows
        return [request for row in sorted(found) if (request := rows[row]) is not None and not request.ending] if found else []

    # ------------------------------------------------------------------------------------------------------ effects

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)
        row = getattr(effect, "row", None)
        if row is not None:
            assert row >= 0, f"{type(effect).__name__} for a request without a row"
            if (request := self.rows[row]) is not None:
                self.touch(request)

    def journal(self, record: JournalRecord) -> None:
        self.effects.append(WriteJournal(record))

    def send(self, actor: InstanceId, message: ToActor) -> bool:
        """Send to the actor's active generation; False while there is none."""
        generation = self.actors.get(actor)
        if generation is None:
            return False
        self.effects.append(Send(actor, generation, message))
        return True

    def save(self, request: Request) -> None:
        """Rewrite the request's record in its row."""
        assert request.row >= 0, "a record of a request without a row"
        self.effects.append(WriteState(request.row, encode_record(request.record)))
        self.touch(request)

    def set_phase(self, request: Request, phase: Phase) -> None:
        before = request.enter(phase)
        self._lists.note_phase(request, before)
        if phase == Phase.DECODE:
            self.windows_s = LONG_AGO_S
        self.emit(SetPhase(request.row, phase))

    def note_end(self, request: Request, end_code: int) -> None:
        """Record the row's end: decode appends no further ids."""
        request.answer.finish(end_code)
        self._lists.note_end()
        self.touch(request)

    def note_counts(self, request: Request, are_known: bool) -> None:
        """Record whether ``committed`` is the final count of decode's last membership."""
        request.answer.note_counts(are_known)
        self._lists.note_counts()
        self.windows_s = LONG_AGO_S
        self.touch(request)

    def ask(self, key: int, gateway_generation: int) -> None:
        """Report the request's state to this gateway generation at the end of the turn."""
        self.pending_replies[key] = gateway_generation

    def number(self) -> int:
        """Return a number unique over all controllers of this run: for plan ids and drop tickets."""
        self._numbers += 1
        return self.epoch << 32 | self._numbers

    # -------------------------------------------------------------------------------------------------------- pages

    def pool_of(self, actor: InstanceId) -> PoolName:
        """Return the only KV pool that an actor maps as its own: its device's. Stages of a pipeline have that of the first."""
        first = instance_id("prefill", 0) if self.limits.is_divided(stage_of(actor)) else actor
        return self.kv_pools[self.devices.get(first, 0)]

    def pools_beside(self, pool: PoolName) -> tuple[PoolName, ...]:
        """Return a KV pool, and the pools beside it: of recurrent states, and of windows."""
        states = (state_pool(pool), log_pool(pool)) if self.limits.num_state_pages else ()
        return (pool, *states, window_pool(pool)) if self.limits.num_window_pages else (pool, *states)

    def tie_snapshots(self) -> None:
        """Let states, and pages of windows, go from the cache before others once the KV pages under them are gone."""
        for kv in self.kv_pools:
            if beside := state_pool if self.limits.num_state_pages else window_pool if self.limits.num_window_pages else None:
                self.pools[kv].cache.follower = self.pools[beside(kv)].cache

    def retire_kv(self, request: Request) -> None:
        """End the row's ownership of KV pages and of those granted with them, in all pools."""
        for kv in self.kv_pools:
            for pool in self.pools_beside(kv):
                self.pools[pool].retire(owner(request))

    def allocate(self, pool: PoolName, request: Request, count: int) -> PageRun | None:
        """Allocate pages for a row, all or none. Earlier holders of these pages become stale."""
        run = self.pools[pool].allocate(owner(request), count)
        if run is not None and count:
            self.effects.append(SetPageGenerations(pool, run))
        return run

    def name_pages(self, pool: PoolName, pages: Sequence[int], keys: Sequence[bytes], depth: int = 0) -> None:
        """Give pages their keys: their contents are complete, and no plan writes them. Contents that the cache has already stay as
        they are. ``depth``: the place of the first page in its prompt or segment."""
        ledger = self.pools[pool]
        if places := ledger.name(pages, keys):
            pages, keys, generations = [pages[at] for at in places], [keys[at] for at in places], ledger.generations
            run = PageRun(pages, [generations[page] for page in pages])
            self.effects.append(SetPageKeys(pool, run, keys, [depth + at for at in places]))
            index = self.saved.get(kind_of_pool(pool))
            if index is not None and index.note_made(keys):
                self.touch_preparing()

    # ------------------------------------------------------------------------------------------------------- ending

    def remember_end(self, key: int) -> None:
        """Remember an ended request, so that a late Submit does not start it again."""
        self.ended[key] = None
        self.ended.move_to_end(key)
        if len(self.ended) > KEPT_ENDS:
            self.ended.popitem(last=False)


def owner(request: Request) -> Owner:
    return request.row


def membership(request: Request) -> User:
    return _membership(request.row)


@cache
def _membership(row: int) -> User:
    return User("decode", row)
