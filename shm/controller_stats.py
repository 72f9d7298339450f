"""The controller's counts, readable by ``mmrt status`` and /metrics even after its death: one snapshot, written by the controller."""

import msgspec

from ..schema.policy_report import NO_POLICY_YET, PolicyReport
from .published import Published

WAITING_FOR = {
    "row": "rows",
    "media": "media pages",
    "kv": "KV pages",
    "window": "KV pages",
    "state": "states",
    "log": "states",
}
"""Words for what requests can wait for: rows, or pages of a kind of pool."""


class PoolUse(msgspec.Struct, frozen=True):
    """Pages of one pool. ``used``: granted or held. ``cached``: with contents that the cache knows. ``evictable``: of these, those that
    nobody else holds; they are not used."""

    pages: int = 0
    used: int = 0
    cached: int = 0
    evictable: int = 0


class StatsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's counts. Totals grow over the whole run, also across controllers: a new one reads them first."""

    epoch: int = 0
    waiting: int = 0  # requests journaled, not admitted
    waiting_for: list[str] = []  # what these lack, or rows without KV pages: of ``WAITING_FOR``
    preparing: int = 0  # rows in phase PREPARE
    running: int = 0  # rows in phase DECODE
    plans: int = 0  # issued, not acknowledged
    rows_left: int = 0  # patch rows to be encoded, of requests without a first token
    tokens_left: int = 0  # likewise, tokens to be prefilled
    video_left: int = 0  # likewise, plans of video; two for a medium that is not analysed
    work_left_s: float = 0.0  # of encoding and prefill, of requests without a first token, as far as costs and sizes are known
    admitted_total: int = 0
    finished_total: int = 0
    failed_total: int = 0
    preempted_total: int = 0
    instances_version: int = 0  # ``ActorTable.version`` that the controller acts on
    drained: list[str] = []  # leaving actors that hold nothing any more
    handed_over_total: int = 0  # rows from one decode actor to another
    transferred_bytes_total: int = 0  # of KV pages, from the pool of one device to that of another
    evicted_total: int = 0
    quarantined_total: int = 0
    prompt_tokens_total: int = 0
    looked_up_tokens_total: int = 0  # those of the prompts that were looked up in the prefix cache
    cached_tokens_total: int = 0  # those of them that were found there
    generated_tokens_total: int = 0
    media_queries_total: int = 0  # segments of media looked up in the embedding cache
    media_hits_total: int = 0
    overruled_total: int = 0  # times that the scheduling policy failed, and another acted in its place
    illegal_choices_total: int = 0  # of the scheduling policy, dropped
    encode_budget: int = 0
    prefill_budget: int = 0
    tbt_s: float = 0.0  # time between tokens as measured last; 0: not measured
    tbt_objective_s: float = 0.0  # for the rows that decode now
    tbt_p99_s: float | None = None  # of the last seconds; None: nothing decoded
    late_share: float | None = None  # likewise: times between tokens over the objective
    gaps: list[int] = []  # times between tokens, by bucket (``schema.gap_buckets``), since the run began
    gaps_s: float = 0.0  # their sum
    pools: dict[str, PoolUse] = {}  # by name: media, patch, embedding, and the KV pools of all devices
    broken: dict[str, str] = {}  # actors that the run does without for now, and why
    policy: PolicyReport = NO_POLICY_YET


class ControllerStats(Published[StatsSnapshot]):
    """The controller's snapshot; all zero before the first. Only the controller publishes it."""

    NAME = "stats"
    MAX_BYTES = 32768
    DECODER = msgspec.msgpack.Decoder(StatsSnapshot)
    FIRST = StatsSnapshot()
