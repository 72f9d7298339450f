"""SmolVLM with its tower in GGUF (mmproj), beside the checkpoint that both files were made of; and what is refused."""

from pathlib import Path

import pytest
import torch

from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.families.registry import family_of
from mmrt.models.gguf.directory import gguf_directory
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.towers.interface import TowerInput
from mmrt.tests.models.gguf_files import write_gguf
from mmrt.tests.models.gguf_siglip import write_siglip
from mmrt.tests.models.logits import our_logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smolvlm")
    make_checkpoint("tiny", folder / "checkpoint", "smolvlm")
    write_gguf(folder / "checkpoint", folder / "model.gguf")
    write_siglip(folder / "checkpoint", folder / "mmproj.gguf")
    return folder


def test_both_files_are_their_checkpoint(folder: Path, tmp_path: Path) -> None:
    """The same configuration, rules, tags of tiles, values, rows of a tile and logits. Rows of the decoder's queries and keys lie in
    another order in the file, those of the tower's do not."""
    ours, theirs = gguf_directory(folder / "model.gguf", tmp_path, tower=folder / "mmproj.gguf"), folder / "checkpoint"
    config, expected = (load_model_config(path, "float32") for path in (ours, theirs))
    assert config.family == "smolvlm" and config.media_kinds == ("image",)
    for name in ("language", "vision", "vision_rules", "tiles", "item_text_ids", "image_token_id", "max_context"):
        assert getattr(config, name) == getattr(expected, name), name
    found, values = read_weights(ours, config), read_weights(theirs, expected)
    assert found.keys() == values.keys()
    for name in found:
        assert torch.equal(found[name], values[name]), name
    report = check_weights(ours, config)
    assert not report.problems and not report.unread
    rules = config.vision_rules
    assert rules is not None
    side = rules.tile // rules.patch_size
    rows = torch.randint(0, 256, (side**2, rules.row_bytes), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    pictures = []
    for one, weights in ((config, found), (expected, values)):
        towers = family_of(one).build_towers(one, weights, torch.device("cpu"))
        with torch.inference_mode():
            pictures.append(towers["image"].encode([TowerInput("image", rows.numpy(), (1, side, side))])[0])
    assert torch.equal(*pictures)
    ids = torch.randint(0, 1000, (1, 12), generator=torch.Generator().manual_seed(1))
    assert torch.equal(our_logits(ours, config, ids, 8), our_logits(theirs, expected, ids, 8))


def test_without_its_tower_it_is_text_alone(folder: Path, tmp_path: Path) -> None:
    config = load_model_config(gguf_directory(folder / "model.gguf", tmp_path))
    assert (config.family, config.media_kinds) == ("llama", ())


def test_a_tower_of_another_kind_is_refused(folder: Path, tmp_path: Path) -> None:
    file = write_siglip(folder / "checkpoint", tmp_path / "mmproj.gguf", changes={"clip.projector_type": "mlp"})
    with pytest.raises(CheckpointError, match="clip.projector_type is 'mlp', expected 'idefics3' for a model of architecture llama"):
        gguf_directory(folder / "model.gguf", tmp_path / "home", tower=file)


@pytest.mark.parametrize(("key", "value"), [("clip.use_gelu", False), ("clip.use_silu", True)])
def test_a_tower_with_another_activation_is_refused(folder: Path, tmp_path: Path, key: str, value: bool) -> None:
    file = write_siglip(folder / "checkpoint", tmp_path / "mmproj.gguf", changes={key: value})
    with pytest.raises(CheckpointError, match=f"{key} is {value}, expected {not value}"):
        gguf_directory(folder / "model.gguf", tmp_path / "home", tower=file)


def test_a_model_without_the_placeholder_is_refused(folder: Path, tmp_path: Path) -> None:
    write_gguf(folder / "checkpoint", tmp_path / "model.gguf", tokens=False)
    with pytest.raises(CheckpointError, match="tokenizer.ggml"):
        gguf_directory(tmp_path / "model.gguf", tmp_path / "home", tower=folder / "mmproj.gguf")
