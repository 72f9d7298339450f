"""Grids, tokens, segments and sampled frames."""

import ast
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.models.architecture import ModelConfig
from mmrt.models.config import load_model_config
from mmrt.models.errors import UnsupportedMediaError
from mmrt.models.families.qwen2_5 import media
from mmrt.models.families.qwen2_5.media import MAX_SEGMENT_MEL_FRAMES, MAX_SEGMENT_PATCHES, audio_tokens, smart_resize
from mmrt.models.families.registry import family_of
from mmrt.schema.media import ItemShape
from mmrt.tests.settings import ImportedLater, examples

theirs: Any = ImportedLater("transformers.models.qwen2_5_omni.processing_qwen2_5_omni")


@pytest.fixture(scope="module")
def omni(checkpoints: Callable[[str], Path]) -> ModelConfig:
    return load_model_config(checkpoints("qwen2_5_omni"))


def function_of_transformers(module: str, name: str) -> Callable[..., Any]:
    """A function out of a module of transformers that cannot be imported here: it wants torchvision, the function does not."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "models" / module.partition("processing_")[2] / f"{module}.py").read_text())
    (node,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    for argument in node.args.args:
        argument.annotation = None
    node.returns = None
    namespace: dict[str, Any] = {"math": math, "np": np, "torch": torch}
    exec(compile(ast.Module([node], []), module, "exec"), namespace)
    return namespace[name]


def consistent(item: ItemShape) -> None:
    """Segments cover the item, in order, and nothing else."""
    assert sum(segment.num_rows for segment in item.segments) == math.prod(max(n, 1) for n in item.grid)
    assert sum(segment.num_tokens for segment in item.segments) == item.num_tokens
    assert all(segment.num_tokens > 0 for segment in item.segments)
    assert sum(segment.grid[0] for segment in item.segments) == item.grid[0]


@given(height=st.integers(1, 5000), width=st.integers(1, 5000))
def test_image(omni: ModelConfig, height: int, width: int) -> None:
    family = family_of(omni)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(UnsupportedMediaError, match="aspect ratio of"):
            family.image_item(omni, height, width)
        return
    item = family.image_item(omni, height, width)
    consistent(item)
    t, h, w = item.grid
    assert t == 1 and len(item.segments) == 1 and h % 2 == 0 and w % 2 == 0
    assert item.num_tokens == h * w // 4
    assert item.segments[0].row_bytes == 1176
    assert h * w * 196 <= 28 * 28 * 1280 or min(h, w) == 2


@given(frames=st.integers(1, 300), height=st.integers(20, 2000), width=st.integers(20, 2000))
def test_video(omni: ModelConfig, frames: int, height: int, width: int) -> None:
    item = family_of(omni).video_item(omni, frames, height, width, sampled_fps=2.0)
    consistent(item)
    t, h, w = item.grid
    assert t == -(-frames // 2) and item.second_per_grid_s == 1.0
    for segment in item.segments:
        assert segment.grid[1:] == (h, w)
        assert segment.num_rows <= MAX_SEGMENT_PATCHES or segment.grid[0] == 1


@given(frames=st.integers(1, 40_000))
def test_audio(omni: ModelConfig, frames: int) -> None:
    family = family_of(omni)
    if frames < 3:
        with pytest.raises(UnsupportedMediaError, match="too short"):
            family.audio_item(omni, frames)
        return
    item = family.audio_item(omni, frames)
    consistent(item)
    assert all(segment.num_rows % 200 == 0 for segment in item.segments[:-1])
    assert all(segment.num_rows <= MAX_SEGMENT_MEL_FRAMES + 2 for segment in item.segments)
    assert item.num_tokens == audio_tokens(frames)


@settings(max_examples=examples(30))
@given(window=st.integers(1, 300), frames=st.integers(3, 9000))
def test_audio_windows_of_any_size(omni: ModelConfig, window: int, frames: int) -> None:
    rules = msgspec.structs.replace(omni.audio_rules, window_frames=2 * window)
    item = media.audio_item(msgspec.structs.replace(omni, audio_rules=rules), frames)
    consistent(item)


def sounded(config: ModelConfig, num_frames: int, num_mel_frames: int, height: int = 100, width: int = 60) -> ItemShape:
    family = family_of(config)
    video = family.video_item(config, num_frames, height, width, sampled_fps=2.0)
    return family.video_with_sound(config, video, family.audio_item(config, num_mel_frames))


def with_fps(config: ModelConfig, fps: float) -> ModelConfig:
    return msgspec.structs.replace(config, vision_rules=msgspec.structs.replace(config.vision_rules, fps=fps))


@given(frames=st.integers(1, 60), mel_frames=st.integers(3, 4000), fps=st.sampled_from([1, 1.3, 2, 3, 24]), width=st.integers(50, 1500))
def test_a_sound_track_takes_turns_as_in_transformers(omni: ModelConfig, frames: int, mel_frames: int, fps: float, width: int) -> None:
    item = sounded(with_fps(omni, fps), frames, mel_frames, width=width)
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2),
        video_token="V",
        audio_token="A",
        audio_bos_token="",
        audio_eos_token="",
        get_chunked_index=partial(theirs.Qwen2_5OmniProcessor.get_chunked_index, None),
    )
    videos = {"video_grid_thw": np.array([item.grid]), "video_second_per_grid": [2 / fps]}
    sounds = {"num_audio_tokens": [audio_tokens(mel_frames)]}
    expected = theirs.Qwen2_5OmniProcessor.replace_video_with_audio_token(
        processor, videos, 0, sounds, 0, position_id_per_seconds=25, seconds_per_chunk=2.0
    )
    assert "".join(part.num_tokens * part.kind[0].upper() for part in item.segments) == expected
    assert item.num_tokens == len(expected)


@given(frames=st.integers(1, 60), mel_frames=st.integers(3, 4000), fps=st.sampled_from([0.01, 0.3, 0.9, 2, 5]))
def test_segments_of_a_video_with_sound(omni: ModelConfig, frames: int, mel_frames: int, fps: float) -> None:
    """Each kind covers its medium, in whole temporal patches and tower windows, and every patch stands in the chunk of its time."""
    item = sounded(with_fps(omni, fps), frames, mel_frames, 700, 700)
    t, h, w = item.grid
    for kind, grid in (("video", (t, h, w)), ("audio", (mel_frames, 0, 0))):
        parts = [part for part in item.segments if part.kind == kind]
        assert sum(part.grid[0] for part in parts) == grid[0] and {part.grid[1:] for part in parts} == {grid[1:]}
        assert sum(part.num_rows for part in parts) == math.prod(max(n, 1) for n in grid)
        assert all(part.num_tokens > 0 for part in parts)
        assert kind == "video" or all(part.num_rows == 200 for part in parts[:-1])
    patch, sounds = 0, 0
    num_sounds = sum(part.kind == "audio" for part in item.segments)
    for part in item.segments:
        if part.kind == "audio":
            sounds += 1
            continue
        for _ in range(part.grid[0]):
            assert sounds == min(int(patch * item.second_per_grid_s * 25 // 50), num_sounds)
            patch += 1


def test_models_without_sound_in_videos(omni: ModelConfig, checkpoints: Callable[[str], Path]) -> None:
    vl = load_model_config(checkpoints("qwen2_5_vl"))
    video, sound = family_of(omni).video_item(omni, 4, 60, 60, 2.0), family_of(omni).audio_item(omni, 200)
    with pytest.raises(UnsupportedMediaError, match="takes no sound with its videos"):
        family_of(vl).video_with_sound(vl, video, sound)
    windows = msgspec.structs.replace(omni, audio_rules=msgspec.structs.replace(omni.audio_rules, window_frames=300))
    with pytest.raises(UnsupportedMediaError, match="chunks of 200 mel frames are not made of whole windows of 300"):
        family_of(omni).video_with_sound(windows, video, sound)


def test_limit_on_all_frames_of_a_video(omni: ModelConfig) -> None:
    rules = msgspec.structs.replace(omni.vision_rules, video_total_pixels=2_000_000)
    config = msgspec.structs.replace(omni, vision_rules=rules)
    assert family_of(omni).video_item(omni, 100, 1000, 1000, 2.0).grid == (50, 54, 54)
    assert family_of(omni).video_item(config, 100, 1000, 1000, 2.0).grid == (50, 22, 22)
    small = msgspec.structs.replace(rules, video_min_pixels=50_000, video_max_pixels=50_000)
    config = msgspec.structs.replace(omni, vision_rules=small)
    assert family_of(omni).video_item(config, 100, 1000, 1000, 2.0).grid == (50, 14, 14), "the limit on each frame holds, too"


def test_refusals(omni: ModelConfig) -> None:
    family = family_of(omni)
    for call in (
        lambda: family.image_item(omni, 0, 5),
        lambda: family.video_item(omni, 0, 50, 50, 2.0),
        lambda: family.sample_frames(omni, 0, 30.0),
        lambda: family.sample_frames(omni, 10, 0.0),
        lambda: family.audio_item(omni, 0),
        lambda: family.audio_item(msgspec.structs.replace(omni, audio_rules=None), 100),
        lambda: family.image_item(msgspec.structs.replace(omni, vision_rules=None), 10, 10),
    ):
        with pytest.raises(UnsupportedMediaError):
            call()


def test_sizes_equal_transformers() -> None:
    reference = function_of_transformers("image_processing_qwen2_vl", "smart_resize")
    rng = np.random.default_rng(0)
    for _ in range(500):
        height, width = (int(10 ** rng.uniform(0, 3.7)) for _ in range(2))
        low = int(rng.integers(1, 200_000))
        limits = (28, low, low + int(rng.integers(1000, 2_000_000)))
        if max(height, width) <= 200 * min(height, width):
            assert smart_resize(height, width, *limits) == reference(height, width, *limits)


def test_frames_equal_transformers(omni: ModelConfig) -> None:
    reference = function_of_transformers("video_processing_qwen2_vl", "sample_frames")
    processor = SimpleNamespace(num_frames=None, fps=2.0, temporal_patch_size=2, min_frames=4, max_frames=768)
    cases = [(60, 60 / 13), *((n, fps) for n in (2, 3, 5, 59, 1000, 40_000) for fps in (0.5, 12.5, 29.97))]
    for total, fps in cases:
        expected = reference(processor, SimpleNamespace(total_num_frames=total, fps=fps)).numpy()
        np.testing.assert_array_equal(family_of(omni).sample_frames(omni, total, fps), expected[expected < total])
    assert family_of(omni).sample_frames(omni, 1, 30.0).tolist() == [0]


@pytest.mark.parametrize("least", [{"fps": 0.01, "min_frames": 1}, {"max_frames": 1}])
def test_a_single_temporal_patch_spans_the_video(omni: ModelConfig, least: dict[str, Any]) -> None:
    """transformers divides by zero here."""
    config = msgspec.structs.replace(omni, vision_rules=msgspec.structs.replace(omni.vision_rules, **least))
    found = {total: family_of(omni).sample_frames(config, total, 30.0).tolist() for total in (1, 2, 3, 300)}
    assert found == {1: [0], 2: [0, 1], 3: [0, 1], 300: [0, 150]}


def test_no_frame_behind_the_end_is_sampled(omni: ModelConfig) -> None:
    """75 frames at 5.3 per second: torch.arange in float32 gives a 29th index, 75, and transformers raises IndexError."""
    for total in range(1, 400):
        for fps in (5.3, 8.0, 12.0, 24.0, 29.97, 30.0):
            indices = family_of(omni).sample_frames(omni, total, fps)
            assert 0 <= indices[0] and indices[-1] < total
    assert family_of(omni).sample_frames(omni, 75, 5.3).tolist() == [int(75 / 28 * k + 1e-6) for k in range(28)]
