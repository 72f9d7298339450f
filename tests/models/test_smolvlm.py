"""SmolVLM2 and Idefics3 beside transformers: pictures in tiles, prompts, tower, logits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mmrt.actors.host.media_rules import for_medium
from mmrt.models.architecture import ModelConfig, WeightFormat
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families import smolvlm
from mmrt.models.families.item_check import fault_of
from mmrt.models.families.smolvlm.tags import read_tile_tokens
from mmrt.models.families.smolvlm.towers import table_rows
from mmrt.models.lm.warm_up import warm_up_towers
from mmrt.models.text.tokenizer_trial import QWEN_SPLIT
from mmrt.models.towers.interface import TowerInput
from mmrt.schema.media import MediaOptions
from mmrt.tests.models.conftest import Loaded
from mmrt.tests.models.whole_prompts import check_greedy_tokens, check_logits_in_cuts, check_rounded_logits, noise, opened, prompt_of
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
TILE, PATCH, SIDE = 58, 14, 4  # of the tiny checkpoint, whose tiles have two pixels more than whole patches
PICTURES = (
    *((1, 1), (7, 400), (400, 3), (33, 21), (58, 58), (57, 59), (116, 58), (232, 232), (232, 174), (231, 175), (174, 175)),
    *((300, 41), (97, 203), (150, 31), (640, 480), (61, 999), (17, 23), (29, 290)),
)


@pytest.fixture(scope="module")
def path(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("smolvlm")


@pytest.fixture(scope="module")
def config(path: Path) -> ModelConfig:
    return load_model_config(path)


@pytest.fixture(scope="module")
def loaded(models: Callable[[str], Loaded]) -> Loaded:
    return models("smolvlm")


@pytest.fixture(scope="module")
def processor(path: Path) -> Any:
    """Idefics3's: SmolVLM's writes pictures alike, and wants packages for videos."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    images = transformers.models.smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil.from_pretrained(path)
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=(SIDE // 2) ** 2)


@pytest.mark.parametrize("size", PICTURES)
def test_pictures_become_transformers_pixels_and_tokens(config: ModelConfig, processor: Any, size: tuple[int, int]) -> None:
    pixels = noise(*size)
    found = processor.image_processor(images=[Image.fromarray(pixels)], return_row_col_info=True, return_tensors="np")
    item, rows = opened(config, pixels)
    num_tiles = found["rows"][0][0] * found["cols"][0][0]
    assert len(item.segments) == num_tiles + 1 and item.grid == (num_tiles + 1, SIDE, SIDE) and fault_of(config, "image", item) == ""
    assert found["pixel_values"].shape == (1, num_tiles + 1, 3, TILE, TILE)
    for ours, theirs in zip(rows, found["pixel_values"][0], strict=True):
        expected = [
            theirs[:, y * PATCH : (y + 1) * PATCH, x * PATCH : (x + 1) * PATCH].ravel()
            for top in range(0, SIDE, 2) for left in range(0, SIDE, 2) for y in (top, top + 1) for x in (left, left + 1)
        ]  # fmt: skip
        np.testing.assert_array_equal(ours, np.rint((np.stack(expected) + 1) * 127.5))
        np.testing.assert_allclose((ours - np.float32(127.5)) / np.float32(127.5), expected, atol=1e-6)


def test_whole_prompts_are_transformers(loaded: Loaded, processor: Any) -> None:
    contents = [["only text"], *([noise(*size), "What is it?"] for size in PICTURES)]
    contents += [["One", noise(30, 90), "\ntwo\n", noise(90, 300), "\n\n", noise(99, 2), " three."], [noise(9, 9), noise(100, 9)]]
    for content in contents:
        prompt = prompt_of(loaded, processor, content)
        assert prompt.ids == prompt.reference_inputs["input_ids"][0].tolist()


def test_the_tower_equals_transformers(loaded: Loaded, processor: Any) -> None:
    prompt = prompt_of(loaded, processor, [noise(75, 131), "and", noise(20, 20)])
    with torch.inference_mode():
        names = "pixel_values", "pixel_attention_mask"
        expected = loaded.reference.model.get_image_features(**{name: prompt.reference_inputs[name] for name in names}).pooler_output
        ours = torch.cat([rows for found in loaded.encode(prompt) for rows in found])
        torch.testing.assert_close(ours, torch.cat(list(expected)), rtol=1e-5, atol=1e-5)
        parts = [TowerInput("image", rows, (1, SIDE, SIDE)) for found in prompt.rows for rows in found]
        torch.testing.assert_close(torch.cat(loaded.towers.encode(parts)), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", [2, 19, 25, 26, 27, 32])
def test_places_in_the_table_are_transformers(side: int) -> None:
    """Also where rounding moves some patches to the place before, and where a tile has other patches than the table."""
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

    vision = transformers.SmolVLMConfig(vision_config={"image_size": 2 * side, "patch_size": 2, "hidden_size": 1}).vision_config
    embeddings = SmolVLMVisionEmbeddings(vision)
    with torch.inference_mode():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(side**2, dtype=torch.float32)[:, None])
        for num_patches in (side, side + 3, 2):
            mask = torch.ones(1, num_patches, num_patches, dtype=torch.bool)
            found = embeddings(torch.zeros(1, 3, 2 * num_patches, 2 * num_patches), mask)
            assert table_rows(side, num_patches).flatten().tolist() == found[0, :, 0].int().tolist()


def test_logits_in_any_cuts(loaded: Loaded, processor: Any) -> None:
    with torch.inference_mode():
        prompt = prompt_of(loaded, processor, ["See", noise(61, 290), "and", noise(58, 58), "Compare."])
        check_logits_in_cuts(loaded, loaded.reference, prompt)


def test_greedy_tokens_equal_those_of_generate(loaded: Loaded, processor: Any) -> None:
    with torch.inference_mode():
        check_greedy_tokens(loaded, prompt_of(loaded, processor, [noise(131, 75), "Tell."]))


def test_idefics3_sees_alike(loaded: Loaded, processor: Any, tmp_path: Path) -> None:
    shutil.copytree(loaded.path, made := tmp_path / "made")
    config = json.loads((made / "config.json").read_text())
    config |= {"model_type": "idefics3", "architectures": ["Idefics3ForConditionalGeneration"]}
    config["vision_config"]["model_type"] = "idefics3_vision"
    (made / "config.json").write_text(json.dumps(config))
    assert load_model_config(made) == loaded.config
    reference = transformers.Idefics3ForConditionalGeneration.from_pretrained(made, dtype=torch.float32).eval()
    with torch.inference_mode():
        check_logits_in_cuts(loaded, reference, prompt_of(loaded, processor, [noise(100, 90), "What?"]), (4096,))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_logits_of_rounded_weights(loaded: Loaded, processor: Any, weights: WeightFormat) -> None:
    check_rounded_logits(loaded, prompt_of(loaded, processor, [noise(131, 75), "Tell."]), weights)


def test_the_first_launches_are_of_a_tile(loaded: Loaded) -> None:
    calls: list[tuple[int, int, int]] = []
    encode = loaded.towers.encode

    def watched(parts: list[TowerInput]) -> list[torch.Tensor]:
        calls.extend(part.grid for part in parts)
        return encode(parts)

    warm_up_towers(SimpleNamespace(encode=watched), loaded.config)  # type: ignore[arg-type]
    assert calls == [(1, SIDE, SIDE)]


def test_a_bound_on_pixels_takes_fewer_tiles(config: ModelConfig) -> None:
    whole = smolvlm.image_item(config, 90, 120)
    for max_pixels in (6 * TILE**2, 4 * TILE**2, TILE**2, 1):
        item = smolvlm.image_item(for_medium(config, MediaOptions(max_pixels=max_pixels)), 90, 120)
        assert (len(item.segments) - 1) * TILE**2 <= max_pixels and len(item.segments) < len(whole.segments)
        assert fault_of(config, "image", item) == ""
    assert len(item.segments) == 1 and smolvlm.image_item(for_medium(config, MediaOptions(max_pixels=10**6)), 90, 120) == whole


def test_names_with_and_without_the_model_in_front(path: Path, config: ModelConfig, tmp_path: Path) -> None:
    tensors, expected = load_file(path / "model.safetensors"), read_weights(path, config)
    assert all(smolvlm.checkpoint_name(smolvlm.canonical_name(name)) == name for name in tensors)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    found = read_weights(tmp_path, config)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("config.json", {"vision_config": {"hidden_act": "gelu"}}, "vision_config.hidden_act is 'gelu', expected"),
    "heads": ("config.json", {"vision_config": {"num_attention_heads": 5}}, "hidden_size is 144, expected a multiple of 5 heads"),
    "text": ("config.json", {"text_config": {"hidden_act": "gelu"}}, "text_config.hidden_act is 'gelu', expected 'silu'"),
    "scale": ("config.json", {"scale_factor": 3}, r"max_image_size.longest_edge is 58, 4 patches: no multiple of scale_factor \(3\)"),
    "placeholder": ("config.json", {"image_token_id": 5000}, "image placeholder id is 5000, outside the vocabulary of 1216"),
    "filter": ("preprocessor_config.json", {"resample": 3}, "resample is 3, expected 1"),
    "steps": ("preprocessor_config.json", {"do_rescale": False}, "do_rescale is false"),
    "splitting": ("preprocessor_config.json", {"do_image_splitting": False}, "do_image_splitting is false, which is not supported"),
    "edge": (
        "preprocessor_config.json",
        {"size": {"longest_edge": 5000}},
        "longest_edge is 5000, expected an integer from 1 to 4096",
    ),
    "tags": (
        "preprocessor_config.json",
        {"size": {"longest_edge": 7 * 58}},
        "tokenizer.json: has no '<row_1_col_7>', which tags",
    ),
    "tokens": ("processor_config.json", {"image_seq_len": 5}, "image_seq_len is 5, but a tile has 4 tokens"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(path: Path, tmp_path: Path, what: str) -> None:
    file, changes, said = REFUSED[what]
    shutil.copytree(path, made := tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((made / file).read_text())
    for field, value in changes.items():
        content[field] = {**content[field], **value} if isinstance(value, dict) else value
    (made / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=said):
        load_model_config(made)


def test_a_tokenizer_that_is_missing_or_another_is_refused(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, made := tmp_path / "made", ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((made / "tokenizer.json").read_text())
    content["model"] = {"type": "Unigram", "vocab": [["a", 0.0]]}
    (made / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="tokenizer.json: no byte-level BPE tokenizer"):
        load_model_config(made)
    (made / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer.json: No such file or directory; tiles of pictures have tags"):
        load_model_config(made)


@pytest.mark.parametrize("kind", ["as made", "gpt-2", "llama 3"])
def test_tags_without_tokens_of_their_own_are_text(path: Path, tmp_path: Path, kind: str) -> None:
    """As in Idefics3-8B and the first SmolVLM."""
    content = json.loads((path / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith(("<row", "<global"))]
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    if kind == "gpt-2":
        digits = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, {**bytes_alone, "use_regex": True}]}
    elif kind == "llama 3":
        expression = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
        split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_alone]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    theirs, found = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), read_tile_tokens(tmp_path, 4)
    tags = {"<global-img>": found.whole, "<row_1_col_4>": found.places[0][3], "<row_3_col_2>": found.places[2][1]}
    for tag, ids in tags.items():
        assert theirs.encode(f"<fake_token_around_image>{tag}<image>").ids[1:-1] == [*ids] and len(ids) > 1
    content["pre_tokenizer"] = bytes_alone
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="has no '<global-img>'"):
        read_tile_tokens(tmp_path, 4)


def test_other_media_are_refused(config: ModelConfig) -> None:
    for refuse, said in (
        (lambda: smolvlm.image_item(config, 0, 9), "picture of 9x0 pixels is empty"),
        (lambda: smolvlm.sample_frames(config, 30, 10.0), "this model takes no video"),
        (lambda: smolvlm.video_item(config, 4, 60, 60, 2.0), "this model takes no video"),
        (lambda: smolvlm.audio_item(config, 300), "this model takes no audio"),
    ):
        with pytest.raises(UnsupportedMediaError, match=said):
            refuse()
    lie = msgspec.structs.replace(smolvlm.image_item(config, 90, 90).segments[0], lead=(3,))
    item = smolvlm.image_item(config, 90, 90)
    assert "other text" in fault_of(config, "image", msgspec.structs.replace(item, segments=[lie, *item.segments[1:]]))


@pytest.mark.parametrize(("shape", "billions"), [("256m", 0.256), ("500m", 0.507), ("2.2b", 2.247), ("idefics3-8b", 8.46)])
def test_published_shapes_have_their_published_size(sized: Callable[..., float], shape: str, billions: float) -> None:
    assert sized("smolvlm", shape) / 1e9 == pytest.approx(billions, rel=0.003)
