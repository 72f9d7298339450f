"""Qwen3-Omni's thinker, served: what it sees and hears, judged by transformers, also when the encoder is killed."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray

from mmrt.tests.end_to_end.conftest import Server, launching
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_media import check, image_part, num_prompt_tokens, picture, sound, text, video
from mmrt.tests.end_to_end.test_sound_tracks import WITH_SOUND, film
from mmrt.tests.settings import ImportedLater

omni: Any = ImportedLater("transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe")
pytestmark = pytest.mark.slow


class OmniOracle(Oracle):
    """Hears sounds of any length, each as alone."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, "Qwen3OmniMoeThinkerForConditionalGeneration")
        self.video_pixels = 128 * 32 * 32, 768 * 32 * 32

    def _heard(self, sounds: list[NDArray[np.float32]]) -> tuple[dict[str, Any], list[int]]:
        options = {"sampling_rate": 16000, "padding": True, "truncation": False, "return_attention_mask": True, "return_tensors": "pt"}
        alone = [self.sounds(sound, **options)["input_features"][0] for sound in sounds]
        lengths = [mel.shape[1] for mel in alone]
        padded = torch.stack([torch.nn.functional.pad(mel, (0, max(lengths) - mel.shape[1])) for mel in alone])
        mask = torch.tensor([[int(at < length) for at in range(max(lengths))] for length in lengths])
        return {"input_features": padded, "feature_attention_mask": mask}, [n // 100 * 13 + -(-(n % 100) // 8) for n in lengths]

    def _with_sound_track(self, found: dict[str, Any], video: int, num_audio_tokens: int) -> list[int]:
        timing = {name: found[name].numpy() for name in ("video_grid_thw", "video_second_per_grid")}
        replaced = omni.Qwen3OmniMoeProcessor.replace_video_with_audio_token
        sounds = {"num_audio_tokens": [num_audio_tokens]}
        ids: list[int] = self.tokenizer(replaced(self.processor, timing, video, sounds, 0, position_id_per_seconds=13.0))["input_ids"]
        return ids


class Case(NamedTuple):
    server: Server
    oracle: OmniOracle


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[..., Any]) -> Iterator[Case]:
    with launching(tmp_path_factory, checkpoints) as start:
        yield Case(start("qwen3_omni_moe"), OmniOracle(checkpoints("qwen3_omni_moe")))


@pytest.mark.parametrize("seconds", [0.37, 8.5])
def test_what_is_seen_and_heard(case: Case, seconds: float) -> None:
    """A sound shorter than a chunk, and one whose rest is."""
    pixels, (clip, frames), (part, samples) = picture(1, 70, 130), video(6, 64, 96, 2), sound(seconds, 440)
    content = [image_part(pixels), text("Look,"), clip, part, text("and tell.")]
    check(case.server, case.oracle, content, Media(images=[pixels], videos=[(frames, 2.0)], audios=[samples]))


def test_a_killed_encoder_changes_no_token(case: Case) -> None:
    (part, samples), pixels = sound(17.3, 330), picture(3, 90, 120)
    content = [part, image_part(pixels), text("Compare.")]
    answers: list[list[int]] = []
    threads = [threading.Thread(target=lambda: answers.append(case.server.chat(content)[1])) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    case.server.kill("encoder")
    for thread in threads:
        thread.join()
    assert len(answers) == 3 and answers[0] == answers[1] == answers[2]
    plain = [{"type": "audio"}, {"type": "image"}, text("Compare.")]
    case.oracle.check_greedy(
        case.oracle.inputs([{"role": "user", "content": plain}], Media(images=[pixels], audios=[samples])), answers[0]
    )
    case.server.wait_until_empty()


def test_videos_with_their_sound_tracks(case: Case) -> None:
    """From the bytes of H.264 and AAC on: one whose sound ends first, one whose pictures do, and the same while stages are killed."""
    films = film(7.0, 3.3, 440), film(2.0, 9.5, 300)
    media = Media(videos=[(one.frames, 2.0) for one in films], audios=[one.samples for one in films], use_audio_in_video=True)
    plain = [{"type": "video"}, {"type": "video"}, text("What happens?")]
    inputs = case.oracle.inputs([{"role": "user", "content": plain}], media)
    content, options = [*(one.part for one in films), plain[-1]], {**WITH_SOUND, "cache_salt": "undisturbed", "ignore_eos": True}
    assert num_prompt_tokens(case.server, content, extra_body=WITH_SOUND) == inputs["input_ids"].shape[1]
    _, ids = case.server.chat(content, max_tokens=40, extra_body=options)
    case.oracle.check_greedy(inputs, ids)
    for stage in ("video", "encoder", "prefill", "decode"):
        pid = case.server.pid(stage)
        stream = case.server.stream(content, max_tokens=40, extra_body={**options, "cache_salt": stage})
        os.kill(pid, signal.SIGKILL)
        found = [id for chunk in stream for choice in chunk.choices for id in (getattr(choice, "token_ids", None) or [])]
        assert found == ids, stage
    case.server.wait_until_empty()


def test_a_video_without_a_sound_track(case: Case) -> None:
    clip, _ = video(6, 64, 96, 2)
    with pytest.raises(openai.UnprocessableEntityError, match="the video has no sound track"):
        case.server.chat([clip, text("?")], extra_body=WITH_SOUND)
    case.server.wait_until_empty()
