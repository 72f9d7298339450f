"""The tower of SmolVLM2 and Idefics3. The encoder actor builds it."""

import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...towers.interface import Tower
from ...towers.vit import VisionTransformer


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    assert config.vision is not None and config.vision_rules is not None
    places = table_rows(config.vision.position_side, config.vision_rules.tile // config.vision_rules.patch_size)
    return {"image": VisionTransformer(config, weights, device, places)}


def table_rows(side: int, num_patches: int) -> Tensor:
    """Rows of a table of side x side positions for num_patches x num_patches patches, int64 [num_patches, num_patches].

    A patch takes the place that its share of the picture has, in float32 as in transformers. For some sides, as 25, rounding then moves
    a few patches to the place before.
    """
    borders = torch.arange(1 / side, 1.0, 1 / side)
    shares = torch.arange(num_patches, dtype=torch.float32) * (1.0 / torch.tensor(num_patches))
    axis = torch.bucketize(shares.clamp(max=1.0 - 1e-6), borders, right=True)
    return axis[:, None] * side + axis
