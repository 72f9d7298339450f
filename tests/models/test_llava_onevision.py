"""LLaVA-OneVision beside transformers: videos, pictures among others, and what its files may say."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mmrt.actors.host.media_rules import for_medium, for_run, image_of_share, option_ranges
from mmrt.actors.video.items import Target
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families.item_check import fault_of
from mmrt.models.families.registry import family_named
from mmrt.models.towers.interface import TowerInput
from mmrt.runtime.config.sections import MediaSection
from mmrt.schema.media import MediaOptions, MediaSpan
from mmrt.tests.models.conftest import Loaded, Prompt
from mmrt.tests.models.picture_families import llava_onevision
from mmrt.tests.models.whole_prompts import check_greedy_tokens, check_logits_in_cuts, edited
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
TILE, SIDE, AMONG_OTHERS = 72, 5, MediaOptions(is_among_others=True)


@pytest.fixture(scope="module")
def loaded(models: Callable[[str], Loaded]) -> Loaded:
    return models("llava_onevision")


def video_prompt(loaded: Loaded, num_frames: int) -> Prompt:
    """Of text and a clip. transformers' processor of videos wants torchvision; the pixels are those of frames in a tile's size."""
    config, rules = loaded.config, loaded.config.vision_rules
    item = loaded.family.video_item(config, num_frames, 90, 70, 2.0)
    assert fault_of(config, "video", item) == ""
    processor = llava_onevision(loaded.path)
    text = processor.replace_video_token({"pixel_values_videos": [np.zeros((num_frames, 1))]}, 0)
    message = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Tell."}]}]
    whole = processor.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    expected, ids = (processor.tokenizer(found)["input_ids"] for found in (whole.replace("<video>", text), whole))
    place = ids.index(config.video_token_id)
    ours = [*ids[:place], *[config.video_token_id] * item.num_tokens, *ids[place + 1 :]]
    assert ours == expected
    frames = np.random.default_rng(num_frames).integers(0, 256, (num_frames, 90, 70, 3), dtype=np.uint8)
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(frames).permute(0, 3, 1, 2), (TILE, TILE), mode="bicubic", antialias=True
    )
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (rules.image_mean, rules.image_std))
    rows = []
    for frame in frames:
        planes = Target.of(rules, item).planes(frame)
        rows.append(planes.reshape(3, SIDE, 14, SIDE, 14).transpose(1, 3, 0, 2, 4).reshape(SIDE**2, -1))
    inputs = {"input_ids": torch.tensor([expected]), "pixel_values_videos": ((resized / 255 - mean) / std)[None]}
    return Prompt(ours, [MediaSpan(place, item)], [rows], {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])})


@torch.inference_mode()
def test_videos_are_a_quarter_of_the_tokens_of_each_frame_and_a_row(loaded: Loaded) -> None:
    prompt = video_prompt(loaded, 5)
    assert [segment.num_tokens for segment in prompt.spans[0].shape.segments] == [9, 9, 9, 9, 10]
    features = loaded.reference.model.get_video_features(prompt.reference_inputs["pixel_values_videos"]).pooler_output
    torch.testing.assert_close(torch.cat(loaded.encode(prompt)[0]), features[0], rtol=1e-5, atol=1e-5)
    check_logits_in_cuts(loaded, loaded.reference, prompt, (7, 4096))
    check_greedy_tokens(loaded, prompt)


def test_frames_are_taken_by_time_as_transformers_takes_them(
    loaded: Loaded, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    fixed = load_model_config(edited(loaded.path, tmp_path / "made", "video_preprocessor_config.json", {"num_frames": 8}))
    for config, expected in ((loaded.config, 20), (fixed, 8)):
        indices = loaded.family.sample_frames(config, 300, 30.0)
        assert indices.tolist() == torch.arange(0, 300, 300 / expected).int().tolist()
    assert len(loaded.family.sample_frames(loaded.config, 9000, 30.0)) == 32
    assert len(loaded.family.sample_frames(for_run(loaded.config, MediaSection(fps=1.0, max_frames=4)), 9000, 30.0)) == 4


def test_a_picture_among_others_is_a_square(loaded: Loaded) -> None:
    """Whatever the bounds and its share of tokens are; alone it is cut by them."""
    config, family = loaded.config, loaded.family
    for options in (AMONG_OTHERS, MediaOptions(is_among_others=True, max_pixels=TILE**2), MediaOptions(is_among_others=True)):
        item = image_of_share(for_medium(config, options), 300, 41, 0.5)
        assert item.num_tokens == SIDE**2 + 1 and fault_of(config, "image", item) == ""
    counts = []
    for options in (MediaOptions(), MediaOptions(max_pixels=2 * TILE**2), MediaOptions(max_pixels=1)):
        (segment,) = family.image_item(for_medium(config, options), 300, 41).segments
        rows = np.zeros((segment.num_rows, segment.row_bytes), np.uint8)
        (found,) = loaded.towers.encode([TowerInput("image", rows, segment.grid, segment.details)])
        assert len(found) == segment.num_tokens
        counts.append(segment.grid[0] - 1)
    assert counts == [3, 2, 1]
    assert option_ranges(config.vision_rules)["image"].keys() == {"min_pixels", "max_pixels", "token_share"}


def test_other_media_and_lies(loaded: Loaded) -> None:
    family, config = loaded.family, loaded.config
    for refuse, said in (
        (lambda: family.image_item(config, 0, 9), "picture of 9x0 pixels is empty"),
        (lambda: family.image_item(for_medium(config, AMONG_OTHERS), 0, 9), "picture of 9x0 pixels is empty"),
        (lambda: family.video_item(config, 0, 60, 60, 2.0), "video has no frames"),
        (lambda: family.audio_item(config, 300), "this model takes no audio"),
    ):
        with pytest.raises(UnsupportedMediaError, match=said):
            refuse()
    video, picture = family.video_item(config, 3, 90, 170, 2.0), family.image_item(config, 90, 170)
    for item, number, lie in (
        (video, 0, {"num_tokens": 10}),
        (video, 0, {"num_tokens": 10, "details": (TILE, TILE, 1)}),
        (video, 2, {"details": (TILE, TILE, 0)}),
        (video, 2, {"details": (TILE,)}),
        (video, 2, {"details": (0, 1, 1)}),
        (picture, 0, {"num_tokens": SIDE**2}),
        (picture, 0, {"details": ()}),
    ):
        segments = list(item.segments)
        segments[number] = msgspec.structs.replace(segments[number], **lie)
        told = msgspec.structs.replace(item, segments=segments, num_tokens=sum(part.num_tokens for part in segments))
        assert fault_of(config, item.kind, told).startswith(f"segment {number} has"), lie
    long = family.video_item(config, 33, 90, 170, 2.0)  # more frames than the model takes
    assert fault_of(config, "video", long).startswith("segment 0 has details")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "tower": (
        "config.json",
        {"vision_config": {"model_type": "clip_vision_model"}},
        "model_type is 'clip_vision_model', expected '",
    ),
    "decoder": ("config.json", {"text_config": {"model_type": "llama"}}, "text_config.model_type is 'llama', expected 'qwen2'"),
    "window": (
        "config.json",
        {"text_config": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}},
        "windows",
    ),
    "strategy": ("config.json", {"vision_feature_select_strategy": "default"}, "_strategy is 'default', expected 'full'"),
    "layer": ("config.json", {"vision_feature_layer": [-1, -2]}, r"_layer is \[-1, -2\], expected a number from -3 to -1"),
    "aspect": ("config.json", {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio is 'pad', expected anyres_max_ with a number"),
    "other aspect": (
        "processor_config.json",
        {"vision_aspect_ratio": "anyres_max_9"},
        "is 'anyres_max_9', but the model's is 'any",
    ),
    "tokens": ("processor_config.json", {"num_image_tokens": 729}, "num_image_tokens is 729, but a tile has 25 tokens"),
    "grids": ("config.json", {"image_grid_pinpoints": [[72, 80]]}, "image_grid_pinpoints is .*, expected pairs of multiples of 72"),
    "filter": ("preprocessor_config.json", {"resample": 2}, "resample is 2, expected 3"),
    "crop": ("preprocessor_config.json", {"do_center_crop": True}, "do_center_crop is true, which is not supported"),
    "size": ("preprocessor_config.json", {"size": 384}, "size is 384, but the vision tower's image_size is 72"),
    "size of frames": (
        "video_preprocessor_config.json",
        {"size": {"height": 80}},
        "size is 80, but the vision tower's image_size",
    ),
    "colours": ("video_preprocessor_config.json", {"image_std": [1, 1, 1]}, r"image_std is \[1.0, 1.0, 1.0\], but that of pictures"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(loaded: Loaded, tmp_path: Path, what: str) -> None:
    file, changes, said = REFUSED[what]
    with pytest.raises(CheckpointError, match=said):
        load_model_config(edited(loaded.path, tmp_path / "made", file, changes))


def test_published_files_leave_out_what_they_have_by_default(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """As those of llava-onevision-qwen2-7b-ov-hf."""
    made = tmp_path / "made"
    shutil.copytree(checkpoints("llava_onevision"), made, ignore=shutil.ignore_patterns("*.safetensors", "*processor_config.json"))
    config = json.loads((made / "config.json").read_text())
    for name in ("vision_config", "image_token_index", "video_token_index", "image_grid_pinpoints", "vision_aspect_ratio"):
        del config[name]
    text = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28}
    config["text_config"] = {**text, "num_key_value_heads": 4, "vocab_size": 152128, "rope_theta": 1e6, "eos_token_id": 9}
    (made / "config.json").write_text(json.dumps(config))
    found, theirs = load_model_config(made), transformers.AutoConfig.from_pretrained(made)
    assert (found.image_token_id, found.video_token_id) == (theirs.image_token_index, theirs.video_token_index) == (151646, 151647)
    assert found.vision.depth == theirs.vision_config.num_hidden_layers == 26 and found.vision.position_side == 27
    assert [list(grid) for grid in found.vision_rules.grids] == theirs.image_grid_pinpoints and found.vision_rules.most_tiles == 9
    family = family_named("llava_onevision")
    processor = llava_onevision(checkpoints("llava_onevision"))
    processor.num_image_tokens, processor.vision_aspect_ratio = 729, theirs.vision_aspect_ratio
    processor.image_processor.image_grid_pinpoints = theirs.image_grid_pinpoints
    for size in ((480, 640), (2000, 3000), (100, 4000), (384, 384)):
        assert family.image_item(found, *size).num_tokens == processor._get_number_of_features(*size, 384, 384)
    assert family.video_item(found, 8, 480, 640, 1.0).num_tokens == 8 * 196 + 1


def test_files_without_a_processor_of_videos(loaded: Loaded, tmp_path: Path) -> None:
    """Videos have the rules of pictures, as in transformers."""
    shutil.copytree(loaded.path, made := tmp_path / "made")
    (made / "video_preprocessor_config.json").unlink()
    assert load_model_config(made) == loaded.config


@pytest.mark.parametrize(("shape", "billions"), [("0.5b", 0.894), ("7b", 8.03)])
def test_published_shapes_have_their_published_size(sized: Callable[..., float], shape: str, billions: float) -> None:
    assert sized("llava_onevision", shape) / 1e9 == pytest.approx(billions, rel=0.01)
