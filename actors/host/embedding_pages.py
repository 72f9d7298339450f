"""Embedding rows in pages on the run's device: the encoder writes them, prefill reads them (US2, US3)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ...models.architecture import ModelConfig
from ...models.checkpoint.filling import tensor_over
from ...models.checkpoint.weights import torch_dtype
from ...runtime.bus.messages import PageRun
from ...runtime.bus.plans import EmbeddingSpan
from ...shm.pool import PagePool
from .shared_tensors import SharedTensors

if TYPE_CHECKING:
    from ...triton_kernels.embedding_pages import PageIndices

Rows = tuple[Sequence[int], int, int]
"""Pages from the one on that holds the first row, that row's number, and how many rows: a kernel's ``PageSpan``."""


class EmbeddingPages(Protocol):
    """Rows [n, (1 + D) H] in the model's dtype: embedding and deep parts; pages are checked against their generations."""

    def write(self, targets: Sequence[PageRun], rows: Sequence[Tensor]) -> None:
        """Store each run's rows from its first on. Raises: StalePage, ValueError if they do not fit."""
        ...

    def read(self, spans: Sequence[EmbeddingSpan], start: int, embeds: Tensor) -> Tensor | None:
        """Put the embeddings of spans over ``embeds`` [n, H], whose row 0 is the prompt's token ``start``. Returns ``Chunk.deep``; None
        without spans or deep parts. Raises: StalePage, ValueError."""
        ...

    def warm_up(self) -> None:
        """Prepare the first write and read, so that they need not wait; touches no page."""
        ...


def open_embedding_pages(config: ModelConfig, pool: PagePool, shared: SharedTensors) -> EmbeddingPages:
    """Open the run's pool, wherever its pages are."""
    return DeviceEmbeddingPages(config, pool, shared.pages(pool)) if pool.on_device else HostEmbeddingPages(config, pool)


class HostEmbeddingPages:
    """``EmbeddingPages`` in shared memory."""

    def __init__(self, config: ModelConfig, pool: PagePool) -> None:
        self._pool, self._row_bytes, self._dtype = pool, config.embedding_row_bytes(), torch_dtype(config.dtype)
        self._num_deep = config.num_deep

    def write(self, targets: Sequence[PageRun], rows: Sequence[Tensor]) -> None:
        for target, its in zip(targets, rows, strict=True):
            self._pool.check(target.pages, target.generations)
            self._pool.scatter_rows(target.pages, its.contiguous().view(torch.uint8).numpy().reshape(-1, self._row_bytes))

    def read(self, spans: Sequence[EmbeddingSpan], start: int, embeds: Tensor) -> Tensor | None:
        deep = _no_deep(spans, embeds, self._num_deep)
        for span in spans:
            self._pool.check(span.source.pages, span.source.generations)
            rows = self._pool.gather_rows(span.source.pages, self._row_bytes, span.num_tokens, span.first_row)
            parts = tensor_over(rows.data.cast("B"), torch.uint8).view(self._dtype).view(span.num_tokens, 1 + self._num_deep, -1)
            at = slice(span.start - start, span.start - start + span.num_tokens)
            embeds[at] = parts[:, 0]
            if deep is not None:
                deep[at] = parts[:, 1:]
        return deep

    def warm_up(self) -> None:
        pass


class DeviceEmbeddingPages:
    """``EmbeddingPages`` on a CUDA device: one launch over all runs, or all spans."""

    def __init__(self, config: ModelConfig, pool: PagePool, pages: Tensor) -> None:
        """``pages`` uint8 [num_pages, page_bytes]; generations are the pool's."""
        from ...triton_kernels import embedding_pages  # the only import of Triton: the CPU loads nothing of it

        self._kernels, self._pool = embedding_pages, pool
        self._num_deep, width = config.num_deep, (1 + config.num_deep) * config.language.hidden_size
        self._pages = pages.view(torch_dtype(config.dtype)).view(pool.num_pages, -1, width)

    def write(self, targets: Sequence[PageRun], rows: Sequence[Tensor]) -> None:
        for target in targets:
            self._pool.check(target.pages, target.generations)
        spans = [(target.pages, 0, its.shape[0]) for target, its in zip(targets, rows, strict=True)]
        self._kernels.write_embeddings(torch.cat(list(rows)), self._pages, self._packed(spans))

    def read(self, spans: Sequence[EmbeddingSpan], start: int, embeds: Tensor) -> Tensor | None:
        for span in spans:
            self._pool.check(span.source.pages, span.source.generations)
        if not spans:
            return None
        deep = _no_deep(spans, embeds, self._num_deep)
        rows = embeds if deep is None else torch.cat((embeds, deep.flatten(1)), 1)
        self._kernels.read_embeddings(self._pages, self._packed(stepped_over(spans, start, self._pages.shape[1])), rows)
        if deep is None:
            return None
        embeds.copy_(rows[:, : embeds.shape[1]])
        return rows[:, embeds.shape[1] :].view_as(deep)

    def warm_up(self) -> None:
        """Run both kernels over a row that has no page."""
        nowhere, row = self._packed([((), 0, 1)]), self._pages.new_zeros(1, self._pages.shape[-1])
        self._kernels.write_embeddings(row, self._pages, nowhere)
        self._kernels.read_embeddings(self._pages, nowhere, row)

    def _packed(self, spans: Sequence[Rows]) -> "PageIndices":
        named = [self._kernels.PageSpan(*span) for span in spans]
        return self._kernels.PageIndices.pack(named, self._pages.shape[1], self._pages.device)


def _no_deep(spans: Sequence[EmbeddingSpan], embeds: Tensor, num_deep: int) -> Tensor | None:
    """Zeros [n, D, H] where there are spans and deep parts."""
    return embeds.new_zeros(len(embeds), num_deep, embeds.shape[1]) if spans and num_deep else None


def stepped_over(spans: Sequence[EmbeddingSpan], start: int, page_tokens: int) -> list[Rows]:
    """Spans in the order of their tokens from ``start`` on, with entries without pages for the text between them."""
    found: list[Rows] = []
    reached = start
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > reached:
            found.append(((), 0, span.start - reached))
        found.append((span.source.pages[span.first_row // page_tokens :], span.first_row, span.num_tokens))
        reached = span.start + span.num_tokens
    return found
