"""Workloads: the same seed gives the same bytes, another seed others; media decode to what was asked for; traces."""

import base64
import io
import json
import statistics
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmrt.bench.serve.samples import make_audio, make_image, make_video
from mmrt.bench.serve.traces import BLOCK_TOKENS, TraceMedium, TraceRow, load_trace, scale_to_rate
from mmrt.bench.serve.workload import (
    Calibration,
    Lengths,
    MediaShapes,
    calibrate,
    make_body,
    make_message,
    media_seed,
    parse_modalities,
    plan_mixed,
    plan_steady,
    poisson_arrivals,
    shapes_of,
    with_arrivals,
    with_trace,
)

ALL = parse_modalities("text,image,video,audio")
LENGTHS = Lengths(input_low=5, input_high=50, max_tokens=9)


def body_of(seed: int, extensions: bool = True) -> bytes:
    (plan,) = plan_steady(ALL, 1, LENGTHS, seed)
    return make_body(plan, MediaShapes(image_size=(30, 20)), Calibration(), "m", extensions=extensions)


def parts_of(body: bytes) -> list[dict[str, Any]]:
    content = json.loads(body)["messages"][0]["content"]
    assert isinstance(content, list)
    return content


def test_the_same_seed_gives_the_same_bytes_and_another_fresh_ones() -> None:
    assert body_of(1) == body_of(1)
    for mine, other in zip(parts_of(body_of(1)), parts_of(body_of(2)), strict=True):
        assert mine["type"] == other["type"] and mine != other


def test_fewer_tokens_are_asked_of_pictures_and_videos_alone() -> None:
    (plan,) = plan_steady(ALL, 1, LENGTHS, 1)
    parts = parts_of(make_body(plan, MediaShapes(token_share=0.5), Calibration(), "m"))
    assert {part["type"]: part.pop("token_share", None) for part in parts} == {
        "image_url": 0.5,
        "video_url": 0.5,
        "input_audio": None,
        "text": None,
    }
    assert parts == parts_of(make_body(plan, MediaShapes(), Calibration(), "m"))


def test_no_two_requests_of_a_run_share_content() -> None:
    bodies = [make_body(plan, MediaShapes(), Calibration(), "m") for plan in plan_mixed({"image": 1.0}, 5, LENGTHS, 0)]
    parts = [json.dumps(part) for body in bodies for part in parts_of(body)]
    assert len(set(parts)) == len(parts)


def test_media_decode_to_the_sizes_asked_for() -> None:
    image_part, video_part, audio_part, text_part = parts_of(body_of(3))
    image = Image.open(io.BytesIO(base64.b64decode(image_part["image_url"]["url"].partition("base64,")[2])))
    assert (image.size, image.format) == ((30, 20), "PNG")
    with av.open(io.BytesIO(base64.b64decode(video_part["video_url"]["url"].partition("base64,")[2]))) as container:
        frames = list(container.decode(video=0))
    assert (len(frames), frames[0].width, frames[0].height) == (16, 320, 240)
    assert np.abs(frames[0].to_ndarray().astype(int) - frames[-1].to_ndarray()).mean() > 0
    with av.open(io.BytesIO(base64.b64decode(audio_part["input_audio"]["data"]))) as container:
        samples = sum(frame.samples for frame in container.decode(audio=0))
    assert samples == 32000 and audio_part["input_audio"]["format"] == "wav"
    assert 5 <= len(text_part["text"].split()) <= 50


def test_fields_of_the_body_and_of_one_without_extensions() -> None:
    body, plain = json.loads(body_of(0)), json.loads(body_of(0, extensions=False))
    assert body["ignore_eos"] is True and body["stream"] is True and body["max_tokens"] == 9
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "ignore_eos" not in plain and plain["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_image(0, 0, 5), "0x5"),
        (lambda: make_video(0, 31, 20, 2, 2), "31x20"),
        (lambda: make_video(0, 32, 20, 0, 2), "0 frames"),
        (lambda: make_audio(0, 0.0), "0.0 s"),
    ],
)
def test_impossible_media_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_poisson_arrivals_have_the_rate_and_the_spread_of_poisson() -> None:
    arrivals = poisson_arrivals(20.0, 4000, 5)
    gaps = np.diff(arrivals)
    assert arrivals == poisson_arrivals(20.0, 4000, 5) != poisson_arrivals(20.0, 4000, 6)
    assert arrivals[0] == 0.0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.1)
    assert poisson_arrivals(float("inf"), 3, 0) == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="above 0"):
        poisson_arrivals(0.0, 1, 0)


def test_mixed_draws_by_weight_and_steady_is_all_alike() -> None:
    groups = [plan.group for plan in plan_mixed(parse_modalities("text:3,audio:1"), 2000, LENGTHS, 1)]
    assert groups.count("audio") == pytest.approx(500, rel=0.2) and set(groups) == {"text", "audio"}
    assert {plan.group for plan in plan_steady(ALL, 3, LENGTHS, 1)} == {"image+video+audio"}
    assert {plan.group for plan in plan_steady({"text": 1.0}, 3, LENGTHS, 1)} == {"text"}


@pytest.mark.parametrize("text", ["", "smell", "text:0", "text:-1", "image:x", "text,image:inf"])
def test_bad_modalities(text: str) -> None:
    with pytest.raises(ValueError):
        parse_modalities(text)


def test_lengths_are_drawn_from_the_range_and_calibrated_to_words() -> None:
    plans = plan_steady({"text": 1.0}, 500, LENGTHS, 1)
    lengths = [plan.num_input_tokens for plan in plans]
    assert (min(lengths), max(lengths)) == (5, 50) and statistics.mean(lengths) == pytest.approx(27.5, abs=2)
    calibration = calibrate((32, 67), (160, 323))
    assert calibration == Calibration(3.0, 2.0)
    assert (calibration.num_words(103), calibration.num_words(1)) == (50, 1)
    with pytest.raises(ValueError, match="no rising line"):
        calibrate((32, 67), (160, 67))


MOONCAKE = """{"timestamp": 27000, "input_length": 300, "output_length": 20, "hash_ids": [1, 2]}
{"timestamp": 27000, "input_length": 0, "output_length": 5, "hash_ids": []}

{"timestamp": 30000, "input_length": 100, "output_length": 10, "hash_ids": [0]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,109
"""
AZURE_MULTIMODAL = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-10-01 00:00:00.009930+00:00,2,1408,79
2024-10-01 00:00:01.009930+00:00,0,776,141
"""


IMAGE = TraceMedium("image")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_traces_of_both_formats(tmp_path: Path) -> None:
    assert load_trace(write(tmp_path / "m.jsonl", MOONCAKE)) == [
        TraceRow(0, 300, 20, (), (1, 2)),
        TraceRow(0, 0, 5),
        TraceRow(3, 100, 10, (), (0,)),
    ]
    assert load_trace(write(tmp_path / "a.csv", AZURE)) == [TraceRow(0, 374, 44), TraceRow(4, 396, 109)]
    assert load_trace(write(tmp_path / "b.csv", AZURE_MULTIMODAL)) == [TraceRow(0, 1408, 79, (IMAGE, IMAGE)), TraceRow(1, 776, 141)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", '{"timestamp": 1}\n', "x.jsonl:1"),
        ("x.jsonl", "\n\nnonsense\n", "x.jsonl:3"),
        (
            "x.jsonl",
            '{"timestamp": 0, "input_length": 1e300, "output_length": 5}\n',
            "x.jsonl:1: 1e.300 input tokens, the most is 10",
        ),
        ("x.jsonl", '{"timestamp": 0, "input_length": Infinity, "output_length": 5}\n', "x.jsonl:1: not a Mooncake request"),
        ("x.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "x.csv:2"),
        ("x.csv", "a,b\n1,2\n", "x.csv:1: no column TIMESTAMP and ContextTokens and GeneratedTokens; there are a, b"),
        ("x.csv", "TIMESTAMP,ContextTokens\n2024-10-01 00:00:00,2\n", "x.csv:1: no column GeneratedTokens"),
        ("x.csv", AZURE + "2023-11-16 18:15:50.0,396,109\n", r"x.csv:4: arrives 0.6\d* s before the line above"),
        ("x.csv", AZURE + "2023-11-16 18:15:51.0,-1,109\n", "x.csv:4: -1 input tokens, the least is 0"),
        (
            "x.csv",
            AZURE_MULTIMODAL + "2024-10-01 00:00:02+00:00,-2,5,6\n",
            "x.csv:4: not an Azure request: .*-2 images, there can be 0 to",
        ),
        ("x.jsonl", MOONCAKE + '{"timestamp": 30001, "input_length": 1, "output_length": -7}', "x.jsonl:5: -7 output tokens"),
        ("x.jsonl", MOONCAKE + '{"timestamp": 29000, "input_length": 1, "output_length": 7}', "x.jsonl:5: arrives 1 s before"),
        ("x.jsonl", '{"timestamp": NaN, "input_length": 1, "output_length": 7}', "x.jsonl:1: not a Mooncake request"),
        ("x.jsonl", "", "no requests"),
    ],
)
def test_bad_traces_are_named_with_their_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_trace(write(tmp_path / name, text))


def test_a_trace_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=f"{file} is no text in UTF-8: .* 0xff"):
        load_trace(file)


def test_scaling_is_linear() -> None:
    rows = [TraceRow(at_s, 1, 1) for at_s in (0.0, 1.0, 1.0, 4.0, 8.0)]
    scaled = scale_to_rate(rows, 2.0)
    assert [row.arrival_s for row in scaled] == [0.0, 0.25, 0.25, 1.0, 2.0]
    assert [row.arrival_s for row in scale_to_rate([TraceRow(0, 1, 1)], 5.0)] == [0.0]
    with pytest.raises(ValueError, match="above 0"):
        scale_to_rate(rows, 0.0)


def test_a_trace_gives_arrivals_lengths_and_images() -> None:
    rows = [TraceRow(0, 300, 20, (IMAGE, IMAGE)), TraceRow(3, 0, 10)]
    plans = plan_steady({"text": 1.0}, 2, LENGTHS, 0)
    first, second = with_trace(plans, rows, own_input=False, own_output=False)
    assert (first.media, first.group, first.num_input_tokens, first.max_tokens) == (("image", "image"), "image", 300, 20)
    assert (second.media, second.group, second.num_input_tokens, second.arrival_s) == ((), "text", 1, 3)
    own = with_trace(plans, rows, own_input=True, own_output=True)
    assert [plan.max_tokens for plan in own] == [9, 9] and own[0].num_input_tokens == plans[0].num_input_tokens
    assert [plan.arrival_s for plan in with_arrivals(plans, [1.5, 2.5])] == [1.5, 2.5]


def test_a_recorded_medium_has_its_size_and_equal_ones_are_the_same_file(tmp_path: Path) -> None:
    line = (
        '{"timestamp": 5, "input_length": 90, "output_length": 9, "hash_ids": [7], "media": ['
        '{"type": "image", "id": 3, "tokens": 24, "width": 40, "height": 30},'
        '{"type": "video", "id": 4, "tokens": 30, "width": 41, "height": 22, "seconds": 0.5},'
        '{"type": "image", "id": 3, "tokens": 24, "width": 40, "height": 30}]}\n'
    )
    (row,) = load_trace(write(tmp_path / "m.jsonl", line))
    (plan,) = with_trace(plan_steady({"text": 1.0}, 1, LENGTHS, 0), [row], own_input=False, own_output=False)
    assert (plan.group, plan.media, plan.num_input_tokens) == ("image+video", ("image", "video", "image"), 12)
    first, video, again = [shapes_of(plan, number, MediaShapes()) for number in range(3)]
    assert first.image_size == again.image_size == (40, 30) and (video.video_size, video.video_s) == ((40, 22), 0.5)
    assert media_seed(plan, 0) == media_seed(plan, 2) != media_seed(plan, 1)
    parts = json.loads(make_body(plan, MediaShapes(), Calibration(), "m"))["messages"][0]["content"]
    assert parts[0] == parts[2] and parts[0] != parts[1] and len(parts) == 4
    for wrong in ('"type": "smell"', '"type": "image", "width": -1', '"type": "image", "tokens": 1.5'):
        with pytest.raises(ValueError, match="m.jsonl:1: not a Mooncake request"):
            load_trace(write(tmp_path / "m.jsonl", line.replace('"type": "image"', wrong, 1)))


@settings(max_examples=100)
@given(
    shared=st.integers(0, 3),
    lengths=st.tuples(st.integers(1, 1200), st.integers(1, 1200)),
    num_media_tokens=st.integers(0, 700),
    calibration=st.builds(Calibration, st.floats(0, 60), st.floats(0.5, 3)),
)
def test_texts_begin_alike_as_far_as_their_blocks(
    shared: int, lengths: tuple[int, int], num_media_tokens: int, calibration: Calibration
) -> None:
    """As many words as the shared blocks have tokens of text, and no text shares another's beyond."""
    texts, media = [], (TraceMedium("image", 1, num_media_tokens),) if num_media_tokens else ()
    for other, length in enumerate(lengths):
        total = shared * BLOCK_TOKENS + num_media_tokens + length
        blocks = tuple(at if at < shared else 100 * (other + 1) + at for at in range(-(-total // BLOCK_TOKENS)))
        row = TraceRow(0, total, 1, media, blocks)
        (plan,) = with_trace(plan_steady({"text": 1.0}, 1, LENGTHS, other), [row], own_input=False, own_output=False)
        content = make_message(plan, MediaShapes(image_size=(8, 8)), calibration)["content"]
        text = content if isinstance(content, str) else content[-1]["text"]  # type: ignore[index]
        texts.append(text.split())
        assert len(texts[-1]) <= calibration.num_words(plan.num_input_tokens)
        assert len(texts[-1]) >= calibration.num_words(plan.num_input_tokens) - len(blocks) - 1
    tokens = max(0, shared * BLOCK_TOKENS - num_media_tokens)
    words = min(*map(len, texts), int(tokens / calibration.tokens_per_word) - shared)
    assert texts[0][: max(0, words)] == texts[1][: max(0, words)]
    if min(map(len, texts)) > words + 100:
        assert texts[0][-50:] != texts[1][-50:]
