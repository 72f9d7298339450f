"""Pixtral's transformer: pictures of any size, whose patches turn by their rows and columns. Its weights are views, never copied; all
but its products and, on a CPU, its attention is torch's.

Shapes: T patches in the order of the tower's input, where those of a token follow each other; H hidden.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...cpu_kernels.flash_attention import prepare
from ..lm.decoder import AfterLayer
from ..lm.rope import Rotation, rotate
from ..media_config import VisionConfig, VisionRules
from .interface import TowerInput
from .linear import Linear
from .sequences import Sequences, attend

_EPSILON = 1e-5  # of the tower's norms
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}

Size = tuple[int, int]


class PixtralTransformer:
    """``Tower``, computing where its weights lie. A picture's third and fourth detail are its rows and columns of patches: where one is
    odd, the input has one more, which is left out, and so is what makes no whole token."""

    def __init__(
        self, config: VisionConfig, rules: VisionRules, weights: dict[str, Tensor], device: torch.device, theta: float, activation: str
    ) -> None:
        """Uses those ``weights`` whose names start with ``vision.``. ``theta``: of the positions."""
        self._config, self._device = config, device
        self._mean, self._std = (
            (torch.tensor(numbers) * 255).repeat_interleave(rules.patch_size**2).to(device)
            for numbers in (rules.image_mean, rules.image_std)
        )
        kernel = weights["vision.patch_conv.weight"]
        self._patch_embed, self._dtype = Linear(kernel.flatten(1), None), kernel.dtype
        self._first_norm = weights["vision.ln_pre.weight"]
        self._layers = [_Layer(config, weights, f"vision.transformer.layers.{i}", activation) for i in range(config.depth)]
        self._merger_norm = weights.get("vision.merger.norm.weight")
        has_merge = "vision.merger.patch_merger.merging_layer.weight" in weights
        self._merge = Linear.of(weights, "vision.merger.patch_merger.merging_layer") if has_merge else None
        self._up, self._down = (Linear.of(weights, f"vision.merger.linear_{i}") for i in (1, 2))
        head_dim = config.hidden_size // config.num_heads
        frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        self._frequencies = frequencies[0::2], frequencies[1::2]  # of rows, of columns
        if device.type == "cpu":
            prepare(head_dim, self._dtype)

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        sizes = [part.grid[1:] for part in parts]
        seen: list[Size] = [
            (part.details[2], part.details[3]) if part.details else size for part, size in zip(parts, sizes, strict=True)
        ]
        merge = self._config.merge_size
        staged = torch.from_numpy(np.concatenate([part.rows for part in parts]))
        kept = torch.from_numpy(np.concatenate([_kept(size, its, merge) for size, its in zip(sizes, seen, strict=True)]))
        if not kept.all():
            staged = staged[kept]
        if self._device.type == "cuda":
            staged = staged.pin_memory()
        pixels = staged.to(self._device, non_blocking=True).float().sub_(self._mean).div_(self._std).to(self._dtype)
        hidden = _norm(self._patch_embed(pixels), self._first_norm, _EPSILON)
        rotation = self._rotation(np.concatenate([_places(size, merge) for size in sizes])[kept.numpy()])
        sequences = Sequences.of(np.array([rows * columns for rows, columns in seen]), self._device)
        for layer in self._layers:
            layer(hidden, rotation, sequences)
            if after_layer is not None:
                after_layer()
        if self._merger_norm is not None:
            hidden = _norm(hidden, self._merger_norm, self._config.norm_eps)
        whole = torch.from_numpy(np.concatenate([_whole(size, its, merge) for size, its in zip(sizes, seen, strict=True)]))
        if not whole.all():
            hidden = hidden[whole.to(self._device)]
        # the matrix has the places of a channel beside each other
        merged = hidden.view(-1, merge**2, hidden.shape[1]).transpose(1, 2).flatten(1)
        tokens = self._down(F.gelu(self._up(merged if self._merge is None else self._merge(merged))))
        return list(torch.split(tokens, [(rows // merge) * (columns // merge) for rows, columns in seen]))

    def _rotation(self, places: np.ndarray) -> Rotation:
        """Of patches at ``places`` int64 [T, 2]."""
        numbers = torch.from_numpy(places).float()
        by_axis = [numbers[:, axis : axis + 1] * self._frequencies[axis] for axis in (0, 1)]
        angles = torch.cat(by_axis, 1).unsqueeze(1).to(self._device)
        sin = angles.sin()
        return angles.cos(), sin, -sin


class _Layer:
    """One layer's weights, looked up once."""

    def __init__(self, config: VisionConfig, weights: dict[str, Tensor], name: str, activation: str) -> None:
        self._head_dim = config.hidden_size // config.num_heads
        self._norms = [weights[f"{name}.{norm}.weight"] for norm in ("attention_norm", "ffn_norm")]
        self._qkv = [Linear.of(weights, f"{name}.attention.{part}_proj") for part in "qkv"]
        self._out = Linear.of(weights, f"{name}.attention.o_proj")
        self._gate, self._up, self._down = (Linear.of(weights, f"{name}.feed_forward.{part}_proj") for part in ("gate", "up", "down"))
        self._activate = _ACTIVATIONS[activation]

    def __call__(self, hidden: Tensor, rotation: Rotation, sequences: Sequences) -> None:
        """Add to ``hidden`` [T, H] what the layer finds."""
        normed = _norm(hidden, self._norms[0], _EPSILON)
        q, k, v = (project(normed).view(len(normed), -1, self._head_dim) for project in self._qkv)
        rotate(q, rotation)
        rotate(k, rotation)
        hidden += self._out(attend(q, k, v, sequences).flatten(1))
        normed = _norm(hidden, self._norms[1], _EPSILON)
        hidden += self._down(self._activate(self._gate(normed)).mul_(self._up(normed)))


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


@lru_cache(64)
def _places(size: Size, merge: int) -> np.ndarray:
    """Row and column of each patch, int64 [T, 2]."""
    rows, columns = size
    blocks = np.stack(np.divmod(np.arange(rows * columns), columns), 1).reshape(rows // merge, merge, columns // merge, merge, 2)
    found: np.ndarray = blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2)
    return found


def _kept(size: Size, seen: Size, merge: int) -> np.ndarray:
    """Which patches are the picture's, bool [T]."""
    found: np.ndarray = np.all(_places(size, merge) < seen, axis=1)
    return found


def _whole(size: Size, seen: Size, merge: int) -> np.ndarray:
    """Which of the picture's patches belong to a whole token."""
    of_token = _kept(size, seen, merge).reshape(-1, merge**2)
    found: np.ndarray = np.broadcast_to(of_token.all(1, keepdims=True), of_token.shape)[of_token]
    return found
