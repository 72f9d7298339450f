"""The families of text alone: Llama and its like (SmolLM2), Mistral, Qwen2 and Qwen3, the last also with experts. As transformers'
models of these names."""

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from ...architecture import AttentionConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from .. import no_media
from ..experts import parse_experts
from ..family import CheckpointRecipe, made_recipes
from ..fields import FeedForwards, parse_attention, parse_mlps
from . import checkpoint
from .windows import Windows, no_windows, windows_by_layer, windows_everywhere, windows_if_used


class TextFamily:
    """A ``Family`` without towers whose decoder's layers attend alike but for their ``windows``. ``parse_mixer`` reads how;
    ``max_positions`` where a checkpoint has no ``max_position_embeddings``."""

    def __init__(
        self,
        name: str,
        parse_mixer: Callable[[JsonObject], AttentionConfig],
        max_positions: int,
        feed_forwards: FeedForwards = parse_mlps,
        windows: Windows = no_windows,
    ) -> None:
        self._name = name
        self._parse_mixer = parse_mixer
        self._max_positions = max_positions
        self._feed_forwards = feed_forwards
        self._windows = windows

    def parse_config(self, files: CheckpointFiles) -> ModelConfig:
        """Map config.json. Raises CheckpointError."""
        mixer = self._parse_mixer(files.required("config.json"))
        return checkpoint.parse_text_config(files, self._name, mixer, self._max_positions, self._feed_forwards, self._windows)

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


LLAMA = TextFamily("llama", _llama_attention, max_positions=2048)
MISTRAL = TextFamily("mistral", _mistral_attention, max_positions=131072, windows=windows_everywhere)
QWEN2 = TextFamily("qwen2", _qwen2_attention, max_positions=32768, windows=windows_by_layer)
QWEN3 = TextFamily("qwen3", _qwen3_attention, max_positions=32768, windows=windows_by_layer)
QWEN3_MOE = TextFamily("qwen3_moe", _qwen3_moe_attention, max_positions=32768, feed_forwards=parse_experts, windows=windows_if_used)
