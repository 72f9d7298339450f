"""From logits to tokens: guidance, rules, penalties, masks, temperature, top-k, top-p and min-p. Its generator is a pure function.

The decode actor calls it once per step for all rows. A draw depends on the row's logits and on (seed, index of the token) alone,
so it does not matter in which batch, order or process it is made. Filters are transformers' logits warpers, in their order.
Shapes: B rows, R rows that draw, V vocabulary, K candidates.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .interface import Constraints, LogitChanges, Pairs, Sampler, SamplingRows
from .mask_lists import MaskLists, Narrow
from .penalties import Counts, History, Penalties
from .rules import change

_MIN_CANDIDATES = 128
_MORE_CANDIDATES = 16  # times as many: sorting a vocabulary takes far longer than a step of a small model

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def combine_guidance(conditional: Tensor, unconditional: Tensor, scale: Tensor) -> Tensor:
    """CF1: u + s (c - u). ``conditional`` and ``unconditional`` float32 [B, V], ``scale`` float32 [B] -> float32 [B, V]."""
    return torch.addcmul(unconditional, conditional - unconditional, scale.unsqueeze(1))


def sampler_for(vocabulary: int, device: torch.device) -> Sampler:
    """Triton's kernels on a CUDA device, torch otherwise."""
    if device.type == "cuda":
        from .triton_sampler import TritonSampler  # Triton is imported only here: never on the CPU

        return TritonSampler(vocabulary, device)
    return CpuSampler(vocabulary)


class CpuSampler:
    """``Sampler`` by ``combine_guidance``, ``rules``, ``Counts``, ``MaskLists`` and ``sample``."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._counts = Counts([], vocabulary)
        self._masks = MaskLists(vocabulary)

    def remember(self, histories: Sequence[History]) -> None:
        self._counts = Counts(histories, self._vocabulary)
        self._masks.forget()

    def sample(
        self,
        logits: Tensor,
        rows: SamplingRows,
        pairs: Pairs | None = None,
        penalties: Penalties | None = None,
        changes: LogitChanges | None = None,
        masks: Constraints | None = None,
    ) -> Tensor:
        own = logits[: rows.temperature.shape[0]]
        if pairs is not None:
            at = torch.from_numpy(pairs.row)
            companions = logits[torch.from_numpy(pairs.companion_row)]
            own = own.index_copy(0, at, combine_guidance(own[at], companions, torch.from_numpy(pairs.scale)))
        if changes is not None:
            change(own, changes)
        if penalties is not None:
            self._counts.penalise(own, penalties)
        tokens = sample(own, rows) if masks is None else self._sample_masked(own, rows, masks)
        if penalties is not None:
            self._counts.add(tokens[penalties.row])
        return torch.from_numpy(tokens)

    def _sample_masked(self, logits: Tensor, rows: SamplingRows, masks: Constraints) -> NDArray[np.int64]:
        """Sample with the masks of rows that draw, and of greedy rows whose largest logit is forbidden: others do not need theirs."""
        is_greedy = rows.temperature[masks.row] == 0
        narrow = self._mask(logits, masks, np.flatnonzero(~is_greedy).tolist())
        tokens = sample(logits, rows, without=np.concatenate([one.row for one in narrow]) if narrow else None)
        _draw_narrow(tokens, rows, narrow)
        drawn = tokens[masks.row].tolist()
        wrong = [number for number in np.flatnonzero(is_greedy).tolist() if not masks.allows(number, drawn[number])]
        if wrong:
            at = masks.row[wrong]
            narrow = self._mask(logits, masks, wrong)
            tokens[at] = _likeliest(logits[torch.from_numpy(at)])
            _draw_narrow(tokens, rows, narrow)
        return tokens

    def _mask(self, logits: Tensor, masks: Constraints, numbers: list[int]) -> list[Narrow]:
        return self._masks.apply(logits, masks.masks(numbers)) if numbers else []


def _draw_narrow(tokens: NDArray[np.int64], rows: SamplingRows, narrow: list[Narrow]) -> None:
    for one in narrow:
        tokens[one.row] = one.tokens(sample(one.logits, rows.of(one.row)))


def uniforms(seed: NDArray[np.uint64], index: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, index): SplitMix64's stream of a hashed seed, at any place."""
    state = _mix(seed.astype(np.uint64) + _GOLDEN) + _GOLDEN * (index.astype(np.uint64) + np.uint64(1))
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def sample(logits: Tensor, rows: SamplingRows, without: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Draw one token per row. ``logits`` float32 [B, V] -> int64 [B]. Greedy rows take the largest logit, of equals the first.

    ``without``: rows whose tokens do not matter.
    """
    tokens = _likeliest(logits)
    is_drawing = rows.temperature > 0
    if without is not None:
        is_drawing[without] = False
    drawing = np.flatnonzero(is_drawing)
    if not drawing.size:
        return tokens
    draws = uniforms(rows.seed[drawing], rows.index[drawing])
    filtered = (rows.top_k[drawing] > 0) | (rows.top_p[drawing] < 1)
    for members, draw in ((drawing[filtered], _draw_filtered), (drawing[~filtered], _draw_whole)):
        if members.size:
            picked = draws[np.isin(drawing, members)]
            tokens[members] = draw(_scaled(logits, rows, members), rows, members, picked)
    return tokens


def _likeliest(logits: Tensor) -> NDArray[np.int64]:
    """[B]: the first of each row's largest logits. torch takes twelve times as long, of 16 rows of 151,936 logits 2 ms."""
    tokens: NDArray[np.int64] = logits.numpy().argmax(1)
    return tokens


def _scaled(logits: Tensor, rows: SamplingRows, members: NDArray[np.intp]) -> Tensor:
    chosen = logits if members.size == logits.shape[0] else logits[torch.from_numpy(members)]
    return chosen / _column(rows.temperature[members])


def _column(values: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).unsqueeze(1)


def _draw_whole(scores: Tensor, rows: SamplingRows, members: NDArray[np.intp], draws: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rows without top-k and top-p: all of the vocabulary, in the order of ids."""
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    if (rows.min_p[members] > 0).any():
        weights = weights.masked_fill(weights < _column(rows.min_p[members]), 0.0)
    return _pick(weights, draws)


def _draw_filtered(scores: Tensor, rows: SamplingRows, members: NDArray[np.intp], draws: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rows with top-k or top-p: candidates in falling order, equal ones by their ids, as few as will do. Rows that these do not cover
    get more, in the end all."""
    vocabulary = scores.shape[1]
    tokens = np.empty(members.size, np.int64)
    pending = np.arange(members.size)
    num_candidates = min(vocabulary, max(_MIN_CANDIDATES, int(rows.top_k[members].max()) + 16))
    totals = torch.logsumexp(scores, 1, keepdim=True)
    while pending.size:
        inside = torch.from_numpy(pending)
        values, ids = _largest(scores[inside], num_candidates)
        weights, covered = _filter(values, totals[inside], rows, members[pending], num_candidates == vocabulary)
        picked = ids.gather(1, torch.from_numpy(_pick(weights, draws[pending])).unsqueeze(1)).squeeze(1).numpy()
        tokens[pending[covered]] = picked[covered]
        pending = pending[~covered]
        num_candidates = min(vocabulary, _MORE_CANDIDATES * num_candidates)
    return tokens


def _largest(scores: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The ``num`` largest of each row in falling order, and their ids. Equal ones come by their ids, but which of those that equal the
    last are there is ``torch.topk``'s choice and depends on ``num``."""
    if num == scores.shape[1]:
        return torch.sort(scores, dim=1, descending=True, stable=True)
    values, ids = torch.topk(scores, num, dim=1)
    ids, order = ids.sort(1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _filter(
    values: Tensor, totals: Tensor, rows: SamplingRows, members: NDArray[np.intp], complete: bool
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Unnormalised probabilities [R, K] of falling ``values``, 0 where filtered out; and which rows lose nothing beyond K.

    top-k keeps all that equal the k-th; top-p keeps a token if those before it sum to less than p; min-p compares with the first.
    """
    num_candidates = values.shape[1]
    top_k = torch.from_numpy(rows.top_k[members]).unsqueeze(1)
    kth = values.gather(1, (top_k - 1).clamp(0, num_candidates - 1))
    by_k = top_k > 0
    kept = torch.where(by_k, values >= kth, True)
    covered = torch.where(by_k, values[:, -1:] < kth, False) | complete
    weights = torch.exp(values - values[:, :1]).masked_fill(~kept, 0.0).double()
    rest = torch.exp(totals - values[:, :1]).double()
    whole = torch.where(covered & by_k, weights.sum(1, keepdim=True), rest)
    top_p = torch.from_numpy(rows.top_p[members].astype(np.float64)).unsqueeze(1)
    cumulative = weights.cumsum(1)
    covered |= ~by_k & (cumulative[:, -1:] >= top_p * whole)
    beyond = (top_p < 1) & (cumulative - weights >= top_p * whole)
    beyond[:, 0] = False
    weights = weights.masked_fill(beyond, 0.0)
    weights = weights.masked_fill(weights < _column(rows.min_p[members]), 0.0)
    least = torch.where(weights > 0, values, torch.inf).amin(1, keepdim=True)
    covered &= complete | (least > values[:, -1:])  # of those that equal the last some may be missing
    return weights, covered.squeeze(1).numpy()


def _pick(weights: Tensor, draws: NDArray[np.float64]) -> NDArray[np.int64]:
    """The first place where the running sum exceeds draw x total: never one of weight 0, and a valid one even among NaNs."""
    cumulative = weights.cumsum(1, dtype=torch.float64)
    targets = torch.from_numpy(draws).unsqueeze(1) * cumulative[:, -1:]
    found: NDArray[np.int64] = torch.searchsorted(cumulative, targets, right=True).squeeze(1).numpy()
    return np.minimum(found, weights.shape[1] - 1)
