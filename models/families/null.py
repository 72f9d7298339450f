"""The null family: no weights, fixed step times, text only. It measures the cost of the runtime itself.

config.json: ``{"model_type": "mmrt_null", "step_ms": 5.0, "prefill_token_ms": 0.0, "vocab_size": 512}``.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...schema.media import ItemShape, MediaKind, MediaSpan
from ..architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, NullConfig, RopeConfig
from ..checkpoint.json_fields import CheckpointFiles
from ..checkpoint.weight_specs import TensorSpec
from ..errors import UnsupportedMediaError
from .family import CheckpointRecipe

if TYPE_CHECKING:
    import torch

    from ..towers.interface import Tower


_NO_MEDIA = "the null model takes no media"


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


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    return {}


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
    return np.broadcast_to(np.arange(num_tokens, dtype=np.int64), (3, num_tokens)), 0


def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
    raise UnsupportedMediaError(_NO_MEDIA)


def sample_frames(config: ModelConfig, total_frames: int, fps: float) -> NDArray[np.int64]:
    raise UnsupportedMediaError(_NO_MEDIA)


def video_item(config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float) -> ItemShape:
    raise UnsupportedMediaError(_NO_MEDIA)


def audio_item(config: ModelConfig, num_frames: int) -> ItemShape:
    raise UnsupportedMediaError(_NO_MEDIA)


def video_with_sound(config: ModelConfig, video: ItemShape, sound: ItemShape) -> ItemShape:
    raise UnsupportedMediaError(_NO_MEDIA)
