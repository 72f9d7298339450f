"""The towers of LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision. The encoder actor builds them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...lm.decoder import AfterLayer
from ...media_config import VisionRules
from ...towers.interface import Tower, TowerInput
from ...towers.vit import VisionTransformer
from .pictures import shrunk, tile_map


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    assert config.vision is not None and config.vision_rules is not None
    side = config.vision.position_side
    tower = VisionTransformer(config, weights, device, torch.arange(side**2).view(side, side))
    newline = weights.get("vision.image_newline")
    if newline is None:
        return {"image": tower}
    tiles = _TileTower(tower, newline, config.vision_rules)
    return {"image": tiles, "video": tiles} if config.vision_rules.max_frames else {"image": tiles}


class _TileTower:
    """``Tower``: joins the tiles of each picture, and brings the rows of each frame down to a quarter."""

    def __init__(self, tower: VisionTransformer, newline: Tensor, rules: VisionRules) -> None:
        self._tower, self._newline, self._rules = tower, newline, rules

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        return [self._joined(part, rows) for part, rows in zip(parts, self._tower.encode(parts, after_layer), strict=True)]

    def _joined(self, part: TowerInput, rows: Tensor) -> Tensor:
        """The whole picture's rows, then the seen lines of the map. A segment without details, as the first at a start, is whole."""
        if not part.details:
            return rows
        side = self._rules.tile // self._rules.patch_size
        if part.kind == "video":
            small = _resized(rows.view(side, side, -1), (-(-side // 2), -(-side // 2))).flatten(0, 1)
            return torch.cat((small, self._newline.expand(part.details[2], -1)))
        if part.grid[0] == 1:  # one among others
            return torch.cat((rows, self._newline.unsqueeze(0)))
        height, width = part.details
        num_rows, num_columns, lines, places = tile_map(self._rules, height, width, part.grid[0] - 1)
        whole, tiles = rows[: side**2], rows[side**2 :].view(num_rows, num_columns, side, side, -1)
        seen = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)[lines.start : lines.stop, places.start : places.stop]
        seen = _resized(seen, shrunk(self._rules, *seen.shape[:2]))
        ends = self._newline.expand(len(seen), 1, -1)
        return torch.cat((whole, torch.cat((seen, ends), 1).flatten(0, 1)))


def _resized(rows: Tensor, size: tuple[int, int]) -> Tensor:
    """A map [lines, places, hidden] in another size."""
    if rows.shape[:2] == size:
        return rows
    return F.interpolate(rows.permute(2, 0, 1).unsqueeze(0), size, mode="bilinear")[0].permute(1, 2, 0)
