"""Gated DeltaNet over paged states on a CPU, from a layer's projections to the input of its output product, in one kernel.

What is computed for a token, and in which order, is the same in prompts and in steps: its bits depend neither on how a prompt was cut
at borders, nor on whether prefill or decode computed it, nor on its neighbours, nor on the threads. A head's state is read once by a
step, and stays in cache for all of a chunk. Formulas: ``models.lm.delta_rule``; parts of pages: ``models.state_layout``.
Shapes: H value heads, F key heads, K key size, V value size, W numbers of a convolution's column.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .delta_code import ROW_WORDS, Folds, Shape
from .delta_tokens import Prompts, Steps
from .kernel import STORED, Kernel, available_threads, load_kernel, vector_width

DeltaWeights = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of a layer, in float32: the convolution [conv_size, W], the newest token last; rates of decay [H], negative; what is added to a
token's a [H]; the norm of the outputs [V]."""

Numbers = NDArray[np.int64]
"""One for each sequence."""

Snapshots = Sequence[tuple[int, int]]
"""Borders, and pages for the bases there."""

_KINDS: dict[str, type[Prompts | Steps | Folds]] = {"prompts": Prompts, "steps": Steps, "folds": Folds}
_LEAST_WORK = 1 << 17  # numbers of states: fewer are left to one thread


class Pages(NamedTuple):
    """Views of a pool's parts, [pages, layers, ...]: of bases the state [H, K, V] float32 and the columns [conv_size - 1, W]; of logs
    the keys [grid, F, K], values [grid, H, V] and log decays [grid, H] in float32, and the columns [conv_size, W]."""

    states: Tensor
    base_columns: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    log_columns: Tensor


class PagedDelta:
    """DeltaNets over the pages of two pools: ``begin_prompts`` or ``begin_steps`` once per forward, ``mix`` in each layer."""

    def __init__(self, pages: Pages, shape: Shape, epsilon: Tensor) -> None:
        self._pages, self._shape, self._epsilon = pages, shape, epsilon
        self._nothing = torch.zeros(shape.mixed_size, dtype=shape.stored)  # the column before a sequence
        bases, logs = (part.stride(0) * part.element_size() for part in (pages.states, pages.keys))
        self._addresses = [(*(part[0, layer].data_ptr() for part in pages), bases, logs) for layer in range(pages.states.shape[1])]
        self._weights: dict[int, tuple[DeltaWeights, tuple[int, ...]]] = {}  # of a layer, and where they are
        self._kind, self._num_tokens = "steps", 0
        self._passes = [np.empty((0, ROW_WORDS), dtype=np.int64)]  # after each other: rows that go on where those before them end
        self._copies: list[tuple[int, int]] = []  # of bases, after the passes, as (from, to)
        self._scratch = torch.empty(0)  # states of prompts whose bases are not kept

    @classmethod
    def of(cls, pages: Pages, epsilon: Tensor) -> "PagedDelta | None":
        """``epsilon``: of the outputs' norm, float32 []. None where there is no kernel: on a processor without AVX2, for other numbers
        than float32 and bfloat16, for heads that are no whole vectors, and for logs of more than the tokens between two borders."""
        width = vector_width()
        _, _, value_heads, key_dim, value_dim = pages.states.shape
        grid, conv_size, stored = pages.keys.shape[2], pages.log_columns.shape[2], pages.log_columns.dtype
        if width is None or stored not in STORED or key_dim % width or value_dim % width:
            return None
        if pages.base_columns.shape[2] != conv_size - 1:
            return None
        shape = Shape(pages.keys.shape[3], value_heads, key_dim, value_dim, conv_size, grid, stored)
        for kind in _KINDS:
            _kernel(kind, shape)
        return cls(pages, shape, epsilon)

    def begin_prompts(
        self,
        starts: Numbers,
        counts: Numbers,
        bases: Numbers,
        targets: Numbers,
        logs: Numbers,
        snapshots: Sequence[Snapshots] = (),
    ) -> None:
        """Of each sequence: where its new tokens start, a border; how many they are; pages of the base there and for that at the last
        border after them, and of the log for what is behind that. Pages that are none are negative. ``snapshots``, if any: of
        each sequence, borders behind its start, in order, with pages for the bases there. Such a sequence has a target, too.

        Raises: ValueError for a start without the base before it, for pages beyond the pools, and for snapshots that are not at borders
        of the new tokens, or have no page or no target.
        """
        self._check_pages(bases[starts > 0], targets, logs)
        self._check_pages(bases[:0], np.array([page for cuts in snapshots for _, page in cuts], dtype=np.int64), logs[:0])
        for start, count, target, cuts in zip(starts.tolist(), counts.tolist(), targets.tolist(), snapshots, strict=False):
            borders = [start, *(border for border, _ in cuts)]
            is_ordered = borders == sorted({*borders}) and borders[-1] <= start + count
            if not is_ordered or any(target < 0 or border % self._shape.grid or page < 0 for border, page in cuts):
                raise ValueError(f"snapshots {[*cuts]}, as (border, page), of tokens {start} to {start + count}")
        unkept = np.flatnonzero(targets < 0)
        targets = targets.copy()
        targets[unkept] = -1 - np.arange(len(unkept))  # places in scratch memory
        num_numbers = len(unkept) * self._shape.value_heads * self._shape.state_numbers
        if self._scratch.numel() < num_numbers:
            self._scratch = torch.empty(num_numbers)
        self._begin("prompts", counts.cumsum() - counts, counts, starts, bases, targets, logs)
        if any(snapshots):
            self._passes, self._copies = _cut(self._passes[0], snapshots)

    def begin_steps(self, places: Numbers, bases: Numbers, logs: Numbers) -> None:
        """Of each sequence's new token: its place, and pages of the base at the last border before it and of the log.

        Raises: ValueError for a page that is none, and for pages beyond the pools.
        """
        self._check_pages(bases, bases, logs)
        ones, none = np.ones_like(places), np.full_like(places, -1)
        self._begin("steps", np.arange(len(places)), ones, places, bases, none, logs)
        if (logs < 0).any():
            raise ValueError(f"steps without a log: pages {logs.tolist()}")

    def mix(self, layer: int, weights: DeltaWeights, mixed: Tensor, z: Tensor, ba: Tensor) -> Tensor:
        """Outputs [N, H x V] of the new tokens. Prompts' bases and logs after them are written; steps append to their logs.

        Raises: ValueError for tensors of other shapes and dtypes.
        """
        shape, num_tokens, words = self._shape, self._num_tokens, list[int]()
        widths = shape.mixed_size, shape.value_heads * shape.value_dim, 2 * shape.value_heads
        for tensor, size in zip((mixed, z, ba), widths, strict=True):
            stride, step = tensor.stride()
            if tensor.dtype != shape.stored or tensor.shape != (num_tokens, size) or step != 1:
                raise ValueError(f"{tensor.dtype} {list(tensor.shape)}, not {shape.stored} {[num_tokens, size]} in rows")
            words += tensor.data_ptr(), stride
        out = torch.empty(num_tokens, widths[1], dtype=shape.stored)
        words += *self._words_of(layer, weights), self._nothing.data_ptr(), out.data_ptr(), self._scratch.data_ptr()
        for rows in self._passes:
            self._run(rows, len(rows) * shape.key_heads, layer, words, len(rows))
        for part in (self._pages.states, self._pages.base_columns) if self._copies else ():
            for source, target in self._copies:
                part[target, layer].copy_(part[source, layer])
        return out

    def fold(self, borders: Numbers, bases: Numbers, targets: Numbers, logs: Numbers) -> None:
        """Write the bases of all layers at ``borders``, the ends of full logs, into pages ``targets``; ``bases``: those before.

        Raises: ValueError for a page that is none, and for pages beyond the pools.
        """
        pages, grid, conv_size = self._pages, self._shape.grid, self._shape.conv_size
        starts, num_layers = borders - grid, pages.states.shape[1]
        self._check_pages(bases[starts > 0], targets, logs)
        if (targets < 0).any() or (logs < 0).any():
            raise ValueError(f"folds of logs {logs.tolist()} into pages {targets.tolist()}")
        self._begin("folds", np.zeros_like(borders), np.full_like(borders, grid), starts, bases, targets, logs)
        of_layers = (part.stride(1) * part.element_size() for part in (pages.states, pages.keys))
        num_states = num_layers * len(borders)
        self._run(self._passes[0], num_states * self._shape.value_heads, 0, [len(borders), *of_layers], num_states)
        for border, target, log in zip(borders.tolist(), targets.tolist(), logs.tolist(), strict=True):
            places = torch.arange(border - conv_size + 1, border) % conv_size
            torch.index_select(pages.log_columns[log], 1, places, out=pages.base_columns[target])

    def _check_pages(self, bases: Numbers, targets: Numbers, logs: Numbers) -> None:
        if bases.min(initial=0) < 0:
            raise ValueError(f"no state of the tokens before: pages {bases.tolist()}")
        limits = len(self._pages.states), len(self._pages.states), len(self._pages.keys)
        for pages, limit in zip((bases, targets, logs), limits, strict=True):
            if pages.max(initial=0) >= limit:
                raise ValueError(f"page {pages.max()} of a pool of {limit}")

    def _begin(self, kind: str, *columns: Numbers) -> None:
        self._kind, self._passes, self._copies = kind, [np.stack(columns, 1)], []
        self._num_tokens = int(columns[1].sum())

    def _words_of(self, layer: int, weights: DeltaWeights) -> tuple[int, ...]:
        """Where weights are, and the epsilon."""
        known, words = self._weights.get(layer, (None, ()))
        if known is not weights:
            shape = self._shape
            sizes = (shape.conv_size, shape.mixed_size), (shape.value_heads,), (shape.value_heads,), (shape.value_dim,)
            for tensor, size in zip(weights, sizes, strict=True):
                if tensor.dtype != torch.float32 or tensor.shape != size or not tensor.is_contiguous():
                    raise ValueError(f"weights {tensor.dtype} {list(tensor.shape)}, not float32 {list(size)}")
            words = tuple(tensor.data_ptr() for tensor in (*weights, self._epsilon))
            self._weights[layer] = weights, words
        return words

    def _run(self, rows: Numbers, num_items: int, layer: int, words: Sequence[int], num_states: int) -> None:
        work = num_states * self._shape.value_heads * self._shape.state_numbers
        num_threads = available_threads() if work >= _LEAST_WORK else 1
        words = (1, num_items, rows.ctypes.data, *self._addresses[layer], *words)
        _kernel(self._kind, self._shape).run(words, num_threads)


def _cut(rows: Numbers, snapshots: Sequence[Snapshots]) -> tuple[list[Numbers], list[tuple[int, int]]]:
    """Cut sequences at borders that are to be kept, each part beginning from the base that the part before it leaves: a border changes
    no bit. Returns the parts, first those at the starts, and bases to be copied: those of snapshots at the last border of all."""
    passes: list[list[list[int]]] = []
    copies = []
    for (first, count, start, base, target, log), cuts in zip(rows.tolist(), snapshots, strict=True):
        end, begun, parts = start + count, start, list[list[int]]()
        for border, page in cuts:
            if border == end:
                copies.append((target, page))
            else:
                parts.append([first + begun - start, border - begun, begun, base, page, -1])
                begun, base = border, page
        parts.append([first + begun - start, end - begun, begun, base, target, log])
        passes += [[] for _ in range(len(passes), len(parts))]
        for part, together in zip(parts, passes, strict=False):
            together.append(part)
    return [np.array(together, dtype=np.int64) for together in passes], copies


@cache
def _kernel(kind: str, shape: Shape) -> Kernel:
    width = vector_width()
    assert width is not None
    name = "-".join(["delta", kind, *map(str, shape[:-1]), str(STORED[shape.stored])])
    return load_kernel(name, _KINDS[kind](shape, width), 1)
