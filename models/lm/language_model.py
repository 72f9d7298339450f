"""The language model: a decoder of the Llama/Qwen2/Qwen2.5/Qwen3 shape with fused projections and a paged KV cache.

The prefill actor calls ``prefill``, the decode actor ``decode``; they share weights and KV pages through memory that neither owns.
Shapes: N tokens of all sequences together, B sequences, H hidden, V vocabulary.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from ..architecture import LanguageConfig, ModelConfig
from ..checkpoint.weights import torch_dtype
from .decoder import AfterLayer, Chunk, Decoder
from .interface import MakeOperations
from .kv_pages import KvPages
from .layer_ops import operations_for
from .matrices import Matrix, matrix_of, table_of
from .null_model import NullModel

__all__ = ["Chunk", "Decoder", "LanguageModel", "build_language_model"]


def build_language_model(config: ModelConfig, weights: dict[str, Tensor], kv: Tensor, page_tokens: int) -> Decoder:
    """The model of this configuration. ``kv`` uint8 [num_pages, config.kv_page_bytes(page_tokens)]."""
    if config.null is not None:
        return NullModel(config, config.null)
    return LanguageModel(config, weights, kv, page_tokens)


class _Layer:
    """One layer's weights, looked up once. ``next_norm`` is that of the next layer's input, or of the output."""

    def __init__(self, weights: dict[str, Tensor], index: int, config: LanguageConfig) -> None:
        prefix, following = f"layers.{index}.", f"layers.{index + 1}.input_norm"
        self.index = index
        self.input_norm = weights[f"{prefix}input_norm"]
        self.qkv = matrix_of(weights, f"{prefix}qkv")
        self.kv = self.qkv.rows_from(config.num_heads * config.head_dim)
        self.qkv_bias = weights[f"{prefix}qkv_bias"] if config.qkv_bias else None
        self.qk_norms = (weights[f"{prefix}q_norm"], weights[f"{prefix}k_norm"]) if config.qk_norm else None
        self.kv_bias = None if self.qkv_bias is None else self.qkv_bias[config.num_heads * config.head_dim :]
        self.o = matrix_of(weights, f"{prefix}o")
        self.post_norm = weights[f"{prefix}post_norm"]
        self.gate_up = matrix_of(weights, f"{prefix}gate_up")
        self.down = matrix_of(weights, f"{prefix}down")
        self.next_norm = weights[following if index + 1 < config.num_layers else "norm"]


class LanguageModel:
    """``Decoder`` on the device where its KV pool and weights lie. The latter are views (``weights.attach_weights``), never copied."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        kv: Tensor,
        page_tokens: int,
        make_operations: MakeOperations = operations_for,
    ) -> None:
        language = config.language
        self._config = language
        self._device = kv.device
        self._dtype = torch_dtype(config.dtype)
        self._embeddings = table_of(weights, "embed")
        self._head: Matrix = self._embeddings if language.tie_embeddings else table_of(weights, "lm_head")
        self._layers = [_Layer(weights, i, language) for i in range(language.num_layers)]
        self._operations = make_operations(language, KvPages(language, kv, page_tokens, self._dtype, config.kv_dtype))
        self._attention = self._operations.attention

    def embed(self, ids: Tensor) -> Tensor:
        return self._embeddings.lookup(ids.to(self._device), self._dtype)

    @torch.inference_mode()
    def prefill(self, chunks: list[Chunk], wanted: Collection[int] = (), after_layer: AfterLayer | None = None) -> list[Tensor]:
        spans = [(chunk.start, chunk.start + chunk.embeds.shape[0]) for chunk in chunks]
        self._attention.begin_prefill(spans, [chunk.block_table for chunk in chunks])
        self._operations.begin(torch.cat([chunk.positions for chunk in chunks], 1).to(self._device))
        hidden = torch.cat([chunk.embeds for chunk in chunks])  # a copy even of one: it is added to in place
        normed = self._operations.norm(hidden, self._layers[0].input_norm)
        for layer in self._layers if wanted else self._layers[:-1]:
            q, kv = torch.tensor_split(self._project(layer, normed), [self._config.num_heads], 1)
            normed = self._finish(layer, hidden, self._attention.prefill_attend(layer.index, q, kv.flatten(1)))
            if after_layer is not None:
                after_layer()
        if not wanted:
            self._project_kv(self._layers[-1], normed)
            return []
        parts = torch.split(normed, [chunk.embeds.shape[0] for chunk in chunks])
        return [parts[index] for index in sorted(wanted)]

    @torch.inference_mode()
    def decode(self, ids: Tensor, positions: Tensor, lengths: Tensor, block_tables: Tensor) -> Tensor:
        self._attention.begin_decode(lengths, block_tables)
        self._operations.begin(positions.to(self._device))
        hidden = self.embed(ids)
        normed = self._operations.norm(hidden, self._layers[0].input_norm)
        for layer in self._layers:
            q = self._project(layer, normed)[:, : self._config.num_heads]
            normed = self._finish(layer, hidden, self._attention.decode_attend(layer.index, q))
        return self.logits(normed)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._head.product(hidden).float()

    def _project(self, layer: _Layer, normed: Tensor) -> Tensor:
        """Heads [N, num_heads + 2 x num_kv_heads, head_dim] of a layer, ready for attention; stores K and V."""
        config = self._config
        qkv = layer.qkv.product(normed, layer.qkv_bias)
        heads = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        self._operations.rotate_and_write(layer.index, heads, layer.qk_norms)
        return heads

    def _project_kv(self, layer: _Layer, normed: Tensor) -> None:
        """As ``_project`` for K and V alone: all that prefill needs of the last layer."""
        config = self._config
        kv = layer.kv.product(normed, layer.kv_bias)
        self._operations.rotate_and_write(layer.index, kv.view(-1, 2 * config.num_kv_heads, config.head_dim), layer.qk_norms)

    def _finish(self, layer: _Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        """Compute output projection and MLP after attention, each added to the residual stream ``hidden``, in place. Returns the
        stream normed for the next layer or the output."""
        operations = self._operations
        normed = operations.add_norm(layer.o.product(attended), hidden, layer.post_norm)
        active = operations.silu_mul(layer.gate_up.product(normed))
        return operations.add_norm(layer.down.product(active), hidden, layer.next_norm)
