"""Models that see, in GGUF with their towers (mmproj), beside the checkpoints that both files were made of; and what is refused.
``test_gguf_towers`` has Qwen's."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from msgspec.structs import replace

from mmrt.models.architecture import ModelConfig
from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.families.gemma4 import made_checkpoint
from mmrt.models.families.registry import family_of
from mmrt.models.gguf.directory import gguf_directory
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.models.towers.interface import TowerInput
from mmrt.tests.models.gguf_files import with_fields, write_gguf
from mmrt.tests.models.gguf_mmproj import write_mmproj
from mmrt.tests.models.logits import our_logits

TOKENS = "tokenizer.ggml.tokens"
ALONE = {  # the family of each without its tower
    "gemma3_seeing": "gemma3",
    "smolvlm": "llama",
    "gemma4": "gemma4",
    "mistral3": "mistral",
    "pixtral": "llama",
    "lighton_ocr": "qwen3",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "gemma4 with experts": "gemma4",
    "ministral3": "mistral",
    "glm4v": "glm4",
    "glm46v": "glm4",
    "glm_ocr": "glm4",
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8192}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
CHANGES: dict[str, dict[str, Any]] = {  # of config.json, by its parts: what files do not say is as published checkpoints have it
    "gemma4": {"audio_config": {"attention_chunk_size": 12, "attention_context_left": 13}},
    "glm46v": {"text_config": {"max_position_embeddings": 131072}},
    "ministral3": {"text_config": {"model_type": "ministral3", "rope_parameters": YARN}},
}
CHANGES["gemma4 with experts"] = CHANGES["gemma4"]
MADE = {"gemma4 with experts": "gemma4", "ministral3": "mistral3"}  # the family of those that are not named by it
LARGE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "num_global_key_value_heads": 1}
LARGE |= {"attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
LARGE |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a family: checkpoint/, model.gguf and mmproj.gguf."""
    known: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in known:
            folder = known[family] = tmp_path_factory.mktemp(family)
            with pytest.MonkeyPatch.context() as patch:
                if family == "gemma4 with experts":
                    tiny = made_checkpoint._SHAPES["tiny"]
                    patch.setitem(made_checkpoint._SHAPES, "tiny", tiny._replace(sizes={**tiny.sizes, **LARGE}))
                make_checkpoint("tiny", folder / "checkpoint", MADE.get(family, family))  # type: ignore[arg-type]
            file = folder / "checkpoint" / "config.json"
            config = json.loads(file.read_text())
            for part, changes in CHANGES.get(family, {}).items():
                config[part] |= changes
            file.write_text(json.dumps(config))
            write_gguf(folder / "checkpoint", folder / "model.gguf")
            write_mmproj(folder / "checkpoint", folder / "mmproj.gguf")
        return known[family]

    return get


@pytest.fixture
def folder(folders: Folders) -> Path:
    return folders("gemma3_seeing")


def renamed(file: Path, copy: Path, names: dict[str, str]) -> Path:
    """A copy of a file whose tokens have other names."""
    reader = gguf.GGUFReader(file)
    tokens = [names.get(token, token) for token in reader.fields[TOKENS].contents()]
    return with_fields(file, copy, {TOKENS: tokens})


ABOUT_A_FILE = ("quantization", "sampling", "eos_token_ids", "vision_rules", "prompt_texts")
"""Fields that a file's model may have in another way: defaults of sampling, more tokens that end answers, colours in float32."""


@pytest.mark.parametrize("family", ALONE)
def test_both_files_are_their_checkpoint(folders: Folders, tmp_path: Path, family: str) -> None:
    """The same configuration, rules, values, rows of a picture, or of sound, and logits."""
    folder = folders(family)
    ours, theirs = gguf_directory(folder / "model.gguf", tmp_path, tower=folder / "mmproj.gguf"), folder / "checkpoint"
    config, expected = (load_model_config(path, "float32") for path in (ours, theirs))
    assert config.family == MADE.get(family, family) and "image" in config.media_kinds
    for name in (one for one in config.__struct_fields__ if one not in ABOUT_A_FILE):
        assert getattr(config, name) == getattr(expected, name), name
    check_rules(config, expected)
    found, values = read_weights(ours, config), read_weights(theirs, expected)
    assert found.keys() == values.keys()
    for name in found:
        if name.endswith("per_dim_scale"):  # a file has softplus of them
            torch.testing.assert_close(found[name], values[name], rtol=1e-5, atol=1e-6)
            found[name] = values[name]
        assert torch.equal(found[name], values[name]), name
    report = check_weights(ours, config)
    assert not report.problems and set(report.unread) <= {"rope_freqs.weight"}
    for kind in set(config.media_kinds) - {"video"}:
        assert torch.equal(*(rows_of(kind, one, weights) for one, weights in ((config, found), (expected, values))))
    ids = torch.randint(0, 1000, (1, 12), generator=torch.Generator().manual_seed(1))
    assert torch.equal(our_logits(ours, config, ids, 8), our_logits(theirs, expected, ids, 8))


def check_rules(config: ModelConfig, expected: ModelConfig) -> None:
    rules, theirs = config.vision_rules, expected.vision_rules
    assert rules is not None and theirs is not None
    for name in ("image_mean", "image_std"):
        assert getattr(rules, name) == pytest.approx(getattr(theirs, name), rel=1e-7)  # a file has them in float32
    assert replace(rules, image_mean=(), image_std=()) == replace(theirs, image_mean=(), image_std=())


def rows_of(kind: Any, config: ModelConfig, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of a picture of one tile, or of a second of sound."""
    generator, rules = torch.Generator().manual_seed(2), config.vision_rules
    assert rules is not None
    if kind == "image":
        side = rules.tile // rules.patch_size if rules.tile else 24
        rows = torch.randint(0, 256, (side**2, rules.row_bytes), generator=generator).byte()
        part = TowerInput("image", rows.numpy(), (1, side, side))
    else:
        assert config.audio is not None
        part = TowerInput("audio", torch.randn(100, config.audio.num_mel_bins, generator=generator).numpy(), (100,))
    towers = family_of(config).build_towers(config, weights, torch.device("cpu"))
    with torch.inference_mode():
        return towers[kind].encode([part])[0]


@pytest.mark.parametrize("family", ALONE)
def test_without_its_tower_it_is_text_alone(folders: Folders, tmp_path: Path, family: str) -> None:
    directory = gguf_directory(folders(family) / "model.gguf", tmp_path)
    config, whole = load_model_config(directory, "float32"), load_model_config(folders(family) / "checkpoint", "float32")
    assert (config.family, config.media_kinds) == (ALONE[family], ())
    ids = torch.randint(0, 1000, (1, 12), generator=torch.Generator().manual_seed(1))
    expected = our_logits(folders(family) / "checkpoint", whole, ids, 8)
    torch.testing.assert_close(our_logits(directory, config, ids, 8), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "kind"), [("gemma3_seeing", "F16"), ("gemma3_seeing", "Q8_0"), ("gemma4", "BF16"), ("mistral3", "Q8_0")]
)
def test_towers_of_other_types_are_read(folders: Folders, tmp_path: Path, family: str, kind: str) -> None:
    """Each value is off by its type's rounding alone, also where rows or columns lie in another order."""
    folder = folders(family)
    file = write_mmproj(folder / "checkpoint", tmp_path / "mmproj.gguf", kind)
    directory = gguf_directory(folder / "model.gguf", tmp_path, tower=file)
    config, expected = (load_model_config(path, "float32") for path in (directory, folder / "checkpoint"))
    found, values = read_weights(directory, config), read_weights(folder / "checkpoint", expected)
    step = {"F16": 2**-11, "BF16": 2**-8, "Q8_0": 2**-6}[kind]
    towers = [name for name in found if name.startswith(("vision.", "audio.")) and "per_dim_scale" not in name]
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


MISTRAL = "clip.projector_type is 'mlp', expected 'pixtral' for a model of architecture mistral3"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another kind": (
        "gemma3_seeing",
        {"clip.projector_type": "gemma3nv"},
        "clip.projector_type is 'gemma3nv', expected 'gemma3' for a model of",
    ),
    "another kind than Pixtral": ("mistral3", {"clip.projector_type": "mlp"}, MISTRAL),
    "another kind than Gemma 4's": ("gemma4", {"clip.vision.projector_type": "gemma4uv"}, "is 'gemma4uv', expected 'gemma4v' for"),
    "no side": ("gemma3_seeing", {"clip.vision.image_size": None}, "clip.vision.image_size is missing"),
    "no colours": ("gemma3_seeing", {"clip.vision.image_mean": None}, "clip.vision.image_mean is missing"),
    "more blocks": ("gemma3_seeing", {"clip.vision.block_count": 4}, r"vision.encoder.layers.3\..* is missing"),
    "fewer blocks": ("gemma3_seeing", {"clip.vision.block_count": 2}, r"encoder.layers.2\..* is none of this model's"),
    "an odd square": (
        "gemma3_seeing",
        {"clip.vision.projector.scale_factor": 3},
        "mm_tokens_per_image is 25, expected a square that divides 16 x 16",
    ),
    "no GELU": ("smolvlm", {"clip.use_gelu": False}, "clip.use_silu tell of quick_gelu, expected gelu"),
    "no activation": ("gemma3_seeing", {"clip.use_gelu": None}, "clip.use_silu tell of quick_gelu, expected gelu"),
    "SiLU": ("smolvlm", {"clip.use_silu": True}, "tell of gelu and silu, expected gelu"),
    "InternVL with SiLU": (
        "internvl",
        {"clip.use_gelu": False, "clip.use_silu": True},
        "clip.use_gelu and clip.use_silu tell of silu, expected gelu",
    ),
    "Pixtral with another norm": ("mistral3", {"clip.vision.attention.layer_norm_epsilon": 1e-6}, "is 1e-06, expected 1e-05"),
    "LLaVA that sees another layer": ("llava", {"clip.vision.feature_layer": [1, 3]}, r"feature_layer is \[1, 3\], expected that of"),
    "LLaVA with GELU": ("llava", {"clip.use_gelu": True}, "clip.use_silu tell of gelu, expected quick_gelu"),
    "colours that Gemma 4's tower does not shift": (
        "gemma4",
        {"clip.vision.image_mean": [0.5] * 3},
        r"image_mean is \[0.5, 0.5, 0.5\], expected 0 of each colour",
    ),
    "two activations": ("internvl", {"clip.use_silu": True}, "tell of gelu and silu, expected gelu"),
    "half a pair of sides": (
        "llava_next",
        {"clip.vision.image_grid_pinpoints": [58, 116, 116]},
        r"image_grid_pinpoints is \[58, 116, 116\], expected pairs of sides",
    ),
    "fewer tiles than the least": (
        "internvl",
        {"clip.vision.preproc_min_tiles": 13},
        "max_patches is 12, expected at least min_patches, 13",
    ),
    "fewer blocks of GLM": ("glm4v", {"clip.vision.block_count": 2}, r"'visual.blocks.2\..* is none of this model's"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_towers_that_cannot_be(folders: Folders, tmp_path: Path, fault: str) -> None:
    family, changes, message = REFUSED[fault]
    file = write_mmproj(folders(family) / "checkpoint", tmp_path / "mmproj.gguf", changes=changes)
    with pytest.raises(CheckpointError, match=message):
        directory = gguf_directory(folders(family) / "model.gguf", tmp_path / "home", tower=file)
        read_weights(directory, load_model_config(directory))


@pytest.mark.parametrize(
    ("family", "token"),
    [("gemma4", "<|image>"), ("mistral3", "[IMG_BREAK]"), ("internvl", "<img>"), ("llava", "<image>"), ("smolvlm", "<image>")],
)
def test_a_vocabulary_without_a_token_at_pictures(folders: Folders, tmp_path: Path, family: str, token: str) -> None:
    file = renamed(folders(family) / "model.gguf", tmp_path / "model.gguf", {token: "no"})
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.tokens has no '{re.escape(token)}', which stands at"):
        gguf_directory(file, tmp_path / "home", tower=folders(family) / "mmproj.gguf")


@pytest.mark.parametrize("family", ["gemma3_seeing", "smolvlm", "llava"])
@pytest.mark.parametrize("tokens", [7, [7, 8]])
def test_a_vocabulary_that_is_no_list_of_words(folders: Folders, tmp_path: Path, family: str, tokens: Any) -> None:
    file = with_fields(folders(family) / "model.gguf", tmp_path / "model.gguf", {TOKENS: tokens})
    with pytest.raises(CheckpointError, match="tokenizer.ggml.tokens is missing, or no list of strings"):
        gguf_directory(file, tmp_path / "home", tower=folders(family) / "mmproj.gguf")


ROPE, GROWTH = "mistral3.rope.scaling.", "mistral3.attention.temperature_scale"
TIMES = 1 + 0.1 * math.log(4)  # what yarn itself multiplies by


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({GROWTH: None}, 1.0),
        ({GROWTH: 0.0}, 1.0),
        ({f"{ROPE}yarn_log_multiplier": None}, TIMES),
        ({f"{ROPE}yarn_log_multiplier": 0.0, GROWTH: None}, TIMES),
        ({f"{ROPE}yarn_log_multiplier": 0.5, f"{ROPE}attn_factor": 2.0}, 2 * TIMES / (0.5 + 0.5 * TIMES)),
    ],
)
def test_what_yarn_multiplies_by_in_ministral_3(folders: Folders, tmp_path: Path, changes: dict[str, Any], factor: float) -> None:
    """As llama.cpp does, whether queries grow or not: of Mistral's own files its converter writes 0 where yarn multiplies."""
    file = with_fields(folders("ministral3") / "model.gguf", tmp_path / "model.gguf", changes)
    config = load_model_config(gguf_directory(file, tmp_path / "home", tower=folders("ministral3") / "mmproj.gguf"))
    assert [rope.factor for rope in config.language.ropes] == pytest.approx([factor])
    assert config.max_context == (8192 if changes.get(GROWTH, 1) else 4 * 8192), "queries that grow are known up to there"


def test_a_part_of_gemma_4s_heads_turns_by_factors_alone(folders: Folders, tmp_path: Path) -> None:
    file = with_fields(folders("gemma4") / "model.gguf", tmp_path / "model.gguf", {"gemma4.rope.dimension_count": 16})
    with pytest.raises(CheckpointError, match="rope.dimension_count is 16; partly rotated heads are not"):
        gguf_directory(file, tmp_path / "home")


def test_the_decoder_of_a_text_model_is_none_of_a_glm_that_sees(folders: Folders, tmp_path: Path) -> None:
    file = with_fields(folders("glm4v") / "model.gguf", tmp_path / "model.gguf", {"glm4.rope.dimension_sections": None})
    with pytest.raises(CheckpointError, match="glm4.rope.dimension_sections is missing: it is the decoder of a model of text alone"):
        gguf_directory(file, tmp_path / "home", tower=folders("glm4v") / "mmproj.gguf")
