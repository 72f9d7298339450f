"""What Gemma 4 has in place of towers in its model of 12B: projections of pixels and samples. The encoder actor builds them. Weights
are views, never copied.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...lm.decoder import AfterLayer
from ...lm.layer_ops import rms_norm
from ...towers.interface import Tower, TowerInput
from ...towers.linear import Linear
from ...towers.whisper import LayerNorm

_EPSILON = torch.tensor(1e-6)


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    towers = dict[MediaKind, Tower]()
    if config.vision is not None:
        towers["image"] = towers["video"] = _Pixels(config, weights, device)
    if config.audio is not None:
        towers["audio"] = _Samples(weights, device)
    return towers


class _Pixels:
    """``Tower``: each square of pixels becomes a row, which knows its place."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> None:
        assert model.vision is not None
        self._device, self._side, self._epsilon = device, model.vision.patch_size, torch.tensor(model.vision.norm_eps)
        self._norms = [LayerNorm(weights, f"vision.{name}") for name in ("patch_ln1", "patch_ln2", "pos_norm")]
        self._dense = Linear.of(weights, "vision.patch_dense")
        self._table, self._project = weights["vision.pos_embedding"], Linear(weights["vision.projection.weight"], None)
        self._ones = torch.ones(model.vision.hidden_size, device=device)

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        rows = torch.from_numpy(np.concatenate([part.rows for part in parts])).to(self._device)
        pixels = rows.view(-1, 3, self._side, self._side).permute(0, 2, 3, 1).flatten(1)  # colours last
        first, second, behind = self._norms
        hidden = second(self._dense(first(pixels.float().div_(255).to(self._table.dtype))))
        x, y = torch.cat([_places(part.grid) for part in parts], 1).to(self._device)
        hidden = behind(hidden + (self._table[x, 0] + self._table[y, 1]))
        tokens = self._project(rms_norm(hidden, self._ones, self._epsilon))
        return list(torch.split(tokens, [len(part.rows) for part in parts]))


class _Samples:
    """``Tower``: as many samples as make a row, normed and projected."""

    def __init__(self, weights: dict[str, Tensor], device: torch.device) -> None:
        self._device, weight = device, weights["audio.projection.weight"]
        self._project, self._ones = Linear(weight, None), torch.ones(weight.shape[1], dtype=weight.dtype, device=device)

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        clips = [torch.from_numpy(part.rows.view(np.float32).copy()) for part in parts]
        rows = torch.cat(clips).to(self._device, self._ones.dtype)
        return list(torch.split(self._project(rms_norm(rows, self._ones, _EPSILON)), [len(clip) for clip in clips]))


def _places(grid: tuple[int, int, int]) -> Tensor:
    """x and y of each row, int64 [2, t h w]."""
    t, h, w = grid
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack((x.flatten().repeat(t), y.flatten().repeat(t)))
