"""LightOnOCR and Mistral 3 beside transformers: pictures in their own ratio of sides, prompts, tower, logits."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from mmrt.actors.host.media_rules import for_medium
from mmrt.models.checkpoint.files import weight_files
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families.item_check import fault_of
from mmrt.models.families.registry import family_named
from mmrt.models.towers.dispatch import Towers
from mmrt.schema.media import MediaOptions
from mmrt.tests.models.conftest import Loaded
from mmrt.tests.models.picture_families import pixtral
from mmrt.tests.models.whole_prompts import (
    bicubic,
    check_logits_in_cuts,
    edited,
    noise,
    prompt_of,
)
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
PATCH, UNIT, EDGE = 14, 28, 210  # of the tiny checkpoints
FAMILIES = ("lighton_ocr", "mistral3")


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, models: Callable[[str], Loaded]) -> Loaded:
    return models(request.param)


@pytest.fixture(scope="module")
def processor(loaded: Loaded) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.image_processing_backends.np_resize", bicubic)
        yield pixtral(loaded.path)


def test_ministral(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """Its rope is stretched, its queries are not within the context that is served, and the files may have gelu and biases."""
    path = checkpoints("mistral3")
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= {"model_type": "ministral3", "max_position_embeddings": 4096}
    config["text_config"]["rope_parameters"] = {
        **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 256, "mscale": 1.0},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    }
    config["vision_config"]["hidden_act"], config["multimodal_projector_bias"] = "gelu", True
    made = transformers.Mistral3ForConditionalGeneration(transformers.Mistral3Config.from_dict(config)).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.2 if value.ndim == 1 else 0.5 / value.shape[-1] ** 0.5)
    shutil.copytree(path, tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    made.save_pretrained(tmp_path / "made")
    found = load_model_config(tmp_path / "made")
    assert found.max_context == 256
    weights = read_weights(tmp_path / "made", found)
    other = Loaded(tmp_path / "made", found, family_named("mistral3"), weights, Towers(found, weights), made)
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.image_processing_backends.np_resize", bicubic)
        prompt = prompt_of(other, pixtral(tmp_path / "made"), ["a word " * 40, noise(60, 111), "and more of it " * 20])
        assert 150 < len(prompt.ids) < 252
        check_logits_in_cuts(other, made, prompt, (4096,))
    config["text_config"] = {"model_type": "ministral3"}
    config["text_config"] |= {"eos_token_id": 2}
    (tmp_path / "made/config.json").write_text(json.dumps(config))
    found, theirs = load_model_config(tmp_path / "made"), transformers.AutoConfig.from_pretrained(tmp_path / "made").text_config
    assert (found.language.num_layers, found.language.intermediate_size) == (theirs.num_hidden_layers, theirs.intermediate_size)
    assert found.max_context == theirs.rope_parameters["original_max_position_embeddings"] and found.language.rms_norm_eps == 1e-5


def test_weights_in_mistral_s_own_form(loaded: Loaded, tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").write_bytes(b"12345678")
    with pytest.raises(CheckpointError, match=r"consolidated.safetensors: is in Mistral's own form; expected model.safetensors"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_a_bound_on_pixels_makes_pictures_smaller(loaded: Loaded) -> None:
    """Also of those that have no whole tokens: their readers believe them."""
    config, sizes = loaded.config, set[int]()
    for max_pixels in (10**9, 20000, 5000, UNIT**2, 1):
        narrowed = for_medium(config, MediaOptions(max_pixels=max_pixels))
        for picture in ((205, 141), (90, 120), (300, 200)):
            item = loaded.family.image_item(narrowed, *picture)
            assert fault_of(config, "image", item) == ""
            assert item.grid[1] * item.grid[2] * PATCH**2 <= 2 * max(max_pixels, UNIT**2)
            sizes.add(item.num_tokens)
    assert len(sizes) > 5


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "decoder": ("config.json", {"text_config": {"model_type": "gemma"}}, "text_config.model_type is 'gemma', expected '"),
    "tower": (
        "config.json",
        {"vision_config": {"model_type": "siglip_vision_model"}},
        "model_type is 'siglip_vision_model', expected 'pi",
    ),
    "activation": ("config.json", {"vision_config": {"hidden_act": "relu"}}, "hidden_act is 'relu', expected 'silu' or 'gelu'"),
    "heads": ("config.json", {"vision_config": {"num_attention_heads": 5}}, "hidden_size is 64, expected a multiple of 4 x 5 heads"),
    "projector": ("config.json", {"projector_hidden_act": "relu"}, "projector_hidden_act is 'relu', expected 'gelu'"),
    "layer": ("config.json", {"vision_feature_layer": [-1, -2]}, r"vision_feature_layer is \[-1, -2\], expected -1"),
    "filter": ("preprocessor_config.json", {"resample": 1}, "resample is 1, expected 3"),
    "crop": ("preprocessor_config.json", {"do_center_crop": True}, "do_center_crop is true, which is not supported"),
    "edge": ("preprocessor_config.json", {"size": {"longest_edge": 9999}}, "longest_edge is 9999, expected an integer from"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(loaded: Loaded, tmp_path: Path, what: str) -> None:
    file, changes, said = REFUSED[what]
    with pytest.raises(CheckpointError, match=said):
        load_model_config(edited(loaded.path, tmp_path / "made", file, changes))


def test_sizes_and_tokens_that_do_not_fit(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    for number, (changes, said) in enumerate(
        (
            ({"patch_size": {"height": 14, "width": 28}}, "patch_size is .*, expected a multiple of the vision tower's"),
            ({"patch_size": 16}, r"patch_size is 16, expected a multiple of the vision tower's \(14\)"),
            ({"size": {"longest_edge": 200}}, r"longest_edge is 200, expected a multiple of patch_size \(14\)"),
        )
    ):
        with pytest.raises(CheckpointError, match=said):
            load_model_config(edited(checkpoints("lighton_ocr"), tmp_path / str(number), "preprocessor_config.json", changes))
    whole = load_model_config(edited(checkpoints("lighton_ocr"), tmp_path / "whole", "preprocessor_config.json", {"patch_size": 28}))
    assert not family_named("lighton_ocr").image_item(whole, 43, 43).segments[0].details
    made = edited(checkpoints("mistral3"), tmp_path / "made", "preprocessor_config.json", {})
    content = json.loads((made / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[IMG_BREAK]"]
    (made / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"tokenizer.json: has no '\[IMG_BREAK\]', which stands behind lines of pictures"):
        load_model_config(made)


def test_pixtral_12b(checkpoints: Callable[[str], Path], sized: Callable[..., float], tmp_path: Path) -> None:
    """A LLaVA with another tower, of which a patch is a token; files leave out what their decoder has by default."""
    for number, (changes, said) in enumerate(
        (
            ({"vision_feature_layer": -2}, "vision_feature_layer is -2, expected -1"),
            ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy is 'default', expected 'full'"),
            ({"text_config": {"model_type": "llama"}}, "text_config.model_type is 'llama', expected 'mistral'"),
            ({"vision_config": {"model_type": "siglip_vision_model"}}, "is 'siglip_vision_model', expected 'clip_vision_model'"),
        )
    ):
        with pytest.raises(CheckpointError, match=said):
            load_model_config(edited(checkpoints("pixtral"), tmp_path / str(number), "config.json", changes))
    vision = {"model_type": "pixtral", "hidden_act": "silu", "image_size": 1024, "patch_size": 16, "rope_theta": 10000.0}
    text = {"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "head_dim": 128, "vocab_size": 131072}
    text |= {"rope_theta": 1e9, "sliding_window": None}
    made = edited(checkpoints("pixtral"), tmp_path / "made", "preprocessor_config.json", {"patch_size": {"height": 16, "width": 16}})
    config = {"model_type": "llava", "image_token_index": 10, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    config |= {"text_config": text, "vision_config": vision, "eos_token_id": 2}
    (made / "config.json").write_text(json.dumps(config))
    found, theirs = load_model_config(made), transformers.AutoConfig.from_pretrained(made)
    assert (found.family, found.image_token_id) == ("pixtral", 10)
    assert found.language.heads.num_kv_heads == theirs.text_config.num_key_value_heads
    assert (found.vision.depth, found.vision.hidden_size) == (theirs.vision_config.num_hidden_layers, theirs.vision_config.hidden_size)
    assert found.vision_rules.longest_edge == 210 and family_named("pixtral").image_item(found, 160, 160).num_tokens == 10 * 11
    assert sized("pixtral", "12b") / 1e9 == pytest.approx(12.68, rel=0.002)


def test_other_media_and_lies(loaded: Loaded) -> None:
    family, config = loaded.family, loaded.config
    for refuse, said in (
        (lambda: family.image_item(config, 0, 9), "picture of 9x0 pixels is empty"),
        (lambda: family.image_item(config, 9, 9000), "picture of 9000x9 pixels is too small or thin: it has no tokens"),
        (lambda: family.video_item(config, 4, 60, 60, 2.0), "this model takes no video"),
        (lambda: family.audio_item(config, 300), "this model takes no audio"),
    ):
        with pytest.raises(UnsupportedMediaError, match=said):
            refuse()
    item = family.image_item(config, 85, 170)
    (segment,) = item.segments
    for lie in ({"num_tokens": segment.num_tokens + 1}, {"grid": (1, 6, 10)}, {"details": (0, 1)}, {"ids": ((9, segment.num_tokens),)}):
        told = msgspec.structs.replace(segment, **lie)
        assert fault_of(config, "image", msgspec.structs.replace(item, segments=[told], num_tokens=told.num_tokens)), lie


@pytest.mark.parametrize(
    ("family", "shape", "billions"),
    [("lighton_ocr", "1b", 1.006), ("mistral3", "24b", 24.01), ("mistral3", "ministral-3b", 3.85), ("mistral3", "ministral-8b", 8.92)],
)
def test_published_shapes_have_their_published_size(sized: Callable[..., float], family: str, shape: str, billions: float) -> None:
    assert sized(family, shape) / 1e9 == pytest.approx(billions, rel=0.005)
