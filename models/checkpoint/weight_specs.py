"""Which tensors a model has: name and shape as computed with, and the checkpoint tensors that each is made of. Pure.

Decoder projections are fused: ``qkv`` [(num_heads + 2 num_kv_heads) head_dim, hidden] and ``gate_up`` [2 intermediate, hidden],
each the checkpoint's matrices one under another. Tower tensors keep transformers' names behind ``vision.`` and ``audio.``.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ..architecture import AudioConfig, LanguageConfig, ModelConfig, VisionConfig

Shape = tuple[int, ...]


class Source(NamedTuple):
    """A checkpoint tensor; ``name`` starts with ``language.``, ``vision.``, ``audio.`` or is ``lm_head.weight``."""

    name: str
    shape: Shape


class TensorSpec(NamedTuple):
    """A tensor of the model: its sources, one under another along the first axis."""

    name: str
    shape: Shape
    sources: tuple[Source, ...]


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """All tensors of the model, in the order in which they lie in memory. The null model has none."""
    if config.null is not None:
        return []
    specs = list(_language(config.language))
    if config.vision is not None:
        specs += _vision(config.vision)
    if config.audio is not None:
        specs += _audio(config.audio)
    return specs


def _fused(name: str, prefix: str, parts: dict[str, int], rest: Shape) -> TensorSpec:
    sources = tuple(Source(f"{prefix}{part}", (rows, *rest)) for part, rows in parts.items())
    return TensorSpec(name, (sum(parts.values()), *rest), sources)


def _single(name: str, source: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, (Source(source, shape),))


def _language(lm: LanguageConfig) -> Iterator[TensorSpec]:
    hidden, head_dim = lm.hidden_size, lm.head_dim
    q, kv = lm.num_heads * head_dim, lm.num_kv_heads * head_dim
    yield _single("embed", "language.embed_tokens.weight", lm.vocab_size, hidden)
    for i in range(lm.num_layers):
        name, source = f"layers.{i}.", f"language.layers.{i}."
        rows = {"q": q, "k": kv, "v": kv}
        yield _single(f"{name}input_norm", f"{source}input_layernorm.weight", hidden)
        attention = f"{source}self_attn."
        yield _fused(f"{name}qkv", attention, {f"{p}_proj.weight": n for p, n in rows.items()}, (hidden,))
        if lm.qkv_bias:
            yield _fused(f"{name}qkv_bias", attention, {f"{p}_proj.bias": n for p, n in rows.items()}, ())
        if lm.qk_norm:
            yield _single(f"{name}q_norm", f"{attention}q_norm.weight", head_dim)
            yield _single(f"{name}k_norm", f"{attention}k_norm.weight", head_dim)
        yield _single(f"{name}o", f"{attention}o_proj.weight", hidden, q)
        yield _single(f"{name}post_norm", f"{source}post_attention_layernorm.weight", hidden)
        mlp = {"gate_proj.weight": lm.intermediate_size, "up_proj.weight": lm.intermediate_size}
        yield _fused(f"{name}gate_up", f"{source}mlp.", mlp, (hidden,))
        yield _single(f"{name}down", f"{source}mlp.down_proj.weight", hidden, lm.intermediate_size)
    yield _single("norm", "language.norm.weight", hidden)
    if not lm.tie_embeddings:
        yield _single("lm_head", "lm_head.weight", lm.vocab_size, hidden)


def _same(name: str, *shape: int) -> TensorSpec:
    return _single(name, name, *shape)


def _linear(name: str, out: int, inp: int, bias: bool = True) -> Iterator[TensorSpec]:
    yield _same(f"{name}.weight", out, inp)
    if bias:
        yield _same(f"{name}.bias", out)


def _vision(vision: VisionConfig) -> Iterator[TensorSpec]:
    hidden, inner = vision.hidden_size, vision.intermediate_size
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield _same("vision.patch_embed.proj.weight", hidden, *patch)
    for i in range(vision.depth):
        block = f"vision.blocks.{i}."
        yield _same(f"{block}norm1.weight", hidden)
        yield _same(f"{block}norm2.weight", hidden)
        if vision.split_qkv:
            for part in "qkv":
                yield from _linear(f"{block}attn.{part}", hidden, hidden)
        else:
            yield from _linear(f"{block}attn.qkv", 3 * hidden, hidden)
        yield from _linear(f"{block}attn.proj", hidden, hidden)
        yield from _linear(f"{block}mlp.gate_proj", inner, hidden)
        yield from _linear(f"{block}mlp.up_proj", inner, hidden)
        yield from _linear(f"{block}mlp.down_proj", hidden, inner)
    merged = hidden * vision.merge_size**2
    yield _same("vision.merger.ln_q.weight", hidden)
    yield from _linear("vision.merger.mlp.0", merged, merged)
    yield from _linear("vision.merger.mlp.2", vision.out_hidden_size, merged)


def _audio(audio: AudioConfig) -> Iterator[TensorSpec]:
    hidden = audio.hidden_size
    yield _same("audio.conv1.weight", hidden, audio.num_mel_bins, 3)
    yield _same("audio.conv1.bias", hidden)
    yield _same("audio.conv2.weight", hidden, hidden, 3)
    yield _same("audio.conv2.bias", hidden)
    yield _same("audio.audio_bos_eos_token.weight", 2, audio.out_hidden_size)
    for i in range(audio.num_layers):
        layer = f"audio.layers.{i}."
        for projection in ("q", "k", "v", "out"):
            yield from _linear(f"{layer}self_attn.{projection}_proj", hidden, hidden, bias=projection != "k")
        yield from _linear(f"{layer}fc1", audio.ffn_size, hidden)
        yield from _linear(f"{layer}fc2", hidden, audio.ffn_size)
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            yield _same(f"{layer}{norm}.weight", hidden)
            yield _same(f"{layer}{norm}.bias", hidden)
    yield _same("audio.ln_post.weight", hidden)
    yield _same("audio.ln_post.bias", hidden)
    yield from _linear("audio.proj", audio.out_hidden_size, hidden)
