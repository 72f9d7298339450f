"""The product's vision tower for the sections that time it. Import it where it is used: unlike kernels it needs more than torch."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mmrt.models.architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from mmrt.models.families.qwen2_5.vision_geometry import Geometry, geometry
from mmrt.models.families.qwen2_5.vision_tower import VisionTower
from mmrt.models.families.registry import family_of
from mmrt.models.media_config import VisionConfig, VisionRules

from .counts import Shape
from .stack import EPSILON

_SIDE = 72  # patches of a picture of a megapixel


@dataclass(frozen=True, slots=True)
class Tower:
    """The product's vision tower on a CUDA device, of the sizes of Qwen2.5-VL and random weights, over one square picture."""

    tower: VisionTower
    patches: Tensor
    places: Geometry

    @classmethod
    def make(cls, shape: Shape, device: torch.device) -> Self:
        def random(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(std=0.02)

        config = _vision_model(shape)
        assert config.vision is not None and config.vision_rules is not None
        weights = {spec.name: random(*spec.shape) for spec in family_of(config).tensor_specs(config) if spec.name.startswith("vision.")}
        places = geometry([(1, _SIDE, _SIDE)], config.vision, device)
        return cls(VisionTower(config, weights, device), random(_SIDE**2, config.vision_rules.row_bytes), places)

    def forward(self) -> Tensor:
        """Embedding rows [tokens, hidden] of the language model of ``shape``."""
        return self.tower.forward(self.patches, self.places)


def _vision_model(shape: Shape) -> ModelConfig:
    """The vision tower of the models of 3B and 7B, before a language model of one layer."""
    language = LanguageConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        rms_norm_eps=EPSILON,
        layers=(
            LayerConfig(
                mixer=AttentionConfig(num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, bias=True),
                feed_forward=MlpConfig(intermediate_size=shape.intermediate),
            ),
        ),
        ropes=(RopeConfig(theta=1e6),),
    )
    vision = VisionConfig(
        depth=32,
        hidden_size=1280,
        intermediate_size=3420,
        num_heads=16,
        in_channels=3,
        patch_size=14,
        temporal_patch_size=2,
        merge_size=2,
        window_size=112,
        out_hidden_size=shape.hidden,
        full_attention_blocks=(7, 15, 23, 31),
    )
    return ModelConfig(
        family="qwen2_5_vl",
        language=language,
        vision=vision,
        vision_rules=VisionRules(),
        dtype="bfloat16",
        max_context=1,
        eos_token_ids=(),
    )
