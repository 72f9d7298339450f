"""The judges of families that see and do not hear."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_media import sample
from mmrt.tests.models.test_items import function_of_transformers
from mmrt.tests.settings import ImportedLater

qwen3_vl: Any = ImportedLater("transformers.models.qwen3_vl.processing_qwen3_vl")


class SeeingOracle(Oracle):
    """A checkpoint of Qwen2-VL in transformers, float32."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, "AutoModelForImageTextToText")
        if not (checkpoint / "video_preprocessor_config.json").exists():
            self.video_pixels = self.image_pixels

    def sampled(self, frames: NDArray[np.uint8], fps: int) -> tuple[NDArray[np.uint8], Any]:
        """What is sampled of a clip, for ``Media.videos``."""
        return frames[sample(len(frames), fps)], 2.0

    def taken(self, frames: NDArray[np.uint8], fps: float) -> tuple[NDArray[np.uint8], Any]:
        """Frames that came as pictures, for ``Media.videos``: all of them."""
        return frames, fps

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


class TimedOracle(SeeingOracle):
    """A checkpoint of Qwen3-VL: the prompt says when each frame is shown, and a bound on pixels is the whole clip's."""

    def sampled(self, frames: NDArray[np.uint8], fps: int) -> tuple[NDArray[np.uint8], Any]:
        """With the frames' times."""
        processor = SimpleNamespace(num_frames=None, fps=2.0, min_frames=4, max_frames=768)
        metadata = SimpleNamespace(total_num_frames=len(frames), fps=fps)
        indices = function_of_transformers("video_processing_qwen3_vl", "sample_frames")(processor, metadata)
        return frames[indices], SimpleNamespace(fps=fps, frames_indices=indices.tolist())

    def taken(self, frames: NDArray[np.uint8], fps: float) -> tuple[NDArray[np.uint8], Any]:
        return frames, SimpleNamespace(fps=fps, frames_indices=list(range(len(frames))))

    def _clip_size(self, frames: NDArray[np.uint8], bounds: tuple[int, int]) -> tuple[int, int]:
        resize = function_of_transformers("video_processing_qwen3_vl", "smart_resize")
        size: tuple[int, int] = resize(len(frames), *frames.shape[1:3], 2, 32, *bounds)
        return size

    def _timing(self, timings: list[Any]) -> dict[str, Any]:
        return {}

    def _video_ids(self, grid: list[int], timing: Any) -> list[int]:
        ids: list[int] = self.tokenizer(text_of_clip(grid, timing))["input_ids"]
        return ids


class GlmOracle(SeeingOracle):
    """A checkpoint of GLM-OCR or GLM-4.1V, whose bounds on pixels are those of a picture that counts twice. It takes no videos here."""

    def _size(self, frames: NDArray[np.uint8], bounds: tuple[int, int]) -> tuple[int, int]:
        from transformers.models.glm46v.image_processing_pil_glm46v import smart_resize

        size: tuple[int, int] = smart_resize(2, *frames.shape[1:3], 2, 28, *bounds)
        return size


def text_of_clip(grid: list[int], metadata: Any) -> str:
    """What transformers' processor puts in place of a video; it wants torchvision to be made, this part of it does not. ``metadata``:
    the file's ``fps``, and the sampled ``frames_indices``."""
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=partial(qwen3_vl.Qwen3VLProcessor._calculate_timestamps, None),
    )
    metadata = SimpleNamespace(fps=metadata.fps, frames_indices=[*metadata.frames_indices])  # the processor appends to them
    text: str = qwen3_vl.Qwen3VLProcessor.replace_video_token(
        processor, {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}, 0
    )
    return text
