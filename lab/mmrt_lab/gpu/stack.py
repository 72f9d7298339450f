"""A decoder of random weights on the device: products by torch, everything between them by our kernels. For sections ``steps``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrt.triton_kernels.kv_write import Rotary, rotate_and_write_kv
from mmrt.triton_kernels.paged_decode import DecodeWorkspace, paged_decode, plan_decode
from mmrt.triton_kernels.paged_extend import ExtendPlan, paged_extend, plan_extend
from mmrt.triton_kernels.paged_kv import PagedKV
from mmrt.triton_kernels.rms_norm import add_rms_norm, rms_norm
from mmrt.triton_kernels.silu_mul import silu_mul

from .counts import Shape
from .kv_write import make_rotary
from .material import last_slots, make_table

EPSILON = 1e-6
PAGE_TOKENS = 16

Attend = Callable[[Tensor, PagedKV], Tensor]
"""Fused heads [N, num_heads + 2 num_kv_heads, head_dim], rotated, and a layer's pages -> [N, num_heads, head_dim]."""


class Layer(NamedTuple):
    """A layer's weights, as ``models.lm`` has them, and its pages."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    kv: PagedKV


@dataclass(frozen=True, slots=True)
class Stack:
    """``embeddings`` and ``head`` [vocabulary, hidden]; rows' KV in ``table`` int32 [B, W], with room for ``lengths`` int32 [B]."""

    shape: Shape
    embeddings: Tensor
    head: Tensor
    norm: Tensor
    layers: Sequence[Layer]
    rotary: Rotary
    table: Tensor
    lengths: Tensor

    @classmethod
    def make(cls, shape: Shape, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Self:
        """Random weights and KV; the pool is [page, layer, token, K or V, head, element]. Memory: as ``Shape`` counts it."""

        def random(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device).normal_(std=0.02)

        def ones() -> Tensor:
            return torch.ones(shape.hidden, dtype=dtype, device=device)

        table, num_pages = make_table(lengths, PAGE_TOKENS, device)
        pool = torch.empty(
            num_pages, shape.num_layers, PAGE_TOKENS, 2, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device
        ).normal_()
        width = shape.num_fused_heads * shape.head_dim
        layers = [
            Layer(
                ones(),
                random(width, shape.hidden),
                random(width),
                random(shape.hidden, shape.num_heads * shape.head_dim),
                ones(),
                random(2 * shape.intermediate, shape.hidden),
                random(shape.hidden, shape.intermediate),
                PagedKV(*pool[:, index].unbind(2)),
            )
            for index in range(shape.num_layers)
        ]
        ends = random(shape.vocabulary, shape.hidden), random(shape.vocabulary, shape.hidden)
        rotary = make_rotary(shape.head_dim, device, shape.section)
        return cls(shape, *ends, ones(), layers, rotary, table, torch.tensor(lengths, dtype=torch.int32, device=device))

    def run_layers(self, residual: Tensor, positions: Tensor, slots: Tensor, attend: Attend, layers: Sequence[Layer]) -> Tensor:
        """Normed hidden rows after ``layers``. ``residual`` [N, hidden] is changed."""
        shape = self.shape
        next_norms = [*(layer.input_norm for layer in layers[1:]), self.norm]
        normed = rms_norm(residual, layers[0].input_norm, EPSILON)
        for layer, next_norm in zip(layers, next_norms, strict=True):
            heads = F.linear(normed, layer.qkv, layer.qkv_bias).view(-1, shape.num_fused_heads, shape.head_dim)
            rotate_and_write_kv(heads, positions, slots, layer.kv, self.rotary)
            attended = F.linear(attend(heads, layer.kv).flatten(1), layer.o)
            normed = add_rms_norm(attended, residual, layer.post_norm, EPSILON)
            down = F.linear(silu_mul(F.linear(normed, layer.gate_up)), layer.down)
            normed = add_rms_norm(down, residual, next_norm, EPSILON)
        return normed


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Inputs of a step, at fixed addresses: ``ids`` int64 [B], ``positions`` int64 [3, B], ``slots`` int64 [B]."""

    stack: Stack
    ids: Tensor
    positions: Tensor
    slots: Tensor
    workspace: DecodeWorkspace

    @classmethod
    def make(cls, stack: Stack, num_sms: int) -> Self:
        """One new token at the end of each row."""
        shape, lengths = stack.shape, stack.lengths
        num_rows = lengths.shape[0]
        ids = torch.randint(0, shape.vocabulary, (num_rows,), device=lengths.device)
        positions = (lengths.long() - 1).expand(3, num_rows).contiguous()
        slots = last_slots(stack.table, lengths, PAGE_TOKENS)
        workspace = DecodeWorkspace.allocate(num_rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, num_sms, lengths.device)
        return cls(stack, ids, positions, slots, workspace)

    def forward(self) -> Tensor:
        """Logits [B, vocabulary], without sampling. Nothing depends on the host: it can be captured."""
        plan_decode(self.stack.lengths, self.workspace)
        normed = self.run_layers(F.embedding(self.ids, self.stack.embeddings), self.stack.layers)
        return F.linear(normed, self.stack.head)

    def run_layers(self, residual: Tensor, layers: Sequence[Layer]) -> Tensor:
        """After ``plan_decode``."""
        return self.stack.run_layers(residual, self.positions, self.slots, self._attend, layers)

    def _attend(self, heads: Tensor, kv: PagedKV) -> Tensor:
        return paged_decode(heads[:, : self.stack.shape.num_heads], kv, self.stack.table, self.workspace)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Inputs of a chunk of the stack's only row: ``ids`` int64 [N], ``positions`` int64 [3, N], ``slots`` int64 [N]."""

    stack: Stack
    ids: Tensor
    positions: Tensor
    slots: Tensor
    plan: ExtendPlan

    @classmethod
    def make(cls, stack: Stack, start: int, end: int) -> Self:
        """Tokens from ``start`` to ``end``, at most the row's length."""
        shape, device = stack.shape, stack.table.device
        tokens = torch.arange(start, end, device=device)
        slots = stack.table[0].long()[tokens // PAGE_TOKENS] * PAGE_TOKENS + tokens % PAGE_TOKENS
        ids = torch.randint(0, shape.vocabulary, (end - start,), device=device)
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        plan = plan_extend([(start, end)], *heads, stack.embeddings.dtype, device)
        return cls(stack, ids, tokens.expand(3, -1).contiguous(), slots, plan)

    def forward(self) -> Tensor:
        """Normed hidden rows [N, hidden] of all layers, without the head."""
        residual = F.embedding(self.ids, self.stack.embeddings)
        return self.stack.run_layers(residual, self.positions, self.slots, self._attend, self.stack.layers)

    def _attend(self, heads: Tensor, kv: PagedKV) -> Tensor:
        shape = self.stack.shape
        q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
        return paged_extend(q, k, v, kv, self.stack.table, self.plan)
