"""The same in plain torch and Python, one row at a time, with a sort: slow and obvious. For tests."""

from typing import NamedTuple

import torch
from torch import Tensor

from .kernel import IN_PROMPT
from .rows import SamplingRows

_WORD = 2**64


class Drawn(NamedTuple):
    token: int
    kept: Tensor  # ids in falling order
    kept_mass: float  # their weights together, the likeliest token's being 1


def uniform(seed: int, index: int) -> float:
    """SplitMix64 at a place of a hashed seed's stream: a number in [0, 1)."""
    golden = 0x9E3779B97F4A7C15
    return (_mix(_mix(seed + golden) + golden * (index + 1)) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z %= _WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _WORD
    return z ^ (z >> 31)


def scores(logits: Tensor, rows: SamplingRows, row: int, counts: Tensor | None = None) -> Tensor:
    """A row's logits after guidance, penalties and temperature: float32 [V]."""
    score = logits[int(rows.logits_row[row])].float()
    companion = int(rows.companion_row[row])
    if companion >= 0:
        unconditional = logits[companion].float()
        score = unconditional + rows.guidance[row] * (score - unconditional)
    if counts is not None and rows.counts_row[row] >= 0:
        count = counts[int(rows.counts_row[row])]
        generated = count & (IN_PROMPT - 1)
        repeated = torch.where(score > 0, score / rows.repetition[row], score * rows.repetition[row])
        score = torch.where(count != 0, repeated, score)
        score = score - rows.frequency[row] * generated - rows.presence[row] * (generated > 0)
    temperature = rows.temperature[row]  # a tensor: by a number, torch multiplies with its reciprocal on CUDA
    return score / temperature if temperature > 0 else score


def draw(score: Tensor, rows: SamplingRows, row: int) -> Drawn:
    """Filters in transformers' order, then the inverse of the distribution: over falling scores where top-k or top-p is on (of equals
    the lowest id first), else over ids."""
    top_k, top_p, min_p = int(rows.top_k[row]), float(rows.top_p[row]), float(rows.min_p[row])
    falling, ids = torch.sort(score, descending=True, stable=True)
    weights = torch.exp(falling - falling[0]).double()
    kept = falling >= falling[min(top_k, len(falling)) - 1] if top_k else torch.ones_like(falling, dtype=torch.bool)
    if top_p < 1:
        before = (weights * kept).cumsum(0) - weights * kept
        kept = kept & (before < top_p * (weights * kept).sum())
    kept = kept & (weights >= min_p)
    if not top_k and top_p >= 1:
        ids, order = ids.sort()
        weights, kept = weights[order], kept[order]
    running = (weights * kept).cumsum(0)
    target = uniform(int(rows.seed[row]) % _WORD, int(rows.index[row])) * running[-1]
    return Drawn(int(ids[int((running <= target).sum())]), ids[kept], float(running[-1]))


def sample(logits: Tensor, rows: SamplingRows, *, counts: Tensor | None = None) -> Tensor:
    """As ``op.sample``: int64 [N]."""
    tokens = torch.full((rows.num_rows,), -1, dtype=torch.int64, device=logits.device)
    for row in range(rows.num_rows):
        if rows.logits_row[row] >= 0:
            score = scores(logits, rows, row, counts)
            tokens[row] = draw(score, rows, row).token if rows.temperature[row] > 0 else int(score.argmax())
    return tokens
