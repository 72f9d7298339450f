"""The towers of a model: each segment goes to the tower of its kind, and gets the rows of its text. The encoder actor calls it; the
family builds the towers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..architecture import ModelConfig
from ..checkpoint.weights import torch_dtype
from ..families.registry import family_of
from ..lm.decoder import AfterLayer
from ..lm.matrices import table_of
from .interface import TowerInput

CPU = torch.device("cpu")


class Towers:
    """The model's towers. ``weights`` are the model's views by name, all on one device."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], device: torch.device = CPU) -> None:
        """Raises: CheckpointError if the weights do not fit the towers, or the device's kernels do not support the towers."""
        self._towers = family_of(config).build_towers(config, weights, device)
        self._weights, self._dtype = weights, torch_dtype(config.dtype)
        self._scale = torch.tensor(config.language.embedding_scale, dtype=self._dtype).item()  # of text, not of media
        self._placeholders = torch.tensor([config.placeholder_id(kind) for kind in config.media_kinds])

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
        return [self._with_text(part, outputs[i]) for i, part in enumerate(parts)]

    def _with_text(self, part: TowerInput, media: Tensor) -> Tensor:
        """The rows of all tokens of a part: ``media`` are those of its placeholders."""
        if not part.ids:
            return media
        tokens = torch.tensor([id for id, count in part.ids for _ in range(count)])
        is_text = torch.isin(tokens, self._placeholders, invert=True)
        text = tokens[is_text].to(media.device)
        is_text = is_text.to(media.device)
        rows = media.new_zeros(len(tokens), media.shape[1])  # text has no deep parts
        embeds = table_of(self._weights, "embed").lookup(text, self._dtype)
        rows[is_text, : embeds.shape[1]] = embeds if self._scale == 1.0 else embeds.mul_(self._scale)
        rows[~is_text] = media
        return rows
