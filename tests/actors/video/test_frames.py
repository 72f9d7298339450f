"""Videos whose frames come as pictures: as transformers' processor makes them of the same frames, and what is refused."""

import io
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from PIL import Image

from mmrt.actors.video import items
from mmrt.actors.video.items import OpenItem, open_item
from mmrt.media.decoding import DecodingPool
from mmrt.media.engines import CpuEngine
from mmrt.media.errors import MediaError
from mmrt.media.frames import MAGIC, pack_frames, read_frames
from mmrt.media.limits import UNLIMITED, MediaLimits
from mmrt.models.architecture import ModelConfig
from mmrt.models.media_config import VisionRules
from mmrt.tests.actors.bench import Weights
from mmrt.tests.media.test_preprocess import normalised

Pictures = list[np.ndarray]
SIZES = {"six": (6, 120, 160), "odd": (5, 64, 96), "one": (1, 240, 135), "large": (4, 720, 1280)}


@pytest.fixture(scope="module")
def videos(make_picture: Callable[[int, int, int], np.ndarray]) -> dict[str, Pictures]:
    return {name: [make_picture(at, *size) for at in range(count)] for name, (count, *size) in SIZES.items()}


@pytest.fixture(scope="module")
def reference(videos: dict[str, Pictures], processor_reference: Callable) -> dict[str, np.ndarray]:
    return processor_reference({f"video {name}": np.stack(frames) for name, frames in videos.items()})


@pytest.fixture
def model(tiny: tuple[ModelConfig, Weights]) -> ModelConfig:
    return msgspec.structs.replace(tiny[0], vision_rules=VisionRules())


def encoded(frame: np.ndarray, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, format)
    return file.getvalue()


def opened(pictures: Sequence[bytes], model: ModelConfig, rate: float = 2.0) -> OpenItem:
    with DecodingPool([CpuEngine()]) as pool:
        return open_item("video", io.BytesIO(pack_frames(pictures, rate)), model, MediaLimits(), UNLIMITED, pool)


def rows(item: OpenItem) -> np.ndarray:
    return np.concatenate([piece for number in range(len(item.item.segments)) for piece in item.rows(number)])


@pytest.mark.parametrize("kept_bytes", [items.KEPT_BYTES, 0])
@pytest.mark.parametrize("name", SIZES)
def test_rows_and_grid_equal_the_processors(
    videos: dict[str, Pictures],
    reference: dict[str, np.ndarray],
    model: ModelConfig,
    name: str,
    kept_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(items, "KEPT_BYTES", kept_bytes)
    item = opened([encoded(frame) for frame in videos[name]], model)
    assert item.item.grid == tuple(reference[f"video {name}_grid"])
    assert np.array_equal(normalised(rows(item)), reference[f"video {name}"])
    assert (item.num_bytes > 0) == (kept_bytes > 0)


@pytest.mark.parametrize(("rate", "num_frames"), [(2.0, 6), (0.5, 5), (24.0, 3)])
def test_seconds_per_patch_follow_the_rate(videos: dict[str, Pictures], model: ModelConfig, rate: float, num_frames: int) -> None:
    """As transformers computes them from the frames' metadata."""
    item = opened([encoded(frame) for frame in videos["six"][:num_frames]], model, rate).item
    assert item.second_per_grid_s == pytest.approx(VisionRules().temporal_patch_size / rate)
    assert item.grid[0] == -(-num_frames // 2)


def test_more_frames_than_the_run_takes_are_sampled(videos: dict[str, Pictures], model: ModelConfig) -> None:
    few = msgspec.structs.replace(model, vision_rules=VisionRules(max_frames=4, min_frames=2))
    frames = [encoded(frame) for frame in videos["six"]] * 2
    sampled, chosen = opened(frames, few, 3.0), opened(frames[::3], few, 1.0)
    assert sampled.item == chosen.item and np.array_equal(rows(sampled), rows(chosen))


def test_frames_may_be_of_any_formats(videos: dict[str, Pictures], model: ModelConfig) -> None:
    grey = [np.full((56, 56, 3), 90 + 20 * at, np.uint8) for at in range(4)]
    formats = ("JPEG", "PNG", "WEBP", "GIF")
    item = opened([encoded(frame, format) for frame, format in zip(grey, formats, strict=True)], model)
    assert [int(np.median(piece)) for number in range(len(item.item.segments)) for piece in item.rows(number)] == pytest.approx(
        [100, 140], abs=3
    )


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (b"hello world", "frame 2: this is text, not an image"),
        (encoded(np.zeros((56, 57, 3), np.uint8)), "frame 2 is 57x56, the first is 56x56: all frames of a video have one size"),
        (encoded(np.zeros((56, 56, 3), np.uint8))[:60], "frame 2: the image is broken or cut off"),
    ],
)
def test_what_is_wrong_with_a_frame_is_said_with_its_number(broken: bytes, says: str, model: ModelConfig) -> None:
    with pytest.raises(MediaError, match=says):
        opened([encoded(np.zeros((56, 56, 3), np.uint8)), broken], model)


@pytest.mark.parametrize("rate", [1e-300, 0.009, 1001.0, 1e300])
def test_a_rate_beyond_the_limits_is_refused(rate: float, model: ModelConfig) -> None:
    with pytest.raises(MediaError, match="the rate of frames is .* a second, allowed are 0.01 to 1000"):
        opened([encoded(np.zeros((56, 56, 3), np.uint8))], model, rate)


def test_lists_that_are_cut_off_or_made_up_are_refused() -> None:
    whole = pack_frames([b"abc", b"", b"defg"], 2.0)
    reader = io.BytesIO(whole)
    frames = read_frames(reader)
    assert frames is not None and [frames.picture(reader, at) for at in range(3)] == [b"abc", b"", b"defg"]
    assert read_frames(io.BytesIO(b"")) is None and read_frames(io.BytesIO(MAGIC)) is None
    for end in range(len(MAGIC) + 12, len(whole)):
        with pytest.raises(MediaError, match="list of frames is broken"):
            read_frames(io.BytesIO(whole[:end]))
    for made_up in (pack_frames([], 2.0), pack_frames([b"a"], -1.0), pack_frames([b"a"], float("nan")), whole + b"x"):
        with pytest.raises(MediaError, match="list of frames is broken"):
            read_frames(io.BytesIO(made_up))
    huge = whole[: len(MAGIC) + 8] + b"\xff" * 4 + bytes(64)
    with pytest.raises(MediaError, match="list of frames is broken"):
        read_frames(io.BytesIO(huge))
