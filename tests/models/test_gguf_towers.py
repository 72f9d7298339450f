"""Models in GGUF that see, whose towers are files of their own (mmproj): beside the checkpoints that they were made of; which file is
taken; and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrt.cli.checkpoints import checkpoint_of
from mmrt.cli.main import run
from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.families.registry import family_of
from mmrt.models.gguf.directory import gguf_directory
from mmrt.models.gguf.made import made_directories, unused_towers
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.media_config import VisionConfig
from mmrt.models.towers.interface import TowerInput
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import ModelSection
from mmrt.runtime.errors import ConfigError
from mmrt.tests.models.gguf_files import with_fields, write_gguf, write_tower
from mmrt.tests.models.logits import our_logits

FAMILIES = ("qwen2_5_omni", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
Files = Callable[[str], Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The folder of a family: checkpoint/, model.gguf and mmproj.gguf."""
    known: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in known:
            folder = known[family] = tmp_path_factory.mktemp(family)
            make_checkpoint("tiny", folder / "checkpoint", family)  # type: ignore[arg-type]
            write_gguf(folder / "checkpoint", folder / "model.gguf")
            write_tower(folder / "checkpoint", folder / "mmproj.gguf")
        return known[family]

    return get


def exact(checkpoint: Path) -> dict[str, torch.Tensor]:
    return read_weights(checkpoint, load_model_config(checkpoint, "float32"))


def made(folder: Path, home: Path, tower: str = "mmproj.gguf") -> Path:
    return gguf_directory(folder / "model.gguf", home, tower=folder / tower)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_sees_is_its_checkpoint(files: Files, tmp_path: Path, family: str) -> None:
    """The same sizes and rules, and the same values, so towers and logits are the same; the limits of pixels are published ones."""
    folder = files(family)
    ours, theirs = made(folder, tmp_path), folder / "checkpoint"
    config, expected = (load_model_config(path, "float32") for path in (ours, theirs))
    assert config.family == family and config.language == expected.language and config.vision == expected.vision
    assert config.audio == expected.audio and config.audio_rules == expected.audio_rules
    tokens = [f"{name}_token_id" for name in ("image", "video", "audio", "audio_start", "audio_end", "vision_start", "vision_end")]
    for name in (*tokens, "times", "seconds_per_chunk"):
        assert getattr(config, name) == getattr(expected, name)
    rules, published = config.vision_rules, expected.vision_rules
    assert rules is not None and published is not None
    for name in ("image_mean", "image_std"):
        assert getattr(rules, name) == pytest.approx(getattr(published, name), rel=1e-7)  # a file has them in float32
    assert rules.patch_size == published.patch_size
    if family.startswith("qwen3"):
        assert rules == published  # whose checkpoints are made with the published limits
    else:
        assert (rules.min_pixels, rules.max_pixels) == (56 * 56, 12845056)  # preprocessor_config.json of Qwen2.5-VL
    found, values = read_weights(ours, config), read_weights(theirs, expected)
    assert found.keys() == values.keys() and all(torch.equal(found[name], values[name]) for name in found)
    report = check_weights(ours, config)
    assert not report.problems and report.num_files == 2
    assert report.unread == (("a.position_embd.weight",) if config.audio else ())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_and_logits_are_the_checkpoints(files: Files, tmp_path: Path, family: str) -> None:
    folder = files(family)
    ids = torch.randint(0, 1000, (1, 12), generator=torch.Generator().manual_seed(1))
    found = []
    for path in (made(folder, tmp_path), folder / "checkpoint"):
        config = load_model_config(path, "float32")
        towers = family_of(config).build_towers(config, read_weights(path, config), torch.device("cpu"))
        assert config.vision_rules is not None
        grid = (1, 8, 12)
        rows = torch.randint(0, 256, (96, config.vision_rules.row_bytes), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
        with torch.inference_mode():
            part = TowerInput("image", rows.numpy(), grid)
            found.append((towers["image"].encode([part])[0], our_logits(path, config, ids, 8)))
    (picture, logits), (expected_picture, expected_logits) = found
    assert torch.equal(logits, expected_logits)
    torch.testing.assert_close(picture, expected_picture, rtol=0, atol=0)


def test_without_its_tower_a_model_is_text_alone(files: Files, tmp_path: Path) -> None:
    for family, alone in (("qwen2_5_vl", "qwen2"), ("qwen3_vl", "qwen3"), ("qwen3_vl_moe", "qwen3_moe")):
        directory = gguf_directory(files(family) / "model.gguf", tmp_path)
        config, whole = load_model_config(directory, "float32"), load_model_config(files(family) / "checkpoint", "float32")
        assert config.family == alone and config.media_kinds == ()
        ids = torch.randint(0, 1000, (1, 12), generator=torch.Generator().manual_seed(1))
        assert torch.equal(our_logits(directory, config, ids, 8), our_logits(files(family) / "checkpoint", whole, ids, 8))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_towers_of_other_types_are_read(files: Files, tmp_path: Path, family: str, kind: str) -> None:
    """Each value is off by its type's rounding alone."""
    folder = files(family)
    write_tower(folder / "checkpoint", tmp_path / "mmproj.gguf", kind)
    directory = gguf_directory(folder / "model.gguf", tmp_path / "home", tower=tmp_path / "mmproj.gguf")
    config = load_model_config(directory, "float32")
    found, values = read_weights(directory, config), exact(folder / "checkpoint")
    step = {"F16": 2**-11, "BF16": 2**-8, "Q8_0": 2**-6}[kind]
    towers = [name for name in found if name.startswith("vision.")]
    assert not all(torch.equal(found[name], values[name]) for name in towers)
    assert all((found[name] - values[name]).abs().max() <= step * values[name].abs().max() for name in towers)


def test_old_files_tell_other_sizes_and_swap_names(files: Files, tmp_path: Path) -> None:
    folder = files("qwen2_vl")
    write_tower(folder / "checkpoint", tmp_path / "mmproj.gguf", old=True)
    directory = gguf_directory(folder / "model.gguf", tmp_path / "home", tower=tmp_path / "mmproj.gguf")
    config = load_model_config(directory, "float32")
    found, values = read_weights(directory, config), exact(folder / "checkpoint")
    assert all(torch.equal(found[name], values[name]) for name in found)


def served(folder: Path, home: Path, mmproj: str = "") -> Any:
    config = RuntimeConfig(model=ModelSection(path=str(folder / "model.gguf"), mmproj=mmproj and str(folder / mmproj)))
    return load_model_config(checkpoint_of(config, home))


NEXT = "it is not used: name the model's own by --mmproj FILE, for pictures"


def unused(folder: Path, home: Path) -> list[str]:
    return unused_towers(checkpoint_of(RuntimeConfig(model=ModelSection(path=str(folder / "model.gguf"))), home))


def test_a_tower_that_does_not_fit_is_said(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what one sees before a start; `mmrt up` has it among its first lines."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shutil.copy(files("qwen2_5_vl") / "model.gguf", tmp_path)
    write_tower(files("qwen2_5_vl") / "checkpoint", tmp_path / "mmproj.gguf", changes={"clip.vision.n_wa_pattern": None})
    told = f"{tmp_path}/mmproj.gguf: clip.vision.n_wa_pattern is missing; {NEXT}"
    assert run(["model", "check", str(tmp_path / "model.gguf")]) == 0
    assert f"takes       text\n            {told}\n" in capsys.readouterr().out
    assert run(["up", "--dry-run", "--port", "0", str(tmp_path)]) == 0
    assert f"it takes       text\n               {told}\n" in capsys.readouterr().out


def test_the_tower_beside_a_model_is_taken_if_it_fits(files: Files, tmp_path: Path) -> None:
    """Of one's own folder, in which other models lie as well."""
    folder, home, source = tmp_path / "models", tmp_path / "home", files("qwen2_5_vl")
    folder.mkdir()
    shutil.copy(source / "model.gguf", folder)
    assert served(folder, home).media_kinds == ()
    shutil.copy(files("qwen3_vl") / "mmproj.gguf", folder / "mmproj-qwen3.gguf")
    (folder / "damaged-mmproj.gguf").write_bytes(b"GGUF")
    assert served(folder, home).media_kinds == () and unused(folder, home) == [
        f"{folder}/damaged-mmproj.gguf: truncated: the version at byte 4 takes 4 bytes, the file has 4; {NEXT}",
        f"{folder}/mmproj-qwen3.gguf: clip.projector_type is 'qwen3vl_merger', expected 'qwen2vl_merger' or 'qwen2.5vl_merger' or"
        f" 'qwen2.5o' for a model of architecture qwen2vl; {NEXT}",
    ]
    write_tower(source / "checkpoint", folder / "mmproj-F32.gguf", "F32")
    write_tower(source / "checkpoint", folder / "mmproj-bf16.gguf", "BF16")
    assert served(folder, home).media_kinds and unused(folder, home) == []
    (made,) = [one for one in made_directories(home / "gguf") if not one.is_stale and any("F32" in str(file) for file in one.files)]
    assert [link.name for link in sorted(made.path.glob("*.gguf"))] == ["mmproj-mmproj-bf16.gguf", "model.gguf"]
    (folder / "mmproj-bf16.gguf").unlink()
    assert served(folder, home).media_kinds and not made.path.exists()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no tower": ("qwen3_vl", {"general.architecture": "qwen3"}, "is no mmproj file: general.architecture is 'qwen3', expected 'clip'"),
    "another kind": ("qwen3_vl", {"clip.projector_type": "gemma3"}, "clip.projector_type is 'gemma3', expected 'qwen3vl_merger' for a"),
    "no kind": ("qwen3_vl", {"clip.projector_type": None}, "clip.projector_type is None"),
    "other norms": ("qwen2_vl", {"clip.vision.attention.layer_norm_epsilon": 1e-5}, "layer_norm_epsilon is 1e-05, expected 1e-06"),
    "no colours": ("qwen2_vl", {"clip.vision.image_mean": None}, "clip.vision.image_mean is missing"),
    "no windows": ("qwen2_5_vl", {"clip.vision.n_wa_pattern": None}, "clip.vision.n_wa_pattern is missing"),
    "more blocks": ("qwen2_vl", {"clip.vision.block_count": 4}, "tensor 'visual.blocks.3.*is missing|vision.blocks.3.* is missing"),
    "fewer blocks": ("qwen2_vl", {"clip.vision.block_count": 2}, "'visual.blocks.2.* is none of this model's"),
    "other flags": ("qwen3_vl", {"clip.vision.is_deepstack_layers": [True] * 5}, r"tells of blocks \[0, 1, 2, 3, 4\], tensors are of"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_towers_that_cannot_be(files: Files, tmp_path: Path, fault: str) -> None:
    family, changes, message = REFUSED[fault]
    architecture = changes.get("general.architecture")
    file = write_tower(files(family) / "checkpoint", tmp_path / "t.gguf", changes={} if architecture else changes)
    if architecture:
        file = with_fields(file, tmp_path / "u.gguf", changes)
    with pytest.raises(CheckpointError, match=message):
        directory = gguf_directory(files(family) / "model.gguf", tmp_path / "home", tower=file)
        read_weights(directory, load_model_config(directory))


def test_a_tower_of_another_model_is_named(files: Files, tmp_path: Path) -> None:
    """By its width, its kind, or its mergers."""
    tiny = files("qwen2_5_vl")
    wide = tmp_path / "wide"
    shutil.copytree(tiny / "checkpoint", wide)
    file = write_tower(tiny / "checkpoint", tmp_path / "mmproj.gguf")
    shrunk = write_gguf_of_half(tiny / "checkpoint", tmp_path)
    with pytest.raises(CheckpointError, match=r"mmproj.gguf: makes rows of 128 values, half.gguf has 64: it is of another model"):
        gguf_directory(shrunk, tmp_path / "home", tower=file)
    with pytest.raises(CheckpointError, match="is 'qwen3vl_merger', expected 'qwen2vl_merger' or 'qwen2.5vl_merger'"):
        gguf_directory(tiny / "model.gguf", tmp_path / "home", tower=files("qwen3_vl") / "mmproj.gguf")
    other = with_fields(files("qwen3_vl") / "model.gguf", tmp_path / "model.gguf", {"qwen3vl.n_deepstack_layers": 2})
    with pytest.raises(CheckpointError, match="has 3 mergers of deepstack, model.gguf 2: it is of another model"):
        gguf_directory(other, tmp_path / "home", tower=files("qwen3_vl") / "mmproj.gguf")


def write_gguf_of_half(checkpoint: Path, folder: Path) -> Path:
    """A model whose embeddings have half the width: no more of it is looked at."""
    shutil.copytree(checkpoint, folder / "half")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "half" / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name] = tensors[name][:, :64].contiguous()
    save_file(tensors, folder / "half" / "model.safetensors")
    write_gguf(folder / "half", folder / "half.gguf")
    return folder / "half.gguf"


def test_what_a_user_names_wrongly(files: Files, tmp_path: Path) -> None:
    folder = files("qwen3_vl")
    with pytest.raises(CheckpointError, match=r"mmproj.gguf: is the part of a model that sees \(mmproj\): name the model's file"):
        gguf_directory(folder / "mmproj.gguf", tmp_path)
    with pytest.raises(ConfigError, match=r"absent.gguf: No such file or directory"):
        served(folder, tmp_path, "absent.gguf")
    with pytest.raises(ConfigError, match="is no GGUF file, for which model.mmproj = 'm.gguf' would be"):
        checkpoint_of(RuntimeConfig(model=ModelSection(path=str(folder / "checkpoint"), mmproj="m.gguf")), tmp_path)
    text = tmp_path / "text"
    make_checkpoint("tiny", text, "smollm3")
    write_gguf(text, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="general.architecture is 'smollm3', which takes no pictures: leave the mmproj file out"):
        gguf_directory(tmp_path / "model.gguf", tmp_path / "home", tower=folder / "mmproj.gguf")


def test_windows_and_limits_that_a_tower_tells(files: Files, tmp_path: Path) -> None:
    changes = {"clip.vision.window_size": 56, "clip.vision.image_min_pixels": 784, "clip.vision.image_max_pixels": 78400}
    file = write_tower(files("qwen2_5_vl") / "checkpoint", tmp_path / "mmproj.gguf", changes=changes)
    config = load_model_config(gguf_directory(files("qwen2_5_vl") / "model.gguf", tmp_path / "home", tower=file))
    vision = config.vision
    assert isinstance(vision, VisionConfig) and vision.window_size == 56 and vision.full_attention_blocks == (1,)
    assert config.vision_rules is not None
    assert (config.vision_rules.min_pixels, config.vision_rules.max_pixels) == (784, 78400)
    assert json.loads((gguf_directory(files("qwen2_5_vl") / "model.gguf", tmp_path / "home", tower=file) / "made_of.json").read_text())
