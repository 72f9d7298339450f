"""Qwen3-Omni's thinker, served: what it sees and hears, judged by transformers, also when the encoder is killed."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray

from mmrt.tests.end_to_end.conftest import Server, launching
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_media import check, image_part, picture, sound, text, video

pytestmark = pytest.mark.slow


class OmniOracle(Oracle):
    """Hears sounds of any length, each as alone."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, "Qwen3OmniMoeThinkerForConditionalGeneration")
        self.video_pixels = 128 * 32 * 32, 768 * 32 * 32

    def _heard(self, sounds: list[NDArray[np.float32]]) -> tuple[dict[str, Any], list[int]]:
        batch = self.sounds(
            sounds, sampling_rate=16000, padding=True, truncation=False, return_attention_mask=True, return_tensors="pt"
        )
        lengths = batch["attention_mask"].sum(-1).tolist()
        counts = [n // 100 * 13 + -(-(n % 100) // 8) for n in lengths]
        return {"input_features": batch["input_features"], "feature_attention_mask": batch["attention_mask"]}, counts


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


def test_a_video_with_its_sound_is_refused_by_name(case: Case) -> None:
    clip, _ = video(6, 64, 96, 2)
    body = {"messages": [{"role": "user", "content": [clip, text("?")]}], "mm_processor_kwargs": {"use_audio_in_video": True}}
    found = httpx2.post(f"{case.server.url}/v1/chat/completions", json=body, timeout=60)
    assert found.status_code in (400, 422) and "sound" in found.json()["error"]["message"]
