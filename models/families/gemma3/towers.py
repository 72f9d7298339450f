"""The tower of Gemma 3. The encoder actor builds it."""

import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...lm.layer_ops import rms_norm
from ...towers.interface import Tower
from ...towers.linear import Linear
from ...towers.vit import VisionTransformer


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    return {"image": _PooledTransformer(config, weights, device)}


class _PooledTransformer(VisionTransformer):
    """``Tower``: the mean of a token's patches, normed and projected."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> None:
        assert model.vision is not None
        side = model.vision.position_side
        super().__init__(model, weights, device, torch.arange(side**2).view(side, side))
        self._soft_norm, self._epsilon = weights["vision.merger.mm_soft_emb_norm.weight"], torch.tensor(model.vision.norm_eps)
        self._project = Linear(weights["vision.merger.mm_input_projection_weight"].t().contiguous(), None)  # stored [in, out]

    def merge(self, patches: Tensor) -> Tensor:
        return self._project(rms_norm(patches.mean(1), self._soft_norm, self._epsilon))
