"""The towers of Gemma 4's small models: their fields, and their tensors, which keep transformers' names after ``vision.`` and
``audio.``."""

import math
from collections.abc import Iterator

from ...checkpoint.json_fields import JsonObject
from ...checkpoint.weight_specs import TensorSpec, linear, number, same
from ...media_config import AudioConfig, VisionConfig

BOUNDS = ("input_min", "input_max", "output_min", "output_max")  # of a product
SUBSAMPLING = 4  # mel frames that convolutions make a row of


class PooledVision(VisionConfig, frozen=True, kw_only=True):
    """A vision transformer whose rows are the means of patches."""

    head_dim: int
    table_size: int  # positions on each axis
    theta: float = 100.0
    is_bounded: bool = False  # inputs and outputs of products are
    is_standardised: bool = False  # rows are, before they are normed


class RawVision(VisionConfig, frozen=True, kw_only=True):
    """No tower: a projection of pixels with norms around it. ``hidden_size``: of its rows, before they become the decoder's."""

    table_size: int  # tokens at a side


class Conformer(AudioConfig, frozen=True, kw_only=True):
    """A conformer (arXiv 2005.08100), each row of which sees ``num_seen`` rows, itself included."""

    channels: tuple[int, int]  # of two convolutions over time and mel, of stride 2 each
    num_seen: int
    conv_size: int  # rows that the convolution of a layer sees
    residual: float  # weight of feed-forwards
    score_cap: float
    most: float  # magnitude of activations
    own_size: int  # of rows, before they are normed and become the decoder's
    is_bounded: bool = True
    norm_eps: float = 1e-6


def parse_vision(vision: JsonObject, hidden_size: int) -> PooledVision:
    """``hidden_size``: the decoder's. Raises CheckpointError."""
    vision.text("hidden_activation", default="gelu_pytorch_tanh", choices=("gelu_pytorch_tanh",))
    if vision.boolean("attention_bias", default=False):
        raise vision.error("attention_bias", "is true; this tower has no biases")
    rope, heads = vision.object("rope_parameters"), vision.integer("num_attention_heads", default=12)
    rope.text("rope_type", default="axial", choices=("axial", "default"))
    if (kv_heads := vision.integer("num_key_value_heads", default=heads)) != heads:
        raise vision.error("num_key_value_heads", f"is {kv_heads}, expected num_attention_heads ({heads})")
    if (head_dim := vision.integer("head_dim", default=64)) % 4:
        raise vision.error("head_dim", f"is {head_dim}, expected a multiple of 4: each half turns by an axis")
    return PooledVision(
        depth=vision.integer("num_hidden_layers", default=16, most=1000),
        hidden_size=vision.integer("hidden_size", default=768),
        intermediate_size=vision.integer("intermediate_size", default=3072),
        num_heads=heads,
        in_channels=3,
        patch_size=vision.integer("patch_size", default=16),
        temporal_patch_size=1,
        merge_size=vision.integer("pooling_kernel_size", default=3),
        out_hidden_size=hidden_size,
        norm_eps=vision.number("rms_norm_eps", default=1e-6),
        head_dim=head_dim,
        table_size=vision.integer("position_embedding_size", default=10240),
        theta=rope.number("rope_theta", default=100.0),
        is_bounded=vision.boolean("use_clipped_linears", default=False),
        is_standardised=vision.boolean("standardize", default=False),
    )


def parse_sound(audio: JsonObject, hidden_size: int) -> Conformer:
    """``hidden_size``: the decoder's. Raises CheckpointError."""
    audio.text("hidden_act", default="silu", choices=("silu",))
    channels = audio.integers("subsampling_conv_channels", default=(128, 32), least=1)
    if len(channels) != 2 or channels[0] % SUBSAMPLING:
        raise audio.error("subsampling_conv_channels", f"is {list(channels)}, expected two numbers, the first a multiple of 4")
    if (right := audio.integer("attention_context_right", default=0, least=0)) != 0:
        raise audio.error("attention_context_right", f"is {right}; only rows that see none behind them are supported")
    hidden, heads = audio.integer("hidden_size", default=1024), audio.integer("num_attention_heads", default=8)
    if hidden % heads or hidden % 2:
        raise audio.error("hidden_size", f"is {hidden}, expected an even multiple of {heads} heads")
    seen, chunk = audio.integer("attention_context_left", default=13, least=2) - 1, audio.integer("attention_chunk_size", default=12)
    if seen != chunk:  # transformers counts places from the middle of a chunk and its context
        raise audio.error("attention_context_left", f"is {seen + 1}, expected attention_chunk_size + 1 ({chunk + 1})")
    return Conformer(
        num_mel_bins=channels[0],  # a projection takes a quarter of as many bins as channels
        num_layers=audio.integer("num_hidden_layers", default=12, most=1000),
        num_heads=heads,
        ffn_size=4 * hidden,
        hidden_size=hidden,
        out_hidden_size=hidden_size,
        max_source_positions=750,
        n_window=2,
        channels=(channels[0], channels[1]),
        num_seen=seen,
        conv_size=audio.integer("conv_kernel_size", default=5),
        residual=audio.number("residual_weight", default=0.5),
        score_cap=audio.number("attention_logit_cap", default=50.0),
        most=audio.number("gradient_clipping", default=1e10),
        own_size=audio.integer("output_proj_dims", default=1536),
        is_bounded=audio.boolean("use_clipped_linears", default=True),
        norm_eps=audio.number("rms_norm_eps", default=1e-6),
    )


def parse_raw_vision(vision: JsonObject, hidden_size: int) -> RawVision:
    """``hidden_size``: the decoder's. Raises CheckpointError."""
    width = vision.integer("mm_embed_dim", default=3840)
    if (found := vision.integer("output_proj_dims", default=width)) != width:
        raise vision.error("output_proj_dims", f"is {found}, expected mm_embed_dim ({width})")
    return RawVision(
        depth=0,
        hidden_size=width,
        intermediate_size=0,
        num_heads=1,
        in_channels=3,
        patch_size=vision.integer("patch_size", default=16) * vision.integer("pooling_kernel_size", default=3),
        temporal_patch_size=1,
        merge_size=1,
        out_hidden_size=hidden_size,
        norm_eps=vision.number("rms_norm_eps", default=1e-6),
        table_size=vision.integer("mm_posemb_size", default=1120),
    )


def parse_raw_sound(audio: JsonObject, hidden_size: int) -> AudioConfig:
    """Samples that a projection makes rows of; ``hidden_size``: the decoder's. Raises CheckpointError."""
    length = audio.integer("audio_embed_dim", default=640)
    if not math.isclose(epsilon := audio.number("rms_norm_eps", default=1e-6), 1e-6):
        raise audio.error("rms_norm_eps", f"is {epsilon:g}, expected 1e-06")
    return AudioConfig(
        num_mel_bins=length,
        num_layers=0,
        num_heads=1,
        ffn_size=0,
        hidden_size=length,
        out_hidden_size=hidden_size,
        max_source_positions=0,
        n_window=1,
    )


def raw_specs(vision: RawVision | None, audio: AudioConfig | None) -> Iterator[TensorSpec]:
    """The tensors of both."""
    if vision is not None:
        hidden, pixels = vision.hidden_size, 3 * vision.patch_size**2
        yield from linear("vision.patch_dense", hidden, pixels)
        for norm, width in (("patch_ln1", pixels), ("patch_ln2", hidden), ("pos_norm", hidden)):
            yield same(f"vision.{norm}.weight", width)
            yield same(f"vision.{norm}.bias", width)
        yield same("vision.pos_embedding", vision.table_size, 2, hidden)
        yield same("vision.projection.weight", vision.out_hidden_size, hidden)
    if audio is not None:
        yield same("audio.projection.weight", audio.out_hidden_size, audio.num_mel_bins)


def vision_specs(vision: PooledVision) -> Iterator[TensorSpec]:
    """The tower's tensors, and its projection."""
    hidden, inner, heads = vision.hidden_size, vision.intermediate_size, vision.num_heads * vision.head_dim
    yield same("vision.patch_embedder.input_proj.weight", hidden, 3 * vision.patch_size**2)
    yield same("vision.patch_embedder.position_embedding_table", 2, vision.table_size, hidden)
    for i in range(vision.depth):
        layer = f"vision.encoder.layers.{i}."
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield same(f"{layer}{norm}_layernorm.weight", hidden)
        for part in ("q", "k", "v"):
            yield from _product(f"{layer}self_attn.{part}_proj", heads, hidden, vision.is_bounded)
        yield from _product(f"{layer}self_attn.o_proj", hidden, heads, vision.is_bounded)
        for part in ("q", "k"):
            yield same(f"{layer}self_attn.{part}_norm.weight", vision.head_dim)
        for part, (rows, columns) in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            yield from _product(f"{layer}mlp.{part}_proj", rows, columns, vision.is_bounded)
    for name in ("std_bias", "std_scale") if vision.is_standardised else ():
        yield same(f"vision.{name}", hidden)
    yield same("vision.projection.weight", vision.out_hidden_size, hidden)


def sound_specs(audio: Conformer) -> Iterator[TensorSpec]:
    """The tower's tensors, and its projection."""
    hidden, (first, second) = audio.hidden_size, audio.channels
    for i, (rows, columns) in enumerate(((first, 1), (second, first))):
        name = f"audio.subsample_conv_projection.layer{i}."
        yield same(f"{name}conv.weight", rows, columns, 3, 3)
        yield same(f"{name}norm.weight", rows)
    yield same("audio.subsample_conv_projection.input_proj_linear.weight", hidden, first // SUBSAMPLING * second)
    for i in range(audio.num_layers):
        layer = f"audio.layers.{i}."
        for part in ("feed_forward1.", "feed_forward2."):
            yield from _product(f"{layer}{part}ffw_layer_1", audio.ffn_size, hidden, audio.is_bounded)
            yield from _product(f"{layer}{part}ffw_layer_2", hidden, audio.ffn_size, audio.is_bounded)
            yield same(f"{layer}{part}pre_layer_norm.weight", hidden)
            yield same(f"{layer}{part}post_layer_norm.weight", hidden)
        for part in ("q_proj", "k_proj", "v_proj", "post"):
            yield from _product(f"{layer}self_attn.{part}", hidden, hidden, audio.is_bounded)
        yield same(f"{layer}self_attn.relative_k_proj.weight", hidden, hidden)
        yield same(f"{layer}self_attn.per_dim_scale", hidden // audio.num_heads)
        yield from _product(f"{layer}lconv1d.linear_start", 2 * hidden, hidden, audio.is_bounded)
        yield from _product(f"{layer}lconv1d.linear_end", hidden, hidden, audio.is_bounded)
        yield same(f"{layer}lconv1d.depthwise_conv1d.weight", hidden, 1, audio.conv_size)
        for norm in ("lconv1d.pre_layer_norm", "lconv1d.conv_norm", "norm_pre_attn", "norm_post_attn", "norm_out"):
            yield same(f"{layer}{norm}.weight", hidden)
    yield from linear("audio.output_proj", audio.own_size, hidden)
    yield same("audio.projection.weight", audio.out_hidden_size, audio.own_size)


def _product(name: str, out: int, inp: int, is_bounded: bool) -> Iterator[TensorSpec]:
    """A projection without a bias, and the bounds of its inputs and outputs."""
    yield same(f"{name}.linear.weight", out, inp)
    for bound in BOUNDS if is_bounded else ():
        yield number(f"{name}.{bound}")
