"""What ``Family`` asks of media, for families that do not take them: there are no towers, and every medium is refused."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...schema.media import ItemShape, MediaKind, MediaSpan
from ..architecture import ModelConfig
from ..errors import UnsupportedMediaError

if TYPE_CHECKING:
    import torch

    from ..towers.interface import Tower


def build_towers(config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
    return {}


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
    """Token i stands at i on each axis."""
    return np.broadcast_to(np.arange(num_tokens, dtype=np.int64), (3, num_tokens)), 0


def image_item(config: ModelConfig, height: int, width: int) -> ItemShape:
    raise _refusal("image")


def sample_frames(config: ModelConfig, total_frames: int, fps: float) -> NDArray[np.int64]:
    raise _refusal("video")


def video_item(
    config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float, times_s: Sequence[float] = ()
) -> ItemShape:
    raise _refusal("video")


def audio_item(config: ModelConfig, num_frames: int) -> ItemShape:
    raise _refusal("audio")


def video_with_sound(config: ModelConfig, video: ItemShape, sound: ItemShape) -> ItemShape:
    raise _refusal("video with its sound")


def _refusal(what: str) -> UnsupportedMediaError:
    return UnsupportedMediaError(f"this model takes no {what}")
