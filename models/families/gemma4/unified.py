"""Gemma 4 without towers (12B), as transformers' ``gemma4_unified``: pixels and samples become rows of the decoder by a projection."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...checkpoint.json_fields import CheckpointFiles
from ...checkpoint.weight_specs import TensorSpec, language_specs
from .. import no_media
from ..family import CheckpointRecipe, made_recipes
from ..qwen2_5 import seeing
from ..qwen2_5.tensors import placed
from ..text import gemma
from . import canonical_name as _canonical_name
from . import hearing_config, media, parse_alone, seeing_config
from .rules import raw_sound_rules, vision_rules
from .towers_config import RawVision, parse_raw_sound, parse_raw_vision, raw_specs

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

positions, video_with_sound = no_media.positions, seeing.video_with_sound
image_item, video_item, audio_item, sample_frames = media.image_item, media.video_item, media.audio_item, media.sample_frames

_TEXT = {
    "use_bidirectional_attention": "vision",
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
}
_PARTS = {
    "vision_embedder.multimodal_embedder.embedding_projection.": "vision.projection.",
    "vision_embedder.": "vision.",
}


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json. Raises CheckpointError."""
    root = files.required("config.json")
    has_parts = root.has("text_config")
    text = (root.object("text_config") if has_parts else root).over(_TEXT)
    config = parse_alone(files, "gemma4_unified", text, ())
    if has_parts and root.has("vision_config"):
        own = root.object("vision_config")
        vision = parse_raw_vision(own, config.language.hidden_size)
        patch, pool = own.integer("patch_size", default=16), own.integer("pooling_kernel_size", default=3)
        config = seeing_config(files, config, vision, vision_rules(files, vision, patch, pool))
    if has_parts and root.has("audio_config"):
        audio = parse_raw_sound(root.object("audio_config"), config.language.hidden_size)
        config = hearing_config(files, config, audio, raw_sound_rules(files, audio))
    return config


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """See ``Family``."""
    assert config.vision is None or isinstance(config.vision, RawVision)
    return [*language_specs(config.language), *raw_specs(config.vision, config.audio)]


def canonical_name(name: str) -> str:
    """See ``Family``."""
    bare = name.removeprefix("model.")
    return found if (found := placed(bare, _PARTS)) != bare else _canonical_name(name)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    if name.startswith("language."):
        return gemma.checkpoint_name(name).replace("model.", "model.language_model.", 1)
    projections = {f"{part}.projection.": f"model.embed_{part}.embedding_projection." for part in ("vision", "audio")}
    return placed(name, {**projections, "vision.": "model.vision_embedder."})


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    # By its name: only the process that builds towers depends on them.
    towers: dict[MediaKind, Tower] = import_module(f"{__package__}.raw_towers").build_towers(config, weights, device)
    return towers


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__, "gemma4_unified")
