"""GLM-OCR, GLM-4.1V and GLM-4.6V: text, pictures and videos. As transformers' ``glm_ocr``, ``glm4v`` and ``glm46v``.

Their decoders norm what their layers add, and turn neighbouring values of a head together. The layers behind ``num_hidden_layers``,
which predict tokens after the next, are in GLM-OCR's files; nothing reads them.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ....schema.media import ItemShape, MediaSpan
from ...architecture import AttentionConfig, LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...media_config import VisionConfig, VisionRules
from ..family import CheckpointRecipe, made_recipes
from ..fields import parse_attention, parse_decoder, parse_fused_mlps
from ..qwen2_5 import fields, media, seeing, tensors
from ..qwen3.clips import frames_of
from ..qwen3.times import SECONDS, read_time_tokens
from ..text.ropes import parse_turning
from . import clips

_NAMES = {
    ".post_layernorm.": ".merger.ln_q.",
    ".downsample.": ".merger.downsample.",
    ".post_conv_layernorm.": ".patch_norm.",
    ".embeddings.position_embedding.": ".pos_embed.",
}


class GlmFamily:
    """A ``Family``. ``parse_heads`` reads the decoder's attention, ``parse_tower`` gets the tower's fields and the decoder's width;
    ``placeholder``: the id of a picture's tokens, where the file does not say, and ``opening``: the one before them.
    ``parse_rules``, ``sample_frames``: of videos; ``behind_times``: the text behind the seconds of a frame. ``others``: families that
    a checkpoint belongs to whose files name this processor of videos."""

    def __init__(
        self,
        name: str,
        parse_heads: Callable[[JsonObject], AttentionConfig],
        parse_tower: Callable[[JsonObject, int], VisionConfig],
        placeholder: int,
        opening: int,
        parse_rules: Callable[[CheckpointFiles, VisionConfig], VisionRules] = clips.parse_rules,
        sample_frames: Callable[[ModelConfig, int, float], NDArray[np.int64]] = clips.sample_frames,
        behind_times: Sequence[str] = (SECONDS,),
        others: "Mapping[str, GlmFamily] | None" = None,
    ) -> None:
        self._name, self._placeholder, self._opening = name, placeholder, opening
        self._parse_heads, self._parse_tower = parse_heads, parse_tower
        self._parse_rules, self._behind_times, self._others = parse_rules, behind_times, others or {}
        self.sample_frames = sample_frames

    def parse_config(self, files: CheckpointFiles) -> ModelConfig:
        """Map config.json. Raises CheckpointError."""
        _, video, _ = fields.processors(files, video_falls_back=False)
        if (other := self._others.get(video.text("video_processor_type", default=""))) is not None:
            return other.parse_config(files)
        config = files.required("config.json")
        return replace(
            seeing.parse_config(files, self._name, self._parse_text, self._parse_tower, self._parse_rules, self._placeholder),
            vision_start_token_id=config.integer("image_start_token_id", default=self._opening, least=0),
            vision_end_token_id=config.integer("image_end_token_id", default=self._opening + 1, least=0),
            times=read_time_tokens(files.path, (), self._behind_times),
        )

    def _parse_text(self, text: JsonObject, tie: bool) -> LanguageConfig:
        heads = self._parse_heads(text)
        turning = parse_turning(text, heads.head_dim)
        rope = fields.parse_sections(text, turning // 2, default_theta=1e4, default_section=(8, 12, 12))
        decoder = parse_decoder(text, heads, replace(rope, has_neighbours=True), tie, parse_fused_mlps)
        layers = tuple(replace(layer, has_output_norms=True) for layer in decoder.layers)
        return replace(decoder, rms_norm_eps=text.number("rms_norm_eps", default=1e-5), layers=layers)

    def recipes(self) -> Mapping[str, CheckpointRecipe]:
        return made_recipes(__package__, self._name)

    @staticmethod
    def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
        """As Qwen's, in a size that is bounded as that of a clip."""
        rules = media.vision_rules(config, "image")
        bounds = rules.min_pixels * clips.FRAMES, rules.max_pixels * clips.FRAMES
        return media.image_item_of(rules, media.resize_frames(rules, clips.FRAMES, (height, width), bounds))

    @staticmethod
    def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
        """Each temporal patch of a video is a picture, and its time is text."""
        return seeing.positions_by_patch(config, num_tokens, [part for span in spans for part in frames_of(span)])

    @staticmethod
    def canonical_name(name: str) -> str:
        """See ``Family``."""
        return tensors.renamed(tensors.canonical_name(name), _NAMES)

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """See ``Family``."""
        return tensors.nested_name(tensors.renamed(name, {ours: theirs for theirs, ours in _NAMES.items()}))

    tensor_specs = staticmethod(tensors.tensor_specs)
    build_towers = staticmethod(seeing.build_towers)
    video_item = staticmethod(clips.video_item)
    audio_item = staticmethod(media.audio_item)
    video_with_sound = staticmethod(seeing.video_with_sound)


def _parse_ocr_heads(text: JsonObject) -> AttentionConfig:
    return replace(parse_attention(text), bias=False, output_bias=False)


def _parse_4v_heads(text: JsonObject) -> AttentionConfig:
    """Raises CheckpointError also for a decoder with experts."""
    text.text("model_type", default="glm4v_text", choices=("glm4v_text",))
    return replace(parse_attention(text), bias=True, output_bias=False)


def _parse_ocr_tower(vision: JsonObject, hidden_size: int) -> VisionConfig:
    config = _parse_tower(vision, hidden_size, vision.integer("intermediate_size", default=4096), has_biases=True)
    return replace(config, qk_norm=True, merger_size=config.out_hidden_size * config.in_channels)


def _parse_4v_tower(vision: JsonObject, hidden_size: int) -> VisionConfig:
    """``intermediate_size`` is the merger's; the blocks' is ``out_hidden_size``."""
    config, size = _parse_tower(vision, hidden_size, hidden_size, has_biases=False), vision.integer("image_size", default=336)
    if size % config.patch_size:
        raise vision.error("image_size", f"is {size}, expected a multiple of patch_size ({config.patch_size})")
    return replace(
        config,
        biases=False,
        patch_norm=True,
        positions="bicubic",
        position_side=size // config.patch_size,
        merger_size=vision.integer("intermediate_size", default=13696),
    )


def _parse_tower(vision: JsonObject, hidden_size: int, inner: int, *, has_biases: bool) -> VisionConfig:
    vision.text("hidden_act", default="silu", choices=("silu",))
    if vision.boolean("attention_bias", default=has_biases) != has_biases:
        told, only = ("false", "with") if has_biases else ("true", "without")
        raise vision.error("attention_bias", f"is {told}; only a tower {only} biases is supported")
    config = fields.parse_tower(vision, hidden_size, inner)
    return replace(config, patch_bias=True, norm_eps=vision.number("rms_norm_eps", default=1e-5))


GLM_OCR = GlmFamily("glm_ocr", _parse_ocr_heads, _parse_ocr_tower, 59280, 59256)
GLM46V = GlmFamily("glm46v", _parse_4v_heads, _parse_4v_tower, 151343, 151339)
GLM4V = GlmFamily(
    *("glm4v", _parse_4v_heads, _parse_4v_tower, 151343, 151339, clips.parse_even_rules, clips.sample_evenly, ()),
    others={"Glm46VVideoProcessor": GLM46V},  # as GLM-4.6V-Flash has it
)
