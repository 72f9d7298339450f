"""The sound tower of Qwen3-ASR and Qwen3-Omni: convolutions over time and mel within chunks, then Whisper's layers within windows.
Weights are views, never copied.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....cpu_kernels.flash_attention import prepare
from ...architecture import ModelConfig
from ...lm.decoder import AfterLayer
from ...towers.interface import TowerInput
from ...towers.linear import Linear
from ...towers.sequences import Sequences
from ...towers.whisper import EncoderLayer, LayerNorm, sinusoids
from .sound import STRIDES, halved

_CHUNKS_AT_ONCE = 8  # in the convolutions, whose rows are a hundred times as large as mel frames


class SoundTower:
    """The tower, computing where its weights lie."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], device: torch.device, fills_short: bool = True) -> None:
        """Uses those ``weights`` whose names start with ``audio.``. ``fills_short``: the convolutions see zeros behind a clip that is
        shorter than a chunk, as behind the last chunk of others."""
        assert model.audio is not None and model.audio_rules is not None
        config = model.audio
        self._device, self._chunk, self._fills_short = device, 2 * config.n_window, fills_short
        self._window = model.audio_rules.window_frames // self._chunk * config.max_source_positions
        names = [f"audio.conv2d{number}" for number in range(1, STRIDES + 1)]
        self._convolutions = [(weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in names]
        self._dtype = self._convolutions[0][0].dtype
        self._flatten = Linear.of(weights, "audio.conv_out")
        self._positions = sinusoids(config.max_source_positions, config.hidden_size).to(device, self._dtype)
        self._layers = [EncoderLayer(config, weights, i) for i in range(config.num_layers)]
        if device.type == "cpu":
            prepare(config.hidden_size // config.num_heads, self._dtype)
        self._norm = LayerNorm(weights, "audio.ln_post")
        self._up, self._project = Linear.of(weights, "audio.proj1"), Linear.of(weights, "audio.proj2")

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        """See ``Tower``. Of a run of a window, as Qwen3-Omni's ``details`` say it, the rows of its tokens."""
        mels = [torch.from_numpy(part.rows.view(np.float32).copy()) for part in parts]
        chunks = [[*torch.split(mel, self._chunk)] for mel in mels]
        hidden = self._convolved(chunks)
        rows = [sum(halved(len(chunk)) for chunk in its) for its in chunks]
        windows = [min(self._window, num - at) for num in rows for at in range(0, num, self._window)]
        sequences = Sequences.of(np.array(windows), self._device)
        for layer in self._layers:
            layer(hidden, sequences)
            if after_layer is not None:
                after_layer()
        found = torch.split(self._project(F.gelu(self._up(self._norm(hidden)))), rows)
        return [its[slice(*(part.details[1:] or (None,)))] for part, its in zip(parts, found, strict=True)]

    def _batches(self, chunks: list[list[Tensor]]) -> Iterator[tuple[int, list[Tensor]]]:
        """Chunks of all clips in order, some at once, and how many mel frames the convolutions see of each."""
        widths = [self._chunk if self._fills_short else min(sum(map(len, its)), self._chunk) for its in chunks]
        each = [(width, chunk) for width, its in zip(widths, chunks, strict=True) for chunk in its]
        for width, equal in groupby(each, key=itemgetter(0)):
            some = [chunk for _, chunk in equal]
            yield from ((width, some[at : at + _CHUNKS_AT_ONCE]) for at in range(0, len(some), _CHUNKS_AT_ONCE))

    def _convolved(self, chunks: list[list[Tensor]]) -> Tensor:
        """Mel frames [n, num_mel_bins] of each clip's chunks, on the host -> rows [T, hidden] of all chunks. What is missing at the end
        of one is zeros to the convolutions."""
        found: list[Tensor] = []
        for width, some in self._batches(chunks):
            x = torch.stack([F.pad(chunk, (0, 0, 0, width - len(chunk))) for chunk in some])
            x = x.transpose(1, 2).unsqueeze(1).to(self._device, self._dtype)
            for weight, bias in self._convolutions:
                x = F.gelu(F.conv2d(x, weight, bias, stride=2, padding=1))
            places = torch.cat([torch.arange(halved(len(chunk))) for chunk in some])
            numbers = torch.repeat_interleave(torch.tensor([halved(len(chunk)) for chunk in some]))
            rows = x.permute(0, 3, 1, 2).flatten(2)[numbers.to(self._device), places.to(self._device)]
            found.append(self._flatten(rows) + self._positions[places.to(self._device)])
        return torch.cat(found)
