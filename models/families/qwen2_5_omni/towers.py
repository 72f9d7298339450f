"""Qwen2.5-Omni's towers. The encoder actor builds them."""

import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...towers.interface import Tower
from ..qwen2_5.audio_tower import AudioTower
from ..qwen2_5.vision_tower import VisionTower


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    vision = VisionTower(config, weights, device)
    return {"image": vision, "video": vision, "audio": AudioTower(config, weights, device)}
