"""Qwen3-VL, also with experts: text, images and video. Its decoder and positions as in transformers' ``qwen3_vl`` and
``qwen3_vl_moe``."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....schema.media import ItemShape, MediaSpan
from ...architecture import FeedForwardConfig, LanguageConfig, ModelConfig, MoeConfig, RopeConfig, VisionConfig, interleaved_axes
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ..experts import parse_experts
from ..family import CheckpointRecipe
from ..fields import FeedForwards, parse_attention, parse_decoder, parse_mlps
from ..qwen2_5 import fields, media, seeing, tensors
from ..qwen3 import clips
from ..qwen3.times import read_time_tokens

audio_item, image_item = media.audio_item, media.image_item
sample_frames, video_item = clips.sample_frames, clips.video_item
build_towers, video_with_sound = seeing.build_towers, seeing.video_with_sound
tensor_specs = tensors.tensor_specs

_WITH_EXPERTS = "qwen3_vl_moe"
_NAMES = {  # in this order: a block's first matrix, then a merger's
    ".mlp.linear_fc1.": ".mlp.up_proj.",
    ".mlp.linear_fc2.": ".mlp.down_proj.",
    ".linear_fc1.": ".mlp.0.",
    ".linear_fc2.": ".mlp.2.",
    ".norm.": ".ln_q.",
}


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json. Raises CheckpointError."""
    config = files.required("config.json")
    feed_forwards = _parse_experts if config.text("model_type") == _WITH_EXPERTS else parse_mlps
    parse_text = partial(_parse_text, feed_forwards=feed_forwards)
    return msgspec.structs.replace(
        seeing.parse_config(files, "qwen3_vl", parse_text, parse_vision, clips.parse_rules),
        vision_start_token_id=config.integer("vision_start_token_id", default=151652, least=0),
        vision_end_token_id=config.integer("vision_end_token_id", default=151653, least=0),
        times=read_time_tokens(files.path),
    )


def _parse_experts(text: JsonObject, num_layers: int) -> list[FeedForwardConfig]:
    """They are weighed so that the weights sum up to 1, whatever the file says."""
    found = parse_experts(text, num_layers)
    return [msgspec.structs.replace(one, renormalise=True) if isinstance(one, MoeConfig) else one for one in found]


def _parse_text(text: JsonObject, tie: bool, feed_forwards: FeedForwards) -> LanguageConfig:
    mixer = msgspec.structs.replace(parse_attention(text, default_head_dim=128), qk_norm=True)
    pairs = mixer.head_dim // 2
    theta, section = fields.parse_mrope(text, pairs, default_theta=5e5, default_section=(24, 20, 20))
    rope = text.object("rope_parameters", "rope_scaling")
    if not rope.boolean("mrope_interleaved", default=True):
        raise rope.error("mrope_interleaved", "is false; only axes that take turns are supported")
    return parse_decoder(text, mixer, RopeConfig(theta=theta, axes=interleaved_axes(section, pairs)), tie, feed_forwards)


def parse_vision(vision: JsonObject, hidden_size: int) -> VisionConfig:
    """The tower. Raises CheckpointError if it does not fit the decoder."""
    vision.text("hidden_act", default="gelu_pytorch_tanh", choices=("gelu_pytorch_tanh",))
    config = fields.parse_tower(vision, hidden_size, vision.integer("intermediate_size", default=4304), patch=16)
    num_positions = vision.integer("num_position_embeddings", default=2304)
    side = math.isqrt(num_positions)
    if side * side != num_positions:
        raise vision.error("num_position_embeddings", f"is {num_positions}, expected the square of a number")
    blocks = vision.integers("deepstack_visual_indexes", default=(8, 16, 24))
    if list(blocks) != sorted({*blocks} & {*range(config.depth)}):
        raise vision.error("deepstack_visual_indexes", f"is {list(blocks)}, expected ascending numbers below depth ({config.depth})")
    return msgspec.structs.replace(
        config, norm="layer", feed_forward="gelu_tanh", patch_bias=True, position_side=side, deepstack_blocks=blocks
    )


def canonical_name(name: str) -> str:
    return tensors.renamed(tensors.canonical_name(name), _NAMES)


def checkpoint_name(name: str) -> str:
    theirs = tensors.renamed(name, {ours: theirs for theirs, ours in _NAMES.items()})
    for ours, part in (("language.", "model.language_model."), ("vision.", "model.visual.")):
        if theirs.startswith(ours):
            return part + theirs.removeprefix(ours)
    return theirs


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
    """Each frame of a video is a picture, and its time is text."""

    def temporal(item: ItemShape) -> NDArray[np.int64]:
        return np.arange(item.grid[0])

    return seeing.positions(config, num_tokens, [part for span in spans for part in clips.frames_of(span)], temporal)


def recipes() -> Mapping[str, CheckpointRecipe]:
    # By its name: no actor depends on it.
    made: dict[str, CheckpointRecipe] = import_module(f"{__package__}.made_checkpoint").recipes()
    return made
