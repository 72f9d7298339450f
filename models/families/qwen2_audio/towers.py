"""Qwen2-Audio's tower. The encoder actor builds it."""

import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...towers.interface import Tower
from ..qwen2_5.audio_tower import AudioTower


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    return {"audio": AudioTower(config, weights, device)}
