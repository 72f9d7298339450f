"""Qwen3-VL, also with experts: text, images and video. Its decoder and positions as in transformers' ``qwen3_vl`` and
``qwen3_vl_moe``."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module

import msgspec

from ...architecture import FeedForwardConfig, LanguageConfig, ModelConfig, VisionConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ..experts import parse_router, place_experts
from ..family import CheckpointRecipe
from ..fields import FeedForwards, parse_attention, parse_decoder, parse_mlps
from ..qwen2_5 import media, tensors
from ..qwen2_5.seeing import build_towers, video_with_sound
from ..qwen3 import clips, seeing
from ..text.ropes import expect_whole_heads

__all__ = [
    "audio_item",
    "build_towers",
    "canonical_name",
    "checkpoint_name",
    "image_item",
    "parse_config",
    "positions",
    "recipes",
    "sample_frames",
    "tensor_specs",
    "video_item",
    "video_with_sound",
]

audio_item, image_item = media.audio_item, media.image_item
sample_frames, video_item = clips.sample_frames, clips.video_item
canonical_name, checkpoint_name, tensor_specs = seeing.canonical_name, seeing.checkpoint_name, tensors.tensor_specs
positions = seeing.positions

_WITH_EXPERTS = "qwen3_vl_moe"
_VISION_START = 151652  # of <|vision_start|>, where the file does not say


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json. Raises CheckpointError."""
    config = files.required("config.json")
    feed_forwards = _parse_experts if config.text("model_type") == _WITH_EXPERTS else parse_mlps
    parse_text = partial(_parse_text, feed_forwards=feed_forwards)
    return seeing.parse_config(files, "qwen3_vl", parse_text, _parse_vision, _VISION_START)


def _parse_experts(text: JsonObject, num_layers: int) -> list[FeedForwardConfig]:
    """They are weighed so that the weights sum up to 1, whatever the file says."""
    return place_experts(text, num_layers, parse_router(text, renormalise=True))


def _parse_text(text: JsonObject, tie: bool, feed_forwards: FeedForwards) -> LanguageConfig:
    mixer = msgspec.structs.replace(parse_attention(text, default_head_dim=128), qk_norm=True)
    expect_whole_heads(text)
    rope = seeing.parse_rope(text, mixer.head_dim // 2, default_theta=5e5, default_section=(24, 20, 20))
    return parse_decoder(text, mixer, rope, tie, feed_forwards)


def _parse_vision(vision: JsonObject, hidden_size: int) -> VisionConfig:
    config = seeing.parse_vision(vision, hidden_size)
    blocks = vision.integers("deepstack_visual_indexes", default=(8, 16, 24))
    if list(blocks) != sorted({*blocks} & {*range(config.depth)}):
        raise vision.error("deepstack_visual_indexes", f"is {list(blocks)}, expected ascending numbers below depth ({config.depth})")
    return msgspec.structs.replace(config, deepstack_blocks=blocks)


def recipes() -> Mapping[str, CheckpointRecipe]:
    # By its name: no actor depends on it.
    made: dict[str, CheckpointRecipe] = import_module(f"{__package__}.made_checkpoint").recipes()
    return made
