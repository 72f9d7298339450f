"""Qwen3-ASR's tower. The encoder actor builds it."""

import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...towers.interface import Tower
from ..qwen3.sound_tower import SoundTower


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    return {"audio": SoundTower(config, weights, device)}
