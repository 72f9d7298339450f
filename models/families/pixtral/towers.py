"""The tower of LightOnOCR and Mistral 3. The encoder actor builds it."""

import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...towers.interface import Tower
from ...towers.pixtral import PixtralTransformer
from .fields import PixtralConfig


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    vision, rules = config.vision, config.vision_rules
    assert isinstance(vision, PixtralConfig) and rules is not None
    return {"image": PixtralTransformer(vision, rules, weights, device, vision.theta, vision.activation)}
