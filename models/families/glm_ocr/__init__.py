"""GLM-OCR: text and pictures. As transformers' ``glm_ocr``, whose decoder norms what its layers add, and turns neighbouring values of
a head together. The layers behind ``num_hidden_layers``, which predict tokens after the next, are in its files; nothing reads them.
"""

from collections.abc import Mapping

import msgspec

from ....schema.media import ItemShape
from ...architecture import FeedForwardConfig, LanguageConfig, MlpConfig, ModelConfig, VisionConfig, VisionRules
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ..family import CheckpointRecipe, made_recipes
from ..fields import parse_attention, parse_decoder
from ..qwen2_5 import fields, media, seeing, tensors

build_towers, video_item, video_with_sound = seeing.build_towers, seeing.video_item, seeing.video_with_sound
positions, tensor_specs = seeing.positions_by_patch, tensors.tensor_specs
audio_item, sample_frames = media.audio_item, media.sample_frames

_NAMES = {".post_layernorm.": ".merger.ln_q.", ".downsample.": ".merger.downsample."}
_PLACEHOLDER = 59280  # of a picture, where the file does not say
_FRAMES = 2  # that a picture counts as where its size is bounded
_BOUNDS = VisionRules(min_pixels=112 * 112, max_pixels=28 * 28 * 15000, max_frames=0)


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json. Raises CheckpointError."""
    return seeing.parse_config(files, "glm_ocr", _parse_text, _parse_vision, _parse_rules, _PLACEHOLDER)


def _parse_text(text: JsonObject, tie: bool) -> LanguageConfig:
    heads = msgspec.structs.replace(parse_attention(text), bias=False, output_bias=False)
    rope = fields.parse_sections(text, heads.head_dim // 2, default_theta=1e4, default_section=(8, 12, 12))
    decoder = parse_decoder(text, heads, msgspec.structs.replace(rope, has_neighbours=True), tie, _parse_mlps)
    return msgspec.structs.replace(
        decoder,
        rms_norm_eps=text.number("rms_norm_eps", default=1e-5),
        layers=tuple(msgspec.structs.replace(layer, has_output_norms=True) for layer in decoder.layers),
    )


def _parse_mlps(text: JsonObject, num_layers: int) -> list[FeedForwardConfig]:
    return [MlpConfig(intermediate_size=text.integer("intermediate_size"), is_fused=True)] * num_layers


def _parse_vision(vision: JsonObject, hidden_size: int) -> VisionConfig:
    vision.text("hidden_act", default="silu", choices=("silu",))
    if not vision.boolean("attention_bias", default=True):
        raise vision.error("attention_bias", "is false; only a tower with biases is supported")
    config = fields.parse_tower(vision, hidden_size, vision.integer("intermediate_size", default=4096))
    return msgspec.structs.replace(
        config,
        patch_bias=True,
        qk_norm=True,
        norm_eps=vision.number("rms_norm_eps", default=1e-5),
        merger_size=config.out_hidden_size * config.in_channels,
    )


def _parse_rules(files: CheckpointFiles, vision: VisionConfig) -> VisionRules:
    """The bounds of the file are those of ``_FRAMES`` frames, ours those of one."""
    image, _, _ = fields.processors(files, video_falls_back=False)
    rules = fields.image_rules(image, vision, _BOUNDS)
    return msgspec.structs.replace(rules, min_pixels=-(-rules.min_pixels // _FRAMES), max_pixels=rules.max_pixels // _FRAMES)


def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
    """As Qwen's, in a size that is bounded as that of a clip."""
    rules = media.vision_rules(config, "image")
    bounds = rules.min_pixels * _FRAMES, rules.max_pixels * _FRAMES
    return media.image_item_of(rules, media.resize_frames(rules, _FRAMES, (height, width), bounds))


def canonical_name(name: str) -> str:
    """See ``Family``."""
    return tensors.renamed(tensors.canonical_name(name), _NAMES)


def checkpoint_name(name: str) -> str:
    """See ``Family``."""
    return tensors.nested_name(tensors.renamed(name, {ours: theirs for theirs, ours in _NAMES.items()}))


def recipes() -> Mapping[str, CheckpointRecipe]:
    return made_recipes(__package__)
