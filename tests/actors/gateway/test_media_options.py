"""Options of media: which counts for which medium, and how everything else is refused by name, value and limit."""

import base64
import json
from typing import Any

import msgspec
import pytest

from mmrt.actors.gateway.reading.ignored import collecting
from mmrt.actors.gateway.reading.validation import Limits, read_chat
from mmrt.models.media_config import VisionRules
from mmrt.runtime.config.sections import MediaSection
from mmrt.runtime.errors import RequestError
from mmrt.schema.media import AUTO_SHARE, MediaKind, MediaOptions
from mmrt.tests.actors.gateway.description import check_described

RULES = VisionRules(max_frames=256)
FILE = base64.b64encode(b"not checked here").decode()
ANY = MediaOptions()


def limits(*kinds: MediaKind, rules: VisionRules | None = RULES) -> Limits:
    return Limits(model_name="tiny", kinds=kinds, max_context=2048, media=MediaSection(), vision_rules=rules)


OMNI = limits("image", "video", "audio")


def part(kind: str, **options: Any) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{kind}/x;base64,{FILE}"}, **options}


def request(*parts: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "hm"}]}], **fields}).encode()


def options(*parts: Any, for_all: Any = None) -> list[MediaOptions]:
    body = request(*parts, mm_processor_kwargs=for_all)
    chat = read_chat(body, OMNI)
    check_described("/v1/chat/completions", body, OMNI)
    return [medium.options for medium in chat.conversation.media]


def refusal(*parts: Any, for_all: Any = None, limits: Limits = OMNI) -> RequestError:
    with collecting(is_strict=True), pytest.raises(RequestError) as caught:
        read_chat(request(*parts, mm_processor_kwargs=for_all), limits)
    assert caught.value.status == 400
    return caught.value


def test_options_of_a_part() -> None:
    asked = {"fps": 1, "min_frames": 2, "max_frames": 16, "min_pixels": 1000, "max_pixels": 50176, "use_audio_in_video": True}
    assert options(part("video", **asked)) == [MediaOptions(1.0, 2, 16, 1000, 50176, True)]
    assert options(part("image", min_pixels=784, max_pixels=1003520)) == [MediaOptions(min_pixels=784, max_pixels=1003520)]
    inline = {"type": "input_video", "input_video": {"data": FILE, "format": "mp4"}, "fps": 0.5}
    assert options(inline) == [MediaOptions(fps=0.5)]
    assert options(part("video"), part("image"), part("audio")) == [ANY, ANY, ANY]


def test_null_is_the_same_as_leaving_out() -> None:
    assert options(part("video", fps=None), for_all={"fps": None, "max_frames": 8}) == [MediaOptions(max_frames=8)]
    assert options(part("video"), for_all={}) == [ANY]


def test_options_for_all_count_for_the_media_that_have_them() -> None:
    found = options(part("image"), part("video"), part("audio"), for_all={"max_pixels": 40000, "fps": 1.5})
    assert found == [MediaOptions(max_pixels=40000), MediaOptions(max_pixels=40000, fps=1.5), ANY]


def test_a_parts_own_option_goes_first() -> None:
    found = options(part("video", fps=0.5), part("video"), for_all={"fps": 1.0, "use_audio_in_video": True})
    assert found == [MediaOptions(fps=0.5, use_audio_in_video=True), MediaOptions(fps=1.0, use_audio_in_video=True)]
    assert options(part("video", use_audio_in_video=False), for_all={"use_audio_in_video": True}) == [ANY]
    assert options(part("image", max_pixels=784), for_all={"max_pixels": 1_003_520}) == [MediaOptions(max_pixels=784)]


def test_a_share_of_tokens() -> None:
    """VL9: a part's own goes before the request's, and this before the run's."""
    found = options(part("image", token_share=0.5), part("video"), part("audio"), for_all={"token_share": "auto"})
    assert found == [MediaOptions(token_share=0.5), MediaOptions(token_share=AUTO_SHARE), ANY]
    for share, expected in ((0.25, 0.25), ("auto", AUTO_SHARE)):
        run = msgspec.structs.replace(OMNI, media=MediaSection(token_share=share))
        media = read_chat(request(part("image"), part("image", token_share=1), part("audio")), run).conversation.media
        assert [medium.options.token_share for medium in media] == [expected, 1.0, 1.0]


def test_low_detail_is_a_number_of_pixels() -> None:
    def detailed(detail: str, **more: Any) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {**part("image")["image_url"], "detail": detail}, **more}

    low = MediaOptions(max_pixels=512 * 512)
    beside = {"type": "image_url", "image_url": part("image")["image_url"]["url"], "detail": "low"}
    assert options(beside, {**beside, "detail": "high"}, {"type": "image", "image": beside["image_url"], "detail": "low"}) == [
        low,
        ANY,
        low,
    ]
    assert options({**detailed("low"), "detail": "auto"}, {**part("image"), "detail": "low"}) == [low, low]
    assert "allowed are auto, high, original, low" in refusal({**beside, "detail": "tiny"}).message
    assert options(detailed("low"), detailed("high"), detailed("auto")) == [low, ANY, ANY]
    assert options(detailed("low", max_pixels=10_000)) == [MediaOptions(max_pixels=10_000)]
    assert options(detailed("low"), for_all={"max_pixels": 10_000}) == [MediaOptions(max_pixels=10_000)]
    assert options(detailed("low", min_pixels=500_000)) == [MediaOptions(min_pixels=500_000, max_pixels=500_000)]


BAD: list[tuple[str, str, Any, str]] = [
    ("video", "fps", 2.5, "is 2.5, allowed are 0.01 to 2"),
    ("video", "fps", 0, "is 0, allowed are 0.01 to 2"),
    ("video", "fps", "1", 'expected a number, got "1"'),
    ("video", "fps", True, "expected a number, got true"),
    ("video", "fps", {}, "expected a number, got an object with 0 entries"),
    ("video", "max_frames", 257, "is 257, allowed are 2 to 256"),
    ("video", "max_frames", 1, "is 1, allowed are 2 to 256"),
    ("video", "max_frames", -(10**15), "is -1000000000000000, allowed are 2 to 256"),
    ("video", "max_frames", True, "expected an integer, got true"),
    ("video", "min_frames", 257, "is 257, allowed are 1 to 256"),
    ("video", "min_frames", 0, "is 0, allowed are 1 to 256"),
    ("video", "max_pixels", 602_113, "is 602113, allowed are 784 to 602112"),
    ("video", "min_pixels", 602_113, "is 602113, allowed are 784 to 602112"),
    ("video", "use_audio_in_video", 1, "expected true or false, got 1"),
    ("video", "use_audio_in_video", "yes", 'expected true or false, got "yes"'),
    ("image", "max_pixels", 1_003_521, "is 1003521, allowed are 784 to 1003520"),
    ("image", "max_pixels", 783, "is 783, allowed are 784 to 1003520"),
    ("image", "max_pixels", {"height": 5}, "expected an integer, got an object with 1 entry"),
    ("image", "min_pixels", 1_003_521, "is 1003521, allowed are 784 to 1003520"),
    ("image", "min_pixels", "3000", 'expected an integer, got "3000"'),
    ("image", "token_share", 0.04, 'is 0.04, allowed are 0.05 to 1 and "auto"'),
    ("video", "token_share", 1.5, 'is 1.5, allowed are 0.05 to 1 and "auto"'),
    ("image", "token_share", "half", 'expected a number or "auto", got "half"'),
    ("image", "token_share", True, 'expected a number or "auto", got true'),
]


@pytest.mark.parametrize(("kind", "name", "value", "says"), BAD)
def test_values_out_of_range_and_of_wrong_types(kind: str, name: str, value: Any, says: str) -> None:
    error = refusal(part("image"), part(kind, **{name: value}))
    assert error.param == f"messages[0].content[1].{name}"
    assert error.message == f"{error.param}: {says}"
    error = refusal(part(kind), for_all={name: value})
    assert error.param == f"mm_processor_kwargs.{name}"
    if "allowed" in says:
        assert error.message == f"{error.param}: {says}"


VIDEO_OPTIONS = "fps, min_frames, max_frames, min_pixels, max_pixels, token_share, use_audio_in_video"
UNKNOWN: list[tuple[str, str, str]] = [
    ("video", "frames", f"options of video are {VIDEO_OPTIONS}"),
    ("image", "fps", "options of image are min_pixels, max_pixels, token_share"),
    ("image", "use_audio_in_video", "options of image are min_pixels, max_pixels, token_share"),
    ("audio", "fps", "there are no options of audio"),
]


@pytest.mark.parametrize(("kind", "name", "says"), UNKNOWN)
def test_unknown_options_of_a_part(kind: str, name: str, says: str) -> None:
    error = refusal(part(kind, **{name: 1}))
    assert error.message == f"messages[0].content[0].{name}: is not supported; {says}"


def test_unknown_options_for_all() -> None:
    error = refusal(part("image"), for_all={"frames": 8})
    assert error.message == f"mm_processor_kwargs.frames: is not supported; options of media are {VIDEO_OPTIONS}"
    assert refusal(part("video", nframes=8)).message == "messages[0].content[0].nframes: is not supported: give max_frames"
    assert refusal(part("image"), for_all=[1]).message == "mm_processor_kwargs: expected an object, got an array"
    assert len(refusal(for_all={"x" * 10_000: 1}).message) < 300


def test_wrong_types_are_refused_without_media_too() -> None:
    assert refusal(for_all={"fps": "fast"}).param == "mm_processor_kwargs.fps"
    assert refusal(for_all={"max_pixels": 1.5}).param == "mm_processor_kwargs.max_pixels"
    assert refusal(for_all={"fps": 10**400}).message.startswith("mm_processor_kwargs.fps: is an integer of 1329 bits, allowed are")
    assert options(for_all={"fps": 1}) == []


def test_a_lower_bound_above_its_upper_one() -> None:
    error = refusal(part("video", min_frames=4, max_frames=2))
    assert error.message == "messages[0].content[0].min_frames: is 4, more than max_frames, which is 2"
    error = refusal(part("image", max_pixels=1000), for_all={"min_pixels": 2000})
    assert error.message == "mm_processor_kwargs.min_pixels: is 2000, more than max_pixels, which is 1000"


def test_what_the_model_does_not_take() -> None:
    silent = limits("image", "video")
    error = refusal(part("video", use_audio_in_video=True), limits=silent)
    assert error.message == "messages[0].content[0].use_audio_in_video: is true, but the model takes no audio"
    assert refusal(for_all={"use_audio_in_video": True}, limits=silent).param == "mm_processor_kwargs.use_audio_in_video"
    read_chat(request(part("video", use_audio_in_video=False)), silent)
    error = refusal(for_all={"fps": 1}, limits=limits(rules=None))
    assert error.message == "mm_processor_kwargs.fps: is not supported; there are no options of media"
