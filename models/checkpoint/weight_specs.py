"""Specs of a model's tensors: name and shape in memory, and the checkpoint tensors that make it up; and the decoder's specs. Pure.

Decoder projections are fused: ``qkv`` [(num_heads + 2 num_kv_heads) head_dim, hidden] and ``gate_up`` [2 intermediate, hidden],
each stacked from the checkpoint's matrices. All experts of a layer are stacked: ``experts_gate_up`` [experts 2 width, hidden] and
``experts_down`` [experts hidden, width]. Families add their towers' tensors, whose names begin with ``vision.`` and ``audio.``.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ...schema.quantization import IntegerQuantization
from ...schema.weight_layout import INT8G_COLUMNS, PACKED_ROWS
from ..architecture import (
    AttentionConfig,
    DeltaConfig,
    LanguageConfig,
    LayerConfig,
    MlpAndExpertsConfig,
    ModelConfig,
    MoeConfig,
    RopeConfig,
)

Shape = tuple[int, ...]

_IN_INTEGERS = ("int8", "int8g", "int4")
_NORMS_OF_EXPERTS = {  # beside an MLP
    "mlp_norm": "post_feedforward_layernorm_1",
    "experts_input_norm": "pre_feedforward_layernorm_2",
    "experts_norm": "post_feedforward_layernorm_2",
}
INT4_GROUPS = (256, 128, 64, 32)  # columns that may share a scale in int4


class Part(NamedTuple):
    """Rows from ``first`` on of ``[number]`` of a checkpoint tensor."""

    name: str
    shape: Shape  # of the tensor
    number: int
    first: int


class Interleaved(NamedTuple):
    """Some rows of a matrix that is cut into blocks of ``rows`` rows: block ``first``, and every ``of``-th block behind it."""

    rows: int
    first: int
    of: int


class Source(NamedTuple):
    """A checkpoint tensor; ``name`` starts with ``language.``, ``vision.``, ``audio.`` or is ``lm_head.weight``. ``interleaved``: only
    these rows of it are used. ``part``: its place in another tensor, for checkpoints that lack this one. ``order``: within each so many
    rows, which of them are the model's first, second and so on; empty: as they are."""

    name: str
    shape: Shape
    interleaved: Interleaved | None = None
    part: Part | None = None
    order: tuple[int, ...] = ()

    def pieces(self) -> Iterator[slice]:
        """The rows that are used, in order."""
        if self.interleaved is None:
            yield slice(0, self.shape[0] if self.shape else 1)
            return
        rows, first, of = self.interleaved
        for start in range(first * rows, self.shape[0], of * rows):
            yield slice(start, start + rows)


class TensorSpec(NamedTuple):
    """A tensor of the model: its sources, stacked along the first axis. A *matrix* is kept in the format of ``ModelConfig.weights``,
    anything else in ``dtype``. A *vocabulary*, a matrix with a row for each token, is kept in int8g where others are in int8 or int4:
    answers depend on it most, and in a large model it is a small part. A *table*, of which rows are looked up alone, is kept in int8g
    but in a model of float32. ``offset`` is added to what the checkpoint has."""

    name: str
    shape: Shape
    sources: tuple[Source, ...]
    is_matrix: bool = False
    is_vocabulary: bool = False
    is_table: bool = False
    dtype: Literal["model", "float32"] = "model"
    offset: float = 0.0


class StoredPart(NamedTuple):
    """A tensor in the memory that all processes share; ``dtype`` is torch's name of it."""

    name: str
    dtype: str
    shape: Shape


def scales_of(name: str) -> str:
    """The name of the scales of a matrix of integers."""
    return f"{name}.scales"


def stored_parts(spec: TensorSpec, config: ModelConfig, in_8_bits: bool = False) -> tuple[StoredPart, ...]:
    """The tensors that one of the model is kept as: a matrix in int8 has a scale for each row besides, one in int8g a scale for each
    row and group of columns, one in int4 a scale and a zero. ``in_8_bits``: a matrix has 8 bits at least."""
    weights = config.weights
    if spec.is_table and weights not in _IN_INTEGERS:
        weights = "auto" if config.dtype == "float32" else "int8g"
    if not spec.is_matrix or weights == "auto":
        return (StoredPart(spec.name, config.dtype if spec.dtype == "model" else spec.dtype, spec.shape),)
    if weights not in _IN_INTEGERS:
        return (StoredPart(spec.name, weights, spec.shape),)
    rows, columns = spec.shape
    is_wide = spec.is_vocabulary or in_8_bits
    if weights == "int4" and not is_wide and (group := _int4_group(spec, config)):
        scales = StoredPart(scales_of(spec.name), "bfloat16", (rows, columns // group, 2))
        return (StoredPart(spec.name, "uint8", (rows, columns // 2)), scales)
    whole = StoredPart(spec.name, "int8", spec.shape)
    if (weights != "int8" or spec.is_vocabulary) and _has_blocks(spec, INT8G_COLUMNS):
        return (whole, StoredPart(scales_of(spec.name), "bfloat16", (rows, columns // INT8G_COLUMNS)))
    return (whole, StoredPart(scales_of(spec.name), "bfloat16", (rows,)))


def _int4_group(spec: TensorSpec, config: ModelConfig) -> int:
    """Columns of a group of a matrix in int4: those of the checkpoint's groups, or parts of them that int4 has. 0 if the matrix does
    not divide into groups, or its sources into blocks of rows."""
    columns = spec.shape[-1]
    known = config.quantization
    wanted = (known.group_size or columns) if isinstance(known, IntegerQuantization) and known.form == "int4" else min(INT4_GROUPS)
    return next((group for group in INT4_GROUPS if wanted % group == 0), 0) if _has_blocks(spec, wanted) else 0


def _has_blocks(spec: TensorSpec, columns: int) -> bool:
    """Return whether a matrix divides into groups of so many columns, and its sources into blocks of rows."""
    rows = (source.interleaved.rows if source.interleaved else source.shape[0] for source in spec.sources)
    return spec.shape[-1] % columns == 0 and not any(number % PACKED_ROWS for number in rows)


def _fused(name: str, prefix: str, parts: dict[str, int], rest: Shape) -> TensorSpec:
    sources = tuple(Source(f"{prefix}{part}", (rows, *rest)) for part, rows in parts.items())
    return TensorSpec(name, (sum(parts.values()), *rest), sources)


def _matrix(spec: TensorSpec) -> TensorSpec:
    return spec._replace(is_matrix=True)


def _vocabulary(spec: TensorSpec) -> TensorSpec:
    return spec._replace(is_matrix=True, is_vocabulary=True)


def _single(name: str, source: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, (Source(source, shape),))


def _float32(name: str, source: str, *shape: int) -> TensorSpec:
    return _single(name, source, *shape)._replace(dtype="float32")


def _norm(lm: LanguageConfig, name: str, source: str, size: int) -> TensorSpec:
    """A norm's weights as they are multiplied. bfloat16 would lose 8 bits of a small weight to which 1 is added."""
    if not lm.norm_offset:
        return _single(name, source, size)
    return _float32(name, source, size)._replace(offset=lm.norm_offset)


def language_specs(lm: LanguageConfig) -> Iterator[TensorSpec]:
    """The decoder's tensors."""
    hidden = lm.hidden_size
    yield _vocabulary(_single("embed", "language.embed_tokens.weight", lm.vocab_size, hidden))
    if (inputs := lm.per_layer) is not None:
        all_layers = lm.num_layers * inputs.size
        table = _single("per_layer_table", "language.embed_tokens_per_layer.weight", inputs.vocab_size, all_layers)
        yield _vocabulary(table)._replace(is_table=True)
        yield _matrix(_single("per_layer_projection", "language.per_layer_model_projection.weight", all_layers, hidden))
        yield _norm(lm, "per_layer_norm", "language.per_layer_projection_norm.weight", inputs.size)
    for i, layer in enumerate(lm.layers):
        name, source = f"layers.{i}.", f"language.layers.{i}."
        if layer.has_input_norms:
            yield _norm(lm, f"{name}input_norm", f"{source}input_layernorm.weight", hidden)
        if isinstance(layer.mixer, DeltaConfig):
            yield from _delta_specs(layer.mixer, hidden, name, f"{source}linear_attn.")
        else:
            yield from _attention_specs(lm, layer.mixer, name, f"{source}self_attn.")
        if layer.has_input_norms:
            yield _norm(lm, f"{name}post_norm", f"{source}post_attention_layernorm.weight", hidden)
        if layer.has_output_norms:
            yield _norm(lm, f"{name}mixed_norm", f"{source}post_self_attn_layernorm.weight", hidden)
            yield _norm(lm, f"{name}output_norm", f"{source}post_mlp_layernorm.weight", hidden)
        yield from _feed_forward_specs(layer, hidden, name, source)
        if inputs is not None:
            yield _matrix(_single(f"{name}per_layer_gate", f"{source}per_layer_input_gate.weight", inputs.size, hidden))
            yield _matrix(_single(f"{name}per_layer_out", f"{source}per_layer_projection.weight", hidden, inputs.size))
            yield _norm(lm, f"{name}per_layer_out_norm", f"{source}post_per_layer_input_norm.weight", hidden)
        if layer.has_scalar:
            yield _single(f"{name}scalar", f"{source}layer_scalar", 1)
    yield _norm(lm, "norm", "language.norm.weight", hidden)
    if not lm.tie_embeddings:
        yield _vocabulary(_single("lm_head", "lm_head.weight", lm.vocab_size, hidden))


def _attention_specs(lm: LanguageConfig, attention: AttentionConfig, name: str, source: str) -> Iterator[TensorSpec]:
    order = _turning_order(lm.ropes[attention.rope], attention.head_dim)
    for spec in _attention_parts(lm, attention, name, source):
        yield spec._replace(sources=tuple(part._replace(order=order) if _turns(part) else part for part in spec.sources))


def _turning_order(rope: RopeConfig, head_dim: int) -> tuple[int, ...]:
    """The order of a head's values in which the halves of pairs stand apart; empty where they do."""
    if not rope.has_neighbours:
        return ()
    turning = 2 * len(rope.axes) or head_dim
    return (*range(0, turning, 2), *range(1, turning, 2), *range(turning, head_dim))


def _turns(source: Source) -> bool:
    """Return whether it makes or norms queries or keys."""
    return source.name.split(".")[-2] in ("q_proj", "k_proj", "q_norm", "k_norm")


def _attention_parts(lm: LanguageConfig, attention: AttentionConfig, name: str, source: str) -> Iterator[TensorSpec]:
    hidden, head_dim = lm.hidden_size, attention.head_dim
    q, kv = attention.num_heads * head_dim, attention.num_kv_heads * head_dim
    rows = {"q": q, "k": kv, "v": kv} if attention.owner < 0 else {"q": q}
    parts = {"qkv_proj.weight": q + 2 * kv} if attention.is_fused else {f"{part}_proj.weight": n for part, n in rows.items()}
    qkv = _matrix(_fused(f"{name}qkv", source, parts, (hidden,)))
    if attention.k_is_v and attention.owner < 0:
        queries, keys, _ = qkv.sources
        qkv = qkv._replace(sources=(queries, keys, keys))
    if attention.gated:  # the checkpoint has a head's queries, then its gates, in one matrix
        both = Source(f"{source}q_proj.weight", (2 * q, hidden))
        queries, gates = (both._replace(interleaved=Interleaved(head_dim, first, 2)) for first in (0, 1))
        yield qkv._replace(sources=(queries, *qkv.sources[1:]))
        yield _matrix(TensorSpec(f"{name}gate", (q, hidden), (gates,)))
    else:
        yield qkv
    if attention.bias:
        yield _fused(f"{name}qkv_bias", source, {f"{part}_proj.bias": n for part, n in rows.items()}, ())
    if attention.qk_norm or attention.has_joint_norms:
        yield _norm(lm, f"{name}q_norm", f"{source}q_norm.weight", q if attention.has_joint_norms else head_dim)
        if attention.owner < 0:
            yield _norm(lm, f"{name}k_norm", f"{source}k_norm.weight", kv if attention.has_joint_norms else head_dim)
    yield _matrix(_single(f"{name}o", f"{source}o_proj.weight", hidden, q))
    if attention.output_bias:
        yield _single(f"{name}o_bias", f"{source}o_proj.bias", hidden)


def _delta_specs(delta: DeltaConfig, hidden: int, name: str, source: str) -> Iterator[TensorSpec]:
    heads, values = delta.num_value_heads, delta.num_value_heads * delta.value_dim
    parts = {"in_proj_qkv.weight": delta.mixed_size, "in_proj_z.weight": values}
    yield _matrix(_fused(f"{name}mixed_z", source, parts, (hidden,)))
    yield _fused(f"{name}ba", source, {"in_proj_b.weight": heads, "in_proj_a.weight": heads}, (hidden,))
    yield _single(f"{name}conv", f"{source}conv1d.weight", delta.mixed_size, 1, delta.conv_size)
    yield _float32(f"{name}A_log", f"{source}A_log", heads)
    yield _float32(f"{name}dt_bias", f"{source}dt_bias", heads)
    yield _float32(f"{name}delta_norm", f"{source}norm.weight", delta.value_dim)
    yield _matrix(_single(f"{name}o", f"{source}out_proj.weight", hidden, values))


def _feed_forward_specs(layer: LayerConfig, hidden: int, name: str, layer_source: str) -> Iterator[TensorSpec]:
    config, source = layer.feed_forward, f"{layer_source}mlp."
    if isinstance(config, MlpAndExpertsConfig):
        yield from _mlp_specs(config.mlp.intermediate_size, hidden, name, source)
        yield _single(f"{name}router", f"{layer_source}router.proj.weight", config.experts.num_experts, hidden)
        yield _float32(f"{name}router_norm", f"{layer_source}router.scale", hidden)
        yield _float32(f"{name}expert_scales", f"{layer_source}router.per_expert_scale", config.experts.num_experts)
        yield from _experts_specs(config.experts, hidden, f"{name}experts_", f"{layer_source}experts.")
        for norm, its in _NORMS_OF_EXPERTS.items():
            yield _single(f"{name}{norm}", f"{layer_source}{its}.weight", hidden)
        return
    if not isinstance(config, MoeConfig):
        yield from _mlp_specs(config.intermediate_size, hidden, name, source, config.is_fused)
        return
    yield _single(f"{name}router", f"{source}gate.weight", config.num_experts, hidden)
    yield from _experts_specs(config, hidden, f"{name}experts_", f"{source}experts.")
    if config.shared_size:
        yield from _mlp_specs(config.shared_size, hidden, f"{name}shared_", f"{source}shared_expert.")
        yield _single(f"{name}shared_router", f"{source}shared_expert_gate.weight", 1, hidden)


def _mlp_specs(inner: int, hidden: int, name: str, source: str, is_fused: bool = False) -> Iterator[TensorSpec]:
    parts = {"gate_up_proj.weight": 2 * inner} if is_fused else {"gate_proj.weight": inner, "up_proj.weight": inner}
    yield _matrix(_fused(f"{name}gate_up", source, parts, (hidden,)))
    yield _matrix(_single(f"{name}down", f"{source}down_proj.weight", hidden, inner))


def _experts_specs(config: MoeConfig, hidden: int, name: str, source: str) -> Iterator[TensorSpec]:
    """Checkpoints have three tensors for each expert, or two of all experts."""
    experts, inner = config.num_experts, config.expert_size
    stacked = {
        "gate_up": (f"{source}gate_up_proj", (experts, 2 * inner, hidden)),
        "down": (f"{source}down_proj", (experts, hidden, inner)),
    }
    rows = {"gate_up": {"gate_proj": 0, "up_proj": inner}, "down": {"down_proj": 0}}
    for matrix, (whole, shape) in stacked.items():
        part = (shape[1] // len(rows[matrix]), shape[2])
        sources = tuple(
            Source(f"{source}{expert}.{own}.weight", part, part=Part(whole, shape, expert, first))
            for expert in range(experts)
            for own, first in rows[matrix].items()
        )
        yield _matrix(TensorSpec(f"{name}{matrix}", (experts * shape[1], shape[2]), sources))


def same(name: str, *shape: int) -> TensorSpec:
    """A tensor as the checkpoint has it."""
    return _single(name, name, *shape)


def number(name: str) -> TensorSpec:
    """A tensor without axes, which is kept with one."""
    return TensorSpec(name, (1,), (Source(name, ()),))


def linear(name: str, out: int, inp: int, bias: bool = True) -> Iterator[TensorSpec]:
    """Weight and bias of a projection, each ``same``."""
    yield same(f"{name}.weight", out, inp)
    if bias:
        yield same(f"{name}.bias", out)
