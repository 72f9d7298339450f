"""Qwen2.5-VL's tower. The encoder actor builds it."""

from typing import Any

import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...towers.interface import Tower
from ..qwen2_5.vision_tower import VisionTower


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    vision = VisionTower(config, weights, device, _find_vision)
    return {"image": vision, "video": vision}


def _find_vision(fields: dict[str, Any]) -> tuple[Any, Any]:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    return Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLVisionConfig(**fields)
