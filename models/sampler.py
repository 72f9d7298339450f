"""SKELETON (being written): guidance and sampling."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def combine_guidance(conditional: Tensor, unconditional: Tensor, scale: Tensor) -> Tensor:
    """[B, V], [B, V], [B] -> u + s (c - u), float32 [B, V] (CF1)."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Per-row parameters, arrays of length B. temperature 0: greedy; top_k 0, top_p 1, min_p 0: off.
    seed uint64, index int64: number of the token in its sequence (the draw depends on (seed, index) only)."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    index: NDArray[np.int64]


def sample(logits: Tensor, rows: SamplingRows) -> NDArray[np.int64]:
    """logits float32 [B, V] -> token ids int64 [B]."""
    raise NotImplementedError
