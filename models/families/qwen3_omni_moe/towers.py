"""The towers of Qwen3-Omni. The encoder actor builds them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...lm.decoder import AfterLayer
from ...towers.interface import Tower, TowerInput
from ..qwen2_5.vision_tower import VisionTower
from ..qwen3.sound_tower import SoundTower


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    vision = VisionTower(config, weights, device)
    sounds = SoundTower(config, weights, device, fills_short=False)
    return {"image": vision, "video": vision, "audio": _WideTower(sounds, config.num_deep * config.language.hidden_size)}


class _WideTower:
    """``Tower``: its rows are as wide as those of pictures. What these add to later layers is zeros in sounds."""

    def __init__(self, tower: SoundTower, more: int) -> None:
        self._tower, self._more = tower, more

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        return [F.pad(rows, (0, self._more)) for rows in self._tower.encode(parts, after_layer)]
