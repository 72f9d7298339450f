"""Families that cut pictures into tiles, served: greedy tokens are transformers' argmax from bytes on, and outlive the encoder."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image

from mmrt.tests.end_to_end.conftest import Server, also_slow, launching
from mmrt.tests.end_to_end.oracle import check_argmax
from mmrt.tests.end_to_end.test_embedding_cache import KNOWN, Asked, work
from mmrt.tests.end_to_end.test_media import image_part, num_prompt_tokens, picture, text, video
from mmrt.tests.models.picture_families import PICTURE_FAMILIES
from mmrt.tests.models.whole_prompts import bicubic
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")


class TiledOracle:
    """A checkpoint in transformers, float32, with the Pillow form of its processor."""

    def __init__(self, checkpoint: Path, family: str) -> None:
        torch.set_num_threads(1)
        self.processor = PICTURE_FAMILIES[family].processor_of(checkpoint)
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def inputs(self, content: list[dict[str, Any]], pictures: list[np.ndarray]) -> dict[str, Any]:
        parts = [part if part["type"] == "text" else {"type": "image"} for part in content]
        message = [{"role": "user", "content": parts}]
        prompt = self.processor.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        images: list[Any] = [Image.fromarray(pixels) for pixels in pictures]
        images = [images] if isinstance(self.processor, transformers.LlavaOnevisionProcessor) else images  # of one prompt
        found: dict[str, Any] = self.processor(text=[prompt], images=images if pictures else None, return_tensors="pt")
        return found

    @property
    def takes_videos(self) -> bool:
        return isinstance(self.processor, transformers.InternVLProcessor | transformers.LlavaOnevisionProcessor) or self._is_minicpm

    @property
    def _is_minicpm(self) -> bool:
        return isinstance(self.processor, transformers.MiniCPMV4_6Processor | transformers.MiniCPMV4_7Processor)

    def video_inputs(self, question: dict[str, Any], frames: np.ndarray) -> dict[str, Any]:
        """Of a clip whose frames are all taken: each is a picture of one tile."""
        if self._is_minicpm:
            return self._minicpm_video(question, frames)
        side = self.processor.image_processor.size["height"]
        planes = torch.from_numpy(frames).permute(0, 3, 1, 2)
        tiles = torch.nn.functional.interpolate(planes, (side, side), mode="bicubic", antialias=True).permute(0, 2, 3, 1).numpy()
        message = [{"role": "user", "content": [{"type": "video"}, question]}]
        prompt = self.processor.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        if isinstance(self.processor, transformers.LlavaOnevisionProcessor):
            made = self.processor.image_processor(list(tiles), image_grid_pinpoints=[[side, side]], return_tensors="pt")
            pixels = made["pixel_values"][:, :1].flatten(0, 1)[None]  # of each frame as a whole
            text = self.processor.replace_video_token({"pixel_values_videos": pixels}, 0)
            return {**self.processor.tokenizer(prompt.replace("<video>", text), return_tensors="pt"), "pixel_values_videos": pixels}
        pictures = [f"Frame{number}: <IMG_CONTEXT>" for number in range(1, 1 + len(frames))]
        found: dict[str, Any] = self.processor(
            text=[prompt.replace("<video>", "\n".join(pictures))], images=[Image.fromarray(tile) for tile in tiles], return_tensors="pt"
        )
        return found

    def _minicpm_video(self, question: dict[str, Any], frames: np.ndarray) -> dict[str, Any]:
        """Frames are pictures that are not cut."""
        message = [{"role": "user", "content": [{"type": "video"}, question]}]
        prompt = self.processor.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        made = self.processor.image_processor(list(frames), max_slice_nums=1, return_tensors="pt")
        sizes, count, token = made["target_sizes"], len(frames), self.processor.video_token
        told = {"target_sizes_videos": sizes, "num_frames_per_video": [count], "grids_videos": np.zeros((count, 2), int)}
        tokens = self.processor.replace_video_token(told, 0, image_token_divisor=16, video_token_divisor=16)
        (tokens,) = self.processor._prepend_local_ids([prompt], [tokens], token)
        inputs = dict(self.processor.tokenizer(prompt.replace(token, tokens), return_tensors="pt"))
        if isinstance(self.processor, transformers.MiniCPMV4_7Processor):
            inputs["mm_token_type_ids"] = 2 * (inputs["input_ids"] == self.processor.video_token_id).int()
        return {**inputs, "pixel_values_videos": made["pixel_values"], "target_sizes_videos": sizes}

    @torch.inference_mode()
    def logits(self, inputs: dict[str, Any], ids: list[int]) -> torch.Tensor:
        """Those that each id was drawn from, [ids, vocabulary]."""
        prompt = inputs["input_ids"]
        forced = torch.cat((prompt, torch.tensor([ids[:-1]], dtype=torch.long)), 1)
        inputs = {**inputs, "input_ids": forced, "attention_mask": torch.ones_like(forced)}
        if (kinds := inputs.get("mm_token_type_ids")) is not None:
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, len(ids) - 1))
        logits = self.model(**inputs).logits
        found: torch.Tensor = logits[0, prompt.shape[1] - 1 :].float()
        return found

    def check_greedy(self, inputs: dict[str, Any], ids: list[int]) -> None:
        """Each id is the argmax of its prefix, nearly."""
        check_argmax(self.logits(inputs, ids), ids)


class Case(NamedTuple):
    server: Server
    oracle: TiledOracle


@pytest.fixture(scope="module", params=["smolvlm", *also_slow(*(family for family in PICTURE_FAMILIES if family != "smolvlm"))])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[..., Any]) -> Iterator[Case]:
    with launching(tmp_path_factory, checkpoints) as start, pytest.MonkeyPatch.context() as patch:
        if request.param != "smolvlm":
            patch.setattr("transformers.image_processing_backends.np_resize", bicubic)
        yield Case(start(request.param), TiledOracle(checkpoints(request.param), request.param))


def test_pictures_and_again(case: Case) -> None:
    """Of many tiles, of one, upright and flat; a second conversation has neither video nor encoder work."""
    pictures = [picture(seed, *size) for seed, size in enumerate(((56, 56), (31, 400), (237, 136)))]
    parts = [image_part(pixels) for pixels in pictures]
    for opening in ("First", "Once more"):
        content = [text(opening), parts[0], text("then\n"), parts[1], parts[2], text("Compare.")]
        inputs = case.oracle.inputs(content, pictures)
        asked = Asked(case.server, content)
        case.oracle.check_greedy(inputs, asked.ids)
    assert work(case.server, asked) == KNOWN
    assert num_prompt_tokens(case.server, content) == inputs["input_ids"].shape[1]


def test_a_killed_encoder_changes_no_token(case: Case) -> None:
    pictures = [picture(seed, 90 + seed, 120) for seed in (5, 6)]
    content = [*map(image_part, pictures), text("Compare.")]
    answers: list[list[int]] = []
    threads = [threading.Thread(target=lambda: answers.append(case.server.chat(content)[1])) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    case.server.kill("encoder")
    for thread in threads:
        thread.join()
    assert len(answers) == 3 and answers[0] == answers[1] == answers[2]
    case.oracle.check_greedy(case.oracle.inputs(content, pictures), answers[0])
    case.server.wait_until_empty()


def test_guidance(case: Case) -> None:
    pixels = picture(5, 98, 126)
    content = [image_part(pixels), text("Describe the weather.")]
    _, ids = case.server.chat(content, extra_body={"guidance_scale": 2.0})
    conditional = case.oracle.logits(case.oracle.inputs(content, [pixels]), ids)
    unconditional = case.oracle.logits(case.oracle.inputs([text("")], []), ids)
    check_argmax(unconditional + 2.0 * (conditional - unconditional), ids)


def test_videos_are_frames_or_refused_by_name(case: Case) -> None:
    part, frames = video(8, 64, 96, 2)
    content = [part, text("What moves?")]
    if not case.oracle.takes_videos:
        body = {"messages": [{"role": "user", "content": content}]}
        found = httpx2.post(f"{case.server.url}/v1/chat/completions", json=body, timeout=60)
        assert found.status_code == 400 and "video" in found.json()["error"]["message"]
        return
    ids = case.server.chat(content)[1]
    case.oracle.check_greedy(case.oracle.video_inputs(content[1], frames), ids)
