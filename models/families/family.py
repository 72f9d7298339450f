"""The interface of a model family. A family is a module, a package or an object that has these members.

Importing it does not load torch; only its towers do, when they are built.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...schema.media import ItemShape, MediaKind, MediaSpan
from ..architecture import ModelConfig
from ..checkpoint.json_fields import CheckpointFiles
from ..checkpoint.weight_specs import TensorSpec

if TYPE_CHECKING:
    import torch

    from ..towers.interface import Tower


class CheckpointRecipe(NamedTuple):
    """The files that ``mmrt model make`` writes besides random weights, for one shape of a family.

    ``special_tokens`` and ``plain_tokens`` are added to the vocabulary in this order, as its last; ``token_names`` are their names in
    tokenizer_config.json, which says that the first pads texts and ``end`` ends them. ``files`` makes the JSON files, including
    config.json, from the ids of the added tokens. ``are_stacked``: the experts of a layer are together in a tensor, since transformers
    reads no others.
    """

    vocab_size: int
    num_merges: int
    special_tokens: Sequence[str]
    plain_tokens: Sequence[str]
    token_names: Mapping[str, str]
    chat_template: str
    files: Callable[[Mapping[str, int]], dict[str, dict[str, Any]]]
    are_stacked: bool = False
    end: str = "<|im_end|>"


def made_recipes(package: str | None, *family: str) -> Mapping[str, CheckpointRecipe]:
    """The recipes in the module ``made_checkpoint`` of a family's package, by its name: no actor depends on it."""
    made: dict[str, CheckpointRecipe] = import_module(".made_checkpoint", package).recipes(*family)
    return made


class Family(Protocol):
    """Everything is pure; numpy only (``sample_frames`` and ``build_towers`` alone use torch)."""

    def parse_config(self, files: CheckpointFiles) -> ModelConfig:
        """The configuration from the checkpoint's files; ``family`` is the name in the registry. Raises CheckpointError."""
        ...

    def tensor_specs(self, config: ModelConfig) -> list[TensorSpec]:
        """All tensors of the model, in memory order."""
        ...

    def canonical_name(self, name: str) -> str:
        """The name in the sources of ``tensor_specs`` for a checkpoint's tensor name, as any version of transformers writes it."""
        ...

    def checkpoint_name(self, name: str) -> str:
        """The name that transformers' save_pretrained gives to a source of ``tensor_specs``."""
        ...

    def recipes(self) -> Mapping[str, CheckpointRecipe]:
        """Checkpoints that can be made, by the name of their shape; "tiny" is for tests."""
        ...

    def build_towers(self, config: ModelConfig, weights: "dict[str, torch.Tensor]", device: "torch.device") -> "dict[MediaKind, Tower]":
        """The tower of each kind of media that the model takes; kinds may share one. ``weights`` are views by the names of
        ``tensor_specs``, all on the device, and are never copied.

        Raises: CheckpointError if they do not fit the towers, or the device's kernels do not support the towers.
        """
        ...

    def positions(self, config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
        """M-RoPE positions of an expanded prompt: int64 [3, num_tokens] (t, h, w), and the delta.

        Token i >= num_tokens stands at i + delta on all three axes. ``spans`` are in order and do not overlap.
        """
        ...

    def image_item(self, config: ModelConfig, height: int, width: int) -> ItemShape:
        """Grid, tokens and the one segment of an image of this size. Raises UnsupportedMediaError."""
        ...

    def sample_frames(self, config: ModelConfig, total_frames: int, fps: float) -> NDArray[np.int64]:
        """Indices of the frames to take from a video of ``total_frames`` at ``fps``. Raises UnsupportedMediaError."""
        ...

    def video_item(
        self, config: ModelConfig, num_frames: int, height: int, width: int, sampled_fps: float, times_s: Sequence[float] = ()
    ) -> ItemShape:
        """Grid, tokens and segments of ``num_frames`` sampled frames; ``sampled_fps`` = num_frames / total_frames x fps.

        ``times_s``: when each of them is shown; without, they are evenly spaced from 0 on. Raises UnsupportedMediaError.
        """
        ...

    def audio_item(self, config: ModelConfig, num_frames: int) -> ItemShape:
        """Tokens and segments of a clip of ``num_frames`` mel frames. Raises UnsupportedMediaError."""
        ...

    def video_with_sound(self, config: ModelConfig, video: ItemShape, sound: ItemShape) -> ItemShape:
        """A video together with its sound track: one item whose segments are of both kinds. Raises UnsupportedMediaError."""
        ...
