"""The interface of a family, and the table of families. Families are modules; each function here is one of theirs."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...schema.media import ItemShape, MediaSpan
from ..architecture import ModelConfig
from ..checkpoint.json_fields import CheckpointFiles


class Family(Protocol):
    """All there is to a family. Everything is pure; numpy only (``sample_frames`` alone uses torch, see there)."""

    def parse_config(self, files: CheckpointFiles) -> ModelConfig:
        """The configuration out of the checkpoint's files. Raises CheckpointError."""
        ...

    def positions(self, config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
        """M-RoPE positions of an expanded prompt: int64 [3, num_tokens] (t, h, w), and the delta.

        Token i >= num_tokens stands at i + delta on all three axes. ``spans`` are in order and do not overlap.
        """
        ...

    def image_item(self, config: ModelConfig, height: int, width: int) -> ItemShape:
        """Grid, tokens and the one segment of an image of so many pixels. Raises UnsupportedMediaError."""
        ...

    def sample_frames(self, config: ModelConfig, total_frames: int, fps: float) -> NDArray[np.int64]:
        """Indices of the frames to take from a video of ``total_frames`` at ``fps``. Raises UnsupportedMediaError."""
        ...

    def video_item(self, config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float) -> ItemShape:
        """Grid, tokens and segments of ``num_frames`` sampled frames; ``sampled_fps`` = num_frames / total_frames x fps.

        Raises UnsupportedMediaError.
        """
        ...

    def audio_item(self, config: ModelConfig, num_frames: int) -> ItemShape:
        """Tokens and segments of a clip of ``num_frames`` mel frames. Raises UnsupportedMediaError."""
        ...

    def video_with_sound(self, config: ModelConfig, video: ItemShape, sound: ItemShape) -> ItemShape:
        """A video together with its sound track: one item whose segments are of both kinds. Raises UnsupportedMediaError."""
        ...
