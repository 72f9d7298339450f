"""Families that see and do not hear, served: greedy tokens are transformers' argmax from files' bytes on, and outlive their stages."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx2
import numpy as np
import pytest

from mmrt.tests.end_to_end.conftest import Server, also_slow, launching
from mmrt.tests.end_to_end.oracle import Media, check_argmax
from mmrt.tests.end_to_end.seeing_oracle import GlmOracle, SeeingOracle, TimedOracle
from mmrt.tests.end_to_end.test_embedding_cache import KNOWN, NEW, Asked, work
from mmrt.tests.end_to_end.test_guidance import companion, guided
from mmrt.tests.end_to_end.test_media import image_part, num_prompt_tokens, picture, text, video
from mmrt.tests.end_to_end.test_prefill_alone import expected
from mmrt.tests.end_to_end.test_prefix_cache import PAGE, Answer, whole_pages

FAMILIES = {
    "qwen2_vl": SeeingOracle,
    "qwen3_vl": TimedOracle,
    "qwen3_5": TimedOracle,
    "qwen3_5_moe": TimedOracle,
    "glm_ocr": GlmOracle,
    "glm4v": GlmOracle,
}
PLAIN = {"image_url": "image", "video_url": "video"}


class Case(NamedTuple):
    family: str
    server: Server
    oracle: SeeingOracle

    def found_again(self, num_tokens: int) -> range:
        """Tokens of a prompt that may be known: with recurrent states those up to the end of its last message."""
        known = whole_pages(num_tokens - 1)
        return range(known - (PAGE if self.family.startswith("qwen3_5") else 0), known + 1)

    def inputs(self, content: list[dict[str, Any]], media: Media) -> dict[str, Any]:
        """What transformers makes of the same parts."""
        plain = [part if part["type"] == "text" else {"type": PLAIN[part["type"]]} for part in content]
        return self.oracle.inputs([{"role": "user", "content": plain}], media)


@pytest.fixture(scope="module", params=["qwen3_vl", "glm4v", *also_slow("qwen2_vl", "qwen3_5", "qwen3_5_moe", "glm_ocr")])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[..., Any]) -> Iterator[Case]:
    with launching(tmp_path_factory, checkpoints) as start:
        settings = "[media]\nfps = 6\n" if request.param == "glm_ocr" else ""  # its own rate, of clips of half a minute
        yield Case(request.param, start(request.param, settings=settings), FAMILIES[request.param](checkpoints(request.param)))


def everything(case: Case) -> tuple[list[dict[str, Any]], Media]:
    """Several pictures and two videos between words."""
    pictures = [picture(seed, 60 + 41 * seed, 200 - 23 * seed) for seed in range(3)]
    clips = [video(num_frames, 64, 96, fps) for num_frames, fps in ((8, 2), (31, 10))]
    images, videos = [image_part(pixels) for pixels in pictures], [part for part, _ in clips]
    content = [text("First"), images[0], text("then"), videos[0], images[1], images[2], text("and"), videos[1], text("Compare.")]
    sampled = [case.oracle.sampled(frames, fps) for (_, frames), fps in zip(clips, (2, 10), strict=True)]
    return content, Media(images=pictures, videos=sampled)


def test_a_picture(case: Case) -> None:
    for size in ((56, 56), (31, 400), (337, 336)):
        pixels = picture(1, *size)
        content = [image_part(pixels), text("What is it?")]
        case.oracle.check_greedy(case.inputs(content, Media(images=[pixels])), case.server.chat(content)[1])


@pytest.mark.parametrize(("num_frames", "fps"), [(8, 2), (30, 10), (9, 2), (3, 4)])
def test_a_video(case: Case, num_frames: int, fps: int) -> None:
    part, frames = video(num_frames, 96, 128, fps)
    content = [part, text("What moves?")]
    inputs = case.inputs(content, Media(videos=[case.oracle.sampled(frames, fps)]))
    assert num_prompt_tokens(case.server, content) == inputs["input_ids"].shape[1]
    case.oracle.check_greedy(inputs, case.server.chat(content)[1])


def test_a_video_as_frames(case: Case) -> None:
    frames = np.stack([picture(seed, 64, 96) for seed in range(5)])
    urls = [image_part(pixels)["image_url"]["url"] for pixels in frames]
    content = [{"type": "video", "video": urls, "fps": 1.5}, text("What moves?")]
    inputs = case.inputs([{"type": "video_url"}, content[1]], Media(videos=[case.oracle.taken(frames, 1.5)]))
    case.oracle.check_greedy(inputs, case.server.chat(content)[1])


def test_known_media_in_a_new_conversation(case: Case) -> None:
    """Neither video nor encoder works again; embedding rows are what they were."""
    pixels, (clip, frames) = picture(7, 150, 213), video(8, 96, 128, 2)
    media = Media(images=[pixels], videos=[case.oracle.sampled(frames, 2)])
    for words in ("One:", "Another:"):
        content = [text(words), image_part(pixels), text("and"), clip, text("What are they?")]
        asked = Asked(case.server, content)
        assert (work(case.server, asked) == KNOWN) == (words == "Another:")
        case.oracle.check_greedy(case.inputs(content, media), asked.ids)


def test_a_picture_several_times_in_two_requests_at_once(case: Case) -> None:
    """It is decoded and encoded once, also where chunks end on a grid."""
    pixels = picture(8, 90, 120)
    part = image_part(pixels)
    content = [part, part, text("and"), part, text("Are they the same?")]
    asked: list[Asked] = []
    threads = [threading.Thread(target=lambda: asked.append(Asked(case.server, content))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    inputs = case.inputs(content, Media(images=[pixels] * 3))
    assert len(asked) == 2
    for one in asked:
        case.oracle.check_greedy(inputs, one.ids)
    assert work(case.server, *asked) == NEW


@pytest.mark.slow
def test_plans_that_cut_inside_a_picture(case: Case, launch: Callable[..., Server]) -> None:
    server = launch(case.family, settings="[scheduling]\nprefill_budget_tokens = 16\nencode_budget_tokens = 64\n")
    content, media = everything(case)
    case.oracle.check_greedy(case.inputs(content, media), server.chat(content)[1])
    server.wait_until_empty()
    server.down()


def test_everything_at_once_and_again(case: Case) -> None:
    """Once more its pages are found; other media in the same places find none of theirs."""
    content, media = everything(case)
    inputs = case.inputs(content, media)
    first, second = Answer(case.server, content), Answer(case.server, content)
    case.oracle.check_greedy(inputs, first.ids)
    assert second.ids == first.ids and second.num_cached in case.found_again(inputs["input_ids"].shape[1])
    other, (_, frames) = [*content], (clip := video(8, 64, 96, 2))
    other[3] = {**clip[0], "max_frames": 6}
    third = Answer(case.server, other)
    before = case.inputs(content[:3], Media(images=media.images[:1]))["input_ids"].shape[1]
    assert third.num_cached <= before + PAGE and len(frames) == 8


def test_guidance_with_a_picture(case: Case) -> None:
    pixels = picture(4, 98, 126)
    content = [image_part(pixels), text("Describe the weather.")]
    _, ids = case.server.chat(content, extra_body={"guidance_scale": 2.0})
    logits = guided(case.oracle, case.inputs(content, Media(images=[pixels])), companion(case.oracle, ""), ids, 2.0)
    check_argmax(logits, ids)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_embedding_of_a_picture(case: Case, pooling: str) -> None:
    pixels = picture(6, 120, 90)
    content = [image_part(pixels), text("What is it?")]
    body = {"messages": [{"role": "user", "content": content}], "pooling": pooling, "add_generation_prompt": True}
    found = httpx2.post(f"{case.server.url}/v1/embeddings", json=body, timeout=60).json()["data"][0]["embedding"]
    wanted = expected(case.oracle, case.inputs(content, Media(images=[pixels])), pooling)
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("actor", ["encoder", *also_slow("video", "prefill", "decode")])
def test_a_killed_stage_changes_no_token(case: Case, actor: str) -> None:
    """It is killed while the first of three requests is in it, or shortly after."""
    content, media = everything(case)
    content[-1] = text(f"Compare, says {actor}.")
    answers: list[list[int]] = []
    threads = [threading.Thread(target=lambda: answers.append(case.server.chat(content)[1])) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    case.server.kill(actor)
    for thread in threads:
        thread.join()
    assert len(answers) == 3 and answers[0] == answers[1] == answers[2]
    case.oracle.check_greedy(case.inputs(content, media), answers[0])
    case.server.wait_until_empty()
