"""transformers' answers to the same files, in float32. Called by ``quality`` when the server has answered.

Files are decoded by mmrt's decoders and resized as torchvision does it; everything behind that, from patches and spectrograms to the
greedy search, is transformers'. Only ``Reference`` imports torch and transformers.
"""

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrt.media.audio import decode_audio
from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits
from mmrt.media.preprocess import resize
from mmrt.media.timing import sampled
from mmrt.media.video import decode_frames
from mmrt.media.video_info import analyse
from mmrt.models.config import load_model_config
from mmrt.models.families.registry import family_of

from .cases import Case, File

Pixels = npt.NDArray[np.uint8]
_LIMITS = MediaLimits()


class Reference:
    """A Qwen2.5-Omni checkpoint in transformers. Raises: ValueError for another family."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        import transformers
        from transformers import AutoTokenizer, Qwen2_5OmniThinkerForConditionalGeneration, WhisperFeatureExtractor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        transformers.utils.logging.disable_progress_bar()
        self._torch: Any = torch
        self._config = load_model_config(checkpoint)
        if self._config.family != "qwen2_5_omni":
            raise ValueError(f"{checkpoint} is of family {self._config.family!r}: quality is compared for qwen2_5_omni alone")
        self._family = family_of(self._config)
        assert self._config.vision_rules is not None and self._config.audio_rules is not None
        self._rules, self._sound_rules = self._config.vision_rules, self._config.audio_rules
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._patches = Qwen2VLImageProcessorPil.from_pretrained(checkpoint, do_resize=False)
        self._sounds = WhisperFeatureExtractor(feature_size=self._sound_rules.num_mel_bins)
        self._model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def answer(self, case: Case, max_tokens: int) -> tuple[str, list[int]]:
        """The greedy answer: its text, and its tokens with the one that ends it."""
        torch = self._torch
        inputs = self._inputs(case)
        self._model.rope_deltas = None  # of the prompt before
        with torch.inference_mode():
            output = self._model.generate(
                **inputs, attention_mask=torch.ones_like(inputs["input_ids"]), max_new_tokens=max_tokens, do_sample=False
            )
        ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)), ids

    def _inputs(self, case: Case) -> dict[str, Any]:
        torch = self._torch
        content = [*({"type": file.kind} for file in case.files), {"type": "text", "text": case.question.text}]
        messages = [{"role": "user", "content": content}]
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found: dict[str, list[Any]] = {}
        counts: dict[int, list[int]] = {}
        for file in case.files:
            num_tokens = self._add(file, found)
            counts.setdefault(self._config.placeholder_id(file.kind), []).append(num_tokens)  # type: ignore[arg-type]
        ids: list[int] = []
        for token in self._tokenizer(rendered)["input_ids"]:
            ids += [token] * (counts[token].pop(0) if token in counts else 1)
        return {"input_ids": torch.tensor([ids]), **{name: torch.cat(parts) for name, parts in found.items()}}

    def _add(self, file: File, found: dict[str, list[Any]]) -> int:
        """Adds a file's inputs; how many tokens it takes."""
        torch, reader = self._torch, io.BytesIO(file.data)
        if file.kind == "audio":
            pcm = decode_audio(reader, self._sound_rules.sample_rate, _LIMITS)
            batch = self._sounds(
                pcm, sampling_rate=self._sound_rules.sample_rate, return_attention_mask=True, padding="max_length", return_tensors="pt"
            )
            found.setdefault("input_features", []).append(batch["input_features"])
            found.setdefault("feature_attention_mask", []).append(batch["attention_mask"])
            return self._family.audio_item(self._config, int(batch["attention_mask"].sum())).num_tokens
        if file.kind == "image":
            picture = decode_image(reader, _LIMITS)
            item = self._family.image_item(self._config, *picture.shape[:2])
            found.setdefault("pixel_values", []).append(self._rows(picture, item.grid))
            found.setdefault("image_grid_thw", []).append(torch.tensor([item.grid]))
            return item.num_tokens
        info = analyse(reader, _LIMITS)
        wanted = sampled(info, partial(self._family.sample_frames, self._config))
        frames = [frame for _, frame in decode_frames(reader, info, wanted)]
        item = self._family.video_item(self._config, len(frames), info.height, info.width, self._rules.fps)
        found.setdefault("pixel_values_videos", []).append(self._video_rows(frames, item.grid))
        found.setdefault("video_grid_thw", []).append(torch.tensor([item.grid]))
        found.setdefault("video_second_per_grid", []).append(torch.tensor([item.second_per_grid_s]))
        return item.num_tokens

    def _rows(self, picture: Pixels, grid: tuple[int, int, int]) -> Any:
        """Patch rows of a picture at the size of this grid."""
        size = self._rules.patch_size
        resized = resize(picture, grid[1] * size, grid[2] * size).transpose(1, 2, 0)
        return self._patches(images=[np.ascontiguousarray(resized)], return_tensors="pt")["pixel_values"]

    def _video_rows(self, frames: list[Pixels], grid: tuple[int, int, int]) -> Any:
        """An image's row repeats its patch over the instants of a temporal patch; a video's row takes each from a frame of its own."""
        torch, steps = self._torch, self._rules.temporal_patch_size
        frames = frames + [frames[-1]] * (grid[0] * steps - len(frames))
        rows = [self._rows(frame, grid).view(grid[1] * grid[2], 3, steps, -1) for frame in frames]
        return torch.cat(
            [
                torch.stack([rows[first + step][:, :, step] for step in range(steps)], dim=2).flatten(1)
                for first in range(0, len(rows), steps)
            ]
        )
