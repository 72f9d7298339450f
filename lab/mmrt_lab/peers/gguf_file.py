"""The language part of a checkpoint as a GGUF file, for llama.cpp: the same numbers in another format.

Written with the package gguf (extra ``peers``), as llama.cpp's own converter writes the architecture ``qwen2``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mmrt.bench.serve.errors import BenchError
from mmrt.models.architecture import LanguageConfig, ModelConfig

_BLOCK = 32  # columns that share a scale in Q8_0 and Q4_0


class Part(NamedTuple):
    """A tensor of the file. A *matrix* is in the file's format, anything else in float32."""

    name: str
    values: Tensor
    is_matrix: bool = True
    is_vocabulary: bool = False


def check_shape(config: ModelConfig) -> None:
    """Raise BenchError if the language part has no counterpart among llama.cpp's architectures here."""
    language = config.language
    heads = language.heads
    if config.null is not None or not heads.bias or heads.qk_norm or language.ropes[0].stretch:
        raise BenchError(f"the language part of family {config.family!r} is not of the architecture qwen2")
    for name in ("hidden_size", "intermediate_size"):
        if (size := getattr(language, name)) % _BLOCK:
            raise BenchError(f"{name} is {size}, not a multiple of {_BLOCK}, the block of Q8_0 and Q4_0")


def write_gguf(file: Path, config: ModelConfig, weights: dict[str, Tensor], form: str) -> None:
    """Write the file. ``weights``: the checkpoint's in float32. ``form``: F32, F16, Q8_0 or Q4_0; in the last, the matrices of the
    vocabulary have 8 bits, as mmrt's have in int4 and, nearly, those of llama.cpp's own quantizer. Raises: BenchError."""
    import gguf

    check_shape(config)
    language, heads = config.language, config.language.heads
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(language.num_layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(language.hidden_size)
    writer.add_feed_forward_length(language.intermediate_size)
    writer.add_head_count(heads.num_heads)
    writer.add_head_count_kv(heads.num_kv_heads)
    writer.add_key_length(heads.head_dim)
    writer.add_value_length(heads.head_dim)
    writer.add_layer_norm_rms_eps(language.rms_norm_eps)
    writer.add_rope_freq_base(language.ropes[0].theta)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(language.vocab_size)
    for part in parts_of(language, weights):
        kind = gguf.GGMLQuantizationType["Q8_0" if part.is_vocabulary and form == "Q4_0" else form]
        values = part.values.float().numpy()
        if part.is_matrix and form != "F32":
            writer.add_tensor(part.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(part.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def parts_of(language: LanguageConfig, weights: dict[str, Tensor]) -> Iterator[Part]:
    """The file's tensors; mmrt's fused ones are taken apart."""
    yield Part("token_embd.weight", weights["embed"], is_vocabulary=True)
    if not language.tie_embeddings:
        yield Part("output.weight", weights["lm_head"], is_vocabulary=True)
    yield Part("output_norm.weight", weights["norm"], is_matrix=False)
    heads = language.heads
    q, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    for index in range(language.num_layers):
        ours, theirs = f"layers.{index}.", f"blk.{index}."
        for name, values in zip("qkv", torch.split(weights[f"{ours}qkv"], [q, kv, kv]), strict=True):
            yield Part(f"{theirs}attn_{name}.weight", values)
        for name, values in zip("qkv", torch.split(weights[f"{ours}qkv_bias"], [q, kv, kv]), strict=True):
            yield Part(f"{theirs}attn_{name}.bias", values, is_matrix=False)
        for name, values in zip(("gate", "up"), weights[f"{ours}gate_up"].chunk(2), strict=True):
            yield Part(f"{theirs}ffn_{name}.weight", values)
        yield Part(f"{theirs}attn_output.weight", weights[f"{ours}o"])
        yield Part(f"{theirs}ffn_down.weight", weights[f"{ours}down"])
        yield Part(f"{theirs}attn_norm.weight", weights[f"{ours}input_norm"], is_matrix=False)
        yield Part(f"{theirs}ffn_norm.weight", weights[f"{ours}post_norm"], is_matrix=False)
