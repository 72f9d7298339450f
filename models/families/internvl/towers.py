"""The tower of InternVL. The encoder actor builds it."""

import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...towers.interface import Tower
from ...towers.vit import VisionTransformer


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    assert config.vision is not None
    side = config.vision.position_side
    tower = VisionTransformer(config, weights, device, torch.arange(side**2).view(side, side))
    return {kind: tower for kind in config.media_kinds}
