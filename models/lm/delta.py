"""Gated DeltaNet over paged states: the interface that ``layers`` uses, and its implementation in torch for a CPU.

A layer's products give each token queries, keys and values to be mixed, a gate z, and two numbers of each value head (b, a). Everything
between these and the output's product happens here. Functions of single numbers are made of exp, log1p and division, whose results do
not depend on where a number lies in its tensor: so a token's bits do not depend on how many others are beside it.
Shapes: N tokens of all sequences together, W mixed_size, H value heads, F key heads, V value size.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...cpu_kernels.delta_kernels import PagedDelta
from ..architecture import DeltaConfig
from ..state_layout import GRID, border_before
from .decoder import StateRefs, StateRows
from .delta_pages import DeltaPages
from .delta_rule import Tokens, block, fold, step

_NORM_EPSILON = 1e-6  # of queries and keys
_LINEAR_FROM = 20.0  # softplus of more is the number itself


class DeltaWeights(NamedTuple):
    """``conv`` float32 [conv_size, W], the newest token last; ``rates`` [H], negative; ``dt_bias`` [H]; ``norm`` [V]: all float32."""

    conv: Tensor
    rates: Tensor
    dt_bias: Tensor
    norm: Tensor


class Projected(NamedTuple):
    """Of each token, in the model's dtype: ``mixed`` [N, W], ``z`` [N, H x V], ``ba`` [N, 2 H]."""

    mixed: Tensor
    z: Tensor
    ba: Tensor


class Delta(Protocol):
    """One forward's DeltaNets. ``begin_*`` once per forward, the others in each layer; ``layer`` counts those that have one."""

    def begin_prefill(self, spans: Sequence[tuple[int, int]], states: Sequence[StateRefs]) -> None:
        """``spans`` (start, end) of each sequence's new tokens. Raises: ValueError for a start that is no border or has no base, and
        for a chunk without tokens."""
        ...

    def begin_decode(self, lengths: Tensor, states: StateRows) -> None:
        """``lengths`` int64 [B], the new token included."""
        ...

    def prefill(self, layer: int, weights: DeltaWeights, tokens: Projected) -> Tensor:
        """Mix new tokens, and store base and log after them. Returns [N, H x V] in the model's dtype."""
        ...

    def decode(self, layer: int, weights: DeltaWeights, tokens: Projected) -> Tensor:
        """Mix one new token for each sequence, and append it to the log. Returns [B, H x V]."""
        ...

    def fold(self, borders: Sequence[int], states: StateRows, targets: Sequence[int]) -> None:
        """Write into page ``targets[i]`` the base at ``borders[i]``, the end of row i's full log: of all layers."""
        ...


class CpuDelta:
    """``Delta`` by kernels where there are some; else in torch, blocks and rows one after another, each in shapes of its own."""

    def __init__(self, config: DeltaConfig, num_layers: int, epsilon: float, pages: DeltaPages) -> None:
        """``epsilon``: of the output's norm."""
        self._config, self._num_layers, self._epsilon, self._pages = config, num_layers, epsilon, pages
        self._kernel = PagedDelta.of(pages.parts, torch.tensor(epsilon))
        self._spans: Sequence[tuple[int, int]] = ()
        self._refs: Sequence[StateRefs] = ()
        self._steps: list[tuple[int, int, int]] = []  # of each row: tokens before this step, pages of base and log

    def begin_prefill(self, spans: Sequence[tuple[int, int]], states: Sequence[StateRefs]) -> None:
        for (start, end), refs in zip(spans, states, strict=True):
            if start % GRID:
                raise ValueError(f"a chunk of a model with recurrent states starts at token {start}, expected a multiple of {GRID}")
            if end <= start:
                raise ValueError(f"a chunk of a model with recurrent states has tokens {start} to {end}, expected one at least")
            if start and refs.base_from < 0:
                raise ValueError(f"a chunk starts at token {start} without the state of those before it")
        self._spans, self._refs = spans, states
        if self._kernel is not None:
            starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
            pages = np.array([(refs.base_from, refs.base_to, refs.log) for refs in states], dtype=np.int64).reshape(-1, 3)
            bases, targets, logs = pages.T
            self._kernel.begin_prompts(starts, ends - starts, bases, targets, logs, [refs.snapshots for refs in states])

    def begin_decode(self, lengths: Tensor, states: StateRows) -> None:
        if self._kernel is not None:
            self._kernel.begin_steps((lengths - 1).numpy(), states.bases.numpy(), states.logs.numpy())
        self._steps = list(zip((lengths - 1).tolist(), states.bases.tolist(), states.logs.tolist(), strict=True))

    def prefill(self, layer: int, weights: DeltaWeights, tokens: Projected) -> Tensor:
        if self._kernel is not None:
            return self._kernel.mix(layer, weights, *tokens)
        sizes = [end - start for start, end in self._spans]
        parts = zip(self._spans, self._refs, torch.split(tokens.mixed, sizes), torch.split(tokens.ba, sizes), strict=True)
        outputs = [self._absorb(layer, weights, *part) for part in parts]
        return self._finish(torch.cat(outputs), weights, tokens.z)

    def decode(self, layer: int, weights: DeltaWeights, tokens: Projected) -> Tensor:
        if self._kernel is not None:
            return self._kernel.mix(layer, weights, *tokens)
        pages = self._pages
        columns = [
            torch.cat((self._columns(layer, log, place, tokens.mixed.dtype), mixed))
            for (place, _, log), mixed in zip(self._steps, torch.split(tokens.mixed, 1), strict=True)
        ]
        for (place, _, log), column in zip(self._steps, columns, strict=True):
            pages.append_columns(layer, log, place, column[-1:])
        ready = self._tokens(_convolve(torch.stack(columns, 1), weights.conv)[0], weights, tokens.ba)
        outputs = []
        for row, (place, base, log) in enumerate(self._steps):
            known = pages.known(layer, log, border_before(place), place)
            out, new = step(self._state(layer, base, place), known, Tokens(*(part[row : row + 1] for part in ready)))
            pages.append(layer, log, place, new)
            outputs.append(out)
        return self._finish(torch.cat(outputs), weights, tokens.z)

    def fold(self, borders: Sequence[int], states: StateRows, targets: Sequence[int]) -> None:
        pages, seen = self._pages, self._config.conv_size - 1
        if self._kernel is not None:
            self._kernel.fold(np.array(borders), states.bases.numpy(), np.array(targets), states.logs.numpy())
            return
        for border, base, log, target in zip(borders, states.bases.tolist(), states.logs.tolist(), targets, strict=True):
            for layer in range(self._num_layers):
                new = pages.base(layer, target)
                state = self._state(layer, base, border - 1)
                new.state.copy_(fold(state, pages.known(layer, log, border - GRID, border)))
                new.columns.copy_(pages.columns(layer, log, border - seen, border))

    def _absorb(self, layer: int, weights: DeltaWeights, span: tuple[int, int], refs: StateRefs, mixed: Tensor, ba: Tensor) -> Tensor:
        """Outputs of a chunk; its base, and its log if it has one, are stored."""
        (start, end), config, pages = span, self._config, self._pages
        state = self._state(layer, refs.base_from, start)
        before = pages.base(layer, refs.base_from).columns if start else mixed.new_zeros(config.conv_size - 1, config.mixed_size)
        columns = torch.cat((before, mixed))
        ready = self._tokens(_convolve(columns.unsqueeze(1), weights.conv).squeeze(1), weights, ba)
        outputs, seen, snapshots = [], config.conv_size - 1, dict(refs.snapshots)
        for at in range(0, end - start, GRID):
            size = min(GRID, end - start - at)
            tokens = Tokens(*(F.pad(part[at : at + size], [0, 0] * (part.dim() - 1) + [0, GRID - size]) for part in ready))
            out, known = block(state, tokens)
            outputs.append(out[:size])
            if size == GRID:
                state = fold(state, known)
                if (page := snapshots.get(start + at + GRID)) is not None:
                    self._store(layer, page, state, columns[at + GRID : at + GRID + seen])
            elif refs.log >= 0:
                pages.append(layer, refs.log, start + at, type(known)(*(part[:size] for part in known)))
        border = border_before(end)
        if refs.base_to >= 0 and border:
            self._store(layer, refs.base_to, state, columns[border - start : border - start + seen])
        if refs.log >= 0:
            kept = min(seen, end)
            pages.append_columns(layer, refs.log, end - kept, columns[-kept:])
        return torch.cat(outputs)

    def _store(self, layer: int, page: int, state: Tensor, columns: Tensor) -> None:
        new = self._pages.base(layer, page)
        new.state.copy_(state)
        new.columns.copy_(columns)

    def _state(self, layer: int, page: int, place: int) -> Tensor:
        """The state at the last border before a token's place. At the first there is nothing, whatever the page holds: a prompt of one
        token is not prefilled, so nobody has written it."""
        if border_before(place):
            return self._pages.base(layer, page).state
        config = self._config
        return torch.zeros(config.num_value_heads, config.key_dim, config.value_dim)

    def _columns(self, layer: int, log: int, place: int, dtype: torch.dtype) -> Tensor:
        """The columns before a token's place, likewise."""
        seen = self._config.conv_size - 1
        found = self._pages.columns(layer, log, max(0, place - seen), place)
        return found if place >= seen else torch.cat((torch.zeros(seen - place, self._config.mixed_size, dtype=dtype), found))

    def _tokens(self, mixed: Tensor, weights: DeltaWeights, ba: Tensor) -> Tokens:
        """Queries, keys, values and gates of tokens whose convolution is ``mixed`` float32 [n, W]."""
        config, count = self._config, len(mixed)
        mixed = _silu(mixed.to(ba.dtype).float()).to(ba.dtype).float()
        keys = config.num_key_heads * config.key_dim
        q, k, v = torch.split(mixed, [keys, keys, config.num_value_heads * config.value_dim], 1)
        q, k = (part.reshape(count, config.num_key_heads, config.key_dim) for part in (q, k))
        q, k = (part / ((part * part).sum(-1, keepdim=True) + _NORM_EPSILON).sqrt() for part in (q, k))
        b, a = ba.float().chunk(2, 1)
        betas = _sigmoid(b).to(ba.dtype).float()
        a = a + weights.dt_bias
        decays = weights.rates * torch.where(a > _LINEAR_FROM, a, a.clamp(max=_LINEAR_FROM).exp().log1p())
        values = v.reshape(count, config.num_value_heads, config.value_dim)
        return Tokens(q * config.key_dim**-0.5, k, values, decays, betas)

    def _finish(self, out: Tensor, weights: DeltaWeights, z: Tensor) -> Tensor:
        """Norm and gate of outputs float32 [n, H, V]."""
        out = out.to(z.dtype).float()
        scale = 1 / ((out * out).mean(-1, keepdim=True) + self._epsilon).sqrt()
        gates = _silu(z.float()).view(out.shape)
        return (out * scale * weights.norm * gates).to(z.dtype).flatten(1)


def _convolve(columns: Tensor, conv: Tensor) -> Tensor:
    """Causal and by column: [conv_size - 1 + n, B, W] -> float32 [n, B, W]."""
    size, count = len(conv), len(columns) - len(conv) + 1
    columns = columns.float()
    total = columns[:count] * conv[0]
    for lag in range(1, size):
        total = total + columns[lag : lag + count] * conv[lag]
    return total


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())
