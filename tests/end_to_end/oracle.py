"""transformers as the judge: given the same prefix, is each emitted token the argmax of its logits?

Everything from pixels to logits is transformers' and PIL's; nothing of mmrt is imported. Media come decoded.
"""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
omni: Any = ImportedLater("transformers.models.qwen2_5_omni.processing_qwen2_5_omni")
qwen2_vl: Any = ImportedLater("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
TIE = 1e-4
MERGE = 4  # patches per token


@dataclass
class Media:
    """What a prompt holds: pictures uint8 [H, W, 3], sampled frames uint8 [N, H, W, 3] with fps (or with each one's time, for an oracle
    whose ``sampled`` gives that), float32 samples at 16 kHz.

    With ``use_audio_in_video`` the sound tracks of all videos are among ``audios``, each in its place. The bounds are those of the area
    that a picture or a frame is resized to; None: as the checkpoint says.
    """

    images: list[NDArray[np.uint8]] = field(default_factory=list)
    videos: list[tuple[NDArray[np.uint8], Any]] = field(default_factory=list)
    audios: list[NDArray[np.float32]] = field(default_factory=list)
    image_pixels: tuple[int, int] | None = None
    video_pixels: tuple[int, int] | None = None
    use_audio_in_video: bool = False


class Oracle:
    """An omni checkpoint in transformers, float32. For other families see ``seeing_oracle``."""

    def __init__(self, checkpoint: Path, model: str = "Qwen2_5OmniThinkerForConditionalGeneration") -> None:
        """``model``: the class of transformers that loads it."""
        torch.set_num_threads(1)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self.model = getattr(transformers, model).from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.images = qwen2_vl.Qwen2VLImageProcessorPil.from_pretrained(checkpoint, do_resize=False)
        self.image_pixels = _pixels(checkpoint / "preprocessor_config.json", (56 * 56, 28 * 28 * 1280))
        self.video_pixels = _pixels(checkpoint / "video_preprocessor_config.json", (128 * 28 * 28, 768 * 28 * 28))
        self.sounds = transformers.WhisperFeatureExtractor(feature_size=128)
        config = self.model.config
        names = ("video_token", "audio_token", "audio_bos_token", "audio_eos_token")
        self.processor = SimpleNamespace(
            **{name: getattr(self.tokenizer, name, None) for name in names},
            video_processor=SimpleNamespace(merge_size=2),
            get_chunked_index=partial(omni.Qwen2_5OmniProcessor.get_chunked_index, None),
        )
        self.placeholders = {
            "image": config.image_token_id,
            "video": config.video_token_id,
            "audio": getattr(config, "audio_token_id", None),
        }

    def inputs(self, messages: list[dict[str, Any]], media: Media | None = None) -> dict[str, Any]:
        """Model inputs for a conversation whose content parts are {"type": "text" | "image" | "video" | "audio"}."""
        media = media or Media()
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text)["input_ids"]
        found: dict[str, Any] = {}
        counts: dict[str, list[int]] = {"image": [], "audio": []}
        if media.images:
            bounds = media.image_pixels or self.image_pixels
            patches, grids = zip(
                *(self._patches(picture[None], self._size(picture[None], bounds)) for picture in media.images), strict=True
            )
            found |= {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
            counts["image"] = [int(np.prod(grid)) // MERGE for grid in grids]
        if media.videos:
            bounds = media.video_pixels or self.video_pixels
            patches, grids = zip(*(self._patches(frames, self._clip_size(frames, bounds)) for frames, _ in media.videos), strict=True)
            found |= {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
            found |= self._timing([timing for _, timing in media.videos])
        if media.audios:
            heard, counts["audio"] = self._heard(media.audios)
            found |= heard
        kinds = {token: kind for kind, token in self.placeholders.items()}
        expanded: list[int] = []
        videos = iter(range(len(media.videos)))
        for token in ids:
            if kinds.get(token) == "video" and media.use_audio_in_video:
                expanded += self._with_sound_track(found, next(videos), counts["audio"].pop(0))
            elif kinds.get(token) == "video":
                index = next(videos)
                expanded += self._video_ids(found["video_grid_thw"][index].tolist(), media.videos[index][1])
            else:
                expanded += [token] * (counts[kinds[token]].pop(0) if token in kinds else 1)
        if media.use_audio_in_video:
            found["use_audio_in_video"] = True
        return {"input_ids": torch.tensor([expanded]), **found}

    def _heard(self, sounds: list[NDArray[np.float32]]) -> tuple[dict[str, Any], list[int]]:
        """What the model hears, and the tokens of each sound."""
        batch = self.sounds(sounds, sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="pt")
        counts = [int(((n - 1) // 2 + 1 - 2) // 2 + 1) for n in batch["attention_mask"].sum(-1).tolist()]
        return {"input_features": batch["input_features"], "feature_attention_mask": batch["attention_mask"]}, counts

    def _with_sound_track(self, found: dict[str, Any], video: int, num_audio_tokens: int) -> list[int]:
        """What transformers' processor puts in place of a video; it wants torchvision to be made, this part of it does not."""
        videos = {name: found[name].numpy() for name in ("video_grid_thw", "video_second_per_grid")}
        text = omni.Qwen2_5OmniProcessor.replace_video_with_audio_token(
            self.processor,
            videos,
            video,
            {"num_audio_tokens": [num_audio_tokens]},
            0,
            position_id_per_seconds=25,
            seconds_per_chunk=2.0,
        )
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def _size(self, frames: NDArray[np.uint8], bounds: tuple[int, int]) -> tuple[int, int]:
        """The height and width that pictures are resized to."""
        return qwen2_vl.smart_resize(*frames.shape[1:3], 2 * self.images.patch_size, *bounds)

    def _clip_size(self, frames: NDArray[np.uint8], bounds: tuple[int, int]) -> tuple[int, int]:
        return self._size(frames, bounds)

    def _timing(self, timings: list[Any]) -> dict[str, Any]:
        """What the model is told about the time of videos."""
        return {"video_second_per_grid": torch.tensor([2 / fps for fps in timings])}

    def _video_ids(self, grid: list[int], timing: Any) -> list[int]:
        """What stands in place of a video."""
        return [self.placeholders["video"]] * (int(np.prod(grid)) // MERGE)

    def _patches(self, frames: NDArray[np.uint8], size: tuple[int, int]) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Patches of pictures that are resized as torchvision does it: uint8, bicubic, antialiased."""
        height, width = size
        side = self.images.patch_size
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
        if pixels.shape[2:] != (height, width):
            pixels = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
        pictures = [picture.permute(1, 2, 0).numpy() for picture in pixels]
        if len(pictures) == 1:
            done = self.images(images=pictures, return_tensors="pt")
            return done["pixel_values"], tuple(done["image_grid_thw"][0].tolist())
        if len(pictures) % 2:
            pictures.append(pictures[-1])
        grid = (len(pictures) // 2, height // side, width // side)
        single = [self.images(images=[picture], return_tensors="pt")["pixel_values"] for picture in pictures]
        # an image's patch row repeats it over both instants: [3, 2, side, side]; a video's takes one instant from each of two frames
        rows = [
            torch.stack((first.view(-1, 3, 2, side**2)[:, :, 0], second.view(-1, 3, 2, side**2)[:, :, 1]), 2).reshape(len(first), -1)
            for first, second in zip(single[::2], single[1::2], strict=True)
        ]
        return torch.cat(rows), grid

    @torch.inference_mode()
    def logits(self, inputs: dict[str, Any], ids: list[int]) -> torch.Tensor:
        """float32 [len(ids), V]: what the model says before each emitted id, all earlier ones given."""
        prompt = inputs["input_ids"]
        forced = torch.cat((prompt, torch.tensor([ids[:-1]], dtype=torch.long)), dim=1)
        # a fresh model state per call: rope positions belong to one prompt
        self.model.rope_deltas = None
        output = self.model(**{**inputs, "input_ids": forced, "attention_mask": torch.ones_like(forced)}, use_cache=False)
        logits: torch.Tensor = output.logits[0, prompt.shape[1] - 1 :].float()
        return logits

    def check_greedy(self, inputs: dict[str, Any], ids: list[int]) -> None:
        """Fail unless every id is the argmax of its prefix, or within TIE of it."""
        assert ids
        check_argmax(self.logits(inputs, ids), ids)


def _pixels(processor_config: Path, default: tuple[int, int]) -> tuple[int, int]:
    """Least and most of the area of a picture or a frame; the default where there is no such file."""
    if not processor_config.exists():
        return default
    found = json.loads(processor_config.read_bytes())
    if "size" in found:
        return found["size"]["shortest_edge"], found["size"]["longest_edge"]
    return found["min_pixels"], found["max_pixels"]


def check_argmax(logits: torch.Tensor, ids: list[int]) -> None:
    gaps = logits.max(dim=-1).values - logits[torch.arange(len(ids)), torch.tensor(ids)]
    worst = int(gaps.argmax())
    assert gaps[worst] <= TIE, f"token {worst} ({ids[worst]}) is {gaps[worst]:.2e} below the argmax ({int(logits[worst].argmax())})"
