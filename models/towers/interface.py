"""The interface of a tower: patch or mel rows in, embedding rows out. Families build them, ``dispatch`` calls them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...schema.media import MediaKind
from ..lm.decoder import AfterLayer


@dataclass(frozen=True, slots=True)
class TowerInput:
    """A segment for a tower.

    ``rows`` of vision: uint8 [t x h x w, 3 x T x P x P] in transformers' patch order, not normalised. ``rows`` of audio: mel frames
    as float32 [frames, num_mel_bins], or their bytes uint8 [frames, 4 x num_mel_bins]. ``grid``, ``details`` and ``ids`` as in the
    segment.
    """

    kind: MediaKind
    rows: NDArray[np.uint8] | NDArray[np.float32]
    grid: tuple[int, int, int]
    details: tuple[int, ...] = ()
    ids: tuple[tuple[int, int], ...] = ()


class Tower(Protocol):
    """One tower, computing where its weights lie."""

    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        """Embedding rows [number of placeholders, hidden] in the model's dtype, one tensor per part, in order, by one forward.

        ``after_layer`` is called after each layer.
        """
        ...
