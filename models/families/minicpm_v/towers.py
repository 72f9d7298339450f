"""The tower of MiniCPM-V. The encoder actor builds it.

Shapes: N patches; four that make a window follow each other, and so do the four windows of a token.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....cpu_kernels.flash_attention import prepare
from ....schema.media import MediaKind
from ...architecture import ModelConfig
from ...lm.decoder import AfterLayer
from ...towers.interface import Tower, TowerInput
from ...towers.linear import Linear
from ...towers.sequences import Sequences
from ...towers.vit import Attention, Layer, Norm
from . import MiniCpmVision

_EPSILON = 1e-6  # of the norm before the last matrices


def build_towers(config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> dict[MediaKind, Tower]:
    """See ``Family``."""
    tower = MergingTransformer(config, weights, device)
    return {kind: tower for kind in config.media_kinds}


class MergingTransformer:
    """``Tower`` of pictures of any size, computing where its weights lie: a vision transformer in which windows of four patches become
    one behind a layer, and four of these a token behind the last."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> None:
        """Uses those ``weights`` whose names start with ``vision.``."""
        config, rules = model.vision, model.vision_rules
        assert isinstance(config, MiniCpmVision) and rules is not None
        self._config, self._device = config, device
        self._mean, self._std = (
            (torch.tensor(numbers) * 255).repeat_interleave(rules.patch_size**2).to(device)
            for numbers in (rules.image_mean, rules.image_std)
        )
        kernel = weights["vision.embeddings.patch_embedding.weight"]
        self._patch_embed = Linear(kernel.flatten(1), weights["vision.embeddings.patch_embedding.bias"])
        self._dtype, self._table = kernel.dtype, weights["vision.embeddings.position_embedding.weight"]
        self._layers = [Layer(config, weights, f"vision.encoder.layers.{i}") for i in range(config.depth)]
        self._last_norm = Norm(weights, "vision.post_layernorm", config.norm_eps)
        self._window_attention = Attention(config, weights, "vision.vit_merger")
        self._window_merger = _Merger(weights, "vision.vit_merger", config.norm_eps, "tanh")
        self._merger = _Merger(weights, "vision.merger", _EPSILON, "none")
        if device.type == "cpu":
            prepare(config.hidden_size // config.num_heads, self._dtype)

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        sizes = [part.grid[1:] for part in parts]
        staged = _by_window(torch.from_numpy(np.concatenate([part.rows for part in parts])))
        if self._device.type == "cuda":
            staged = staged.pin_memory()
        pixels = staged.to(self._device, non_blocking=True).float().sub_(self._mean).div_(self._std).to(self._dtype)
        places = torch.cat([table_rows(self._config.position_side, *size) for size in sizes])
        hidden = self._patch_embed(pixels) + self._table[places.to(self._device)]
        lengths = np.array([rows * columns for rows, columns in sizes])
        sequences = Sequences.of(lengths, self._device)
        for number, layer in enumerate(self._layers):
            layer(hidden, sequences)
            if number == self._config.merge_layer:
                hidden, sequences = self._merge_windows(hidden), Sequences.of(lengths // 4, self._device)
            if after_layer is not None:
                after_layer()
        tokens = self._merger(self._last_norm(hidden).view(-1, 4 * hidden.shape[1]))
        return list(torch.split(tokens, (lengths // 16).tolist()))

    def _merge_windows(self, hidden: Tensor) -> Tensor:
        """[N, width] to [N / 4, width]."""
        windows = Sequences.of(np.full(len(hidden) // 4, 4), self._device)
        found = (hidden + self._window_attention(hidden, windows)).view(-1, 4, hidden.shape[1])
        return self._window_merger(found.flatten(1)).add_(found.mean(1))


class _Merger:
    """A norm and two matrices with GELU between them; ``approximate``: how torch is to compute it."""

    def __init__(self, weights: dict[str, Tensor], name: str, epsilon: float, approximate: str) -> None:
        self._norm = Norm(weights, f"{name}.pre_norm", epsilon)
        self._up, self._down = (Linear.of(weights, f"{name}.linear_{i}") for i in (1, 2))
        self._approximate = approximate

    def __call__(self, merged: Tensor) -> Tensor:
        return self._down(F.gelu(self._up(self._norm(merged)), approximate=self._approximate))


def _by_window(rows: Tensor) -> Tensor:
    """Patches [N, ...] of tokens row by row, in the order of windows."""
    return rows.view(-1, 2, 2, 2, 2, *rows.shape[1:]).transpose(2, 3).flatten(0, 4)


@lru_cache(64)
def table_rows(side: int, num_rows: int, num_columns: int) -> Tensor:
    """Rows of a table of side x side positions for so many patches, int64 [N] in the order of windows.

    A patch takes the place that its share of the picture has, in float32 as in transformers.
    """
    borders = torch.arange(1 / side, 1.0, 1 / side)
    rows, columns = (torch.bucketize(torch.arange(count) / count, borders, right=True) for count in (num_rows, num_columns))
    places = rows[:, None] * side + columns
    return places.view(num_rows // 4, 2, 2, num_columns // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).flatten()
