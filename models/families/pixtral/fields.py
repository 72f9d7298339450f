"""Checkpoint reading of models with Pixtral's tower: its fields, its processor's, its tensors."""

from collections.abc import Iterator
from typing import Literal

from msgspec.structs import replace

from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, linear, same
from ...media_config import VisionConfig, VisionRules
from ..qwen2_5 import fields
from ..text.ropes import rope_fields
from ..vit import parse_steps

_SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_MOST_EDGE = 4096  # of a picture once it is resized


class PixtralConfig(VisionConfig, frozen=True, kw_only=True):
    """Pixtral's tower and its projector. ``norm_eps`` is that of the projector's norm."""

    theta: float
    activation: Literal["silu", "gelu"]
    unit: int  # pixels, of which the sides of pictures are multiples
    merger_bias: bool = False
    has_merge: bool = True  # a norm, and a matrix that makes one of the patches of a token


def parse_tower(root: JsonObject, text: JsonObject, hidden_size: int, activation_without: str, has_merge: bool = True) -> PixtralConfig:
    """``vision_config``; ``activation_without``: of the tower where there is none. ``has_merge``: as in ``PixtralConfig``; without, the
    file is LLaVA's, and a patch is a token. Raises CheckpointError."""
    vision = root.object("vision_config")
    patch, activation = (16, "gelu") if vision.data else (14, activation_without)
    vision = vision.with_defaults({**_SIZES, "patch_size": patch, "hidden_act": activation, "model_type": "pixtral"})
    vision.text("model_type", choices=("pixtral",))
    root.text("projector_hidden_act", default="gelu", choices=("gelu",))
    if not has_merge:
        root.text("vision_feature_select_strategy", default="default", choices=("full",))
    if (layer := root.data.get("vision_feature_layer", -1 if has_merge else -2)) != -1:
        raise root.error("vision_feature_layer", f"is {layer!r}, expected -1")
    rope, patch = rope_fields(vision), vision.integer("patch_size")
    merge = root.integer("spatial_merge_size", default=2) if has_merge else 1
    activation = vision.text("hidden_act", choices=("silu", "gelu"))
    config = PixtralConfig(
        depth=vision.integer("num_hidden_layers", most=1000),
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
        num_heads=vision.integer("num_attention_heads"),
        in_channels=vision.integer("num_channels", default=3, least=3, most=3),
        patch_size=patch,
        temporal_patch_size=1,
        merge_size=merge,
        out_hidden_size=hidden_size,
        split_qkv=True,
        biases=False,
        norm_eps=text.number("rms_norm_eps", default=1e-6),
        theta=(rope if rope.has("rope_theta") else vision).number("rope_theta", default=1e4),
        activation="silu" if activation == "silu" else "gelu",
        unit=patch * merge,
        merger_bias=root.boolean("multimodal_projector_bias", default=not has_merge),
        has_merge=has_merge,
    )
    if config.hidden_size % (4 * config.num_heads):
        raise vision.error("hidden_size", f"is {config.hidden_size}, expected a multiple of 4 x {config.num_heads} heads")
    return config


def processor_unit(files: CheckpointFiles, config: PixtralConfig) -> PixtralConfig:
    """The tower with the image processor's own ``patch_size`` as unit, half a token's side in some files. Raises CheckpointError."""
    image, _, _ = fields.processors(files, video_falls_back=False)
    found = image.data.get("patch_size", 16)
    sides = image.object("patch_size") if isinstance(found, dict) else None
    unit = image.integer("patch_size", default=16) if sides is None else sides.integer("height")
    if (sides is not None and sides.integer("width") != unit) or unit % config.patch_size:
        raise image.error("patch_size", f"is {found!r}, expected a multiple of the vision tower's ({config.patch_size})")
    return replace(config, unit=unit)


def parse_rules(files: CheckpointFiles, vision: PixtralConfig) -> VisionRules:
    """Raises CheckpointError."""
    image, _, _ = fields.processors(files, video_falls_back=False)
    parse_steps(image, "bicubic")
    if image.boolean("do_center_crop", default=False):
        raise image.error("do_center_crop", "is true, which is not supported")
    base, size, factor = VisionRules(), image.object("size"), vision.patch_size * vision.merge_size
    longest = size.integer("longest_edge", default=1024, least=vision.unit, most=_MOST_EDGE)
    if longest % vision.unit and vision.unit % factor:
        raise size.error("longest_edge", f"is {longest}, expected a multiple of patch_size ({vision.unit})")
    return VisionRules(
        patch_size=vision.patch_size,
        temporal_patch_size=1,
        merge_size=vision.merge_size,
        min_pixels=factor**2,
        max_pixels=(-(-longest // factor) * factor) ** 2,
        max_frames=0,
        longest_edge=longest,
        image_mean=image.colour("image_mean", default=base.image_mean),
        image_std=image.colour("image_std", default=base.image_std),
    )


def tower_specs(vision: PixtralConfig) -> Iterator[TensorSpec]:
    """The tower's tensors, and those of its projector."""
    hidden, inner, patch = vision.hidden_size, vision.intermediate_size, vision.patch_size
    yield same("vision.patch_conv.weight", hidden, vision.in_channels, patch, patch)
    yield same("vision.ln_pre.weight", hidden)
    for i in range(vision.depth):
        layer = f"vision.transformer.layers.{i}."
        yield same(f"{layer}attention_norm.weight", hidden)
        for part in "qkvo":
            yield from linear(f"{layer}attention.{part}_proj", hidden, hidden, bias=False)
        yield same(f"{layer}ffn_norm.weight", hidden)
        for part, out, inp in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield from linear(f"{layer}feed_forward.{part}_proj", out, inp, bias=False)
    if vision.has_merge:
        yield same("vision.merger.norm.weight", hidden)
        yield from linear("vision.merger.patch_merger.merging_layer", hidden, hidden * vision.merge_size**2, bias=False)
    yield from linear("vision.merger.linear_1", vision.out_hidden_size, hidden, bias=vision.merger_bias)
    yield from linear("vision.merger.linear_2", vision.out_hidden_size, vision.out_hidden_size, bias=vision.merger_bias)
