"""The towers of a model: each segment goes to the tower of its kind. The encoder actor calls it; the family builds the towers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..architecture import ModelConfig
from ..families.registry import family_of
from ..lm.decoder import AfterLayer
from .interface import TowerInput

CPU = torch.device("cpu")


class Towers:
    """The model's towers. ``weights`` are the model's views by name, all on one device."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], device: torch.device = CPU) -> None:
        """Raises: CheckpointError if the weights do not fit the towers, or the device's kernels do not support the towers."""
        self._towers = family_of(config).build_towers(config, weights, device)

    @torch.inference_mode()
    def encode(self, parts: Sequence[TowerInput], after_layer: AfterLayer | None = None) -> list[Tensor]:
        """Embedding rows [num_tokens, hidden] in the model's dtype, one tensor per part, in order; one forward per tower.

        Attention stays within a temporal patch and within an audio window, so parts do not see each other, and the segments of an
        item encode as the whole item would. ``after_layer`` as in ``Tower``. Raises: ValueError for a kind of media that the model
        has no tower for.
        """
        missing = [part.kind for part in parts if part.kind not in self._towers]
        if missing:
            raise ValueError(f"this model has no tower for {missing[0]}")
        outputs: dict[int, Tensor] = {}
        for tower in {id(tower): tower for tower in self._towers.values()}.values():
            mine = [i for i, part in enumerate(parts) if self._towers[part.kind] is tower]
            if mine:
                outputs |= zip(mine, tower.encode([parts[i] for i in mine], after_layer), strict=True)
        return [outputs[i] for i in range(len(parts))]
