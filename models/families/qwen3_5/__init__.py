"""Qwen3.5: three layers with a DeltaNet for one that attends. As transformers' ``qwen3_5``.

It sees as Qwen3-VL does, without deepstack; a checkpoint without a tower is text alone.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....schema.media import MediaKind, MediaSpan
from ...architecture import (
    AttentionConfig,
    DeltaConfig,
    LanguageConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    RopeConfig,
)
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from .. import no_media
from ..family import CheckpointRecipe
from ..fields import parse_attention, parse_dtype, parse_eos
from ..qwen2_5 import media, tensors
from ..qwen2_5.seeing import build_towers as build_vision
from ..qwen2_5.seeing import video_with_sound
from ..qwen3 import clips, seeing
from ..text.ropes import rope_fields

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower

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

_VISION_START = 248053  # of <|vision_start|>, where the file does not say


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json, whose decoder is in ``text_config`` or at the top; without ``vision_config`` it is text alone. Raises
    CheckpointError."""
    root = files.required("config.json")
    if root.has("vision_config"):
        return seeing.parse_config(files, "qwen3_5", _parse_text, seeing.parse_vision, _VISION_START)
    text = root.object("text_config") if root.has("text_config") else root
    tied = root if root.has("tie_word_embeddings") else text
    return ModelConfig(
        family="qwen3_5",
        language=_parse_text(text, tied.boolean("tie_word_embeddings", default=False)),
        dtype=parse_dtype(text, root),
        max_context=seeing.max_positions(text),
        eos_token_ids=parse_eos(files, root, text),
    )


def _parse_text(text: JsonObject, tie: bool) -> LanguageConfig:
    text.text("hidden_act", default="silu", choices=("silu",))
    heads = msgspec.structs.replace(_parse_attention(text), gated=True, qk_norm=True)
    feed_forward = MlpConfig(intermediate_size=text.integer("intermediate_size"))
    mixers: dict[str, AttentionConfig | DeltaConfig] = {"full_attention": heads, "linear_attention": _parse_delta(text)}
    return LanguageConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        rms_norm_eps=text.number("rms_norm_eps", default=1e-6),
        layers=tuple(LayerConfig(mixer=mixers[kind], feed_forward=feed_forward) for kind in _parse_kinds(text)),
        ropes=(_parse_rope(text, heads.head_dim),),
        tie_embeddings=tie,
        norm_offset=1.0,
    )


def recipes() -> Mapping[str, CheckpointRecipe]:
    # By its name: no actor depends on it.
    made: dict[str, CheckpointRecipe] = import_module(f"{__package__}.made_checkpoint").recipes()
    return made


def _parse_attention(text: JsonObject) -> AttentionConfig:
    for field, expected in (("attention_bias", False), ("attn_output_gate", True)):
        if text.boolean(field, default=expected) != expected:
            raise text.error(field, f"is {str(not expected).lower()}, which is not supported")
    return parse_attention(text, default_head_dim=256)


def _parse_delta(text: JsonObject) -> DeltaConfig:
    delta = DeltaConfig(
        num_key_heads=text.integer("linear_num_key_heads", default=16),
        num_value_heads=text.integer("linear_num_value_heads", default=32),
        key_dim=text.integer("linear_key_head_dim", default=128),
        value_dim=text.integer("linear_value_head_dim", default=128),
        conv_size=text.integer("linear_conv_kernel_dim", default=4, least=2, most=16),
    )
    if delta.num_value_heads % delta.num_key_heads:
        told = f"is {delta.num_value_heads}, expected a multiple of linear_num_key_heads ({delta.num_key_heads})"
        raise text.error("linear_num_value_heads", told)
    return delta


def _parse_kinds(text: JsonObject) -> list[str]:
    """The mixer of each layer."""
    count = text.integer("num_hidden_layers", most=1000)
    interval = text.integer("full_attention_interval", default=4)
    kinds = text.data.get("layer_types")
    if kinds is None:
        kinds = ["linear_attention" if number % interval else "full_attention" for number in range(1, count + 1)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise text.error("layer_types", f"is {kinds!r}, expected a list of num_hidden_layers ({count}) names")
    if (named := {*map(str, kinds)}) != {"linear_attention", "full_attention"}:
        raise text.error("layer_types", f"has {', '.join(sorted(named))}, expected linear_attention and full_attention")
    return kinds


def _parse_rope(text: JsonObject, head_dim: int) -> RopeConfig:
    rope = rope_fields(text)
    part = (rope if rope.has("partial_rotary_factor") else text).number("partial_rotary_factor", default=0.25, most=1.0)
    if (turning := int(head_dim * part)) % 2 or not turning:
        raise rope.error("partial_rotary_factor", f"is {part:g}; {turning} of a head's {head_dim} values would turn, expected pairs")
    return seeing.parse_rope(text, turning // 2, default_theta=1e4, default_section=(11, 11, 10))


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    """See ``Family``."""
    return {} if config.vision is None else build_vision(config, weights, device)


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
    """See ``Family``."""
    if config.vision is None:
        return no_media.positions(config, num_tokens, spans)
    return seeing.positions(config, num_tokens, spans)
