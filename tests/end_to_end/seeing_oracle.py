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
from mmrt.tests.models.glm_reference import embedded, glm4v, text_of_glm_clip
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
    """A checkpoint of GLM's, whose bounds on pixels are those of a picture that counts twice, or of a whole clip. Each frame of a
    video is a picture, before its time."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.family = self.model.config.model_type
        self.module = "glm4v" if self.family == "glm4v" else "glm46v"

    def sampled(self, frames: NDArray[np.uint8], fps: int) -> tuple[NDArray[np.uint8], Any]:
        processor = SimpleNamespace(fps=2.0, max_duration=300, temporal_patch_size=2)
        metadata = SimpleNamespace(total_num_frames=len(frames), fps=fps, duration=len(frames) / fps)
        indices = function_of_transformers(f"video_processing_{self.module}", "sample_frames")(processor, metadata)
        return frames[indices], SimpleNamespace(fps=fps, timestamps=[number / fps for number in indices.tolist()])

    def taken(self, frames: NDArray[np.uint8], fps: float) -> tuple[NDArray[np.uint8], Any]:
        return frames, SimpleNamespace(fps=fps, timestamps=[number / fps for number in range(len(frames))])

    def logits(self, inputs: dict[str, Any], ids: list[int]) -> torch.Tensor:
        prompt = inputs["input_ids"]
        forced = torch.cat((prompt, torch.tensor([ids[:-1]], dtype=torch.long)), dim=1)
        found = {**inputs, "input_ids": forced, "mm_token_type_ids": self._types(forced)}
        grids = {name: found[name] for name in ("image_grid_thw", "video_grid_thw") if name in found}
        found["position_ids"], _ = self.model.model.get_rope_index(
            input_ids=forced, mm_token_type_ids=found["mm_token_type_ids"], **grids
        )
        with torch.inference_mode():
            output = self.model(**embedded(self.model.model, found), use_cache=False)
        logits: torch.Tensor = output.logits[0, prompt.shape[1] - 1 :].float()
        return logits

    def _types(self, ids: torch.Tensor) -> torch.Tensor:
        config = self.model.config
        processor = SimpleNamespace(
            video_start_id=config.video_start_token_id, video_end_id=config.video_end_token_id, image_token_id=config.image_token_id
        )
        return torch.tensor(glm4v.Glm4vProcessor.create_mm_token_type_ids(processor, ids.tolist()))

    def _size(self, frames: NDArray[np.uint8], bounds: tuple[int, int]) -> tuple[int, int]:
        return self._fit(2, *frames.shape[1:3], bounds)

    def _clip_size(self, frames: NDArray[np.uint8], bounds: tuple[int, int]) -> tuple[int, int]:
        return self._fit(*frames.shape[:3], bounds)

    def _fit(self, num_frames: int, height: int, width: int, bounds: tuple[int, int]) -> tuple[int, int]:
        resize = function_of_transformers("image_processing_glm46v", "smart_resize")
        size: tuple[int, int] = resize(num_frames, height, width, 2, 28, *bounds)
        return size

    def _timing(self, timings: list[Any]) -> dict[str, Any]:
        return {}

    def _video_ids(self, grid: list[int], timing: Any) -> list[int]:
        ids: list[int] = self.tokenizer(text_of_glm_clip(self.family, grid, timing))["input_ids"]
        return ids


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
