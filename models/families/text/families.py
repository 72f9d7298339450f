"""The families of text alone: Llama and its like (SmolLM2), SmolLM3, Mistral, Phi-3 and Phi-4, GLM-4, Qwen2 and Qwen3, the last also
with experts. As transformers' models of these names."""

from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from ...architecture import AttentionConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from .. import no_media
from ..experts import parse_experts
from ..family import CheckpointRecipe, made_recipes
from ..fields import parse_attention, parse_fused_mlps
from . import checkpoint
from .checkpoint import Reading
from .ropes import parse_glm_rope, parse_phi3_rope, parse_rope, turn_but_for_some
from .windows import windows_by_layer, windows_everywhere, windows_if_named, windows_if_used


class TextFamily:
    """A ``Family`` without towers. ``reading``: of its config.json."""

    def __init__(self, name: str, reading: Reading) -> None:
        self._name, self.reading = name, reading

    def parse_config(self, files: CheckpointFiles) -> ModelConfig:
        """Map config.json. Raises CheckpointError."""
        return checkpoint.parse_text_config(files, self._name, self.reading)

    def recipes(self) -> Mapping[str, CheckpointRecipe]:
        return made_recipes(__package__, self._name)

    tensor_specs = staticmethod(checkpoint.tensor_specs)
    canonical_name = staticmethod(checkpoint.canonical_name)
    checkpoint_name = staticmethod(checkpoint.checkpoint_name)
    build_towers = staticmethod(no_media.build_towers)
    positions = staticmethod(no_media.positions)
    image_item = staticmethod(no_media.image_item)
    sample_frames = staticmethod(no_media.sample_frames)
    video_item = staticmethod(no_media.video_item)
    audio_item = staticmethod(no_media.audio_item)
    video_with_sound = staticmethod(no_media.video_with_sound)


def _llama_attention(config: JsonObject) -> AttentionConfig:
    if config.boolean("mlp_bias", default=False):
        raise config.error("mlp_bias", "is true; a feed-forward with biases is not supported")
    return parse_attention(config)


def _mistral_attention(config: JsonObject) -> AttentionConfig:
    return replace(parse_attention(config, default_kv_heads=8), bias=False, output_bias=False)


def _qwen2_attention(config: JsonObject) -> AttentionConfig:
    return replace(parse_attention(config), bias=True, output_bias=False)


def _qwen3_attention(config: JsonObject) -> AttentionConfig:
    return replace(parse_attention(config, default_head_dim=128), qk_norm=True)


def _qwen3_moe_attention(config: JsonObject) -> AttentionConfig:
    return replace(parse_attention(config), qk_norm=True)


def _phi3_attention(config: JsonObject) -> AttentionConfig:
    return replace(parse_attention(config), bias=False, output_bias=False, is_fused=True)


def _glm_attention(config: JsonObject) -> AttentionConfig:
    has_biases = config.boolean("attention_bias", default=True)
    return replace(parse_attention(config, default_head_dim=128, default_kv_heads=2), bias=has_biases, output_bias=False)


def _smollm3_attention(config: JsonObject) -> AttentionConfig:
    if config.boolean("use_sliding_window", default=False):
        raise config.error("use_sliding_window", "is true, which is not supported")
    return _llama_attention(config)


_SMOLLM3 = Reading(
    _smollm3_attention, 32768, ropes=partial(parse_rope, default_theta=2e6), turning_layers=turn_but_for_some, is_tied=True
)
_GLM = Reading(_glm_attention, 131072, parse_fused_mlps, ropes=parse_glm_rope, epsilon=1.5625e-7)

LLAMA = TextFamily("llama", Reading(_llama_attention, max_positions=2048))
MISTRAL = TextFamily("mistral", Reading(_mistral_attention, max_positions=131072, windows=windows_everywhere))
PHI3 = TextFamily("phi3", Reading(_phi3_attention, 4096, parse_fused_mlps, windows_if_named, parse_phi3_rope, epsilon=1e-5))
GLM, GLM4 = TextFamily("glm", _GLM), TextFamily("glm4", _GLM._replace(has_output_norms=True))
SMOLLM3 = TextFamily("smollm3", _SMOLLM3)
QWEN2 = TextFamily("qwen2", Reading(_qwen2_attention, max_positions=32768, windows=windows_by_layer))
QWEN3 = TextFamily("qwen3", Reading(_qwen3_attention, max_positions=32768, windows=windows_by_layer))
QWEN3_MOE = TextFamily("qwen3_moe", Reading(_qwen3_moe_attention, 32768, feed_forwards=parse_experts, windows=windows_if_used))
