"""Gemma 4, served: greedy tokens are transformers' argmax from bytes on, with windows and inputs of each layer; they outlive stages."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import openai
import pytest
import torch
from PIL import Image

from mmrt.models.config import load_model_config
from mmrt.shm.controller_stats import ControllerStats
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.end_to_end.conftest import Server, also_slow, launching
from mmrt.tests.end_to_end.oracle import check_argmax
from mmrt.tests.end_to_end.test_embedding_cache import KNOWN, Asked, work
from mmrt.tests.end_to_end.test_media import image_part, num_prompt_tokens, picture, sound, text, video
from mmrt.tests.models.test_gemma4_media import processor_of
from mmrt.tests.models.test_gemma4_unified import prompt_of, with_masks
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")


class Medium(NamedTuple):
    """As a client sends it, and what transformers gets; of a video its frames, with their times."""

    part: dict[str, Any]
    kind: str
    values: Any
    times_s: tuple[float, ...] = ()


def seen(seed: int, height: int, width: int) -> Medium:
    pixels = picture(seed, height, width)
    return Medium(image_part(pixels), "image", pixels)


def heard(seconds: float, hertz: float) -> Medium:
    part, samples = sound(seconds, hertz)
    return Medium(part, "audio", samples)


def shown(num_frames: int, height: int, width: int, fps: int) -> Medium:
    part, frames = video(num_frames, height, width, fps)
    return Medium(part, "video", frames, tuple(number / fps for number in range(num_frames)))


class GemmaOracle:
    """The checkpoint in transformers, float32, with the Pillow form of its processor."""

    def __init__(self, checkpoint: Path, processor: Any) -> None:
        torch.set_num_threads(1)
        self.processor = processor
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def inputs(self, content: list[str | Medium]) -> dict[str, Any]:
        media = [part for part in content if isinstance(part, Medium)]
        parts = [text(part) if isinstance(part, str) else {"type": part.kind} for part in content]
        messages = [{"role": "user", "content": parts}]
        prompt = self.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        clips = [self._clip(one) for one in media if one.kind == "video"]
        for _, words in clips:
            prompt = prompt.replace("<|video|>", words, 1)
        images = [Image.fromarray(one.values) for one in media if one.kind == "image"] or None
        sounds = [one.values for one in media if one.kind == "audio"] or None
        found: dict[str, Any] = dict(self.processor(text=[prompt], images=images, audio=sounds, return_tensors="pt"))
        if clips:
            found["pixel_values_videos"] = torch.cat([frames["pixel_values"] for frames, _ in clips])
            found["video_position_ids"] = torch.cat([frames["image_position_ids"] for frames, _ in clips])
            found["num_frames_per_video"] = torch.tensor([len(frames["pixel_values"]) for frames, _ in clips])
        found.pop("mm_token_type_ids", None)
        return found

    def _clip(self, one: Medium) -> tuple[dict[str, Any], str]:
        """Its frames, which are pictures of few tokens, and the words for it in the prompt."""
        frames = self.processor.image_processor(
            images=[Image.fromarray(frame) for frame in one.values], max_soft_tokens=70, return_tensors="pt"
        )
        metadata = type("Metadata", (), {"fps": 1.0, "timestamps": one.times_s})()
        inputs = {"num_soft_tokens_per_video": frames["num_soft_tokens_per_image"], "video_metadata": [metadata]}
        return dict(frames), self.processor.replace_video_token(inputs, 0)

    @torch.inference_mode()
    def logits(self, inputs: dict[str, Any], ids: list[int]) -> torch.Tensor:
        """Of each id."""
        prompt = inputs["input_ids"]
        forced = torch.cat((prompt, torch.tensor([ids[:-1]], dtype=torch.long)), 1)
        logits = self.model(**{**inputs, "input_ids": forced, "attention_mask": torch.ones_like(forced)}, use_cache=False).logits
        found: torch.Tensor = logits[0, prompt.shape[1] - 1 :].float()
        return found


class Case(NamedTuple):
    server: Server
    oracle: GemmaOracle

    def check(self, content: list[str | Medium], ids: list[int]) -> None:
        check_argmax(self.oracle.logits(self.oracle.inputs(content), ids), ids)


def sent(content: list[str | Medium]) -> list[dict[str, Any]]:
    return [text(part) if isinstance(part, str) else part.part for part in content]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[..., Any]) -> Iterator[Case]:
    path = checkpoints("gemma4")
    with launching(tmp_path_factory, checkpoints) as start, processor_of(path) as processor:
        yield Case(start("gemma4"), GemmaOracle(path, processor))


def test_media_of_all_kinds_and_again(case: Case) -> None:
    """Prompts are longer than the window of 48 tokens. A second conversation has neither video nor encoder work."""
    media: list[str | Medium] = [seen(1, 56, 56), "then", shown(8, 64, 96, 2), heard(1.7, 440), seen(2, 237, 36), "Compare."]
    for opening in ("First", "Once more"):
        content = [opening, *media]
        asked = Asked(case.server, sent(content))
        case.check(content, asked.ids)
    assert work(case.server, asked) == KNOWN
    assert num_prompt_tokens(case.server, sent(content)) == case.oracle.inputs(content)["input_ids"].shape[1]


def test_a_prefix_hit_that_ends_within_a_window(case: Case) -> None:
    """Each turn hits what the turn before left, which windows reach into."""
    content: list[str | Medium] = [seen(3, 120, 90), "Tell me of it at length, and of all that stands beside it."]
    for turn in range(3):
        content = [*content, f"And of number {turn}?"]
        first = Asked(case.server, sent(content), salt="turns")
        case.check(content, first.ids)


def test_guidance(case: Case) -> None:
    content: list[str | Medium] = [seen(4, 98, 126), heard(0.4, 900), "Describe the weather."]
    _, ids = case.server.chat(sent(content), extra_body={"guidance_scale": 2.0})
    c, u = case.oracle.logits(case.oracle.inputs(content), ids), case.oracle.logits(case.oracle.inputs([""]), ids)
    check_argmax(u + 2.0 * (c - u), ids)


def test_a_long_prompt_keeps_the_pages_of_its_window_alone(case: Case) -> None:
    """Of 8k tokens. Full layers' pages stay; those of layers with a window of 48 tokens are given back while it is prefilled."""
    content: list[str | Medium] = ["one two three four five six seven eight nine ten " * 390, seen(8, 60, 80), "Go on."]
    ids, most, used = list[int](), 0, {}
    with RunDirectory.attach(case.server.run_path) as run, closing(ControllerStats.attach(run)) as stats:
        stream = case.server.stream(sent(content), max_tokens=80)
        for chunk in stream:
            ids += [id for choice in chunk.choices for id in getattr(choice, "token_ids", None) or []]
            used = {name: pool.used for name, pool in stats.read().pools.items()}
            most = max(most, used["window"])
    num_tokens = num_prompt_tokens(case.server, sent(content))
    assert 7000 < num_tokens < 8100 and used["kv"] >= num_tokens // 16, "the test's prompt is not that long"
    assert 0 < most <= 48 // 16 + 2 + 40, f"{most} pages of windows"  # some are ahead of the answer
    case.check(content, ids)


@pytest.mark.parametrize("stages", ["encoder decode", *also_slow("video prefill")])
def test_killed_stages_change_no_token(case: Case, stages: str) -> None:
    content: list[str | Medium] = [seen(5, 90, 120), shown(6, 48, 64, 2), heard(2.2, 300), f"Compare after {stages}."]
    answers: list[list[int]] = []
    threads = [threading.Thread(target=lambda: answers.append(case.server.chat(sent(content), max_tokens=60)[1])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for stage in stages.split():
        time.sleep(0.15)
        case.server.kill(stage)
    for thread in threads:
        thread.join()
    assert len(answers) == 3 and answers[0] == answers[1] == answers[2]
    case.check(content, answers[0])
    case.server.wait_until_empty()


def test_a_sound_that_is_too_long_is_refused(case: Case) -> None:
    with pytest.raises(openai.BadRequestError, match="the audio is longer than the limit of 30 s"):
        case.server.chat([heard(30.01, 300).part, text("What?")])


@pytest.mark.slow
def test_pixels_and_samples_without_towers(launch: Callable[..., Server], checkpoints: Callable[..., Any]) -> None:
    """Gemma 4 12B's form, with a prefill budget that is less than a picture, and a clip of several segments."""
    server, path = launch("gemma4_unified", settings="[scheduling]\nprefill_budget_tokens = 20\n"), checkpoints("gemma4_unified")
    loaded: Any = SimpleNamespace(config=load_model_config(path), path=path)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    content = [seen(1, 90, 120), "and", heard(5.3, 440), seen(2, 30, 200), "Compare."]
    answers = []
    for stage in ("", "prefill"):
        thread = threading.Thread(target=lambda: answers.append(server.chat(sent(content), max_tokens=60)[1]))
        thread.start()
        if stage:
            time.sleep(0.2)
            server.kill(stage)
        thread.join()
    assert answers[0] == answers[1]
    inputs = prompt_of(loaded, [part if isinstance(part, str) else part.values for part in content]).reference_inputs
    length = inputs["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat((inputs["input_ids"], torch.tensor([answers[0][:-1]])), 1)
    inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(answers[0]) - 1))
    with torch.inference_mode():
        logits = with_masks(model)(**inputs, attention_mask=torch.ones_like(inputs["input_ids"])).logits[0, length - 1 :]
    check_argmax(logits.float(), answers[0])
    server.wait_until_empty()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4", "gemma3_seeing"])
def test_pages_of_several_groups_move_between_devices(family: str, launch: Callable[..., Server], case: Case) -> None:
    """Prompts are prefilled in one pool and decoded in another, with decode killed among steps and copies: the same answers as in one
    pool. Windows end within the prompt."""
    settings = '[actors]\nlayout = "EP@left+D@right"\n[[devices]]\nname = "left"\n[[devices]]\nname = "right"\n'
    apart, alone = launch(family, settings=settings), case.server if family == "gemma4" else launch(family)
    content = sent([seen(7, 90, 120), "a b c d e f g h " * 12, "What is it?"])
    expected = alone.chat(content, max_tokens=60)[1]
    for wait_s in (0.0, 0.15, 0.3):
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(apart.chat, content, max_tokens=60) for _ in range(3)]
            if wait_s:
                time.sleep(wait_s)
                apart.kill("decode")
            assert [answer.result()[1] for answer in asked] == [expected] * 3
    apart.wait_until_empty()
    with RunDirectory.attach(apart.run_path) as run, closing(ControllerStats.attach(run)) as stats:
        assert stats.read().transferred_bytes_total > 0
