"""The language model: a decoder of the Llama/Qwen2/Qwen2.5/Qwen3 shape with fused projections and a paged KV cache.

The prefill actor calls ``prefill``, the decode actor ``decode``; both share weights and KV pages through memory that neither owns.
Shapes: N tokens of all sequences together, B sequences, H hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .architecture import LanguageConfig, ModelConfig
from .attention import Attention, CpuAttention
from .decoder import Chunk, Decoder
from .null_model import NullModel
from .rope import Rope, rotate
from .weights import torch_dtype

__all__ = ["Chunk", "Decoder", "LanguageModel", "build_language_model"]


def build_language_model(config: ModelConfig, weights: dict[str, Tensor], kv: Tensor, page_tokens: int) -> Decoder:
    """The model of this configuration. ``kv`` uint8 [num_pages, config.kv_page_bytes(page_tokens)]."""
    if config.null is not None:
        return NullModel(config, config.null)
    return LanguageModel(config, weights, kv, page_tokens)


class _Layer:
    """One layer's weights, by name, looked up once."""

    def __init__(self, weights: dict[str, Tensor], index: int, config: LanguageConfig) -> None:
        prefix = f"layers.{index}."
        self.input_norm = weights[f"{prefix}input_norm"]
        self.qkv = weights[f"{prefix}qkv"]
        self.qkv_bias = weights[f"{prefix}qkv_bias"] if config.qkv_bias else None
        self.q_norm = weights[f"{prefix}q_norm"] if config.qk_norm else None
        self.k_norm = weights[f"{prefix}k_norm"] if config.qk_norm else None
        self.o = weights[f"{prefix}o"]
        self.post_norm = weights[f"{prefix}post_norm"]
        self.gate_up = weights[f"{prefix}gate_up"]
        self.down = weights[f"{prefix}down"]


class LanguageModel:
    """``Decoder`` on the CPU. ``weights`` are views (see ``weights.attach_weights``); nothing of them is copied."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], kv: Tensor, page_tokens: int) -> None:
        language = config.language
        self._config = language
        self._embeddings = weights["embed"]
        self._head = weights["embed" if language.tie_embeddings else "lm_head"]
        self._norm = weights["norm"]
        self._layers = [_Layer(weights, i, language) for i in range(language.num_layers)]
        self._rope = Rope(language)
        self._attention: Attention = CpuAttention(language, kv, page_tokens, torch_dtype(config.dtype))

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._embeddings)

    @torch.inference_mode()
    def prefill(self, chunks: list[Chunk]) -> None:
        spans = [(chunk.start, chunk.start + chunk.embeds.shape[0]) for chunk in chunks]
        self._attention.begin_prefill(spans, [chunk.block_table for chunk in chunks])
        hidden = torch.cat([chunk.embeds for chunk in chunks])
        rotation = self._rope.rotation(torch.cat([chunk.positions for chunk in chunks], 1))
        for index in range(len(self._layers) - 1):
            q, kv = self._project(hidden, index, rotation)
            hidden = self._finish(hidden, index, self._attention.prefill_attend(index, q, kv))
        self._project_kv(hidden, len(self._layers) - 1, rotation)

    @torch.inference_mode()
    def decode(self, ids: Tensor, positions: Tensor, lengths: Tensor, block_tables: Tensor) -> Tensor:
        self._attention.begin_decode(lengths, block_tables)
        hidden = F.embedding(ids, self._embeddings)
        rotation = self._rope.rotation(positions)
        for index in range(len(self._layers)):
            q, _ = self._project(hidden, index, rotation)
            hidden = self._finish(hidden, index, self._attention.decode_attend(index, q))
        return F.linear(self._normed(hidden, self._norm), self._head).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)

    def _project(self, hidden: Tensor, index: int, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries [N, num_heads, head_dim] and K and V [N, 2 x num_kv_heads x head_dim] of a layer; stores the latter."""
        layer, config = self._layers[index], self._config
        qkv = F.linear(self._normed(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
        heads = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        turning = heads[:, : config.num_heads + config.num_kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = torch.split(turning, [config.num_heads, config.num_kv_heads], 1)
            queries.copy_(self._normed(queries, layer.q_norm))
            keys.copy_(self._normed(keys, layer.k_norm))
        rotate(turning, *rotation)
        kv = qkv[:, config.num_heads * config.head_dim :]
        self._attention.write(index, kv)
        return heads[:, : config.num_heads], kv

    def _project_kv(self, hidden: Tensor, index: int, rotation: tuple[Tensor, Tensor]) -> None:
        """As ``_project`` for K and V alone: all that prefill needs of the last layer."""
        layer, config = self._layers[index], self._config
        skip = config.num_heads * config.head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[skip:]
        kv = F.linear(self._normed(hidden, layer.input_norm), layer.qkv[skip:], bias)
        keys = kv.view(-1, 2 * config.num_kv_heads, config.head_dim)[:, : config.num_kv_heads]
        if layer.k_norm is not None:
            keys.copy_(self._normed(keys, layer.k_norm))
        rotate(keys, *rotation)
        self._attention.write(index, kv)

    def _finish(self, hidden: Tensor, index: int, attended: Tensor) -> Tensor:
        """What follows attention: output projection and MLP, each added to the residual stream."""
        layer = self._layers[index]
        hidden = hidden + F.linear(attended, layer.o)
        gate, up = F.linear(self._normed(hidden, layer.post_norm), layer.gate_up).chunk(2, -1)
        return hidden.add_(F.linear(F.silu(gate).mul_(up), layer.down))
