"""A decoder's layers, each a mixer and a feed-forward, chosen by kind.

``LanguageModel`` runs them one after another. Shapes: N tokens of all sequences together, H hidden.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..architecture import AttentionConfig, DeltaConfig, KvPlace, LanguageConfig
from .delta import Delta, DeltaWeights, Projected
from .feed_forwards import Weights, feed_forward_of
from .interface import Operations
from .matrices import matrix_of


class Mixer(Protocol):
    """What lets a token see earlier ones. Input [N, H] is normed; output [N, H] is for the residual stream."""

    def prefill(self, normed: Tensor) -> Tensor:
        """Mix new tokens of prompts, and store what later tokens need of them."""
        ...

    def store(self, normed: Tensor) -> None:
        """As ``prefill``, without an output: all that the last layer that stores is for in a prompt whose logits nobody wants."""
        ...

    def decode(self, normed: Tensor) -> Tensor:
        """As ``prefill``, of one new token for each sequence."""
        ...


class AttentionMixer:
    """``Mixer`` by attention, with a fused projection."""

    def __init__(self, config: AttentionConfig, prefix: str, place: KvPlace, weights: Weights, operations: Operations) -> None:
        """``place`` of its K and V in a page."""
        num_query_values = config.num_heads * config.head_dim
        self._config, self._place = config, place
        self._operations, self._attention = operations, operations.attentions[place.group]
        self._qkv, self._o = matrix_of(weights, f"{prefix}qkv"), matrix_of(weights, f"{prefix}o")
        self._kv = self._qkv.rows(num_query_values, 2 * config.num_kv_heads * config.head_dim)
        self._qkv_bias = weights[f"{prefix}qkv_bias"] if config.bias else None
        self._kv_bias = None if self._qkv_bias is None else self._qkv_bias[num_query_values:]
        self._o_bias = weights[f"{prefix}o_bias"] if config.output_bias else None
        self._gate = matrix_of(weights, f"{prefix}gate") if config.gated else None
        self._norms = (weights[f"{prefix}q_norm"], weights[f"{prefix}k_norm"]) if config.qk_norm else None

    def prefill(self, normed: Tensor) -> Tensor:
        q, kv = torch.tensor_split(self._project(normed), [self._config.num_heads], 1)
        return self._finish(self._attention.prefill_attend(self._place.layer, q, kv.flatten(1)), normed)

    def store(self, normed: Tensor) -> None:
        self._write(self._kv.product(normed, self._kv_bias))

    def decode(self, normed: Tensor) -> Tensor:
        q = self._project(normed)[:, : self._config.num_heads]
        return self._finish(self._attention.decode_attend(self._place.layer, q), normed)

    def _finish(self, attended: Tensor, normed: Tensor) -> Tensor:
        if self._gate is not None:
            attended = attended * self._gate.product(normed).sigmoid_()
        return self._o.product(attended, self._o_bias)

    def _project(self, normed: Tensor) -> Tensor:
        """Heads [N, num_heads + 2 x num_kv_heads, head_dim], ready for attention; K and V are stored."""
        return self._write(self._qkv.product(normed, self._qkv_bias))

    def _write(self, projected: Tensor) -> Tensor:
        heads = projected.view(projected.shape[0], -1, self._config.head_dim)
        self._operations.rotate_and_write(self._place, heads, self._config.rope, self._norms)
        return heads


class DeltaMixer:
    """``Mixer`` by gated DeltaNet."""

    def __init__(self, config: DeltaConfig, prefix: str, layer: int, weights: Weights, delta: Delta) -> None:
        """``layer``: the place of its states in a page."""
        self._layer, self._delta = layer, delta
        self._sizes = [config.mixed_size, config.num_value_heads * config.value_dim]
        self._mixed_z, self._ba, self._o = (matrix_of(weights, f"{prefix}{name}") for name in ("mixed_z", "ba", "o"))
        self._weights = DeltaWeights(
            conv=weights[f"{prefix}conv"].float().squeeze(1).t().contiguous(),
            rates=-weights[f"{prefix}A_log"].exp(),
            dt_bias=weights[f"{prefix}dt_bias"],
            norm=weights[f"{prefix}delta_norm"],
        )

    def prefill(self, normed: Tensor) -> Tensor:
        return self._o.product(self._delta.prefill(self._layer, self._weights, self._project(normed)))

    def store(self, normed: Tensor) -> None:
        self._delta.prefill(self._layer, self._weights, self._project(normed))

    def decode(self, normed: Tensor) -> Tensor:
        return self._o.product(self._delta.decode(self._layer, self._weights, self._project(normed)))

    def _project(self, normed: Tensor) -> Projected:
        mixed, z = torch.split(self._mixed_z.product(normed), self._sizes, 1)
        return Projected(mixed, z, self._ba.product(normed))


class Layer:
    """One layer, its weights looked up once. ``norm``: of its input."""

    def __init__(self, config: LanguageConfig, index: int, weights: Weights, operations: Operations) -> None:
        kinds, is_last = config.layers[index], index + 1 == config.num_layers
        self.norm, self._post_norm = weights[f"layers.{index}.input_norm"], weights[f"layers.{index}.post_norm"]
        self._following = weights["norm" if is_last else f"layers.{index + 1}.input_norm"]
        self.mixer = _mixer(config, index, weights, operations)
        self._feed_forward = feed_forward_of(kinds.feed_forward, index, weights, operations)
        names = ("mixed_norm", "output_norm") if kinds.has_output_norms else ()
        self._output_norms = [weights[f"layers.{index}.{name}"] for name in names]
        self._operations = operations

    def finish(self, mixed: Tensor, hidden: Tensor, deep: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
        """Add the mixer's output, then the feed-forward's, to the residual stream ``hidden``, in place. Returns the stream normed for
        what follows. ``deep``: parts of the stream, and what is added to them besides."""
        normed = self._operations.add_norm(self._output(0, mixed), hidden, self._post_norm)
        output = self._output(1, self._feed_forward(normed))
        if not deep:
            return self._operations.add_norm(output, hidden, self._following)
        hidden += output
        for part, added in deep:
            part += added
        return self._operations.norm(hidden, self._following)

    def _output(self, number: int, values: Tensor) -> Tensor:
        """What is added of the mixer's output (0), or of the feed-forward's (1)."""
        return self._operations.norm(values, self._output_norms[number]) if self._output_norms else values


def _mixer(config: LanguageConfig, index: int, weights: Weights, operations: Operations) -> Mixer:
    """A layer's mixer."""
    mixer = config.layers[index].mixer
    if isinstance(mixer, DeltaConfig):
        number = sum(isinstance(earlier.mixer, DeltaConfig) for earlier in config.layers[:index])
        assert operations.delta is not None, "a model with recurrent states has pools of them"
        return DeltaMixer(mixer, f"layers.{index}.", number, weights, operations.delta)
    return AttentionMixer(mixer, f"layers.{index}.", config.kv_place(index), weights, operations)


def layers_of(config: LanguageConfig, weights: Weights, operations: Operations) -> list[Layer]:
    """The decoder's layers, in order."""
    return [Layer(config, index, weights, operations) for index in range(config.num_layers)]
