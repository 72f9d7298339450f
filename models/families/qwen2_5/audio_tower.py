"""The sound tower of Qwen2-Audio and Qwen2.5-Omni (arXiv 2503.20215, 2.1): Whisper's encoder over pieces of 2 x n_window mel frames
that do not see each other. Weights are views, never copied.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ....cpu_kernels.flash_attention import prepare
from ...architecture import ModelConfig
from ...lm.decoder import AfterLayer
from ...towers.interface import TowerInput
from ...towers.linear import Linear
from ...towers.sequences import Sequences
from ...towers.whisper import EncoderLayer, LayerNorm, sinusoids


class AudioTower:
    """The tower, computing where its weights lie."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> None:
        """Uses those ``weights`` whose names start with ``audio.``."""
        assert model.audio is not None
        config = model.audio
        self._device, self._piece = device, 2 * config.n_window
        self._convolutions = [(weights[f"audio.conv{i}.weight"], weights[f"audio.conv{i}.bias"]) for i in (1, 2)]
        self._dtype = self._convolutions[0][0].dtype
        learned = weights.get("audio.embed_positions.weight")
        made = sinusoids(config.max_source_positions, config.hidden_size) if learned is None else learned
        self._positions = made.to(device, self._dtype)
        self._layers = [EncoderLayer(config, weights, i) for i in range(config.num_layers)]
        if device.type == "cpu":
            prepare(config.hidden_size // config.num_heads, self._dtype)
        self._norm, self._project = LayerNorm(weights, "audio.ln_post"), Linear.of(weights, "audio.proj")

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        mels = [torch.from_numpy(part.rows.view(np.float32).copy()) for part in parts]
        pieces = [piece for mel in mels for piece in torch.split(mel, self._piece)]
        heard = [min(self._piece, part.grid[0] - at) for part in parts for at in range(0, part.grid[0], self._piece)]
        hidden, sequences = self._convolved(pieces, heard)
        for layer in self._layers:
            layer(hidden, sequences)
            if after_layer is not None:
                after_layer()
        rows = _halved(np.array([part.grid[0] for part in parts])).tolist()
        pairs = [part[: len(part) // 2 * 2].view(len(part) // 2, 2, part.shape[1]) for part in torch.split(hidden, rows)]
        pooled = torch.cat(pairs).sum(1) / 2
        return list(torch.split(self._project(self._norm(pooled)), [len(part) for part in pairs]))

    def _convolved(self, pieces: list[Tensor], heard: list[int]) -> tuple[Tensor, Sequences]:
        """Mel frames [n, num_mel_bins] of each piece, on the host -> rows [T, hidden] of all pieces. ``heard``: frames of each that
        give rows, two of them one; those behind are silence."""
        lengths, halves = np.array([len(piece) for piece in pieces]), _halved(np.array(heard))
        padded = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True).transpose(1, 2)
        inside = torch.arange(padded.shape[2]) < torch.from_numpy(lengths).unsqueeze(1)
        kept = (torch.arange(halves.max()) < torch.from_numpy(halves).unsqueeze(1)).flatten().nonzero().squeeze(1)
        (first, first_bias), (second, second_bias) = self._convolutions
        x = F.gelu(F.conv1d(padded.to(self._device, self._dtype), first, first_bias, padding=1))
        x = x * inside.unsqueeze(1).to(self._device)  # what the first convolution makes of the padding is not for the second
        x = F.gelu(F.conv1d(x, second, second_bias, stride=2, padding=1)).transpose(1, 2)
        x = x[:, : halves.max()] + self._positions[: halves.max()]
        return x.flatten(0, 1)[kept.to(self._device)], Sequences.of(halves, self._device)


def _halved(frames: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows that the second convolution, of stride 2, makes of as many mel frames."""
    return (frames + 1) // 2
