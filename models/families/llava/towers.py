"""The towers of LLaVA-1.5 and LLaVA-NeXT. The encoder actor builds them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...lm.decoder import AfterLayer
from ...media_config import VisionRules
from ...towers.interface import Tower, TowerInput
from ...towers.vit import VisionTransformer
from .pictures import tile_map


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    assert config.vision is not None and config.vision_rules is not None
    side = config.vision.position_side
    tower = VisionTransformer(config, weights, device, torch.arange(side**2).view(side, side))
    newline = weights.get("vision.image_newline")
    return {"image": tower if newline is None else _TileTower(tower, newline, config.vision_rules)}


class _TileTower:
    """``Tower``: joins the tiles of each picture."""

    def __init__(self, tower: VisionTransformer, newline: Tensor, rules: VisionRules) -> None:
        self._tower, self._newline, self._rules = tower, newline, rules

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        return [self._joined(part, rows) for part, rows in zip(parts, self._tower.encode(parts, after_layer), strict=True)]

    def _joined(self, part: TowerInput, rows: Tensor) -> Tensor:
        """The whole picture's rows, then the seen lines of the map. A segment without details, as the first at a start, is whole."""
        if not part.details:
            return rows
        height, width = part.details
        num_rows, num_columns, lines, places = tile_map(self._rules, height, width, part.grid[0] - 1)
        side = self._rules.tile // self._rules.patch_size
        whole, tiles = rows[: side**2], rows[side**2 :].view(num_rows, num_columns, side, side, -1)
        seen = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)[lines.start : lines.stop, places.start : places.stop]
        ends = self._newline.expand(len(seen), 1, -1)
        return torch.cat((whole, torch.cat((seen, ends), 1).flatten(0, 1)))
