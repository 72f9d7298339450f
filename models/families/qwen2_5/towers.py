"""The tower of families that see alone. The encoder actor builds it."""

import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...towers.interface import Tower
from .vision_tower import VisionTower


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    vision = VisionTower(config, weights, device)
    return {"image": vision, "video": vision}
