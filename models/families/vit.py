"""Checkpoint reading shared by families whose tower is a plain vision transformer, SigLIP's or CLIP's: its fields, its processor's, its
tensors. These keep the names that transformers gives to SigLIP's, after ``vision.``."""

import math
from collections.abc import Iterator
from typing import Literal

from ..checkpoint.json_fields import JsonObject
from ..checkpoint.weight_specs import TensorSpec, linear, same
from ..media_config import VisionConfig

_PARTS = {  # newer files have all but the head within ``model.``
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "language.",
    "language_model.": "language.",
    "vision_tower.vision_model.": "vision.",
    "vision_tower.": "vision.",
    "multi_modal_projector.": "vision.merger.",
    **{part: f"language.{part}" for part in ("embed_tokens.", "layers.", "norm.")},  # GGUF's decoders have files of their own
}
_SAVED = {
    "vision.merger.": "multi_modal_projector.",
    "vision.": "vision_tower.",
    "language.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}
_FILTERS = {"lanczos": 1, "bilinear": 2, "bicubic": 3}  # as Pillow numbers them


class VitConfig(VisionConfig, frozen=True, kw_only=True):
    """A plain vision transformer, and the matrices that make a token's row of its patches."""

    has_class: bool = False  # a token of the whole picture, before those of patches
    has_first_norm: bool = False  # before the layers
    has_last_norm: bool = True  # behind them
    has_scales: bool = False  # of what each half of a layer adds, by column
    has_joint_norms: bool = False  # RMSNorms of all query heads together, and of all key heads
    merger_depth: int = 1  # matrices, with GELU between them
    merger_bias: bool = False


Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]


def parse_vit(vision: JsonObject, out: int, merge: int, activation: Activation = "gelu_tanh", epsilon: float = 1e-6) -> VitConfig:
    """``vision_config``. ``out``: the decoder's width; ``merge`` x ``merge`` patches are a token. Defaults are SmolVLM's. Raises
    CheckpointError."""
    theirs = "gelu_pytorch_tanh" if activation == "gelu_tanh" else activation
    vision.text("hidden_act", default=theirs, choices=(theirs,))
    patch = vision.integer("patch_size", default=32)
    config = VitConfig(
        depth=vision.integer("num_hidden_layers", default=12, most=1000),
        hidden_size=vision.integer("hidden_size", default=1152),
        intermediate_size=vision.integer("intermediate_size", default=3072),
        num_heads=vision.integer("num_attention_heads", default=16),
        in_channels=vision.integer("num_channels", default=3, least=3, most=3),
        patch_size=patch,
        temporal_patch_size=1,
        merge_size=merge,
        out_hidden_size=out,
        norm="layer",
        feed_forward=activation,
        patch_bias=True,
        position_side=vision.integer("image_size", default=224, least=patch) // patch,
        split_qkv=True,
        norm_eps=vision.number("layer_norm_eps", default=epsilon),
    )
    if config.hidden_size % config.num_heads:
        raise vision.error("hidden_size", f"is {config.hidden_size}, expected a multiple of {config.num_heads} heads")
    return config


def parse_steps(processor: JsonObject, resample: Literal["lanczos", "bilinear", "bicubic"]) -> None:
    """Raise CheckpointError for an image processor that leaves out a step, or resizes with another filter."""
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not processor.boolean(name, default=True):
            raise processor.error(name, "is false, which is not supported")
    for name, number in (("resample", _FILTERS[resample]), ("rescale_factor", 1 / 255)):
        if not math.isclose(found := processor.number(name, default=number, least=0), number, rel_tol=1e-6):
            raise processor.error(name, f"is {found:g}, expected {number:g}")


def vit_specs(vision: VitConfig) -> Iterator[TensorSpec]:
    """The tower's tensors, and those of its merger."""
    hidden, inner = vision.hidden_size, vision.intermediate_size
    yield same("vision.embeddings.patch_embedding.weight", hidden, vision.in_channels, vision.patch_size, vision.patch_size)
    yield same("vision.embeddings.position_embedding.weight", vision.position_side**2 + vision.has_class, hidden)
    if vision.has_class:
        yield same("vision.embeddings.class_embedding", hidden)
    if vision.patch_bias:
        yield same("vision.embeddings.patch_embedding.bias", hidden)
    if vision.has_first_norm:
        yield from _norm("vision.pre_layrnorm", hidden)
    if vision.has_last_norm:
        yield from _norm("vision.post_layernorm", hidden)
    for i in range(vision.depth):
        yield from _layer_specs(vision, f"vision.encoder.layers.{i}.", inner)
    width = hidden * vision.merge_size**2
    if vision.merger_norm:
        yield from _norm("vision.merger.layer_norm", width)
    for i in range(1, 1 + vision.merger_depth):
        yield from linear(f"vision.merger.linear_{i}", vision.out_hidden_size, width, bias=vision.merger_bias)
        width = vision.out_hidden_size


def _layer_specs(vision: VitConfig, layer: str, inner: int) -> Iterator[TensorSpec]:
    hidden = vision.hidden_size
    for part in ("q", "k", "v", "out"):
        yield from linear(f"{layer}self_attn.{part}_proj", hidden, hidden, bias=vision.biases or part == "out")
    for part in ("q", "k") if vision.has_joint_norms else ():
        yield same(f"{layer}self_attn.{part}_norm.weight", hidden)
    for norm in ("layer_norm1", "layer_norm2"):
        yield from _norm(f"{layer}{norm}", hidden, has_bias=vision.norm == "layer")
    yield from linear(f"{layer}mlp.fc1", inner, hidden)
    yield from linear(f"{layer}mlp.fc2", hidden, inner)
    for part in ("lambda_1", "lambda_2") if vision.has_scales else ():
        yield same(f"{layer}{part}", hidden)


def _norm(name: str, width: int, has_bias: bool = True) -> Iterator[TensorSpec]:
    yield same(f"{name}.weight", width)
    if has_bias:
        yield same(f"{name}.bias", width)


def canonical_name(name: str) -> str:
    """See ``Family``: of models whose tower and decoder are parts beside each other."""
    inner = name.removeprefix("model.")
    return next((ours + inner.removeprefix(theirs) for theirs, ours in _PARTS.items() if inner.startswith(theirs)), inner)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    return next((theirs + name.removeprefix(ours) for ours, theirs in _SAVED.items() if name.startswith(ours)), name)
