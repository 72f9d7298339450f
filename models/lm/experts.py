"""Experts of a layer: which of them a token goes to, and the sum of what they give, on any device.

Sums are in float32: ``sum_by_expert`` adds a token's experts in the order of their numbers, ``sum_by_mask`` in an order of torch's.
A sum depends on the tokens beside it no more than products do: in a step on a CPU with kernels not at all.
Shapes: N tokens, E experts, k of them for each token, H hidden, I width of an expert.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...cpu_kernels.groups import Groups
from ..architecture import MASKED_TOKENS, MoeConfig
from .matrices import FloatMatrix, Matrix

_PAIRS = 1024  # of a token and an expert, multiplied at once: their activations take some MiB


Activation = Callable[[Tensor], Tensor]


class Experts(NamedTuple):
    """A layer's experts, one below the other: ``gate_up`` [E x 2 I, H] and ``down`` [E x H, I]. ``scales``: float32 [E], by which
    weights are multiplied. ``activate``: in place of the operations' SwiGLU."""

    config: MoeConfig
    gate_up: Matrix
    down: Matrix
    scales: Tensor | None = None
    activate: Activation | None = None


class Routes(NamedTuple):
    """The experts of each token: numbers int64 [N, k], ascending, and float32 weights [N, k] as the dtype of the logits has them."""

    numbers: Tensor
    weights: Tensor


def route(logits_NE: Tensor, config: MoeConfig, scales: Tensor | None = None) -> Routes:
    """The experts with the largest softmax of ``logits``; of equal ones those with the lower numbers. ``scales``: see ``Experts``; with
    them weights are not rounded."""
    chances = logits_NE.softmax(-1, dtype=torch.float32)
    # Keys that differ even where chances are equal: the bits of a chance, which order as it does, then the expert's number, reversed.
    reversed_numbers = torch.arange(config.num_experts - 1, -1, -1, device=logits_NE.device)
    keys = (chances.view(torch.int32).to(torch.int64) << 32).bitwise_or_(reversed_numbers)
    chosen = keys.topk(config.top_k, sorted=False).values
    numbers = (config.num_experts - 1 - (chosen & 0xFFFFFFFF)).sort().values
    weights = chances.gather(1, numbers)
    if config.renormalise:
        weights = weights / weights.sum(1, keepdim=True)
    if scales is not None:
        return Routes(numbers, weights * scales[numbers])
    return Routes(numbers, weights.to(logits_NE.dtype).float())


def sum_by_expert(
    x_NH: Tensor, routes: Routes, experts: Experts, silu_mul: Callable[[Tensor], Tensor], *, alike: bool = False
) -> Tensor:
    """Sums float32 [N, H]: pairs of a token and an expert are sorted by expert, and those of several experts are multiplied at once,
    with ``alike`` as ``Matrix.products`` has it. Sizes are read back from the device."""
    top_k = experts.config.top_k
    of_pairs, order = routes.numbers.flatten().sort(stable=True)
    tokens, weights = order // top_k, routes.weights.flatten()[order].unsqueeze(1)
    found, counts = torch.unique_consecutive(of_pairs, return_counts=True)
    total = x_NH.new_zeros(x_NH.shape, dtype=torch.float32)
    most = 1 if x_NH.is_cuda else _PAIRS  # there a token's experts would be added in any order
    first = 0
    for numbers, sizes in _batches(found.tolist(), counts.tolist(), most):
        pairs = slice(first, first + sum(sizes))
        its, first = tokens[pairs], pairs.stop
        inner = silu_mul(_products(experts, experts.gate_up, x_NH[its], numbers, sizes, alike))
        total.index_add_(0, its, _products(experts, experts.down, inner, numbers, sizes, alike).float().mul_(weights[pairs]))
    return total


def _batches(numbers: list[int], sizes: list[int], most: int) -> Iterator[tuple[list[int], list[int]]]:
    """Experts with their numbers of pairs, in runs of up to ``most`` pairs or of one expert."""
    first = num_pairs = 0
    for index, size in enumerate(sizes):
        if index > first and num_pairs + size > most:
            yield numbers[first:index], sizes[first:index]
            first, num_pairs = index, 0
        num_pairs += size
    if sizes:
        yield numbers[first:], sizes[first:]


def _products(experts: Experts, matrix: Matrix, x: Tensor, numbers: list[int], sizes: list[int], alike: bool) -> Tensor:
    num_values = matrix.num_rows // experts.config.num_experts
    return matrix.products(x, Groups(sizes, [num_values * number for number in numbers], num_values), alike)


def sum_by_mask(x_NH: Tensor, routes: Routes, experts: Experts, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
    """As ``sum_by_expert``, of matrices that are kept as they are multiplied: every expert multiplies all tokens, and what a token did
    not choose counts nothing. Shapes do not depend on routes, and nothing is read back from the device, so a CUDA graph can have it."""
    assert isinstance(experts.down, FloatMatrix)
    num_experts, (num_tokens, hidden) = experts.config.num_experts, x_NH.shape
    down_EIH = experts.down.values.view(num_experts, hidden, -1).transpose(1, 2)
    shares = routes.weights.new_zeros(num_tokens, num_experts).scatter_(1, routes.numbers, routes.weights).t().unsqueeze(2)
    chosen = torch.zeros_like(shares, dtype=torch.bool).scatter_(0, routes.numbers.t().unsqueeze(2), True)
    total = x_NH.new_empty(x_NH.shape, dtype=torch.float32)
    for first in range(0, num_tokens, MASKED_TOKENS):
        rows = slice(first, first + MASKED_TOKENS)
        inner = silu_mul(experts.gate_up.product(x_NH[rows]).view(-1, 2 * experts.config.expert_size))
        found = torch.bmm(inner.view(-1, num_experts, experts.config.expert_size).transpose(0, 1), down_EIH)
        torch.sum(torch.where(chosen[:, rows], found.float() * shares[:, rows], 0.0), 0, out=total[rows])
    return total
