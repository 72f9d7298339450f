"""Recurrent states in pages: their grid, and the parts of a page. Pure.

A row's state in DeltaNet layers is a *base*, the state at a multiple of ``GRID`` tokens, and a *log* of the tokens behind it. A step
reads both and appends to the log; only when the log has ``GRID`` entries is the next base written, into another page. A page, of a base
or of a log, is [num_layers, parts]: ``lm.delta_pages`` views it, and the pools of a run have pages of ``StateLayout``'s sizes.
"""

import math
from typing import NamedTuple

from .architecture import DTYPE_BYTES, DeltaConfig, DType, ModelConfig

GRID = 16  # tokens between bases, counted from the start of the sequence
_ALIGNMENT = 64  # bytes, of each part


class Part(NamedTuple):
    """A tensor in a layer's part of a page."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes up to the next part."""
        return -(-math.prod(self.shape) * DTYPE_BYTES[self.dtype] // _ALIGNMENT) * _ALIGNMENT


class BaseParts(NamedTuple):
    """``state``: of each value head, keys by values. ``columns``: of the tokens before the border, as the convolution takes them."""

    state: Part
    columns: Part


class LogParts(NamedTuple):
    """Of the token with index t, at t modulo their first dimension: its normalised keys, its corrected values, its sum of log decays
    since the base, and its column for the convolution."""

    keys: Part
    values: Part
    decays: Part
    columns: Part


class StateLayout(NamedTuple):
    """Bytes of a page of bases and of a log. ``ring``: entries of a log; a step writes none that the step before it needs."""

    base_bytes: int
    log_bytes: int
    ring: int = GRID


def base_parts(delta: DeltaConfig, dtype: DType) -> BaseParts:
    """A layer's part of a base; ``dtype`` is the model's."""
    state = delta.num_value_heads, delta.key_dim, delta.value_dim
    return BaseParts(Part("float32", state), Part(dtype, (delta.conv_size - 1, delta.mixed_size)))


def log_parts(delta: DeltaConfig, dtype: DType, ring: int = GRID) -> LogParts:
    """A layer's part of a log."""
    return LogParts(
        keys=Part("float32", (ring, delta.num_key_heads, delta.key_dim)),
        values=Part("float32", (ring, delta.num_value_heads, delta.value_dim)),
        decays=Part("float32", (ring, delta.num_value_heads)),
        columns=Part(dtype, (delta.conv_size + ring - GRID, delta.mixed_size)),
    )


def state_layout(config: ModelConfig) -> StateLayout | None:
    """The pages of a model's recurrent states; None for a model without any."""
    language = config.language
    if language.delta is None:
        return None
    num_layers = language.num_layers - language.num_kv_layers
    base, log = base_parts(language.delta, config.dtype), log_parts(language.delta, config.dtype)
    return StateLayout(*(num_layers * sum(part.num_bytes for part in parts) for parts in (base, log)))


def border_before(num_tokens: int) -> int:
    """The place of the base that a state of so many tokens begins from."""
    return num_tokens // GRID * GRID
