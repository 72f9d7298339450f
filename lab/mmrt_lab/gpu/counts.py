"""Bytes that must move and operations that must be done, for rates. Pure.

Bytes are read plus written, each value once; operations are two per multiplication and addition, of useful products alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Spans = Sequence[tuple[int, int]]
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Query heads, KV heads and their size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"


HEADS_7B = Heads(num_heads=28, num_kv_heads=4, head_dim=128)
HEADS_8B = Heads(num_heads=32, num_kv_heads=8, head_dim=128)


def decode_bytes(lengths: Sequence[int], num_heads: int, num_kv_heads: int, head_dim: int, value_bytes: int) -> int:
    """K and V of all tokens, with scales where values have 1 byte, and queries and outputs of 2 bytes a value."""
    head = head_dim * value_bytes + (SCALE_BYTES if value_bytes == 1 else 0)
    return sum(lengths) * 2 * num_kv_heads * head + 2 * len(lengths) * num_heads * head_dim * 2


def extend_flops(spans: Spans, num_heads: int, head_dim: int) -> int:
    """Tokens [start, end) of each span over all tokens up to themselves."""
    pairs = sum((end - start) * start + (end - start) * (end - start + 1) // 2 for start, end in spans)
    return 4 * head_dim * num_heads * pairs


def attention_flops(lengths: Sequence[int], num_heads: int, head_dim: int) -> int:
    """Every token over all tokens of its sequence."""
    return 4 * head_dim * num_heads * sum(length * length for length in lengths)


def rotate_and_write_bytes(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, value_bytes: int) -> int:
    """A projection of 2 bytes a value read, its queries and keys written back, keys and values written to pages of ``value_bytes``."""
    head = head_dim * value_bytes + (SCALE_BYTES if value_bytes == 1 else 0)
    projection = (num_heads + 2 * num_kv_heads) + (num_heads + num_kv_heads)
    return num_tokens * (projection * head_dim * 2 + 2 * num_kv_heads * head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder's sizes; qkv with bias, weights and KV of 2 bytes a value."""

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    section: tuple[int, ...]

    @property
    def num_fused_heads(self) -> int:
        """Heads of the fused projection."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def product_weights(self) -> int:
        """Weights of a layer's four products."""
        attention = (self.num_fused_heads + self.num_heads) * self.head_dim
        return self.hidden * (attention + 3 * self.intermediate)

    def layer_bytes(self) -> int:
        """Weights of a layer."""
        return 2 * (self.product_weights + self.num_fused_heads * self.head_dim + 2 * self.hidden)

    def kv_bytes(self, num_tokens: int) -> int:
        """KV of one layer."""
        return 2 * num_tokens * 2 * self.num_kv_heads * self.head_dim

    def step_bytes(self, lengths: Sequence[int]) -> int:
        """A decode step: all weights, one row per sequence for the embedding table, and all KV."""
        ends = 2 * self.hidden * (self.vocabulary + 1 + len(lengths))
        return self.num_layers * (self.layer_bytes() + self.kv_bytes(sum(lengths))) + ends

    def prefill_flops(self, spans: Spans) -> int:
        """All layers over chunks, without the output head, which prefill does not need."""
        num_tokens = sum(end - start for start, end in spans)
        attention = extend_flops(spans, self.num_heads, self.head_dim)
        return self.num_layers * (2 * num_tokens * self.product_weights + attention)


SHAPE_3B = Shape(
    name="3B",
    hidden=2048,
    num_layers=36,
    num_heads=16,
    num_kv_heads=2,
    head_dim=128,
    intermediate=11008,
    vocabulary=151936,
    section=(16, 24, 24),
)
SHAPE_7B = Shape(
    name="7B",
    hidden=3584,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    intermediate=18944,
    vocabulary=152064,
    section=(16, 24, 24),
)
"""The language models of Qwen2.5-VL."""
