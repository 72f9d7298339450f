"""Tensors of Qwen's families that see and hear, and of GLM's: those of their towers, and their names in checkpoints.

Tower tensors keep the names that transformers gives to Qwen2.5's, after ``vision.`` and ``audio.``.
"""

from collections.abc import Iterator, Mapping

from ...architecture import ModelConfig
from ...checkpoint.weight_specs import TensorSpec, language_specs, linear, same
from ...media_config import AudioConfig, VisionConfig


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """Decoder, vision tower, audio tower."""
    specs = list(language_specs(config.language))
    if config.vision is not None:
        specs += vision_specs(config.vision)
    if config.audio is not None:
        specs += audio_specs(config.audio)
    return specs


def vision_specs(vision: VisionConfig) -> Iterator[TensorSpec]:
    """The vision tower's tensors."""
    hidden, inner = vision.hidden_size, vision.intermediate_size
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield same("vision.patch_embed.proj.weight", hidden, *patch)
    if vision.patch_bias:
        yield same("vision.patch_embed.proj.bias", hidden)
    if vision.patch_norm:
        yield same("vision.patch_norm.weight", hidden)
    if vision.position_side:
        yield same("vision.pos_embed.weight", vision.position_side**2, hidden)
    for i in range(vision.depth):
        block = f"vision.blocks.{i}."
        yield from _norm(vision, f"{block}norm1", hidden)
        yield from _norm(vision, f"{block}norm2", hidden)
        if vision.split_qkv:
            for part in "qkv":
                yield from linear(f"{block}attn.{part}", hidden, hidden, bias=vision.biases)
        else:
            yield from linear(f"{block}attn.qkv", 3 * hidden, hidden, bias=vision.biases)
        if vision.qk_norm:
            for part in "qk":
                yield same(f"{block}attn.{part}_norm.weight", hidden // vision.num_heads)
        yield from linear(f"{block}attn.proj", hidden, hidden, bias=vision.biases)
        if vision.feed_forward == "swiglu":
            yield from linear(f"{block}mlp.gate_proj", inner, hidden, bias=vision.biases)
        yield from linear(f"{block}mlp.up_proj", inner, hidden, bias=vision.biases)
        yield from linear(f"{block}mlp.down_proj", hidden, inner, bias=vision.biases)
    if vision.merger_size:
        yield from _gated_merger_specs(vision)
        return
    merged = hidden * vision.merge_size**2
    mergers = {"vision.merger": hidden, **{f"vision.deepstack_merger_list.{i}": merged for i in range(len(vision.deepstack_blocks))}}
    for merger, normed in mergers.items():
        yield from _norm(vision, f"{merger}.ln_q", normed)
        if vision.merger_norm:
            yield from _norm(vision, f"{merger}.pre_norm", normed)
        yield from linear(f"{merger}.mlp.0", merged, merged)
        yield from linear(f"{merger}.mlp.2", vision.out_hidden_size, merged)


def _gated_merger_specs(vision: VisionConfig) -> Iterator[TensorSpec]:
    out, inner = vision.out_hidden_size, vision.merger_size
    yield from _norm(vision, "vision.merger.ln_q", vision.hidden_size)
    yield same("vision.merger.downsample.weight", out, vision.hidden_size, vision.merge_size, vision.merge_size)
    yield same("vision.merger.downsample.bias", out)
    yield same("vision.merger.proj.weight", out, out)
    yield same("vision.merger.post_projection_norm.weight", out)
    yield same("vision.merger.post_projection_norm.bias", out)
    for name in ("gate_proj", "up_proj"):
        yield same(f"vision.merger.{name}.weight", inner, out)
    yield same("vision.merger.down_proj.weight", out, inner)


def _norm(vision: VisionConfig, name: str, width: int) -> Iterator[TensorSpec]:
    yield same(f"{name}.weight", width)
    if vision.norm == "layer":
        yield same(f"{name}.bias", width)


def audio_specs(audio: AudioConfig, has_positions: bool = False) -> Iterator[TensorSpec]:
    """The audio tower's tensors. ``has_positions``: with rows for its positions."""
    hidden = audio.hidden_size
    yield same("audio.conv1.weight", hidden, audio.num_mel_bins, 3)
    yield same("audio.conv1.bias", hidden)
    yield same("audio.conv2.weight", hidden, hidden, 3)
    yield same("audio.conv2.bias", hidden)
    if has_positions:
        yield same("audio.embed_positions.weight", audio.max_source_positions, hidden)
    yield from encoder_specs(audio)
    yield from linear("audio.proj", audio.out_hidden_size, hidden)


def encoder_specs(audio: AudioConfig, has_key_bias: bool = False) -> Iterator[TensorSpec]:
    """The layers of a sound tower, and the norm behind them."""
    hidden = audio.hidden_size
    for i in range(audio.num_layers):
        layer = f"audio.layers.{i}."
        for projection in ("q", "k", "v", "out"):
            yield from linear(f"{layer}self_attn.{projection}_proj", hidden, hidden, bias=has_key_bias or projection != "k")
        yield from linear(f"{layer}fc1", audio.ffn_size, hidden)
        yield from linear(f"{layer}fc2", hidden, audio.ffn_size)
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            yield same(f"{layer}{norm}.weight", hidden)
            yield same(f"{layer}{norm}.bias", hidden)
    yield same("audio.ln_post.weight", hidden)
    yield same("audio.ln_post.bias", hidden)


def canonical_name(name: str) -> str:
    """See ``Family``: transformers has written ``model.``, ``visual.`` and others in front of a part's name."""
    name = name.removeprefix("thinker.")
    if name.startswith(("talker.", "token2wav.", "lm_head.")):
        return name
    name = name.removeprefix("model.")
    for theirs, ours in (("visual.", "vision."), ("audio_tower.", "audio."), ("language_model.model.", "language.")):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return "language." + name.removeprefix("language_model.")


def renamed(name: str, names: Mapping[str, str]) -> str:
    """A tensor of the vision tower, with parts of its name, which begin and end with a dot, replaced; others as they are."""
    if name.startswith("vision."):
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
    return name


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    return placed(name, {"language.": "model.", "vision.": "visual.", "audio.": "audio_tower."})


def nested_name(name: str) -> str:
    """As ``checkpoint_name``, for models whose decoder and tower are both within ``model.``."""
    return placed(name, {"language.": "model.language_model.", "vision.": "model.visual."})


def placed(name: str, parts: Mapping[str, str]) -> str:
    """The name with the first beginning that is one of ``parts`` replaced."""
    for ours, theirs in parts.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name
