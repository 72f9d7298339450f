"""The devices of a simulated run: which actors share one, and where pages lie.

With a link between devices, each process of encoder, prefill and decode has a device of its own (TI1, RS1), and ``video`` computes on
the host. Pages that a plan or a decode reads on another device come over the link first, each transfer alone at its full rate (TI6:
pulled by the reader). Page numbers are those of one pool, as the controller has it: no device is full before all are.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from ...actors.host.model_facts import facts_of
from ...runtime.controller.scheduling.types import Limits
from ...runtime.process.memory_layout import EMBEDDING_PAGE_TOKENS
from ...runtime.stage_table import STAGES, InstanceId, stage_of
from .costs import Costs
from .interference import Interference
from .processors import Processors

HOST = "host"
Pool = Literal["embedding", "kv"]


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Between any two devices: bytes per second, and seconds before the first byte."""

    bytes_per_s: float = float("inf")
    latency_s: float = 0.0


class Devices:
    """``link``: between them; None: one device for all actors, with one set of pages."""

    def __init__(self, costs: Costs, limits: Limits, link: Link | None) -> None:
        self.num_bytes = 0  # that have come over the link
        self._link = link
        self._interference = Interference(costs)
        self._of: dict[InstanceId, str] = {}
        self._processors: dict[str, Processors] = {}
        facts = facts_of(costs.model, limits.kv_page_tokens)
        self._page_bytes = {"embedding": EMBEDDING_PAGE_TOKENS * facts.embedding_row_bytes, "kv": facts.kv_page_bytes}
        self._lies: dict[Pool, list[str]] = {"embedding": [HOST] * limits.num_embedding_pages, "kv": [HOST] * limits.num_kv_pages}

    def place(self, actor: InstanceId, process: InstanceId) -> Processors:
        """Place an actor of this process. Returns the processors that it works on."""
        has_own = self._link is not None and bool(STAGES[stage_of(actor)].letter)
        device = self._of[actor] = process if has_own else HOST
        if device not in self._processors:
            self._processors[device] = Processors(self._interference)
        return self._processors[device]

    def write(self, pool: Pool, pages: Sequence[int], actor: InstanceId) -> None:
        """The actor is about to write these pages: from now on they lie on its device."""
        if self._link is not None:
            lies, device = self._lies[pool], self._of[actor]
            for page in pages:
                lies[page] = device

    def bring(self, pool: Pool, pages: Sequence[int], actor: InstanceId) -> float:
        """Bring these pages to the actor's device. Returns the seconds until they are there."""
        if self._link is None:
            return 0.0
        lies, device = self._lies[pool], self._of[actor]
        absent = [page for page in pages if lies[page] != device]
        if not absent:
            return 0.0
        self.write(pool, absent, actor)
        num_bytes = len(absent) * self._page_bytes[pool]
        self.num_bytes += num_bytes
        return self._link.latency_s + num_bytes / self._link.bytes_per_s
