"""Decode steps as CUDA graphs: one per batch size of a small set, all captured before the first request, replayed from then on.

A step of a 7B model is some 300 launches, which would take longer to issue than to run. A graph has fixed addresses and shapes: a
smaller batch is filled up with rows of length 0, which store nothing; lengths and pages are read on the device.
Array suffixes: B rows of the step, P pages of its longest row.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .decoder import AfterLayer, Chunk, Decoder, StateRows, Stream

_SMALL = (1, 2, 4)
_STEPS = ((64, 8), (256, 32), (1024, 128))  # up to so many rows, buckets are multiples of so many
MAX_ROWS = _STEPS[-1][0]


def bucket_of(num_rows: int) -> int:
    """The batch size for a step of ``num_rows``. Raises: ValueError for more rows than the largest graph has."""
    for size in _SMALL:
        if num_rows <= size:
            return size
    for most, step in _STEPS:
        if num_rows <= most:
            return -(-num_rows // step) * step
    raise ValueError(f"a step of {num_rows} rows is larger than {MAX_ROWS}")


def buckets(max_rows: int) -> list[int]:
    """The batch sizes for steps of 1 to ``max_rows`` rows, ascending. Raises: ValueError as ``bucket_of``."""
    return sorted({bucket_of(num_rows) for num_rows in range(1, max_rows + 1)})


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The buffers that a graph reads a step from, and their host twins, where a step is assembled. numbers int64 [5, B]: three rows of
    positions (at the start, which is aligned whatever B is), ids, lengths. tables int32 [B, most pages]."""

    numbers: Tensor
    tables: Tensor
    host_numbers: Tensor
    host_tables: Tensor

    @classmethod
    def allocate(cls, num_rows: int, max_pages: int, device: torch.device) -> "StepInputs":
        """All rows are padding."""
        pinned = device.type == "cuda"
        return cls(
            numbers=torch.zeros(5, num_rows, dtype=torch.int64, device=device),
            tables=torch.zeros(num_rows, max_pages, dtype=torch.int32, device=device),
            host_numbers=torch.zeros(5, num_rows, dtype=torch.int64, pin_memory=pinned),
            host_tables=torch.zeros(num_rows, max_pages, dtype=torch.int32, pin_memory=pinned),
        )

    def fill(self, ids: Tensor, positions: Tensor, lengths: Tensor, block_tables: Tensor) -> None:
        """A step's arguments, as ``Decoder.decode`` has them, on the CPU; the rows after them become padding.

        Never waits: the previous step's data have arrived, since its sampled ids have. Only table rows with new pages are
        sent: each once in a page's worth of steps.
        """
        num_rows, host = ids.shape[0], self.host_numbers
        host[:3, :num_rows], host[3, :num_rows], host[4, :num_rows] = positions, ids, lengths
        host[:, num_rows:] = 0
        self.numbers.copy_(host, non_blocking=True)
        tables = block_tables.to(torch.int32)
        known = self.host_tables[:num_rows, : tables.shape[1]]
        for row in (known != tables).any(1).nonzero().flatten().tolist():
            known[row] = tables[row]
            self.tables[row, : tables.shape[1]].copy_(known[row], non_blocking=True)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of ``Decoder.decode``, at fixed addresses."""
        return self.numbers[3], self.numbers[:3], self.numbers[4], self.tables


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: StepInputs
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """``Decoder`` that decodes by replaying captured steps of another. Their memory is one pool, and their logits one buffer: one step
    runs at a time."""

    def __init__(self, model: Decoder, vocab_size: int, max_rows: int, max_pages: int, device: torch.device) -> None:
        """``max_rows``: of the largest possible step; ``max_pages``: of the longest sequence."""
        self._model, self._max_pages, self._device = model, max_pages, device
        self._logits = torch.empty(bucket_of(max_rows), vocab_size, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        # Kernels of a graph have the priority of the stream that they were captured on.
        self._stream = torch.cuda.Stream(device, priority=torch.cuda.current_stream(device).priority)  # type: ignore[no-untyped-call]
        # One for the first runs of all sizes: torch keeps a workspace for each stream that has computed a product.
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._captured: dict[int, _Captured] = {}

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture the steps of all batch sizes, the largest first: the others fit in its memory. A capture takes some 50 ms;
        no stream should wait for it."""
        for size in reversed(buckets(len(self._logits))):
            self._captured[size] = self._capture(size)

    def embed(self, ids: Tensor) -> Tensor:
        return self._model.embed(ids)

    def prefill(
        self,
        chunks: list[Chunk],
        wanted: Collection[int] = (),
        after_layer: AfterLayer | None = None,
        ends: Collection[int] = (),
        stream: Stream | None = None,
        first: int = 0,
    ) -> list[Tensor]:
        return self._model.prefill(chunks, wanted, after_layer, ends, stream, first)

    def prefill_layers(
        self, chunks: list[Chunk], layers: range, stream: Stream | None = None, after_layer: AfterLayer | None = None
    ) -> Stream:
        return self._model.prefill_layers(chunks, layers, stream, after_layer)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def fold(self, borders: Sequence[int], states: StateRows, targets: Sequence[int]) -> None:
        self._model.fold(borders, states, targets)

    @torch.inference_mode()
    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        lengths: Tensor,
        block_tables: Tensor,
        states: StateRows | None = None,
        window_tables: Tensor | None = None,
    ) -> Tensor:
        """As ``Decoder.decode``, after ``capture_all``; the logits are overwritten by the next step. No model on CUDA has states, or
        pages of windows in a pool of their own.

        Raises: ValueError for more than ``max_rows`` rows.
        """
        size = bucket_of(ids.shape[0])
        if size > len(self._logits):
            raise ValueError(f"a step of {ids.shape[0]} rows is larger than {len(self._logits)}")
        step = self._captured[size]
        step.inputs.fill(ids, positions, lengths, block_tables)
        step.graph.replay()
        return self._logits[: ids.shape[0]]

    def _capture(self, size: int) -> _Captured:
        """Run the step over padding, once to compile and load its kernels, and once to record it."""
        inputs = StepInputs.allocate(size, self._max_pages, self._device)
        self._aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._aside):
            self._model.decode(*inputs.arguments())
        torch.cuda.current_stream(self._device).wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self._logits[:size].copy_(self._model.decode(*inputs.arguments()))
        except Exception as error:
            torch.cuda.set_stream(stream)  # torch stays on the capture's own where ending it fails, too, which hides why
            raise error.__context__ or error from None
        return _Captured(inputs, graph)
