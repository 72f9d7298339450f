"""InternVL2.5, 3 and 3.5 in transformers' form (``-hf``): text, pictures and videos. As transformers' ``internvl``, with the decoder of
Llama, Qwen2 or Qwen3, also with experts.

A picture is cut into square tiles, and shown once more as a whole. Each frame of a video is one tile.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ....schema.media import MediaKind
from ...architecture import LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...checkpoint.weight_specs import TensorSpec, language_specs
from .. import no_media, vit
from ..family import CheckpointRecipe, made_recipes
from ..qwen2_5 import media, seeing
from ..qwen2_5.tensors import renamed
from ..text.nested import is_tied, nested_fields, nested_positions, parse_nested
from ..vit import VitConfig, parse_vit, vit_specs
from . import tiles
from .texts import add_texts

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

_PLACEHOLDER = 151667  # of a picture, where the file does not say
_INTERN_VIT = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_NAMES = {
    ".embeddings.cls_token": ".embeddings.class_embedding",
    ".embeddings.position_embeddings": ".embeddings.position_embedding.weight",
    ".embeddings.patch_embeddings.projection.": ".embeddings.patch_embedding.",
    ".encoder.layer.": ".encoder.layers.",
    ".attention.projection_layer.": ".self_attn.out_proj.",
    ".attention.": ".self_attn.",
    ".layernorm_before.": ".layer_norm1.",
    ".layernorm_after.": ".layer_norm2.",
}

positions, image_item, video_item = no_media.positions, tiles.image_item, tiles.video_item
sample_frames = tiles.sample_frames
audio_item, video_with_sound = media.audio_item, seeing.video_with_sound


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json. Raises CheckpointError."""
    root = files.required("config.json")
    text = nested_fields(root, "qwen2", "llama", "qwen3", "qwen3_moe")

    def parse_text(own: JsonObject, is_any_tied: bool) -> LanguageConfig:
        return parse_nested(text, is_tied(files, root, text))

    def parse_tower(own: JsonObject, hidden_size: int) -> VitConfig:
        return _parse_tower(root, hidden_size)

    config = seeing.parse_config(files, "internvl", parse_text, parse_tower, tiles.parse_rules, _PLACEHOLDER)
    return replace(add_texts(files, config), max_context=nested_positions(text))


def _parse_tower(root: JsonObject, hidden_size: int) -> VitConfig:
    """Raises CheckpointError."""
    vision = root.object("vision_config").with_defaults(_INTERN_VIT)
    vision = vision.over({"patch_size": 14, "image_size": 448, "hidden_act": "gelu"})
    ratio = root.number("downsample_ratio", default=0.5)
    merge = round(1 / ratio)
    for place, name, default, only in (
        (root, "vision_feature_layer", -1, -1),
        (root, "vision_feature_select_strategy", "default", "default"),
        (root, "projector_hidden_act", "gelu", "gelu"),
        (root, "downsample_ratio", 0.5, 1 / merge),
        (vision, "use_absolute_position_embeddings", True, True),
        (vision, "use_mean_pooling", True, True),
    ):
        if (found := place.data.get(name, default)) != only:
            raise place.error(name, f"is {found!r}, expected {only!r}")
    sides = {name: _side(vision, name) for name in ("image_size", "patch_size")}
    config = parse_vit(vision.with_values(sides), hidden_size, merge, "gelu")
    if sides["image_size"] % (config.patch_size * merge):
        raise vision.error("image_size", f"is {sides['image_size']}, expected a multiple of {merge} patches of {config.patch_size}")
    return replace(
        config,
        norm="rms" if vision.text("norm_type", default="layer_norm", choices=("layer_norm", "rms_norm")) == "rms_norm" else "layer",
        biases=vision.boolean("attention_bias", default=False),
        has_class=True,
        has_last_norm=False,
        has_scales=True,
        has_joint_norms=vision.boolean("use_qk_norm", default=False),
        merger_norm=True,
        merger_depth=2,
        merger_bias=True,
    )


def _side(vision: JsonObject, name: str) -> int:
    """Of a square, that files give by one number or by two that are equal."""
    sides = vision.integers(name, least=1)
    if len({*sides}) != 1:
        raise vision.error(name, f"is {list(sides)}, expected a square")
    return sides[0]


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """Decoder and tower."""
    assert isinstance(config.vision, VitConfig)
    return [*language_specs(config.language), *_batched(vit_specs(config.vision))]


def _batched(specs: Iterable[TensorSpec]) -> Iterable[TensorSpec]:
    """The tower's, of which the checkpoint has some with axes of size 1 in front."""
    axes = {"vision.embeddings.class_embedding": (1, 1), "vision.embeddings.position_embedding.weight": (1,)}
    for spec in specs:
        shape = (*axes.get(spec.name, ()), *spec.shape)
        yield spec._replace(shape=shape, sources=tuple(source._replace(shape=shape) for source in spec.sources))


def canonical_name(name: str) -> str:
    """See ``Family``."""
    return renamed(vit.canonical_name(name), _NAMES)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    return vit.checkpoint_name(renamed(name, {ours: theirs for theirs, ours in _NAMES.items()}))


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__)


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    # By its name: only the process that builds towers depends on them.
    towers: dict[MediaKind, Tower] = import_module(f"{__package__}.towers").build_towers(config, weights, device)
    return towers
