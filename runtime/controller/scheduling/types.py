"""Inputs and outputs of scheduling decisions: immutable values, without clocks and handles (pure).

The controller builds a ``View`` of its state, a policy answers with a ``StepPlan``. The same types serve a simulator.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec

from ....schema.media import ItemShape, MediaKind
from ...bus.messages import RequestSpec
from ...config.runtime_config import MAX_STEP_TOKENS, MAX_UNANSWERED
from ...stage_table import ACTORS, InstanceId
from .facts import NO_OBJECTIVES, Facts, Objective, RequestKind
from .page_keys import Positions, indices
from .routing import Routing

Rank = tuple[float, ...]
"""Lower ranks go first."""


class Candidate(Protocol):
    """The properties of a request that its rank may depend on, waiting, in preparation or decoding.

    ``arrival`` is its number in order of arrival, ``arrived_s`` the time. ``is_partial``: work on it has begun. What is left until its
    first token, as far as it is known: ``tokens_left`` to be prefilled, of all members; ``rows_left`` to be encoded, and of these
    ``video_rows_left`` to be decoded before. Before their analysis media have no rows, and a token each. All are 0 once it has a token,
    also while it is prefilled again.
    """

    @property
    def key(self) -> int: ...
    @property
    def arrival(self) -> int: ...
    @property
    def arrived_s(self) -> float: ...
    @property
    def kind(self) -> RequestKind: ...
    @property
    def objective(self) -> Objective: ...
    @property
    def priority(self) -> int: ...
    @property
    def has_row(self) -> bool: ...
    @property
    def is_partial(self) -> bool: ...
    @property
    def tokens_left(self) -> int: ...
    @property
    def rows_left(self) -> int: ...
    @property
    def video_rows_left(self) -> int: ...
    @property
    def spec(self) -> RequestSpec: ...


MAX_PARTS = 256  # of one encode plan: it must fit a slot of the plan table


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits and settings of a run. Sizes in pages, tokens or bytes, times in seconds."""

    policy: str = "unified"
    actors: tuple[InstanceId, ...] = ACTORS  # of the run
    num_devices: int = 1  # each with a KV pool
    devices: Mapping[InstanceId, int] = field(default_factory=dict)  # of the actors, by number; 0 where not given
    with_decode: frozenset[str] = frozenset()  # the stages that share a process with a decode
    num_rows: int
    max_context: int
    kv_page_tokens: int
    num_kv_pages: int  # of each pool
    media_page_bytes: int
    num_media_pages: int
    patch_page_bytes: int
    num_patch_pages: int
    embedding_page_tokens: int
    num_embedding_pages: int
    num_state_pages: int = 0  # of recurrent states, beside each KV pool; 0: the model has none
    num_log_pages: int = 0  # of their logs, likewise
    num_window_pages: int = 0  # of layers with a window, beside the KV pool; 0: they have no pages of their own
    window_tokens: int = 0  # that such a layer attends to, the newest included
    window_chunk: int = 0  # tokens of a chunk at most, where they have such pages, and of a picture that a chunk must hold
    placeholder_ids: dict[MediaKind, int] = field(default_factory=dict)
    behind_ids: frozenset[int] = frozenset()  # as in ``ModelConfig``
    max_items: int = 512
    max_request_pixels: int = 1 << 29  # of the pictures of a request that no cache has
    max_waiting: int = 256
    max_waiting_tokens: int = 1 << 22
    max_spec_bytes: int = 65536
    max_state_bytes: int = 131072
    num_plan_slots: int = 64
    depth: int = MAX_UNANSWERED
    routing: Routing = "least_load"  # among several instances of a stage, and several devices
    tbt_target_s: float = 0.05
    tbt_factor: float = 0.0  # above 0: the objective is this multiple of the undisturbed step, once measured, and
    tbt_least_s: float = 0.0  # at least this
    objectives: Mapping[RequestKind, Objective] = field(default_factory=lambda: NO_OBJECTIVES)
    prefill_budget: int = 0  # tokens per prefill plan; 0: steered
    encode_budget: int = 0  # patch rows per encode plan; 0: steered
    rows_per_token: int = 4  # patch rows per embedding token
    row_pixels: int = 196  # of a picture, per patch row
    most_pixels: int = 0  # of a picture, after it was resized
    resend_s: float = 0.2
    patience_s: float = 0.5  # how long the first request waits for pages before later ones lose theirs
    silence_s: float = 15.0  # after which the gateway is told about a request that it has not asked about
    ahead_s: float = 2.0
    ahead_pages: int = 2
    spare_ahead_s: float = 6.0  # while half of the pool is free: the start of a controller takes up to 4.7 s on a busy machine
    embedding_cache: bool = True  # media of equal content are analysed and encoded once
    prefix_cache: bool = False
    prefill_ranks: int = 1  # stages of prefill's pipeline, each with a range of the layers (RS1): its actors; 1: there is none
    has_breaks: bool = False  # prefill does plans between the layers of one that is twice as long
    first_tokens: bool = False  # prefill draws them where it can: see ``Answer.begins_in_prefill``
    snapshot_tokens: int = 256  # least between the first snapshots of a prompt: a copy of its states is worth that
    learnt_tokens: int = 1024  # that a prompt has in common with others behind its last snapshot: it leaves one there
    positions: Positions = indices
    sees_pictures: bool = False  # a chunk holds all of a picture, or none of it
    fault_of: Callable[[MediaKind, ItemShape], str] = lambda kind, shape: ""  # what contradicts what in the shape of such an item

    @property
    def grid(self) -> int:
        """Tokens between two places where a chunk may end: of a model with recurrent states the tokens between two of them that are
        kept, a page's."""
        return self.kv_page_tokens if self.num_state_pages else 1

    def is_divided(self, stage: str) -> bool:
        """Return whether the stage needs all of its actors. In a pipeline none does another's work."""
        return stage == "prefill" and self.prefill_ranks > 1


def num_relays(num_ranks: int, depth: int) -> int:
    """Return how many plans a pipeline of so many ranks may have in flight."""
    return num_ranks * depth if num_ranks > 1 else 0


class SegmentStage(enum.IntEnum):
    """Progress of a segment; only increases, except when a request is preempted or its pages are evicted."""

    PENDING = 0
    PREPROCESSING = 1  # has patch pages and a plan
    PREPROCESSED = 2
    ENCODING = 3  # has embedding pages too, and a plan
    ENCODED = 4  # patch pages are given back; embedding pages go as prefill consumes them


class SegmentView(msgspec.Struct, frozen=True):
    """A segment not yet encoded. ``is_streamed``: it is decoded when its turn comes, not with its item's analysis. One that a file has
    (``cache.dir``) is PREPROCESSED and has no rows: to encode it is to load it."""

    item: int
    segment: int
    stage: SegmentStage
    num_rows: int
    patch_pages: int
    embedding_pages: int
    is_streamed: bool = False


class MemberView(msgspec.Struct, frozen=True):
    """One member of a row: tokens [0, next) are prefilled, [next, ready) can be, ``target`` are to be (RS4). The first ``cached`` were
    found in the cache. No chunk may end within one of the ``pictures``, tokens [start, end) each, of those that are ready: they see
    themselves. Nor behind ``room``, where that is not 0: the row has pages up to there."""

    next: int
    ready: int
    target: int
    cached: int = 0
    pictures: tuple[tuple[int, int], ...] = ()
    room: int = 0

    def chunk_end(self, end: int) -> int:
        """Return where a chunk from ``next`` to ``end`` may end: not behind ``room``, and before the picture that it would end in or,
        if nothing would be left, behind it."""
        end = min(end, self.room or end)
        for first, last in self.pictures:
            if first < end < last:
                return first if first > self.next else last
        return end


class RequestView(msgspec.Struct, frozen=True):
    """A request in preparation. ``segments``: those not encoded yet, in prompt order, at most some. ``alone``: it shares no plan (a
    suspect). ``arrived_s``, ``kind``, ``objective``, ``priority``: see ``Candidate``.

    ``work``: of each item, see ``media_work``. ``video_in_flight``: plans that video has for it. ``video_since_s``: when it got one.
    ``video``: the process of video that has its media, "" before the first plan.
    """

    key: int
    arrival: int
    has_kv: bool = False
    prefill_in_flight: bool = False
    members: tuple[MemberView, ...] = ()
    unanalysed: tuple[int, ...] = ()
    segments: tuple[SegmentView, ...] = ()
    patch_held: int = 0
    embedding_held: int = 0
    alone: bool = False
    work: tuple[int, ...] = ()
    video_in_flight: int = 0
    video_since_s: float = 0.0
    arrived_s: float = 0.0
    kind: RequestKind = "text"
    objective: Objective = Objective()
    priority: int = 0
    video: str = ""

    @property
    def tokens_left(self) -> int:
        """The tokens of all members that are still to be prefilled."""
        return sum([member.target - member.next for member in self.members])

    @property
    def tokens_ready(self) -> int:
        """Those of them that can be prefilled now."""
        return sum([member.ready - member.next for member in self.members])

    @property
    def is_partial(self) -> bool:
        """True if work on it has begun: some of it is prefilled that was not found in the cache."""
        for member in self.members:
            if member.next > member.cached:
                return True
        return False


Device = Literal["encode", "prefill"]


class VideoRoom(msgspec.Struct, frozen=True):
    """One of several processes of video: how many more plans it may be sent, and whether it has one of large work."""

    name: InstanceId
    credit: int = 0
    large_in_flight: bool = False


class View(msgspec.Struct, frozen=True):
    """The policy's input. ``requests`` are in rank order. Credits: how many more plans the actors of a stage may be sent together.
    ``num_turns``: how many plans of encoder and prefill may be in flight at once where these stages take turns. ``large_in_flight``:
    video has a plan of large work, in each of its processes; ``videos``: these, if they are several; ``last_streamed``: the last such
    plan was for a streamed segment. ``num_decoding``: rows; ``num_decode_tokens``: tokens of decode's step, two for a guidance pair
    (CF3). ``grid``: chunks end at its multiples, or at their member's target; more than 1 for models with recurrent states."""

    requests: tuple[RequestView, ...]
    facts: Facts = Facts()
    video_credit: int = 0
    encoder_credit: int = 0
    prefill_credit: int = 0
    encode_in_flight: int = 0
    prefill_in_flight: int = 0
    num_decoding: int = 0
    num_decode_tokens: int = 0
    num_encoders: int = 1
    num_patch_pages: int = 0
    num_free_patch_pages: int = 0
    num_embedding_pages: int = 0
    num_free_embedding_pages: int = 0
    last: Device = "prefill"
    num_turns: int = 1
    large_in_flight: bool = False
    last_streamed: bool = False
    grid: int = 1
    videos: tuple[VideoRoom, ...] = ()

    @property
    def now(self) -> float:
        return self.facts.now


class StepLimits(msgspec.Struct, frozen=True):
    """tau and alpha of US8, as the core has steered them.

    A policy may have budgets of its own, up to ``max_prefill_tokens`` and ``max_encode_rows`` of one plan. ``with_decode``: the stages
    in decode's process."""

    prefill_tokens: int
    encode_rows: int
    max_prefill_tokens: int = MAX_STEP_TOKENS
    max_encode_rows: int = MAX_STEP_TOKENS
    with_decode: frozenset[str] = frozenset()


class ItemChoice(NamedTuple):
    key: int
    item: int


class SegmentChoice(NamedTuple):
    key: int
    item: int
    segment: int


class ChunkChoice(NamedTuple):
    key: int
    member: int
    start: int
    end: int


class StepPlan(msgspec.Struct, frozen=True):
    """One video plan per choice of ``analyse`` and ``preprocess``, one encode plan of all of ``encode``, one prefill plan likewise."""

    analyse: tuple[ItemChoice, ...] = ()
    preprocess: tuple[SegmentChoice, ...] = ()
    encode: tuple[SegmentChoice, ...] = ()
    prefill: tuple[ChunkChoice, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.analyse or self.preprocess or self.encode or self.prefill)
