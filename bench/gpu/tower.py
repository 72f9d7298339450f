"""The product's vision tower for the sections that time it. Import it where it is used: unlike kernels it needs more than torch."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ...models.architecture import LanguageConfig, ModelConfig, VisionConfig, VisionRules
from ...models.families.qwen2_5.triton_vision import VisionKernels
from ...models.families.registry import family_of
from .counts import Shape
from .stack import EPSILON

_SIDE = 72  # patches of a picture of a megapixel
_WINDOW = 64  # patches


@dataclass(frozen=True, slots=True)
class Tower:
    """The product's vision tower on a CUDA device, of the sizes of Qwen2.5-VL and random weights, over one square picture."""

    kernels: VisionKernels
    patches: Tensor
    geometry: dict[str, Any]

    @classmethod
    def make(cls, shape: Shape, device: torch.device) -> Self:
        def random(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(std=0.02)

        config = _vision_model(shape)
        assert config.vision is not None
        weights = {spec.name: random(*spec.shape) for spec in family_of(config).tensor_specs(config) if spec.name.startswith("vision.")}
        side = torch.arange(_SIDE, device=device)
        geometry = {
            "position_ids": torch.cartesian_prod(side, side),
            "window_index": torch.arange(_SIDE**2 // config.vision.merge_size**2, device=device),
            "cu_window_seqlens": torch.arange(0, _SIDE**2 + 1, _WINDOW, dtype=torch.int32, device=device),
            "cu_seqlens": torch.tensor([0, _SIDE**2], dtype=torch.int32, device=device),
            "max_window_seqlen": _WINDOW,
            "max_seqlen": _SIDE**2,
        }
        return cls(VisionKernels(config.vision, weights), random(_SIDE**2, VisionRules().row_bytes), geometry)

    def forward(self) -> Tensor:
        """Embedding rows [tokens, hidden] of the language model of ``shape``."""
        return self.kernels(self.patches, **self.geometry)


def _vision_model(shape: Shape) -> ModelConfig:
    """The vision tower of the models of 3B and 7B, before a language model without layers."""
    language = LanguageConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=0,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=EPSILON,
        rope_theta=1e6,
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
    return ModelConfig(family="qwen2_5_vl", language=language, vision=vision, dtype="bfloat16", max_context=1, eos_token_ids=())
