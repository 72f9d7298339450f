"""Specs of a model's tensors: name and shape in memory, and the checkpoint tensors that make it up; and the decoder's specs. Pure.

Decoder projections are fused: ``qkv`` [(num_heads + 2 num_kv_heads) head_dim, hidden] and ``gate_up`` [2 intermediate, hidden],
each stacked from the checkpoint's matrices. Families add their towers' tensors, whose names begin with ``vision.`` and ``audio.``.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ...schema.weight_layout import INT4_ROWS
from ..architecture import AttentionConfig, LanguageConfig, MlpConfig, ModelConfig

Shape = tuple[int, ...]

INT4_GROUPS = (256, 128, 64, 32)  # columns that may share a scale in int4


class Source(NamedTuple):
    """A checkpoint tensor; ``name`` starts with ``language.``, ``vision.``, ``audio.`` or is ``lm_head.weight``."""

    name: str
    shape: Shape


class TensorSpec(NamedTuple):
    """A tensor of the model: its sources, stacked along the first axis. A *matrix* is kept in the format of ``ModelConfig.weights``,
    anything else in the model's dtype. A *vocabulary*, a matrix with a row for each token, is kept in 8 bits at least: answers depend
    on it most, and in a large model it is a small part."""

    name: str
    shape: Shape
    sources: tuple[Source, ...]
    is_matrix: bool = False
    is_vocabulary: bool = False


class StoredPart(NamedTuple):
    """A tensor in the memory that all processes share; ``dtype`` is torch's name of it."""

    name: str
    dtype: str
    shape: Shape


def scales_of(name: str) -> str:
    """The name of the scales of a matrix in int8 or int4."""
    return f"{name}.scales"


def stored_parts(spec: TensorSpec, config: ModelConfig, in_8_bits: bool = False) -> tuple[StoredPart, ...]:
    """The tensors that one of the model is kept as: a matrix in int8 has a scale for each row besides, one in int4 a scale and a zero
    for each row and group of columns. ``in_8_bits``: a matrix has 8 bits at least."""
    if not spec.is_matrix or config.weights == "auto":
        return (StoredPart(spec.name, config.dtype, spec.shape),)
    group = 0 if spec.is_vocabulary or in_8_bits else _int4_group(spec, config)
    if config.weights == "int4" and group:
        rows, columns = spec.shape
        scales = StoredPart(scales_of(spec.name), "bfloat16", (rows, columns // group, 2))
        return (StoredPart(spec.name, "uint8", (rows, columns // 2)), scales)
    if config.weights in ("int8", "int4"):
        return (StoredPart(spec.name, "int8", spec.shape), StoredPart(scales_of(spec.name), "bfloat16", spec.shape[:1]))
    return (StoredPart(spec.name, config.weights, spec.shape),)


def _int4_group(spec: TensorSpec, config: ModelConfig) -> int:
    """Columns of a group of a matrix in int4: those of the checkpoint's groups, or parts of them that int4 has. 0 if the matrix does
    not divide into groups, or its sources into blocks of rows."""
    columns = spec.shape[-1]
    known = config.quantization
    wanted = (known.group_size or columns) if known is not None and known.form == "int4" else min(INT4_GROUPS)
    if columns % wanted or any(source.shape[0] % INT4_ROWS for source in spec.sources):
        return 0
    return next((group for group in INT4_GROUPS if wanted % group == 0), 0)


def _fused(name: str, prefix: str, parts: dict[str, int], rest: Shape) -> TensorSpec:
    sources = tuple(Source(f"{prefix}{part}", (rows, *rest)) for part, rows in parts.items())
    return TensorSpec(name, (sum(parts.values()), *rest), sources)


def _matrix(spec: TensorSpec) -> TensorSpec:
    return spec._replace(is_matrix=True)


def _vocabulary(spec: TensorSpec) -> TensorSpec:
    return spec._replace(is_matrix=True, is_vocabulary=True)


def _single(name: str, source: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, (Source(source, shape),))


def language_specs(lm: LanguageConfig) -> Iterator[TensorSpec]:
    """The decoder's tensors."""
    hidden = lm.hidden_size
    yield _vocabulary(_single("embed", "language.embed_tokens.weight", lm.vocab_size, hidden))
    for i, layer in enumerate(lm.layers):
        name, source = f"layers.{i}.", f"language.layers.{i}."
        yield _single(f"{name}input_norm", f"{source}input_layernorm.weight", hidden)
        yield from _attention_specs(layer.mixer, hidden, name, f"{source}self_attn.")
        yield _single(f"{name}post_norm", f"{source}post_attention_layernorm.weight", hidden)
        yield from _mlp_specs(layer.feed_forward, hidden, name, f"{source}mlp.")
    yield _single("norm", "language.norm.weight", hidden)
    if not lm.tie_embeddings:
        yield _vocabulary(_single("lm_head", "lm_head.weight", lm.vocab_size, hidden))


def _attention_specs(attention: AttentionConfig, hidden: int, name: str, source: str) -> Iterator[TensorSpec]:
    head_dim = attention.head_dim
    q, kv = attention.num_heads * head_dim, attention.num_kv_heads * head_dim
    rows = {"q": q, "k": kv, "v": kv}
    yield _matrix(_fused(f"{name}qkv", source, {f"{part}_proj.weight": n for part, n in rows.items()}, (hidden,)))
    if attention.bias:
        yield _fused(f"{name}qkv_bias", source, {f"{part}_proj.bias": n for part, n in rows.items()}, ())
    if attention.qk_norm:
        yield _single(f"{name}q_norm", f"{source}q_norm.weight", head_dim)
        yield _single(f"{name}k_norm", f"{source}k_norm.weight", head_dim)
    yield _matrix(_single(f"{name}o", f"{source}o_proj.weight", hidden, q))
    if attention.output_bias:
        yield _single(f"{name}o_bias", f"{source}o_proj.bias", hidden)


def _mlp_specs(mlp: MlpConfig, hidden: int, name: str, source: str) -> Iterator[TensorSpec]:
    inner = mlp.intermediate_size
    yield _matrix(_fused(f"{name}gate_up", source, {"gate_proj.weight": inner, "up_proj.weight": inner}, (hidden,)))
    yield _matrix(_single(f"{name}down", f"{source}down_proj.weight", hidden, inner))


def same(name: str, *shape: int) -> TensorSpec:
    """A tensor as the checkpoint has it."""
    return _single(name, name, *shape)


def linear(name: str, out: int, inp: int, bias: bool = True) -> Iterator[TensorSpec]:
    """Weight and bias of a projection, each ``same``."""
    yield same(f"{name}.weight", out, inp)
    if bias:
        yield same(f"{name}.bias", out)
