"""The data that ``mmrt inspect`` shows: made by ``inspect``, printed as a table or as JSON."""

import msgspec

from .breakdown import Breakdown


class SegmentReport(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a medium. ``start`` is its place in the prompt, -1 before the prompt is expanded; pages are its current ones."""

    state: str
    rows: int
    tokens: int
    start: int
    patch_pages: list[int]
    embedding_pages: list[int]


class ItemReport(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    num_bytes: int
    grid: tuple[int, int, int] | None  # None: not analysed yet
    tokens: int
    media_pages: list[int]
    segments: list[SegmentReport]


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of the request: the conditional one, or its companion. ``ready``: prompt tokens that can be prefilled."""

    prompt_tokens: int
    ready_tokens: int
    prefilled_tokens: int
    block_table: list[int]


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """A plan in the plan table that names the request's row. ``state``: "queued" or "running for … ms"."""

    plan_id: int
    what: str
    actor: str
    slot: int
    units: int
    first: int
    last: int
    state: str


class TimingReport(msgspec.Struct, frozen=True, kw_only=True):
    """A stage, and its duration so far in seconds."""

    stage: str
    seconds: float
    over: bool


class WorkReport(msgspec.Struct, frozen=True, kw_only=True):
    """All finished plans of one kind for the request: seconds of work, and of waiting in the actor's queue."""

    what: str
    plans: int
    seconds: float
    queued_seconds: float


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """A request. Lists are empty and numbers 0 where nothing is known yet."""

    key: str
    request_id: str
    stage: str
    live: bool
    age_s: float
    deadline_s: float | None  # seconds left
    arrival: int = -1
    kind: str = ""  # of its most demanding medium
    priority: int = 0
    gateway_generation: int = 0
    row: int = -1
    row_generation: int = 0
    phase: str = ""
    end: str = ""
    committed_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, in pages found in the cache
    sent_tokens: int = 0
    max_new_tokens: int = 0
    decode: str = ""  # the decode actor that runs it
    in_running_set: bool = False
    failure: str = ""
    members: list[MemberReport] = []
    items: list[ItemReport] = []
    plans: list[PlanReport] = []
    timings: list[TimingReport] = []
    work: list[WorkReport] = []
    marks: list[tuple[str, float]] = []  # (event, seconds after its start)
    breakdown: Breakdown = Breakdown()  # of its latency so far (TI22)


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """All live requests of a run in order of arrival, and the resources that they share."""

    epoch: int
    waiting: int
    preparing: int
    running: int
    prefill_budget_tokens: int
    encode_budget_rows: int
    tbt_ms: float
    tbt_objective_ms: float = 0.0
    tbt_p99_ms: float | None = None  # of the last seconds
    late_share: float | None = None  # of their times between tokens over the objective
    pools: dict[str, tuple[int, int]]  # used, pages
    cached_pages: dict[str, int] = {}  # with contents that the cache knows, by pool; those that no request holds are not used
    policy: str = ""  # in charge, and what has become of the one that was set
    requests: list[RequestReport]
