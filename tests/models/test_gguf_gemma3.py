"""Gemma 3 with its tower in GGUF (mmproj), beside the checkpoint that both files were made of; and what is refused."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.families.registry import family_of
from mmrt.models.gguf.directory import gguf_directory
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.models.towers.interface import TowerInput
from mmrt.tests.models.gguf_files import with_fields, write_gguf
from mmrt.tests.models.gguf_siglip import write_siglip
from mmrt.tests.models.logits import our_logits

TOKENS = "tokenizer.ggml.tokens"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    make_checkpoint("tiny", folder / "checkpoint", "gemma3_seeing")
    write_gguf(folder / "checkpoint", folder / "model.gguf")
    write_siglip(folder / "checkpoint", folder / "mmproj.gguf")
    return folder


def renamed(file: Path, copy: Path, names: dict[str, str]) -> Path:
    """A copy of a file whose tokens have other names."""
    reader = gguf.GGUFReader(file)
    tokens = [names.get(token, token) for token in reader.fields[TOKENS].contents()]
    return with_fields(file, copy, {TOKENS: tokens})


def test_both_files_are_their_checkpoint(folder: Path, tmp_path: Path) -> None:
    """The same configuration, rules, values, prompt texts, rows of a picture and logits."""
    ours, theirs = gguf_directory(folder / "model.gguf", tmp_path, tower=folder / "mmproj.gguf"), folder / "checkpoint"
    config, expected = (load_model_config(path, "float32") for path in (ours, theirs))
    assert config.family == "gemma3_seeing" and config.media_kinds == ("image",)
    for name in ("language", "vision", "vision_rules", "prompt_texts", "image_token_id", "vision_start_token_id", "max_context"):
        assert getattr(config, name) == getattr(expected, name), name
    found, values = read_weights(ours, config), read_weights(theirs, expected)
    assert found.keys() == values.keys()
    for name in found:
        assert torch.equal(found[name], values[name]), name
    report = check_weights(ours, config)
    assert not report.problems and not report.unread
    assert config.vision_rules is not None
    rows = torch.randint(0, 256, (256, config.vision_rules.row_bytes), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    pictures = []
    for one, weights in ((config, found), (expected, values)):
        towers = family_of(one).build_towers(one, weights, torch.device("cpu"))
        with torch.inference_mode():
            pictures.append(towers["image"].encode([TowerInput("image", rows.numpy(), (1, 16, 16))])[0])
    assert torch.equal(*pictures)
    ids = torch.randint(0, 1000, (1, 12), generator=torch.Generator().manual_seed(1))
    assert torch.equal(our_logits(ours, config, ids, 8), our_logits(theirs, expected, ids, 8))


def test_without_its_tower_it_is_text_alone(folder: Path, tmp_path: Path) -> None:
    config = load_model_config(gguf_directory(folder / "model.gguf", tmp_path))
    assert (config.family, config.media_kinds) == ("gemma3", ())


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_towers_of_other_types_are_read(folder: Path, tmp_path: Path, kind: str) -> None:
    file = write_siglip(folder / "checkpoint", tmp_path / "mmproj.gguf", kind)
    directory = gguf_directory(folder / "model.gguf", tmp_path, tower=file)
    config, expected = (load_model_config(path, "float32") for path in (directory, folder / "checkpoint"))
    found, values = read_weights(directory, config), read_weights(folder / "checkpoint", expected)
    step = {"F16": 2**-11, "Q8_0": 2**-6}[kind]
    towers = [name for name in found if name.startswith("vision.")]
    assert not all(torch.equal(found[name], values[name]) for name in towers)
    assert all((found[name] - values[name]).abs().max() <= step * values[name].abs().max() for name in towers)


def test_a_vocabulary_without_the_token_of_a_picture(folder: Path, tmp_path: Path) -> None:
    """Most files end before it: an unused token gets its name, and is a control token as the ones around pictures are."""
    named = Tokenizer.load(folder / "checkpoint").control_ids
    place = named["<image_soft_token>"]
    file = renamed(folder / "model.gguf", tmp_path / "model.gguf", {"<image_soft_token>": "<unused17>"})
    directory = gguf_directory(file, tmp_path / "home", tower=folder / "mmproj.gguf")
    config, ids = load_model_config(directory), Tokenizer.load(directory).control_ids
    assert config.image_token_id == place == ids["<image_soft_token>"]
    assert {"<start_of_image>", "<end_of_image>"} <= ids.keys() and "<unused17>" not in ids
    none = renamed(folder / "model.gguf", tmp_path / "none.gguf", {"<image_soft_token>": "no"})
    with pytest.raises(CheckpointError, match="tokenizer.ggml.tokens has neither '<image_soft_token>' nor an unused token"):
        gguf_directory(none, tmp_path / "home", tower=folder / "mmproj.gguf")
    begin = renamed(folder / "model.gguf", tmp_path / "begin.gguf", {"<start_of_image>": "no"})
    with pytest.raises(CheckpointError, match="tokenizer.ggml.tokens has no '<start_of_image>', which stands at pictures"):
        gguf_directory(begin, tmp_path / "home", tower=folder / "mmproj.gguf")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"clip.projector_type": "gemma3nv"}, "clip.projector_type is 'gemma3nv', expected 'gemma3' for a model of"),
    "no side": ({"clip.vision.image_size": None}, "clip.vision.image_size is missing"),
    "no colours": ({"clip.vision.image_mean": None}, "clip.vision.image_mean is missing"),
    "more blocks": ({"clip.vision.block_count": 4}, r"vision.encoder.layers.3\..* is missing"),
    "fewer blocks": ({"clip.vision.block_count": 2}, r"encoder.layers.2\..* is none of this model's"),
    "an odd square": ({"clip.vision.projector.scale_factor": 3}, "mm_tokens_per_image is 25, expected a square that divides 16 x 16"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_towers_that_cannot_be(folder: Path, tmp_path: Path, fault: str) -> None:
    changes, message = REFUSED[fault]
    file = write_siglip(folder / "checkpoint", tmp_path / "mmproj.gguf", changes=changes)
    with pytest.raises(CheckpointError, match=message):
        directory = gguf_directory(folder / "model.gguf", tmp_path / "home", tower=file)
        read_weights(directory, load_model_config(directory))
