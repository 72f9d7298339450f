"""The devices of a simulated run: which actors share one, and where pages lie.

With a link between devices, each process of encoder, prefill and decode has a device of its own (TI1, RS1), and ``video`` computes on
the host. Pages that a plan or a decode reads on another device come over the link first (TI6: pulled by the reader), those of a prompt
layer by layer while prefill computes the next ones (KT1), packed ones chunk by chunk. Page numbers are those of one pool, as the
controller has it: no device is full before all are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from mmrt.models.config import facts_of
from mmrt.runtime.controller.scheduling.types import Limits
from mmrt.runtime.process.memory_layout import EMBEDDING_PAGE_TOKENS
from mmrt.runtime.stage_table import STAGES, InstanceId, parse_layout, stage_of

from .costs import Costs
from .events import NS, to_ns
from .interference import Interference
from .links import Link, Ports, Way, fastest_way, num_begun, num_recomputed
from .processors import Processors
from .recomputing import Recomputing

HOST = "host"
Pool = Literal["embedding", "kv"]
RecomputeSeconds = Callable[[int], float]
"""Takes the number of a prompt's last pages, and returns how long all their layers take to compute."""


class Arrival(NamedTuple):
    """When the pages of a prompt are there, and the seconds of work until the reader's device has computed its share of them."""

    ready_ns: int
    recompute_s: float = 0.0


def num_kv_devices(layout: str) -> int:
    """Return how many devices of a layout hold KV pages, if each process has one."""
    return sum(process.count for process in parse_layout(layout) if {"prefill", "decode"} & {*process.stages})


class Filled(NamedTuple):
    """When the first and the last layer of pages could be read, as far as one knows."""

    first_ns: int = 0
    last_ns: int = 0


class Devices:
    """``link``: between them; None: one device for all actors, with one set of pages."""

    def __init__(self, costs: Costs, limits: Limits, link: Link | None) -> None:
        self.num_bytes = 0  # that have come over the link
        self._link = Link() if link is None else link
        self.is_one = link is None  # nothing is brought anywhere
        self._ports = Ports(self._link)
        self._interference = Interference(costs)
        self._of: dict[InstanceId, str] = {}
        self._processors: dict[str, Processors] = {}
        facts = facts_of(costs.model, limits.kv_page_tokens, self._link.packing)
        kv = [Way(facts.kv_page_bytes)]
        if facts.packed_page_bytes:  # read and written at either end, at the rate at which decode reads its cache
            touched = 1 + facts.packed_page_bytes / facts.kv_page_bytes
            kv.append(Way(facts.packed_page_bytes, 2 * touched * limits.kv_page_tokens * costs.decode_context_s))
        self._ways: dict[Pool, Way] = {
            "embedding": Way(EMBEDDING_PAGE_TOKENS * facts.embedding_row_bytes),
            "kv": fastest_way(kv, self._link.bytes_per_s),
        }
        self._num_layers = costs.model.language.num_layers
        self._lies: dict[Pool, list[str]] = {"embedding": [HOST] * limits.num_embedding_pages, "kv": [HOST] * limits.num_kv_pages}
        self._by_layers = self._ways["kv"] is kv[0]
        self._filled = [Filled()] * limits.num_kv_pages

    def place(self, actor: InstanceId, process: InstanceId) -> Processors:
        """Place an actor of this process. Returns the processors that it works on."""
        has_own = not self.is_one and STAGES[stage_of(actor)].has_device
        device = self._of[actor] = process if has_own else HOST
        if device not in self._processors:
            self._processors[device] = Processors(self._interference)
        return self._processors[device]

    def processors_of(self, actor: InstanceId) -> Processors:
        """Return those that a placed actor works on."""
        return self._processors[self._of[actor]]

    def write(self, pool: Pool, pages: Iterable[int], actor: InstanceId) -> None:
        """The actor is about to write these pages: from now on they lie on its device."""
        if not self.is_one:
            lies, device = self._lies[pool], self._of[actor]
            for page in pages:
                lies[page] = device

    def fill(self, pages: Iterable[int], elapsed_ns: int, end_ns: int, known_ns: int) -> None:
        """A plan has filled these KV pages, layer after layer. ``known_ns``: when the controller knows; packed ones go from then on."""
        begin_ns = end_ns - elapsed_ns + elapsed_ns // self._num_layers
        self._note_filled(pages, Filled(begin_ns, end_ns) if self._by_layers else Filled(known_ns, known_ns))

    def bring(self, pool: Pool, pages: Sequence[int], actor: InstanceId, now_ns: int) -> int:
        """Bring these pages to the actor's device, from now on. Returns when all of them are there."""
        ready_ns = now_ns
        for source, _, absent in self._absent(pool, pages, actor):
            ready_ns = max(ready_ns, self._send(pool, source, absent, actor, now_ns))
        return ready_ns

    def bring_prompt(
        self, pages: Sequence[int], actor: InstanceId, now_ns: int, message_ns: int, recompute: RecomputeSeconds | None
    ) -> Arrival:
        """Bring these KV pages to the actor's device, each layer since prefill has stored it, or all since a message said so.
        ``recompute``: of those that have not begun to come by now; None: none is computed anew."""
        ready_ns, left = now_ns, [*self._absent("kv", pages, actor)]
        page_s = self._ways["kv"].page_s(self._link.bytes_per_s)
        while left:
            source, filled, absent = left[0]
            from_ns = self._sent_from_ns(filled, to_ns(len(absent) * page_s), message_ns)
            begin_ns = self._ports.begin_ns(source, self._of[actor], from_ns)
            count = len(absent) if recompute is None else num_begun(len(absent), begin_ns, now_ns, page_s)
            if count:
                ready_ns = max(ready_ns, self._send("kv", source, absent[:count], actor, from_ns))
            if count < len(absent):
                left[0] = source, filled, absent[count:]
                break
            del left[0]
        if not left or recompute is None:
            return Arrival(ready_ns)
        num_left = sum(len(absent) for _, _, absent in left)
        begin_ns = self._ports.begin_ns(left[0][0], self._of[actor], now_ns)
        wait_s, all_s = (begin_ns - now_ns) / NS + self._link.latency_s, recompute(num_left)
        rate = self.processors_of(actor).rate_of_one_more(Recomputing.stage)
        num_layers = num_recomputed(self._num_layers, wait_s, num_left * page_s, all_s / rate)
        for source, _, absent in left:
            sent_ns = self._send("kv", source, absent, actor, now_ns, 1 - num_layers / self._num_layers)
            ready_ns = max(ready_ns, sent_ns)
        return Arrival(ready_ns, all_s * num_layers / self._num_layers)

    def _sent_from_ns(self, filled: Filled, copy_ns: int, message_ns: int) -> int:
        """Return when a copy that makes no pause begins, if the link is free: with the first layer where the link is the slower, else
        so that only the last layer comes behind prefill."""
        if filled.first_ns == filled.last_ns:
            return filled.last_ns + message_ns
        return max(filled.first_ns, filled.last_ns - copy_ns + copy_ns // self._num_layers)

    def _note_filled(self, pages: Iterable[int], filled: Filled) -> None:
        if not self.is_one:
            for page in pages:
                self._filled[page] = filled

    def _absent(self, pool: Pool, pages: Sequence[int], actor: InstanceId) -> Iterator[tuple[str, Filled, list[int]]]:
        """Yield pages that lie elsewhere, in order, by their device and since when they are filled."""
        if self.is_one:
            return
        lies, device = self._lies[pool], self._of[actor]
        absent = [page for page in pages if lies[page] != device]
        for (source, filled), group in groupby(absent, lambda page: (lies[page], self._filled[page] if pool == "kv" else Filled())):
            yield source, filled, [*group]

    def _send(self, pool: Pool, source: str, pages: Sequence[int], actor: InstanceId, ready_ns: int, share: float = 1.0) -> int:
        """Send pages, of each this share. Returns when they are there."""
        way = self._ways[pool]
        end_ns = ready_ns
        if share > 0:
            num_bytes = round(share * len(pages) * way.page_bytes)
            packing_ns = to_ns(share * len(pages) * way.packing_s)
            end_ns = self._ports.send(source, self._of[actor], num_bytes, ready_ns) + packing_ns
            self.num_bytes += num_bytes
        self.write(pool, pages, actor)
        if pool == "kv":
            self._note_filled(pages, Filled(end_ns, end_ns))
        return end_ns
