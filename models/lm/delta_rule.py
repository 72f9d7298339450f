"""The gated delta rule (Yang et al., 2024) over a base and what is behind it, in float32, for one sequence.

S is the state, keys by values, before the first of some tokens; G_i the sum of their log decays up to token i. With corrected values u,
  u_i = beta_i (v_i - e^G_i S' k_i - sum_{j<i} e^(G_i - G_j) (k_i . k_j) u_j)
  o_i = e^G_i S' q_i + sum_{j<=i} e^(G_i - G_j) (q_i . k_j) u_j
  S after token n = e^G_n S + sum_j e^(G_n - G_j) k_j u_j'.
``block`` solves the first for tokens together, ``step`` for one whose predecessors are known, and ``fold`` is the third. The shapes of
their products depend on nothing but the model and, in a step, on the place in its block: so do the bits.
Shapes: C tokens of a block, M known tokens, H value heads, F key heads (H is a multiple), K key size, V value size.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Normalised keys and scaled queries [C, F, K], values [C, H, V], log decays and betas [C, H]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    betas: Tensor


class Known(NamedTuple):
    """Tokens behind the base whose u is known: keys [M, F, K], u [M, H, V], G [M, H]."""

    keys: Tensor
    values: Tensor
    decays: Tensor


def block(state_HKV: Tensor, tokens: Tokens) -> tuple[Tensor, Known]:
    """Outputs [C, H, V] of tokens that follow the base, and what is known of them then."""
    repeats = tokens.values.shape[1] // tokens.keys.shape[1]
    size = tokens.keys.shape[0]
    k, q = (part.transpose(0, 1).repeat_interleave(repeats, 0) for part in (tokens.keys, tokens.queries))
    beta, decays = tokens.betas.t().contiguous(), tokens.decays.t().contiguous().cumsum(1)
    from_base = torch.bmm(torch.cat((k, q), 1), state_HKV) * decays.exp().repeat(1, 2).unsqueeze(2)
    products = torch.bmm(torch.cat((k, q), 1), k.mT)
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    between = (decays.unsqueeze(2) - decays.unsqueeze(1)).masked_fill_(later, float("-inf")).exp_()
    system = products[:, :size] * between * beta.unsqueeze(2)  # its diagonal counts as 1
    known = (tokens.values.transpose(0, 1) - from_base[:, :size]) * beta.unsqueeze(2)
    u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    out = from_base[:, size:] + torch.bmm(products[:, size:] * between, u)
    return out.transpose(0, 1), Known(tokens.keys, u.transpose(0, 1).contiguous(), decays.t().contiguous())


def step(state_HKV: Tensor, known: Known, token: Tokens) -> tuple[Tensor, Known]:
    """As ``block``, of one token that follows ``known``."""
    num_heads, num_key_heads = token.values.shape[1], token.keys.shape[1]
    kq = torch.stack((token.keys[0], token.queries[0]), 1)  # [F, 2, K]
    repeats = num_heads // num_key_heads
    decay, beta = token.decays[0], token.betas[0].unsqueeze(1)
    if len(known.decays):
        decay = decay + known.decays[-1]
    found = torch.bmm(kq.repeat_interleave(repeats, 0), state_HKV) * decay.exp()[:, None, None]  # [H, 2, V]
    if len(known.decays):
        between = (decay - known.decays).exp_().t().unsqueeze(1)  # [H, 1, M]
        products = torch.bmm(kq, known.keys.permute(1, 2, 0)).repeat_interleave(repeats, 0)
        found = found + torch.bmm(products * between, known.values.transpose(0, 1))
    u = (token.values[0] - found[:, 0]) * beta
    same = (kq[:, 0] * kq[:, 1]).sum(-1).repeat_interleave(repeats, 0)
    out = found[:, 1] + same.unsqueeze(1) * u
    return out.unsqueeze(0), Known(token.keys, u.unsqueeze(0), decay.unsqueeze(0))


def fold(state_HKV: Tensor, known: Known) -> Tensor:
    """The state [H, K, V] after the known tokens."""
    last = known.decays[-1]
    repeats = known.values.shape[1] // known.keys.shape[1]
    keys = known.keys.permute(1, 2, 0).repeat_interleave(repeats, 0) * (last - known.decays).exp_().t().unsqueeze(1)  # [H, K, M]
    return torch.baddbmm(last.exp()[:, None, None] * state_HKV, keys, known.values.transpose(0, 1))
