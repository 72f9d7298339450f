"""The families that see as Qwen3-VL does: what their ``Family`` has in common."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ....schema.media import MediaKind, MediaSpan
from ...architecture import LanguageConfig, ModelConfig
from ...checkpoint.json_fields import CheckpointFiles, JsonObject
from ...media_config import VisionConfig
from .. import no_media
from ..family import CheckpointRecipe, made_recipes
from ..qwen2_5 import media, tensors
from ..qwen2_5.seeing import build_towers, video_with_sound
from . import clips, seeing

if TYPE_CHECKING:
    import torch

    from ...towers.interface import Tower


class Qwen3Family:
    """A ``Family``. ``home``: the package that has its decoder and its made checkpoints; the other arguments are those of
    ``seeing.parse_config``. ``may_be_text``: a checkpoint without a tower is text alone."""

    def __init__(
        self,
        name: str,
        home: str,
        parse_text: Callable[[JsonObject, bool], LanguageConfig],
        parse_tower: Callable[[JsonObject, int], VisionConfig],
        vision_start: int,
        may_be_text: bool = False,
    ) -> None:
        self.home = home
        self._name, self._may_be_text, self._vision_start = name, may_be_text, vision_start
        self._parse_text, self._parse_tower = parse_text, parse_tower

    def parse_config(self, files: CheckpointFiles) -> ModelConfig:
        """Map config.json. Raises CheckpointError."""
        if self._may_be_text and not files.required("config.json").has("vision_config"):
            return seeing.parse_text_alone(files, self._name, self._parse_text)
        return seeing.parse_config(files, self._name, self._parse_text, self._parse_tower, self._vision_start)

    def recipes(self) -> Mapping[str, CheckpointRecipe]:
        return made_recipes(self.home, self._name)

    def build_towers(self, config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
        return {} if config.vision is None else build_towers(config, weights, device)

    def positions(self, config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
        if config.vision is None:
            return no_media.positions(config, num_tokens, spans)
        return seeing.positions(config, num_tokens, spans)

    tensor_specs = staticmethod(tensors.tensor_specs)
    canonical_name = staticmethod(seeing.canonical_name)
    checkpoint_name = staticmethod(seeing.checkpoint_name)
    image_item = staticmethod(media.image_item)
    sample_frames = staticmethod(clips.sample_frames)
    video_item = staticmethod(clips.video_item)
    audio_item = staticmethod(media.audio_item)
    video_with_sound = staticmethod(video_with_sound)
