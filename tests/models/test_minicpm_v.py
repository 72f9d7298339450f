"""MiniCPM-V beside transformers: what ``test_picture_families`` does not show of all families that see pictures."""

import importlib
from collections.abc import Callable
from dataclasses import replace as replaced
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from mmrt.actors.host.media_rules import for_medium, image_of_share
from mmrt.models.architecture import ModelConfig
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families.item_check import fault_of
from mmrt.models.families.minicpm_v import MINICPM_V_4_6, MINICPM_V_4_7
from mmrt.models.families.minicpm_v.canvas import _spread
from mmrt.models.item_text import with_prompt_texts
from mmrt.schema.media import ItemShape, MediaOptions, View
from mmrt.tests.models.conftest import Loaded
from mmrt.tests.models.picture_families import SLICES
from mmrt.tests.models.picture_families import minicpm_v as processor_of
from mmrt.tests.models.whole_prompts import bicubic, check_logits_in_cuts, edited, expanded, noise, opened, prompt_of
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")


@pytest.fixture(scope="module")
def config(checkpoints: Callable[[str], Path]) -> ModelConfig:
    return load_model_config(checkpoints("minicpmv4_6"))


def test_sizes_are_transformers(config: ModelConfig) -> None:
    """Of the whole and of its slices, with published numbers."""
    theirs = transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6.MiniCPMV4_6ImageProcessorPil()
    rules = replace(config.vision_rules, slice_side=448, max_pixels=9 * 448**2)  # type: ignore[type-var]
    published = replace(config, vision_rules=rules)
    sizes = np.random.default_rng(0).integers(1, 3000, (500, 2)).tolist()
    for height, width in [*sizes, [1, 1], [448, 448], [448, 449], [896, 448], [1, 60000], [60000, 1], [1344, 1344]]:
        grid = theirs.get_sliced_grid((height, width), 9, 448)
        whole = theirs.find_best_resize((height, width), 448, 14, "16x", allow_upscale=grid is None)
        views = [View((whole,))]
        if grid is not None:
            refined = theirs.get_refine_size((height, width), grid, 448, 14, "16x", allow_upscale=True)
            h, w = refined[0] // grid[0], refined[1] // grid[1]
            views += [View((refined,), (x * w, y * h, w, h)) for y in range(grid[0]) for x in range(grid[1])]
        item = MINICPM_V_4_6.image_item(published, height, width)
        assert [segment.views for segment in item.segments] == [(view,) for view in views], (height, width)
        assert fault_of(published, "image", item) == ""


def test_a_bound_on_pixels_makes_fewer_slices(config: ModelConfig) -> None:
    counts = []
    for max_pixels in (10**9, 6 * 100**2, 2 * 100**2, 1):
        item = MINICPM_V_4_6.image_item(for_medium(config, MediaOptions(max_pixels=max_pixels)), 340, 250)
        assert fault_of(config, "image", item) == ""
        counts.append(len(item.segments))
    assert counts == [10, 7, 3, 1]


def test_a_share_of_the_tokens(config: ModelConfig) -> None:
    """By fewer slices: as many as have it."""
    whole = MINICPM_V_4_6.image_item(config, 340, 250)
    items = [image_of_share(config, 340, 250, share) for share in (1.0, 0.75, 0.5, 0.25, 0.05)]
    assert items[0] == whole and len(items[-1].segments) == 1
    assert all(item.num_tokens <= share * whole.num_tokens for item, share in zip(items[:4], (1.0, 0.75, 0.5, 0.25), strict=True))
    assert len({item.num_tokens for item in items}) >= 4 and all(fault_of(config, "image", item) == "" for item in items)


def test_slices_that_lie(config: ModelConfig) -> None:
    """Their number is the item's, and so is the size of the whole."""
    item = MINICPM_V_4_6.image_item(config, 250, 500)
    whole, *slices = item.segments
    assert whole.grid != slices[0].grid
    rows, columns = item.grid[1:]
    for told in (
        ItemShape("image", (8, rows, columns), item.num_tokens, item.segments),
        ItemShape("image", (9, rows, columns + 4), item.num_tokens, item.segments),
        ItemShape("image", item.grid, item.num_tokens, [*slices, whole]),
        ItemShape("image", item.grid, item.num_tokens, [replace(part, views=()) for part in item.segments]),
    ):
        assert fault_of(config, "image", told).startswith("segments of ")
    told = ItemShape("image", item.grid, item.num_tokens, [whole, replace(slices[0], num_tokens=5), *slices[1:]])
    assert fault_of(config, "image", told).startswith("segment 1 has ")


def test_numbers_of_pictures_are_per_request(checkpoints: Callable[[str], Path], config: ModelConfig, tmp_path: Path) -> None:
    """Also above nine, as transformers writes them; a checkpoint may do without."""
    text = "One <|image_pad|>" + " two <|image_pad|>" * 11
    processor = processor_of(checkpoints("minicpmv4_6"))
    pictures = [np.zeros((30, 30, 3), np.uint8)] * 12
    theirs = processor(text=[text], images=pictures, return_tensors="pt")["input_ids"][0].tolist()
    ours = processor.tokenizer(with_prompt_texts(text, config.prompt_texts))["input_ids"]
    item = MINICPM_V_4_6.image_item(config, 30, 30)
    (segment,) = item.segments
    its = [*segment.lead, *[config.image_token_id] * segment.num_tokens, *segment.trail]
    assert [id for token in ours for id in (its if token == config.image_token_id else [token])] == theirs
    made = edited(checkpoints("minicpmv4_6"), tmp_path / "made", "preprocessor_config.json", {"use_image_id": False})
    assert load_model_config(made).prompt_texts == ()


def test_pictures_that_are_not_cut(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    made = edited(checkpoints("minicpmv4_6"), tmp_path / "made", "preprocessor_config.json", {"slice_mode": False})
    config = load_model_config(made)
    assert len(MINICPM_V_4_6.image_item(config, 3000, 200).segments) == 1


def test_other_media(config: ModelConfig) -> None:
    for refuse, said in (
        (lambda: MINICPM_V_4_6.image_item(config, 0, 9), "picture of 9x0 pixels is empty"),
        (lambda: MINICPM_V_4_6.video_item(config, 0, 60, 60, 2.0), "video of 0 frames of 60x60 pixels is empty"),
        (lambda: MINICPM_V_4_6.sample_frames(config, 0, 2.0), "video has no frames"),
        (lambda: MINICPM_V_4_6.sample_frames(config, 9, 0.0), "video has a frame rate of 0"),
        (lambda: MINICPM_V_4_6.audio_item(config, 300), "this model takes no audio"),
    ):
        with pytest.raises(UnsupportedMediaError, match=said):
            refuse()


@pytest.mark.parametrize("has_numbers", [True, False])
def test_positions_on_canvases_are_transformers(models: Callable[[str], Loaded], has_numbers: bool) -> None:
    """Of pictures at the start and the end, beside each other, with line ends and spaces behind them, in rows and columns of slices."""
    loaded = models("minicpmv4_7")
    config = loaded.config if has_numbers else replace(loaded.config, prompt_texts=())
    loaded, processor = replaced(loaded, config=config), processor_of(loaded.path)
    processor.default_use_image_id = has_numbers
    for content in (
        ["only text"],
        [noise(30, 40), "What is it?"],
        [noise(300, 300), "\nWhat is it?"],
        ["Say:", noise(100, 340), "\n", noise(340, 90), noise(20, 20), noise(250, 120), " ", noise(7, 400), "\n\nCompare."],
        ["A", noise(300, 41), noise(640, 480), "\n", noise(61, 999), "\n x"],
        *([noise(*size), "Tell."] for size in SLICES),
    ):
        prompt = prompt_of(loaded, processor, content)
        inputs = prompt.reference_inputs
        assert prompt.ids == inputs["input_ids"][0].tolist()
        found, delta = MINICPM_V_4_7.positions(config, len(prompt.ids), prompt.spans)
        names = ("input_ids", "mm_token_type_ids", "target_sizes")
        expected, deltas = loaded.reference.model.get_rope_index(**{name: inputs[name] for name in names if name in inputs})
        np.testing.assert_array_equal(found, expected[:, 0].numpy())
        assert delta == deltas.item()


def test_a_stretched_grid_is_rounded_as_torch_does() -> None:
    for count in range(1, 60):
        for length in range(count, 300, 7):
            expected = torch.linspace(0, length - 1, count).round().long().numpy()
            np.testing.assert_array_equal(_spread(count, length), expected)


def test_sampled_frames_are_transformers(config: ModelConfig) -> None:
    """Short and long, but for frames that it would take twice."""
    module = importlib.import_module("transformers.models.minicpmv4_6.video_processing_minicpmv4_6")
    theirs = SimpleNamespace(max_num_frames=128, stack_frames=1)
    for total, fps in (
        (1, 25.0),
        (7, 2.0),
        (49, 24.0),
        (50, 24.0),
        (300, 29.97),
        (3072, 24.0),
        (3073, 24.0),
        (20000, 23.976),
        (5, 0.5),
    ):
        metadata = SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps)
        expected = module.MiniCPMV4_6VideoProcessor.sample_frames(theirs, metadata)
        assert MINICPM_V_4_6.sample_frames(config, total, fps).tolist() == list(dict.fromkeys(expected)), (total, fps)
    assert len(MINICPM_V_4_6.sample_frames(for_medium(config, MediaOptions(fps=0.5)), 240, 24.0)) == 5


@pytest.mark.parametrize("family", ["minicpmv4_6", "minicpmv4_7"])
@torch.inference_mode()
def test_a_video(models: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Its prompt, positions and logits; frames are pictures that are not cut."""
    monkeypatch.setattr("transformers.image_processing_backends.np_resize", bicubic)
    loaded = models(family)
    config, processor = loaded.config, processor_of(loaded.path)
    frames, alone = [noise(90, 160) // (1 + number) for number in range(3)], for_medium(config, MediaOptions(max_pixels=1))
    rows = [opened(alone, frame)[1][0] for frame in frames]
    text = "See <|image_pad|>and <|video_pad|>\n\nWhat <|video_pad|>\nmoves?"
    made = processor.image_processor(frames, max_slice_nums=1, return_tensors="pt")
    told = {"target_sizes_videos": made["target_sizes"], "num_frames_per_video": [3], "grids_videos": np.zeros((3, 2), int)}
    picture = processor.image_processor([noise(30, 40)], return_tensors="pt")
    theirs = [processor.replace_video_token(told, 0, image_token_divisor=16, video_token_divisor=16)] * 2
    theirs = processor._prepend_local_ids([text], theirs, "<|video_pad|>")
    (its,) = processor._prepend_local_ids([text], [processor.replace_image_token(picture, 0, image_token_divisor=16)], "<|image_pad|>")
    before, between, after = text.split("<|video_pad|>")
    whole = "".join((before.replace("<|image_pad|>", its), theirs[0], between, theirs[1], after))
    ids = processor.tokenizer(whole, return_tensors="pt")["input_ids"]
    shape, (photo, its_rows) = loaded.family.video_item(config, 3, 90, 160, 1.0), opened(config, noise(30, 40))
    assert fault_of(config, "video", shape) == ""
    prompt = expanded(loaded, processor.tokenizer, text, [photo, shape, shape], [its_rows, rows, rows])
    assert prompt.ids == ids[0].tolist()
    kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    prompt.reference_inputs = {
        **{
            "input_ids": ids,
            "mm_token_type_ids": kinds,
            "pixel_values": picture["pixel_values"],
            "target_sizes": picture["target_sizes"],
        },
        "pixel_values_videos": torch.cat([made["pixel_values"]] * 2, 3),
        "target_sizes_videos": torch.cat([made["target_sizes"]] * 2),
    }
    if family == "minicpmv4_6":
        del prompt.reference_inputs["mm_token_type_ids"]
    check_logits_in_cuts(loaded, loaded.reference, prompt, [16, 4096])


def test_videos_whose_frames_are_cut_are_not_taken(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    for number, changes in enumerate(({"max_slice_nums": 9}, {"stack_frames": 5})):
        made = edited(checkpoints("minicpmv4_6"), tmp_path / str(number), "video_preprocessor_config.json", changes)
        config = load_model_config(made)
        assert config.media_kinds == ("image",) and config.video_token_id == -1 and len(config.prompt_texts) == 1
        with pytest.raises(UnsupportedMediaError, match="this model takes no video"):
            MINICPM_V_4_6.video_item(config, 4, 60, 60, 2.0)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "more tokens": ("config.json", {"downsample_mode": "4x"}, "downsample_mode is '4x', expected '16x'"),
    "more tokens of the processor": ("preprocessor_config.json", {"downsample_mode": "4x"}, "downsample_mode is '4x', expected '16x'"),
    "tokens of another size": ("config.json", {"merge_kernel_size": [4, 4]}, r"merge_kernel_size is \[4, 4\], expected \[2, 2\]"),
    "rounds": ("config.json", {"merger_times": 2}, "merger_times is 2, expected 1"),
    "layer": ("config.json", {"insert_layer_id": 4}, "insert_layer_id is 4, expected an integer from 0 to 3"),
    "windows": ("config.json", {"vision_config": {"window_kernel_size": [4, 4]}}, r"window_kernel_size is \[4, 4\], expected \[2, 2\]"),
    "decoder": ("config.json", {"text_config": {"model_type": "qwen3"}}, "model_type is 'qwen3', expected 'qwen3_5_text'"),
    "activation": ("config.json", {"vision_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu', expected 'gelu_pyt"),
    "placeholder": ("tokenizer_config.json", {"image_token": "<pic>"}, r"has no '<pic>' \(image_token\)"),
    "filter": ("preprocessor_config.json", {"resample": 2}, "resample is 2, expected 3"),
    "patches": ("preprocessor_config.json", {"patch_size": 16}, "patch_size is 16, but the vision tower has 14"),
    "slices": ("preprocessor_config.json", {"max_slice_nums": 65}, "max_slice_nums is 65, expected an integer from 1 to 64"),
    "sides of videos": (
        "video_preprocessor_config.json",
        {"scale_resolution": 90},
        "scale_resolution is 90, but that of pictures is 100",
    ),
    "colours of videos": ("video_preprocessor_config.json", {"image_mean": [0.4] * 3}, "image_mean is .*, but that of pictures is"),
    "fence": ("tokenizer_config.json", {"slice_start_token": "<cut>"}, r"has no '<cut>' \(slice_start_token\)"),
    "number": ("tokenizer_config.json", {"image_id_end_token": "<end>"}, r"has no '<end>' \(image_id_end_token\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(checkpoints: Callable[[str], Path], tmp_path: Path, what: str) -> None:
    file, changes, said = REFUSED[what]
    with pytest.raises(CheckpointError, match=said):
        load_model_config(edited(checkpoints("minicpmv4_6"), tmp_path / "made", file, changes))


@pytest.mark.parametrize("name", ["image_end_id", "slice_start_id", "newline_id"])
def test_ids_around_pictures_that_the_tokenizer_has_not(checkpoints: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is 5, but tokenizer.json has "):
        load_model_config(edited(checkpoints("minicpmv4_7"), tmp_path / "made", "config.json", {name: 5}))


def test_the_published_shape_has_its_published_size(sized: Callable[..., float]) -> None:
    assert sized("minicpmv4_6", "1.3b") / 1e9 == pytest.approx(1.3, rel=0.03)
