"""PaddleOCR-VL beside transformers: what ``test_picture_families`` does not show of all families that see pictures."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from mmrt.actors.host.media_rules import for_medium
from mmrt.models.architecture import ModelConfig
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families import paddleocr_vl
from mmrt.models.families.item_check import fault_of
from mmrt.models.families.qwen2_5.vision_geometry import geometry
from mmrt.schema.media import MediaOptions
from mmrt.tests.models.whole_prompts import edited
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")


@pytest.fixture(scope="module")
def config(checkpoints: Callable[[str], Path]) -> ModelConfig:
    return load_model_config(checkpoints("paddleocr_vl"))


@pytest.mark.parametrize("size", [(2, 4), (8, 8), (6, 30), (64, 2), (14, 10)])
def test_positions_are_interpolated_as_torch_does(config: ModelConfig, size: tuple[int, int]) -> None:
    """From a table of eight by eight, also at its edges."""
    assert config.vision is not None
    table, cpu = torch.randn(64, 5), torch.device("cpu")
    found = geometry([(1, *size)], config.vision, cpu)
    square = table.view(1, 8, 8, 5).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(square, size, mode="bilinear", align_corners=False)[0]
    rows, columns = found.positions.T
    torch.testing.assert_close(found.interpolated(table), expected[:, rows, columns].T, rtol=1e-5, atol=1e-5)


def test_sizes_are_transformers(config: ModelConfig) -> None:
    """Also where it refuses, with published bounds of pixels."""
    module = transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl
    rules = paddleocr_vl._RULES
    published = replace(config, vision_rules=replace(rules, temporal_patch_size=1))
    luck = np.random.default_rng(0)
    flat = np.stack((luck.integers(1, 28, 500), luck.integers(1, 3000, 500)), 1)
    sizes = [*luck.integers(1, 3000, (200, 2)).tolist(), *flat.tolist(), *flat[:, ::-1].tolist()]
    for height, width in [*sizes, [1, 200], [1, 201], [14, 3000], [28, 5601]]:
        try:
            expected = module.smart_resize(height, width, 28, rules.min_pixels, rules.max_pixels)
        except ValueError:
            expected = None
        try:
            item = paddleocr_vl.image_item(published, height, width)
            found = (item.grid[1] * 14, item.grid[2] * 14)
        except UnsupportedMediaError as error:
            assert "above the limit of 200" in str(error)
            found = None
        assert found == expected, (height, width)


def test_a_bound_on_pixels_makes_pictures_smaller(config: ModelConfig) -> None:
    sizes = set[int]()
    for max_pixels in (10**9, 20000, 5000, 1):
        item = paddleocr_vl.image_item(for_medium(config, MediaOptions(max_pixels=max_pixels)), 205, 141)
        assert fault_of(config, "image", item) == ""
        sizes.add(item.num_tokens)
    assert len(sizes) == 4 and min(sizes) == 1


def test_other_media(config: ModelConfig) -> None:
    for refuse, said in (
        (lambda: paddleocr_vl.image_item(config, 0, 9), "picture of 9x0 pixels is empty"),
        (lambda: paddleocr_vl.image_item(config, 9, 9000), "above the limit of 200"),
        (lambda: paddleocr_vl.video_item(config, 4, 60, 60, 2.0), "this model takes no video"),
        (lambda: paddleocr_vl.audio_item(config, 300), "this model takes no audio"),
    ):
        with pytest.raises(UnsupportedMediaError, match=said):
            refuse()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "biases": ("config.json", {"text_config": {"use_bias": True}}, "use_bias is true, which is not supported"),
    "activation": ("config.json", {"text_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu', expected 'silu'"),
    "tower's activation": (
        "config.json",
        {"vision_config": {"hidden_act": "gelu"}},
        "hidden_act is 'gelu', expected 'gelu_pyt",
    ),
    "heads": ("config.json", {"vision_config": {"num_attention_heads": 5}}, "hidden_size is 72, expected a multiple of 4 x num_heads"),
    "sections": (
        "config.json",
        {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [16, 24, 24]}}},
        r"mrope_section is \[16, 24, 24\], expected three numbers that sum to the 32 pairs",
    ),
    "placeholder": ("config.json", {"image_token_id": 5000}, "image placeholder id is 5000, outside the vocabulary of 1216"),
    "filter": ("preprocessor_config.json", {"resample": 1}, r"resample is 1, expected 2 \(bilinear\) or 3 \(bicubic\)"),
    "colours": ("preprocessor_config.json", {"image_std": [0.5, 0, 0.5]}, r"image_std is \[0.5, 0.0, 0.5\], expected numbers above 0"),
    "patches": ("preprocessor_config.json", {"patch_size": 16}, "patch_size is 16, but the vision tower has 14"),
    "frames": ("preprocessor_config.json", {"temporal_patch_size": 2}, "temporal_patch_size is 2, but the vision tower has 1"),
    "step": ("preprocessor_config.json", {"do_normalize": False}, "do_normalize is false, which is not supported"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(checkpoints: Callable[[str], Path], tmp_path: Path, what: str) -> None:
    file, changes, said = REFUSED[what]
    with pytest.raises(CheckpointError, match=said):
        load_model_config(edited(checkpoints("paddleocr_vl"), tmp_path / "made", file, changes))


@pytest.mark.parametrize("is_flat", [True, False])
def test_published_files_leave_out_what_they_have_by_default(checkpoints: Callable[[str], Path], tmp_path: Path, is_flat: bool) -> None:
    """Those of the hub have the decoder's fields beside the tower's, whose patches they say to have two frames."""
    shutil.copytree(checkpoints("paddleocr_vl"), made := tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors"))
    decoder = {"rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}, "rope_theta": 500000}
    config = {"model_type": "paddleocr_vl", "torch_dtype": "bfloat16", "eos_token_id": 2}
    vision = {"model_type": "paddleocr_vl", "temporal_patch_size": 2, "tokens_per_second": 2}
    config |= {"vision_config": vision, **(decoder if is_flat else {"text_config": decoder})}
    (made / "config.json").write_text(json.dumps(config))
    found, theirs = load_model_config(made), transformers.AutoConfig.from_pretrained(made)
    text, lm = theirs.text_config, found.language
    assert (lm.hidden_size, lm.intermediate_size, lm.num_layers, lm.heads.num_heads, lm.heads.num_kv_heads, lm.heads.head_dim) == (
        *(text.hidden_size, text.intermediate_size, text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads),
        text.head_dim,
    )
    assert (lm.vocab_size, lm.rms_norm_eps, lm.ropes[0].theta, found.max_context) == (103424, 1e-5, 500000, 32768)
    assert load_model_config(made, max_context=131072).max_context == text.max_position_embeddings
    assert lm.tie_embeddings and theirs.tie_word_embeddings and found.image_token_id == theirs.image_token_id
    assert (found.vision.depth, found.vision.position_side, found.vision.hidden_size) == (27, 27, theirs.vision_config.hidden_size)


def test_the_published_shape_has_its_published_size(sized: Callable[..., float]) -> None:
    """Less what nothing reads: the head of its tower, a table of positions, and a copy of the decoder's table."""
    unread = 4 * 1152**2 + 2 * 4304 * 1152 + 32768 * 1152 + 103424 * 1024
    assert (sized("paddleocr_vl", "0.9b") + unread) / 1e9 == pytest.approx(0.9586, rel=0.001)
