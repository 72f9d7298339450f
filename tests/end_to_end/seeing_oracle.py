"""The judge of families that see and do not hear."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForImageTextToText

from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_media import sample


class SeeingOracle(Oracle):
    """A checkpoint of Qwen2-VL in transformers, float32."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, AutoModelForImageTextToText)
        self.video_pixels = self.image_pixels  # the checkpoint has one file for both

    def sampled(self, frames: NDArray[np.uint8], fps: int) -> tuple[NDArray[np.uint8], float]:
        """What is sampled of a clip, for ``Media.videos``."""
        return frames[sample(len(frames), fps)], 2.0

    def inputs(self, messages: list[dict[str, Any]], media: Media | None = None) -> dict[str, Any]:
        found = super().inputs(messages, media)
        found.pop("video_second_per_grid", None)
        return {**found, "mm_token_type_ids": self._types(found["input_ids"])}

    def logits(self, inputs: dict[str, Any], ids: list[int]) -> torch.Tensor:
        self.model.model.rope_deltas = None
        types = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(ids) - 1))
        return super().logits({**inputs, "mm_token_type_ids": types}, ids)

    def _types(self, ids: torch.Tensor) -> torch.Tensor:
        """Which tokens are pictures' (1) and videos' (2)."""
        return (ids == self.placeholders["image"]).int() + 2 * (ids == self.placeholders["video"]).int()
