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
from .per_layer import PerLayerMixing


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
    """``Mixer`` by attention, with a fused projection. One without K and V of its own attends to those of an ``owner``."""

    def __init__(
        self,
        config: AttentionConfig,
        prefix: str,
        place: KvPlace,
        weights: Weights,
        operations: Operations,
        owner: "AttentionMixer | None" = None,
    ) -> None:
        """``place`` of the K and V in a page."""
        num_query_values = config.num_heads * config.head_dim
        self._config, self._place, self._owner = config, place, owner
        self._operations, self._attention = operations, operations.attentions[place.group]
        self._qkv, self._o = matrix_of(weights, f"{prefix}qkv"), matrix_of(weights, f"{prefix}o")
        self._kv = self._qkv if owner else self._qkv.rows(num_query_values, 2 * config.num_kv_heads * config.head_dim)
        self._qkv_bias = weights[f"{prefix}qkv_bias"] if config.bias else None
        self._kv_bias = None if self._qkv_bias is None else self._qkv_bias[num_query_values:]
        self._o_bias = weights[f"{prefix}o_bias"] if config.output_bias else None
        self._gate = matrix_of(weights, f"{prefix}gate") if config.gated else None
        q_norm, k_norm = f"{prefix}q_norm", f"{prefix}q_norm" if owner else f"{prefix}k_norm"
        self._norms = (weights[q_norm], weights[k_norm]) if config.qk_norm else None
        self._joint_norms = [weights[f"{prefix}{part}_norm"] for part in "qk"] if config.has_joint_norms else []
        self._ones = torch.ones_like(weights[q_norm]) if config.v_norm and not owner else None
        self.is_shared = False  # the layer owns K and V that others attend to
        self.new_kv: Tensor | None = None  # of the last prompts, [N, R], in an owner that ``is_shared``

    def prefill(self, normed: Tensor) -> Tensor:
        q, own = torch.tensor_split(self._project(normed), [self._config.num_heads], 1)
        kv = own.flatten(1) if self._owner is None else self._owner.new_kv
        assert kv is not None, "an owner is an earlier layer"
        self.new_kv = kv if self.is_shared else None
        return self._finish(self._attention.prefill_attend(self._place.layer, q, kv), normed)

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
        """Heads [N, num_heads + 2 x num_kv_heads, head_dim], ready for attention; K and V are stored. Without own K and V: queries."""
        return self._write(self._qkv.product(normed, self._qkv_bias))

    def _write(self, projected: Tensor) -> Tensor:
        if self._joint_norms:
            self._norm_jointly(projected)
        heads = projected.view(projected.shape[0], -1, self._config.head_dim)
        if self._ones is not None:
            values = heads[:, -self._config.num_kv_heads :]
            values.copy_(self._operations.norm(values, self._ones))
        self._operations.rotate_and_write(None if self._owner else self._place, heads, self._config.rope, self._norms)
        return heads

    def _norm_jointly(self, projected: Tensor) -> None:
        """Norm queries, where there are some, and keys in place."""
        num_keys = self._config.num_kv_heads * self._config.head_dim
        num_queries = projected.shape[1] - 2 * num_keys
        parts = torch.split(projected, [num_queries, num_keys, num_keys], 1)
        for part, weight in zip(parts, self._joint_norms, strict=False):
            if part.shape[1]:
                part.copy_(self._operations.norm(part.contiguous(), weight))


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
    """One layer, its weights looked up once. ``earlier``: layers before it."""

    def __init__(
        self, config: LanguageConfig, index: int, weights: Weights, operations: Operations, earlier: Sequence["Layer"]
    ) -> None:
        kinds, is_last = config.layers[index], index + 1 == config.num_layers
        self._norm, self._post_norm = weights.get(f"layers.{index}.input_norm"), weights.get(f"layers.{index}.post_norm")
        self._following = weights.get("norm" if is_last else f"layers.{index + 1}.input_norm")
        self.mixer: Mixer = _mixer(config, index, weights, operations, [layer.mixer for layer in earlier])
        self._feed_forward = feed_forward_of(kinds.feed_forward, index, weights, operations)
        names = ("mixed_norm", "output_norm") if kinds.has_output_norms else ()
        self._output_norms = [weights[f"layers.{index}.{name}"] for name in names]
        self._per_layer = PerLayerMixing(f"layers.{index}.", weights, operations) if config.per_layer is not None else None
        self._output_scale = kinds.output_scale
        self._scalar = weights[f"layers.{index}.scalar"] if kinds.has_scalar else None
        self._operations = operations

    def begin(self, hidden: Tensor) -> Tensor:
        """The residual stream as the layer's mixer sees it: normed, or itself."""
        return self._normed(hidden, self._norm)

    def finish(self, mixed: Tensor, hidden: Tensor, deep: Sequence[tuple[Tensor, Tensor]] = (), inputs: Tensor | None = None) -> Tensor:
        """Add the mixer's output, then the feed-forward's, to the residual stream ``hidden``, in place. Returns the stream normed for
        what follows. ``deep``: parts of the stream, and what is added to them besides. ``inputs``: the layer's of ``per_layer``."""
        normed = self._add(self._output(0, mixed), hidden, self._post_norm)
        output = self._output(1, self._feed_forward(normed, hidden))
        if not deep and inputs is None and self._scalar is None:
            return self._add(output, hidden, self._following)
        hidden += output
        for part, added in deep:
            part += added
        if self._per_layer is not None and inputs is not None:
            self._per_layer.add(hidden, inputs)
        if self._scalar is not None:
            hidden *= self._scalar
        return self._normed(hidden, self._following)

    def _normed(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        return hidden if weight is None else self._operations.norm(hidden, weight)

    def _add(self, output: Tensor, hidden: Tensor, weight: Tensor | None) -> Tensor:
        """Add to the stream. Returns it normed, where what follows has a norm."""
        return hidden.add_(output) if weight is None else self._operations.add_norm(output, hidden, weight)

    def _output(self, number: int, values: Tensor) -> Tensor:
        """What is added of the mixer's output (0), or of the feed-forward's (1)."""
        values = self._operations.norm(values, self._output_norms[number]) if self._output_norms else values
        return values if self._output_scale == 1.0 else values.mul_(self._output_scale)


def _mixer(config: LanguageConfig, index: int, weights: Weights, operations: Operations, earlier: Sequence[Mixer]) -> Mixer:
    """A layer's mixer. ``earlier``: those of the layers before it."""
    mixer, prefix = config.layers[index].mixer, f"layers.{index}."
    if isinstance(mixer, DeltaConfig):
        number = sum(isinstance(layer.mixer, DeltaConfig) for layer in config.layers[:index])
        assert operations.delta is not None, "a model with recurrent states has pools of them"
        return DeltaMixer(mixer, prefix, number, weights, operations.delta)
    owner = earlier[mixer.owner] if mixer.owner >= 0 else None
    assert owner is None or isinstance(owner, AttentionMixer)
    if owner is not None:
        owner.is_shared = True
    return AttentionMixer(mixer, prefix, config.kv_place(index), weights, operations, owner)


def layers_of(config: LanguageConfig, weights: Weights, operations: Operations) -> list[Layer]:
    """The decoder's layers, in order."""
    layers: list[Layer] = []
    for index in range(config.num_layers):
        layers.append(Layer(config, index, weights, operations, layers))
    return layers
