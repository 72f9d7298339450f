"""The towers of Gemma 4. The encoder actor builds them."""

import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...towers.interface import Tower
from .sound_tower import SoundTower
from .vision_tower import VisionTower


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    towers = dict[MediaKind, Tower]()
    if config.vision is not None:
        towers["image"] = towers["video"] = VisionTower(config, weights, device)
    if config.audio is not None:
        towers["audio"] = SoundTower(config, weights, device)
    return towers
