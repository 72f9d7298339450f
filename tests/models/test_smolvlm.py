"""SmolVLM2 and Idefics3 beside transformers: pictures in tiles, prompts, tower, logits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
import torch

from mmrt.actors.host.media_rules import for_medium
from mmrt.models.architecture import ModelConfig
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError, UnsupportedMediaError
from mmrt.models.families import smolvlm
from mmrt.models.families.item_check import fault_of
from mmrt.models.families.smolvlm.tags import read_tile_tokens
from mmrt.models.families.smolvlm.towers import table_rows
from mmrt.models.text.tokenizer_trial import QWEN_SPLIT
from mmrt.schema.media import MediaOptions
from mmrt.tests.models.conftest import Loaded
from mmrt.tests.models.picture_families import smolvlm as smolvlm_processor
from mmrt.tests.models.whole_prompts import check_logits_in_cuts, noise, prompt_of
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
TILE, PATCH, SIDE = 58, 14, 4  # of the tiny checkpoint, whose tiles have two pixels more than whole patches


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
    return smolvlm_processor(path)


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


def test_a_bound_on_pixels_takes_fewer_tiles(config: ModelConfig) -> None:
    whole = smolvlm.image_item(config, 90, 120)
    for max_pixels in (6 * TILE**2, 4 * TILE**2, TILE**2, 1):
        item = smolvlm.image_item(for_medium(config, MediaOptions(max_pixels=max_pixels)), 90, 120)
        assert (len(item.segments) - 1) * TILE**2 <= max_pixels and len(item.segments) < len(whole.segments)
        assert fault_of(config, "image", item) == ""
    assert len(item.segments) == 1 and smolvlm.image_item(for_medium(config, MediaOptions(max_pixels=10**6)), 90, 120) == whole


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
