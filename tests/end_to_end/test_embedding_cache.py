"""Media that were served before: neither video nor encoder works on them again, whoever has died meanwhile, and the answers are
transformers' all the same."""

import io
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from mmrt.cli.trace import take_recording
from mmrt.runtime.observe.trace import make_trace
from mmrt.tests.end_to_end.conftest import Server, also_slow
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_faults import status_pid
from mmrt.tests.end_to_end.test_media import as_url, image_part, picture, sound, text, video
from mmrt.tests.end_to_end.test_restart import edited
from mmrt.tests.end_to_end.test_sound_tracks import WITH_SOUND, film

MEDIA_WORK = ("analyse", "preprocess", "encode")
NEW = (1, 1, 1)
KNOWN = (0, 0, 0)


class Asked:
    """One answer to a tenant: its request's id, and its token ids."""

    def __init__(self, server: Server, content: Any, salt: str = "a tenant", **more: Any) -> None:
        self.ids: list[int] = []
        for chunk in server.stream(content, extra_body={"cache_salt": salt, **more}):
            self.request = chunk.id
            self.ids += [token for choice in chunk.choices for token in (getattr(choice, "token_ids", None) or [])]


def work(server: Server, *asked: Asked) -> tuple[int, ...]:
    """How many plans of each type of MEDIA_WORK there were for these requests."""
    server.wait_until_empty()
    counts: Counter[str] = Counter()
    requests = {one.request for one in asked}
    for event in make_trace(take_recording(server.run_path))["traceEvents"]:
        if event["ph"] == "X" and event["name"] in MEDIA_WORK and requests & set(event["args"]["requests"]):
            counts[event["name"]] += 1
    return tuple(counts[name] for name in MEDIA_WORK)


def new_words() -> dict[str, Any]:
    """Text that no conversation began with before: so it is the embeddings that are found, not the KV cache."""
    new_words.number += 1  # type: ignore[attr-defined]
    return text(f"Question {new_words.number}:")  # type: ignore[attr-defined]


new_words.number = 0  # type: ignore[attr-defined]


def check(oracle: Oracle, asked: Asked, content: list[dict[str, Any]], media: Media) -> None:
    kinds = {"image_url": "image", "video_url": "video", "input_audio": "audio"}
    plain = [part if part["type"] == "text" else {"type": kinds[part["type"]]} for part in content]
    oracle.check_greedy(oracle.inputs([{"role": "user", "content": plain}], media), asked.ids)


def encoded(pixels: NDArray[np.uint8], **options: Any) -> dict[str, Any]:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", **options)
    return {"type": "image_url", "image_url": {"url": as_url("image/png", out.getvalue())}}


def test_a_known_picture_in_a_new_conversation(own: Server, oracle: Oracle) -> None:
    pixels = picture(1, 150, 213)
    for expected in (NEW, KNOWN, KNOWN):
        content = [new_words(), image_part(pixels), text("What is it?")]
        asked = Asked(own, content)
        assert work(own, asked) == expected
        check(oracle, asked, content, Media(images=[pixels]))


def test_known_media_of_all_kinds_among_new_ones(own: Server, oracle: Oracle) -> None:
    pixels, fresh = picture(2, 90, 120), picture(3, 112, 84)
    clip, frames = video(8, 96, 128, 2)
    noise, samples = sound(1.5, 300)
    for part in (image_part(pixels), clip, noise):
        Asked(own, [part, text("Well?")])
    content = [new_words(), image_part(pixels), clip, image_part(fresh), noise, image_part(pixels), text("Compare.")]
    asked = Asked(own, content)
    assert work(own, asked) == NEW, "one of the five is new"
    check(oracle, asked, content, Media([pixels, fresh, pixels], [(frames, 2.0)], [samples]))


@pytest.mark.slow
def test_a_known_video_with_its_sound_track(own: Server, oracle: Oracle) -> None:
    made = film(5.0, 5.0, 440)
    media = Media(videos=[(made.frames, 2.0)], audios=[made.samples], use_audio_in_video=True)
    for is_known in (False, True):
        content = [new_words(), made.part, text("What happens?")]
        asked = Asked(own, content, **WITH_SOUND)
        assert (work(own, asked) == KNOWN) == is_known
        check(oracle, asked, content, media)
    assert work(own, Asked(own, [new_words(), made.part, text("What happens?")])) != KNOWN, "without its sound it is another medium"


@pytest.mark.slow
def test_what_looks_alike_is_not_known(own: Server) -> None:
    """Equal bytes with other options, equal pixels in other bytes, and another tenant."""
    pixels = picture(4, 300, 400)
    part = encoded(pixels)
    assert work(own, Asked(own, [new_words(), part, text("Hm?")])) == NEW
    assert work(own, Asked(own, [new_words(), {**part, "max_pixels": 20_000}, text("Hm?")])) == NEW
    assert work(own, Asked(own, [new_words(), encoded(pixels, compress_level=1), text("Hm?")])) == NEW
    for expected in (NEW, KNOWN):
        asked = Asked(own, [new_words(), part, text("Hm?")], "another tenant")
        assert work(own, asked) == expected
    assert work(own, Asked(own, [new_words(), part, text("Hm?")])) == KNOWN


def test_sixteen_at_once_have_their_picture_encoded_once(own: Server, oracle: Oracle) -> None:
    pixels = picture(5, 224, 196)
    contents = [[new_words(), image_part(pixels), text("What is it?")] for _ in range(16)]
    answers: dict[int, Asked] = {}

    def ask(index: int) -> None:
        answers[index] = Asked(own, contents[index])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert work(own, *answers.values()) == NEW
    for index in (0, 7, 15):
        check(oracle, answers[index], contents[index], Media(images=[pixels]))


@pytest.mark.parametrize("victim", ["controller", *also_slow("encoder", "video", "prefill", "decode", "memory", "gateway")])
def test_a_kill_leaves_the_cache_as_it_is(own: Server, oracle: Oracle, victim: str) -> None:
    pixels = picture(6, 84, 140)
    part = image_part(pixels)
    Asked(own, [new_words(), part, text("Hm?")])
    before = own.pid(victim)
    own.kill(victim)
    own.wait(lambda status: bool(status["ready"]) and status_pid(status, victim) != before, victim)
    content = [new_words(), part, text("Hm?")]
    asked = Asked(own, content)
    assert work(own, asked)[1:] == KNOWN[1:], "only the controller forgets analyses"
    check(oracle, asked, content, Media(images=[pixels]))


@pytest.mark.slow
def test_edited_code_is_seen_at_once(own: Server, own_source: Path) -> None:
    """A restart alone leaves the cache warm; after an edit everything is done by the new code, and behind it by the old one again."""
    part = image_part(picture(8, 84, 84))

    def ask() -> tuple[int, ...]:
        return work(own, Asked(own, [new_words(), part, text("Hm?")]))

    assert (ask(), ask()) == (NEW, KNOWN)
    assert own.mmrt("restart", "encoder").returncode == 0
    assert ask() == KNOWN
    with edited(own_source / "actors" / "encoder.py", "# edited"):
        assert own.mmrt("restart", "encoder").returncode == 0
        assert ask() == NEW
    assert own.mmrt("restart", "encoder").returncode == 0, "the tests behind this one have the code that the run began with"
