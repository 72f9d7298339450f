"""Patch rows against transformers' image and video processors, bit for bit, and their layout against a plain definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.media.preprocess import image_rows, patch_rows, resize, video_rows
from mmrt.models.media_config import VisionRules
from mmrt.tests.settings import examples

RULES = VisionRules()
IMAGE_SIZES = ((224, 224), (97, 203), (33, 21), (1, 1), (3, 500), (720, 1280), (56, 56))
VIDEO_SIZES = ((4, 120, 160), (3, 64, 96), (1, 240, 135))


def normalised(rows: np.ndarray, rules: VisionRules = RULES) -> np.ndarray:
    """What the encoder computes from rows."""
    values_per_channel = rows.shape[1] // 3
    mean = np.repeat(np.float32(rules.image_mean) * np.float32(255), values_per_channel)
    std = np.repeat(np.float32(rules.image_std) * np.float32(255), values_per_channel)
    return (rows.astype(np.float32) - mean) / std


@pytest.fixture(scope="module")
def media(make_picture) -> dict[str, np.ndarray]:
    images = {f"image{i}": make_picture(i, *size) for i, size in enumerate(IMAGE_SIZES)}
    videos = {f"video{i}": np.stack([make_picture(k, *size) for k in range(n)]) for i, (n, *size) in enumerate(VIDEO_SIZES)}
    return images | videos


@pytest.fixture(scope="module")
def reference(media, processor_reference) -> dict[str, np.ndarray]:
    return processor_reference(media)


@pytest.mark.parametrize("name", [f"image{i}" for i in range(len(IMAGE_SIZES))])
def test_image_rows_equal_the_processor(media, reference, name):
    _, h, w = reference[f"{name}_grid"]
    rows = image_rows(media[name], 14 * h, 14 * w, RULES)
    assert rows.dtype == np.uint8
    assert np.array_equal(normalised(rows), reference[name])


@pytest.mark.parametrize("name", [f"video{i}" for i in range(len(VIDEO_SIZES))])
def test_video_rows_equal_the_processor(media, reference, name):
    t, h, w = reference[f"{name}_grid"]
    rows = list(video_rows(iter(media[name]), 14 * h, 14 * w, RULES))
    assert len(rows) == t
    assert np.array_equal(normalised(np.concatenate(rows)), reference[name])


@given(
    patch=st.integers(1, 5),
    merge=st.integers(1, 3),
    temporal=st.integers(1, 3),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(40), deadline=None)
def test_patch_rows_hold_every_pixel_in_merge_order(patch, merge, temporal, blocks, seed):
    rules = VisionRules(patch_size=patch, merge_size=merge, temporal_patch_size=temporal)
    height, width = blocks[0] * patch * merge, blocks[1] * patch * merge
    planes = np.random.default_rng(seed).integers(0, 256, (temporal, 3, height, width), dtype=np.uint8)
    rows = patch_rows(planes, rules)
    expected = []
    for block_y in range(0, height, patch * merge):
        for block_x in range(0, width, patch * merge):
            for y in range(block_y, block_y + patch * merge, patch):
                for x in range(block_x, block_x + patch * merge, patch):
                    expected.append(planes[:, :, y : y + patch, x : x + patch].transpose(1, 0, 2, 3).ravel())
    assert np.array_equal(rows, np.stack(expected))


def test_resize_takes_read_only_and_full_size_frames(make_picture):
    frame = make_picture(0, 40, 30)
    frame.flags.writeable = False
    assert resize(frame, 56, 28).shape == (3, 56, 28)
    assert np.array_equal(resize(frame, 40, 30), frame.transpose(2, 0, 1))


def test_an_incomplete_temporal_patch_repeats_its_last_frame(make_picture):
    frames = [make_picture(i, 28, 28) for i in range(3)]
    odd, even = (list(video_rows(sequence, 28, 28, RULES)) for sequence in (frames, [*frames, frames[-1]]))
    assert np.array_equal(np.stack(odd), np.stack(even))
