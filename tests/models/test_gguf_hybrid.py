"""GGUF files of Qwen3.5, beside the checkpoints that they were made of: values, logits, towers, formats; and what is refused."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from mmrt.models.checkpoint.gguf_matrices import BlockMatrix, StoredBlocks
from mmrt.models.checkpoint.gguf_orders import Orders, Tiled
from mmrt.models.checkpoint.safetensors_files import StoredTensor
from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.gguf.directory import gguf_directory
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.tests.models.gguf_files import Tensors, copy_field, finish, with_fields, write_gguf, write_tower
from mmrt.tests.models.kept import exact, keep
from mmrt.tests.models.test_qwen3_5 import Rows, close, some_ids

FAMILIES = ("qwen3_5", "qwen3_5_moe")


class Made:
    """A checkpoint, the file that was written of it, and the directory that was made of that."""

    def __init__(self, root: Path, family: str, kind: str) -> None:
        self.checkpoint, self.file = root / "checkpoint", root / f"{family}-{kind}.gguf"
        make_checkpoint("tiny", self.checkpoint, family)  # type: ignore[arg-type]
        self.values: Tensors = write_gguf(self.checkpoint, self.file, kind)
        self.directory = gguf_directory(self.file, root / "home")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    known: dict[tuple[str, str], Made] = {}

    def get(family: str, kind: str = "F32") -> Made:
        if (family, kind) not in known:
            known[family, kind] = Made(tmp_path_factory.mktemp("gguf"), family, kind)
        return known[family, kind]

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_its_checkpoint(made: Callable[..., Made], family: str) -> None:
    """The same values; but rates of decay, of which a file has -exp, are rounded once more."""
    one = made(family)
    ours, theirs = (load_model_config(path, "float32") for path in (one.directory, one.checkpoint))
    assert ours.family == family and ours.media_kinds == () and ours.language == theirs.language
    found, expected = read_weights(one.directory, ours), read_weights(one.checkpoint, theirs)
    assert found.keys() == {name for name in expected if not name.startswith("vision.")}
    for name in found:
        if name.endswith("A_log"):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
        else:
            assert torch.equal(found[name], expected[name]), name
    report = check_weights(one.directory, ours)
    assert not report.problems and not report.unread


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_from_a_file(made: Callable[..., Made], family: str) -> None:
    """Its reader of GGUF gives the logits of a prompt, and of steps behind it."""
    one, ids = made(family), some_ids(1, 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(one.file.parent, gguf_file=one.file.name, dtype=torch.float32)
    expected = theirs.eval()(ids, use_cache=False).logits[0]
    ours = Rows(one.directory, 1)
    close(ours.prefill(0, ids[0, :40]), expected[:40])
    for at in range(40, 60):
        close(ours.step(ids[:, at]), expected[at : at + 1])


@pytest.mark.parametrize(("kind", "weights"), [("Q8_0", "int8g"), ("Q4_1", "int4"), ("F16", "auto")])
def test_codes_move_with_their_heads(made: Callable[..., Made], kind: str, weights: Any) -> None:
    """Rows and columns of value heads are put back: each value is off by its scale's rounding alone."""
    one = made("qwen3_5", kind)
    found = read_weights(one.directory, load_model_config(one.directory, "float32", weights=weights))
    for name, source in (("o", "out_proj"), ("mixed_z", "in_proj_qkv"), ("ba", "in_proj_b")):
        expected = one.values[f"model.layers.1.linear_attn.{source}.weight"]
        values = exact(found, f"layers.1.{name}")[: len(expected)]
        assert ((values - expected).abs() <= 2**-6 * expected.abs().amax(1, keepdim=True)).all(), name
        if f"layers.1.{name}.scales" in found:
            assert found[f"layers.1.{name}"].dtype == (torch.uint8 if weights == "int4" else torch.int8)


@pytest.mark.parametrize("width", [16, 32])
def test_columns_of_narrow_heads_are_rounded_anew(tmp_path: Path, width: int) -> None:
    """Heads that groups of 32 columns do not divide move as values; others with their scales."""
    values = torch.randn(32, 4 * width, generator=torch.Generator().manual_seed(3))
    blocks = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
    stored = StoredBlocks("m", StoredTensor(tmp_path, "Q8_0", (32, 4 * width), 0, blocks.size), Orders(columns=Tiled(0, 2, 4)))
    matrix = BlockMatrix(stored, torch.from_numpy(blocks.copy()).flatten())
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0).copy())
    expected = expected.view(32, 2, 2, width).transpose(1, 2).reshape(32, -1)
    assert torch.equal(matrix.values(slice(0, 32)), expected)
    target, scales = torch.empty(32, 4 * width, dtype=torch.int8), torch.empty(32, 4 * width // 32, dtype=torch.bfloat16)
    matrix.write(slice(0, 32), target, scales)
    if width == 16:
        again = keep(expected.clone(), "int8g")
        assert torch.equal(target, again["w"]) and torch.equal(scales, again["w.scales"])
    else:
        assert ((exact({"w": target, "w.scales": scales}) - expected).abs() <= 2**-8 * expected.abs()).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_its_tower_is_the_checkpoints(made: Callable[..., Made], tmp_path: Path, family: str) -> None:
    one = made(family)
    tower = write_tower(one.checkpoint, tmp_path / "mmproj.gguf")
    directory = gguf_directory(one.file, tmp_path / "home", tower=tower)
    ours, theirs = (load_model_config(path, "float32") for path in (directory, one.checkpoint))
    assert ours.language == theirs.language and ours.vision == theirs.vision and ours.vision_rules == theirs.vision_rules
    assert ours.media_kinds == ("image", "video") and ours.times == theirs.times
    found, expected = read_weights(directory, ours), read_weights(one.checkpoint, theirs)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found if name.startswith("vision."))


def test_layers_that_guess_tokens_are_left_out(made: Callable[..., Made], tmp_path: Path) -> None:
    """A file counts them among its blocks."""
    one = made("qwen3_5")
    reader = gguf.GGUFReader(one.file)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen35")
    for field in reader.fields.values():
        if not field.name.endswith("block_count"):
            copy_field(field, writer)
    writer.add_block_count(5)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name in ("attn_norm", "nextn.enorm", "nextn.eh_proj"):
        writer.add_tensor(f"blk.4.{name}.weight", np.ones(128, np.float32))
    finish(writer)
    directory = gguf_directory(tmp_path / "model.gguf", tmp_path / "home")
    config = load_model_config(directory, "float32")
    assert config.language == load_model_config(one.directory, "float32").language
    assert not check_weights(directory, config).problems


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no heads": ({"qwen35.ssm.time_step_rank": None}, "qwen35.ssm.time_step_rank is missing"),
    "other heads": ({"qwen35.ssm.time_step_rank": 5}, "linear_num_value_heads is 5, expected a multiple of linear_num_key_heads"),
    "sections": ({"qwen35.rope.dimension_count": 12}, "mrope_section is .* expected three numbers that sum to the 6 pairs"),
    "wide": ({"qwen35.rope.dimension_count": 128}, "qwen35.rope.dimension_count is 128, expected an integer from 1 to 64"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_a_file_says_that_cannot_be(made: Callable[..., Made], tmp_path: Path, fault: str) -> None:
    changes, message = REFUSED[fault]
    file = with_fields(made("qwen3_5").file, tmp_path / "model.gguf", changes)
    with pytest.raises(CheckpointError, match=message):
        gguf_directory(file, tmp_path / "home")


def test_rates_that_do_not_decay_are_refused(made: Callable[..., Made], tmp_path: Path) -> None:
    reader = gguf.GGUFReader(made("qwen3_5").file)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen35")
    for field in reader.fields.values():
        copy_field(field, writer)
    for tensor in reader.tensors:
        data = -tensor.data if tensor.name == "blk.1.ssm_a" else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    finish(writer)
    directory = gguf_directory(tmp_path / "model.gguf", tmp_path / "home")
    with pytest.raises(CheckpointError, match=r"language.layers.1.linear_attn.A_log' has a value that is not finite"):
        read_weights(directory, load_model_config(directory))
