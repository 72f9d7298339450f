"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision beside transformers: what ``test_picture_families`` does not show of all families."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mmrt.actors.host.media_rules import for_medium
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families.item_check import fault_of
from mmrt.models.families.registry import family_named
from mmrt.models.towers.interface import TowerInput
from mmrt.schema.media import MediaOptions
from mmrt.tests.models.conftest import Loaded
from mmrt.tests.models.whole_prompts import edited
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
TILE = 58  # of the tiny checkpoints of the first two, whose tiles have two pixels more than whole patches
FAMILIES = ("llava", "llava_next")


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, models: Callable[[str], Loaded]) -> Loaded:
    return models(request.param)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "tower": (
        "config.json",
        {"vision_config": {"model_type": "siglip_vision_model"}},
        "vision_config.model_type is 'siglip_v",
    ),
    "decoder": ("config.json", {"text_config": {"model_type": "gemma"}}, "text_config.model_type is 'gemma', expected 'llama' or"),
    "activation": (
        "config.json",
        {"vision_config": {"hidden_act": "gelu"}},
        "vision_config.hidden_act is 'gelu', expected 'quick_",
    ),
    "layer": (
        "config.json",
        {"vision_feature_layer": [-2, -5]},
        r"_feature_layer is \[-2, -5\], expected a number from -4 to -1",
    ),
    "far layer": ("config.json", {"vision_feature_layer": -9}, "vision_feature_layer is -9, expected a number from -4 to -1"),
    "strategy": (
        "config.json",
        {"vision_feature_select_strategy": "full"},
        "_select_strategy is 'full', expected 'default'",
    ),
    "projector": ("config.json", {"projector_hidden_act": "relu"}, "projector_hidden_act is 'relu', expected 'gelu'"),
    "placeholder": ("config.json", {"image_token_index": 5000}, "image placeholder id is 5000, outside the vocabulary of 1216"),
    "filter": ("preprocessor_config.json", {"resample": 1}, "resample is 1, expected 3"),
    "size": ("preprocessor_config.json", {"size": 224}, "size is 224, but the vision tower's image_size is 58"),
    "crop": ("preprocessor_config.json", {"crop_size": {"height": 60}}, "crop_size is 60, but the vision tower's image_size is 58"),
    "whole": ("preprocessor_config.json", {"do_center_crop": False}, "do_center_crop is false, or do_pad is true"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(loaded: Loaded, tmp_path: Path, what: str) -> None:
    file, changes, said = REFUSED[what]
    with pytest.raises(CheckpointError, match=said):
        load_model_config(edited(loaded.path, tmp_path / "made", file, changes))


@pytest.mark.parametrize(
    ("file", "grids", "said"),
    [
        ("config.json", [[58, 59]], "config.json: image_grid_pinpoints is .*, expected pairs of multiples of 58"),
        ("config.json", "all", "config.json: image_grid_pinpoints is 'all', expected pairs"),
        ("preprocessor_config.json", [[58, 58]], r"image_grid_pinpoints is \[\(58, 58\)\], but the model's is \[\(58, 116\)"),
    ],
)
def test_grids_are_checked(checkpoints: Callable[[str], Path], tmp_path: Path, file: str, grids: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_model_config(edited(checkpoints("llava_next"), tmp_path / "made", file, {"image_grid_pinpoints": grids}))


def test_published_files_leave_out_what_their_decoder_has_by_default(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """As those of llava-1.5-7b and llava-v1.6-mistral-7b."""
    for family, text in (
        ("llava", {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}),
        ("llava_next", {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": None}),
    ):
        shutil.copytree(checkpoints(family), made := tmp_path / family, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((made / "config.json").read_text())
        del config["vision_config"], config["image_token_index"]
        config["text_config"] = {**text, "torch_dtype": "float16", "rope_theta": 1e6}
        config["image_grid_pinpoints"] = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
        (made / "config.json").write_text(json.dumps({**config, "text_config": {"vocab_size": 32064, **config["text_config"]}}))
        (made / "preprocessor_config.json").write_text(json.dumps({"size": 336, "crop_size": 336, "do_center_crop": True}))
        found, theirs = load_model_config(made), transformers.AutoConfig.from_pretrained(made)
        text_config, lm = theirs.text_config, found.language
        assert (lm.hidden_size, lm.intermediate_size, lm.num_layers, lm.heads.num_heads, lm.heads.num_kv_heads, lm.heads.head_dim) == (
            text_config.hidden_size,
            text_config.intermediate_size,
            text_config.num_hidden_layers,
            text_config.num_attention_heads,
            text_config.num_key_value_heads,
            128,
        )
        assert found.image_token_id == theirs.image_token_index == 32000 and lm.ropes[0].theta == 1e6
        assert found.vision.depth == theirs.vision_config.num_hidden_layers - 1 and found.vision.position_side == 24
        assert family_named(family).image_item(found, 480, 640).num_tokens == (576 if family == "llava" else 576 + 36 * 49)


def test_bounds_on_pixels_are_bounds_on_tiles(models: Callable[[str], Loaded]) -> None:
    """Their readers believe such pictures, and the tower joins as many tiles as there are."""
    next_model = models("llava_next")
    config, family, counts = next_model.config, next_model.family, list[int]()
    for options in (
        MediaOptions(),
        MediaOptions(max_pixels=2 * TILE**2),
        MediaOptions(max_pixels=1),
        MediaOptions(min_pixels=4 * TILE**2),
    ):
        for size in ((300, 41), (90, 120), (40, 300)):
            item = family.image_item(for_medium(config, options), *size)
            assert fault_of(config, "image", item) == ""
            (segment,) = item.segments
            rows = np.zeros((segment.num_rows, segment.row_bytes), np.uint8)
            (found,) = next_model.towers.encode([TowerInput("image", rows, segment.grid, segment.details)])
            assert len(found) == segment.num_tokens
            counts.append(len(segment.views) - 1)
    assert counts == [3, 4, 3, 2, 2, 2, 2, 2, 2, 4, 4, 4]


def test_other_media_and_lies(loaded: Loaded) -> None:
    family, config = loaded.family, loaded.config
    for refuse, said in (
        (lambda: family.image_item(config, 0, 9), "picture of 9x0 pixels is empty"),
        (lambda: family.video_item(config, 4, 60, 60, 2.0), "this model takes no video"),
        (lambda: family.audio_item(config, 300), "this model takes no audio"),
    ):
        with pytest.raises(UnsupportedMediaError, match=said):
            refuse()
    item = family.image_item(config, 90, 170)
    (segment,) = item.segments
    for lie in ({"num_tokens": segment.num_tokens + 1}, {"details": (90, 60)}, {"details": (0, 1)}, {"views": segment.views * 2}):
        told = msgspec.structs.replace(segment, **lie)
        assert fault_of(config, "image", msgspec.structs.replace(item, segments=[told], num_tokens=told.num_tokens)), lie


@pytest.mark.parametrize(
    ("family", "shape", "billions"), [("llava", "7b", 7.063), ("llava", "13b", 13.35), ("llava_next", "mistral-7b", 7.566)]
)
def test_published_shapes_have_their_published_size(sized: Callable[..., float], family: str, shape: str, billions: float) -> None:
    """Less a layer of the tower that is not computed, and the norm behind it."""
    unread = 4 * 1024 * 1024 + 2 * 1024 * 4096 + 13 * 1024 + 2 * 1024
    assert (sized(family, shape) + unread) / 1e9 == pytest.approx(billions, rel=0.002)
