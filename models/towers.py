"""SKELETON (being written): vision and audio towers, the only module that imports transformers (lazily). encoder calls it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .architecture import MediaKind, ModelConfig


@dataclass(frozen=True, slots=True)
class TowerInput:
    """rows: uint8 [n, row_bytes] (vision patch rows; audio: the bytes of float32 mel rows, i.e. uint8 [frames, 4 * mel_bins] or
    float32 [frames, mel_bins]); grid as in SegmentShape."""

    kind: MediaKind
    rows: NDArray[np.uint8] | NDArray[np.float32]
    grid: tuple[int, int, int]


class Towers:
    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None: ...

    def encode(self, parts: list[TowerInput]) -> list[Tensor]:
        """One [num_tokens, hidden] tensor in the model's dtype per part, in order."""
        raise NotImplementedError
