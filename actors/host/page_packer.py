"""KV pages in fewer bits for their way to another device (``memory.kv_transfer_dtype``; KQ2): prefill packs those that it fills for
rows that are decoded on another one, and the decode of that device reads the packed bytes instead of the pages.

A packed page lies at its page's number in a segment beside the pool, with the generation of the page that it was made from. So
nothing is allocated, and a page that others have filled since is not mistaken for it. A row's pages are copied only when no plan
writes them, and prefill packs before it answers its plan: what is read is whole. A page that was never packed, since its first row
was decoded where it was prefilled, is copied as it is.
"""

import torch

from ...models.checkpoint.weights import torch_dtype
from ...models.lm.kv_packing import KvPacking
from ...runtime.bus.plans import Prefill
from ...runtime.pools import packed_pool
from ...shm.fence import fence
from ...shm.pool import Access, PagePool
from ...shm.sequence_table import SequenceTable
from .actor import Actor


def open_packing(actor: Actor, page_tokens: int) -> KvPacking | None:
    """Return how the run packs pages; None if it copies them as they are."""
    packed = actor.config.memory.kv_transfer_dtype
    return None if packed == "auto" else KvPacking(actor.model.language, page_tokens, torch_dtype(actor.model.dtype), packed)


class PackedPages:
    """The packed pages of a KV pool, ``pool``, of this device or another."""

    def __init__(self, actor: Actor, pool: PagePool, packing: KvPacking, access: Access) -> None:
        """``access``: "own" for the actor that packs them, else "read"."""
        self._pool = pool
        self._packing = packing
        self._packed = PagePool.attach(actor.run, packed_pool(pool.name), access)

    def pack(self, pages: list[int]) -> None:
        """Pack pages that this actor has just filled, or begun."""
        for page in pages:
            self._packed.page(page)[:] = self._packing.pack(torch.from_numpy(self._pool.data[page : page + 1])).numpy().data.cast("B")
            fence()
            self._packed.generations[page] = self._pool.generations[page]

    def read(self, page: int) -> tuple[memoryview, int]:
        """Return the contents of a page and the number of bytes read: those of the packed page, or of the page if it was not packed."""
        if self._packed.generations[page] != self._pool.generations[page]:
            return self._pool.page(page), self._pool.page_bytes
        fence()
        contents = self._packing.unpack(torch.from_numpy(self._packed.data[page : page + 1]))
        return contents.numpy().data.cast("B"), self._packed.page_bytes


def pack_chunks(packed: PackedPages, plan: Prefill, table: SequenceTable, page_tokens: int) -> None:
    """Pack the pages that a plan has written of rows that are decoded on another device."""
    for chunk in plan.chunks:
        if table.generation[chunk.row] == chunk.row_generation:
            pages = table.source_pages(chunk.row, chunk.member)[chunk.start // page_tokens : -(-chunk.end // page_tokens)]
            packed.pack(pages.tolist())
