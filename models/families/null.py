"""The null family: no weights, fixed step times, text only. It measures the cost of the runtime itself.

config.json: ``{"model_type": "mmrt_null", "step_ms": 5.0, "prefill_token_ms": 0.0, "vocab_size": 512}``.
"""

from collections.abc import Mapping
from typing import Any

from ..architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, NullConfig, RopeConfig
from ..checkpoint.json_fields import CheckpointFiles
from ..checkpoint.weight_specs import TensorSpec
from .family import CheckpointRecipe
from .no_media import audio_item, build_towers, image_item, positions, sample_frames, video_item, video_with_sound

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


def parse_config(files: CheckpointFiles) -> ModelConfig:
    """Map config.json. The KV cache is minimal: 64 bytes per token. Raises CheckpointError."""
    config = files.required("config.json")
    language = LanguageConfig(
        vocab_size=config.integer("vocab_size", default=512),
        hidden_size=8,
        rms_norm_eps=1e-6,
        layers=(
            LayerConfig(mixer=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8), feed_forward=MlpConfig(intermediate_size=8)),
        ),
        ropes=(RopeConfig(theta=10000.0),),
    )
    return ModelConfig(
        family="null",
        language=language,
        dtype="float32",
        max_context=config.integer("max_position_embeddings", default=32768),
        eos_token_ids=config.integers("eos_token_id", default=()),
        null=NullConfig(
            step_ms=config.number("step_ms", default=0.0, least=0),
            prefill_token_ms=config.number("prefill_token_ms", default=0.0, least=0),
        ),
    )


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    return []


def canonical_name(name: str) -> str:
    return name


def checkpoint_name(name: str) -> str:
    return name


def recipes() -> Mapping[str, CheckpointRecipe]:
    """Checkpoints without weights, with the vocabularies of Qwen2.5-VL's."""
    from . import qwen2_5_vl
    from .qwen2_5.made_checkpoint import eos_token_ids, generation_config

    def without_weights(recipe: CheckpointRecipe) -> CheckpointRecipe:
        def files(ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
            config = {"model_type": "mmrt_null", "step_ms": 0.0, "vocab_size": recipe.vocab_size, "eos_token_id": eos_token_ids(ids)}
            return {"config.json": config, "generation_config.json": generation_config(ids)}

        return recipe._replace(files=files)

    return {shape: without_weights(recipe) for shape, recipe in qwen2_5_vl.recipes().items()}
