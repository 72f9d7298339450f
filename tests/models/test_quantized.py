"""Quantized checkpoints: matrices that other programs packed, whole checkpoints in each packing, and what is refused.

``quantized_layers.safetensors`` holds one matrix for each packing, and its values as the same program unpacks them: AutoAWQ 0.2.9,
AutoGPTQ at 9f7d370 (with GPTQModel 7.7's conversion to version 2), compressed-tensors 0.20.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrt.models.architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from mmrt.models.checkpoint import int8g
from mmrt.models.checkpoint.int4 import unpack
from mmrt.models.checkpoint.quantized import Integers, _parts, find_integers
from mmrt.models.checkpoint.safetensors_files import SafetensorsFiles
from mmrt.models.checkpoint.weight_specs import Source, TensorSpec, stored_parts
from mmrt.models.checkpoint.weights import read_weights
from mmrt.models.config import load_model_config, weight_bytes
from mmrt.models.errors import CheckpointError
from mmrt.schema.quantization import IntegerQuantization, find_quantization
from mmrt.tests.models.logits import our_logits
from mmrt.tests.models.quantized_checkpoint import CONFIGS, GROUP, PACKED, compressed, quantize_checkpoint, words

LAYERS_FILE = Path(__file__).with_name("quantized_layers.safetensors")


def how(packing: str, bits: int = 4, group_size: int = GROUP, symmetric: bool = False, in_order: bool = True) -> IntegerQuantization:
    given = {"packing": packing, "bits": bits, "group_size": group_size, "symmetric": symmetric, "in_order": in_order}
    return msgspec.convert(given, IntegerQuantization)


LAYERS = {
    "awq": how("awq"),
    "gptq4": how("gptq"),
    "gptq4_v2": how("gptq_v2"),
    "gptq4_act_order": how("gptq", in_order=False),
    "gptq8": how("gptq", 8),
    "packed4": how("pack-quantized", symmetric=True),
    "packed4_asymmetric": how("pack-quantized"),
    "packed4_channel": how("pack-quantized", group_size=0, symmetric=True),
    "packed8": how("pack-quantized", 8, 0, True),
    "packed8_asymmetric": how("pack-quantized", 8),
    "int8": how("int-quantized", 8, 0, True),
    "int8_asymmetric": how("int-quantized", 8, 0),
}
SHAPE = (64, 64)  # of each layer


def open_layer(name: str, path: Path) -> tuple[Integers, torch.Tensor]:
    """A matrix that another program has packed, and its values."""
    mine = {key.removeprefix(f"{name}."): value for key, value in load_file(LAYERS_FILE).items() if key.startswith(f"{name}.")}
    expected = mine.pop("expected")
    save_file({f"m.{key}": value for key, value in mine.items()}, path / "model.safetensors")
    with SafetensorsFiles(path) as files:
        found = find_integers(Source("m.weight", SHAPE), files.tensors, LAYERS[name])
    assert found is not None
    tensors = load_file(path / "model.safetensors")
    names = {tensor: key for key, tensor in files.tensors.items()}
    return Integers(SHAPE, {role: tensors[names[tensor]] for role, tensor in found.parts.items()}, LAYERS[name]), expected


@pytest.mark.parametrize("name", LAYERS)
def test_values_are_those_of_the_program_that_packed_them(name: str, tmp_path: Path) -> None:
    integers, expected = open_layer(name, tmp_path)
    assert torch.equal(integers.values(slice(0, SHAPE[0])), expected)


@pytest.mark.parametrize("name", ["awq", "gptq4", "gptq4_v2", "packed4", "packed4_asymmetric", "packed4_channel"])
def test_int4_holds_the_integers_as_they_are(name: str, tmp_path: Path) -> None:
    """But for scales and zeros, which are rounded to bfloat16."""
    integers, expected = open_layer(name, tmp_path)
    num_rows, num_columns = SHAPE
    packed = torch.empty(num_rows, num_columns // 2, dtype=torch.uint8)
    scales = torch.empty(num_rows, num_columns // GROUP, 2, dtype=torch.bfloat16)
    integers.write_int4(slice(0, num_rows), packed, scales)
    found = torch.empty(num_rows, num_columns)
    unpack(packed, scales, found)
    steps = integers.codes(slice(0, num_rows)).scales.amax()
    assert (found - expected).abs().max() < 0.05 * steps


@pytest.mark.parametrize("name", ["packed8", "int8"])
def test_int8_holds_the_integers_as_they_are(name: str, tmp_path: Path) -> None:
    integers, expected = open_layer(name, tmp_path)
    target, scales = torch.empty(SHAPE, dtype=torch.int8), torch.empty(SHAPE[0], dtype=torch.bfloat16)
    integers.write_int8(slice(0, SHAPE[0]), target, scales)
    assert torch.equal(target.float() * scales.float().unsqueeze(1), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_int8g_holds_integers_near_their_zero_points_as_they_are(name: str, tmp_path: Path) -> None:
    """But for scales, which are rounded to bfloat16. Others are rounded, to the nearest."""
    integers, expected = open_layer(name, tmp_path)
    packed, scales = torch.empty(SHAPE, dtype=torch.int8), torch.empty(SHAPE[0], SHAPE[1] // 32, dtype=torch.bfloat16)
    integers.write_int8g(slice(0, SHAPE[0]), packed, scales)
    found = torch.empty(SHAPE)
    int8g.unpack(packed, scales, found)
    groups, error = expected.view(SHAPE[0], -1, 32), (found - expected).view(SHAPE[0], -1, 32).abs()
    assert (error <= 0.51 * groups.abs().amax(2, keepdim=True) / 127).all()
    zeros = integers.codes(slice(0, SHAPE[0])).zeros
    is_near = bool((zeros == 128).all()) if LAYERS[name].bits == 8 else LAYERS[name].in_order
    assert is_near == (name not in ("gptq4_act_order", "gptq8", "packed8_asymmetric", "int8_asymmetric"))
    assert (error <= 2**-8 * groups.abs()).all() == is_near


def test_int8g_holds_gptq_as_it_is_where_stored_zero_points_are_the_middle() -> None:
    known = how("gptq", 8, 64)
    codes = torch.randint(0, 256, (32, 128), generator=torch.Generator().manual_seed(0)).numpy()
    codes[0, 0] = 0  # -128
    steps = torch.rand(2, 32, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    zeros = torch.full((2, 32), 127).numpy()  # less one
    integers = integers_of(known, 32, 128, codes=words(codes, 8).t().contiguous(), zeros=words(zeros, 8), scales=steps)
    packed, scales = torch.empty(32, 128, dtype=torch.int8), torch.empty(32, 4, dtype=torch.bfloat16)
    integers.write_int8g(slice(0, 32), packed, scales)
    found = torch.empty(32, 128)
    int8g.unpack(packed, scales, found)
    assert torch.equal(found, (torch.from_numpy(codes) - 128) * steps.t().repeat_interleave(64, 1))


def integers_of(known: IntegerQuantization, num_rows: int, num_columns: int, **parts: torch.Tensor) -> Integers:
    """A matrix whose rows and columns need not fill words and groups, as ``find_integers`` finds it."""
    expected = _parts(Source("m.weight", (num_rows, num_columns)), known)
    assert all(tensor.shape == expected[role].shape for role, tensor in parts.items())
    return Integers((num_rows, num_columns), parts, known)


def test_the_last_group_may_be_smaller() -> None:
    """Two groups, of 64 and 32 columns: not two of 48."""
    codes, scales = torch.full((4, 12), 0x11111111, dtype=torch.int32), torch.tensor([[1.0, 2.0]]).expand(4, 2)
    found = integers_of(how("pack-quantized", group_size=64, symmetric=True), 4, 96, codes=codes, scales=scales).values(slice(0, 4))
    assert torch.equal(found, torch.tensor([-7.0] * 64 + [-14.0] * 32).expand(4, 96))


def test_int8g_holds_a_smaller_last_group() -> None:
    """Rounded as any values are: its columns are in a group of 32, but scales do not repeat evenly."""
    known = how("pack-quantized", 8, group_size=64, symmetric=True)
    codes, scales = torch.full((32, 24), 0x7F7F7F7F, dtype=torch.int32), torch.tensor([[1.0, 2.0]]).expand(32, 2)
    integers = integers_of(known, 32, 96, codes=codes, scales=scales)
    packed, steps, found = torch.empty(32, 96, dtype=torch.int8), torch.empty(32, 3, dtype=torch.bfloat16), torch.empty(32, 96)
    assert known.form == "int8g"
    integers.write_int8g(slice(0, 32), packed, steps)
    int8g.unpack(packed, steps, found)
    torch.testing.assert_close(found, integers.values(slice(0, 32)), rtol=2**-7, atol=0)


def test_a_group_may_be_larger_than_a_row() -> None:
    codes, scales = torch.full((4, 12), 0x11111111, dtype=torch.int32), torch.ones(4, 1)
    known = how("pack-quantized", group_size=10**30, symmetric=True)
    assert (integers_of(known, 4, 96, codes=codes, scales=scales).values(slice(0, 4)) == -7).all()


@pytest.mark.parametrize("packing", ["awq", "gptq", "pack-quantized"])
def test_the_last_word_may_hold_more(packing: str) -> None:
    num_rows, num_columns = 12, 20
    known = how(packing, group_size=0)
    parts = _parts(Source("m.weight", (num_rows, num_columns)), known)
    words = {role: torch.full(part.shape, 0x33333333, dtype=torch.int32) for role, part in parts.items()}
    words["scales"] = words["scales"].float().fill_(1)
    words["zeros"].fill_(0)
    words.pop("groups", None)
    found = integers_of(known, num_rows, num_columns, **words).values(slice(0, num_rows))
    assert found.shape == (num_rows, num_columns) and set(found.flatten().tolist()) == {2.0 if packing == "gptq" else 3.0}


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_0_is_the_most_in_version_1_of_gptq(bits: int) -> None:
    """AutoGPTQ stores zero points less one, and takes the lowest bits of the sum (qlinear_cuda_old.py, ``forward``)."""
    codes, zeros = torch.zeros(32 * bits // 32, 32, dtype=torch.int32), torch.full((1, bits), -1, dtype=torch.int32)
    known = how("gptq", bits, group_size=32)
    assert not integers_of(known, 32, 32, codes=codes, zeros=zeros, scales=torch.ones(1, 32)).values(slice(0, 32)).any()


def test_an_order_that_was_not_set_is_the_columns_own() -> None:
    known = how("pack-quantized", group_size=32, symmetric=True, in_order=False)
    parts = {"codes": torch.zeros(4, 8, dtype=torch.int32), "scales": torch.tensor([[1.0, 2.0]]).expand(4, 2)}
    found = integers_of(known, 4, 64, **parts, groups=torch.full((64,), -1, dtype=torch.int32)).values(slice(0, 4))
    assert torch.equal(found, torch.tensor([-8.0] * 32 + [-16.0] * 32).expand(4, 64))


# --------------------------------------------------------------------------------------------- whole checkpoints


Pair = tuple[Path, Path]
SPARED = "3.self_attn.o_proj"  # the output projection of the last layer


@pytest.fixture(scope="module")
def pair(checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """The tiny checkpoint quantized, and with the values of that in float32."""
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            made[name] = quantize_checkpoint(checkpoints("qwen2_5_vl"), tmp_path_factory.mktemp(name), CONFIGS[name], SPARED)
        return made[name]

    return get


@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantized_checkpoint_has_the_values_that_it_says(pair: Callable[[str], Pair], name: str) -> None:
    quantized, plain = pair(name)
    found = read_weights(quantized, load_model_config(quantized))
    expected = read_weights(plain, load_model_config(plain))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize(("name", "most"), [("awq", 0.05), ("gptq", 0.05), ("packed", 0.05), ("packed8", 0.05), ("int8", 0.05)])
def test_a_model_computes_with_the_integers(pair: Callable[[str], Pair], name: str, most: float) -> None:
    """Its logits are those of the values, but for roundings of activations, of scales, and of matrices that were not quantized or
    do not divide into blocks."""
    quantized, plain = pair(name)
    known = load_model_config(quantized).quantization
    assert known is not None
    config = load_model_config(quantized, weights=known.form)
    ids = torch.randint(0, 1000, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = our_logits(plain, load_model_config(plain), ids, 40)
        found = our_logits(quantized, config, ids, 40)
    error = (found - expected).abs().mean() / expected.std()
    assert 0 < error < most, float(error)


def test_what_is_kept_in_int4(pair: Callable[[str], Pair]) -> None:
    """Embeddings, the output and a matrix that the checkpoint has in full precision take 8 bits, in groups."""
    quantized, _ = pair("awq")
    config = load_model_config(quantized, weights="int4")
    weights = read_weights(quantized, config)
    forms = {name: tensor.dtype for name, tensor in weights.items() if f"{name}.scales" in weights}
    layers = range(config.language.num_layers)
    assert {name for name, form in forms.items() if form == torch.uint8} == {
        *(f"layers.{i}.{part}" for i in layers for part in ("qkv", "o", "gate_up", "down") if (i, part) != (3, "o"))
    }
    assert {name for name, form in forms.items() if form == torch.int8} == {
        "embed", "lm_head", "layers.3.o"
    }  # fmt: skip
    assert all(weights[f"{name}.scales"].dim() == 2 for name, form in forms.items() if form == torch.int8)
    assert weight_bytes(config) <= sum(tensor.nbytes for tensor in weights.values()) < 1.1 * weight_bytes(config)


@pytest.mark.parametrize(
    ("rows", "columns", "group", "expected"),
    [
        ((128,), 256, None, 32),
        ((128, 64, 64), 96, None, 32),
        ((128, 16, 16), 256, None, 0),
        ((128,), 80, None, 0),
        ((64,), 256, 128, 128),
        ((64,), 352, 128, 0),
        ((64,), 384, 96, 32),
        ((64,), 1024, 512, 256),
        ((64,), 384, 0, 128),
        ((64,), 256, 16, 32),
    ],
    ids=str,
)
def test_groups_of_int4(rows: tuple[int, ...], columns: int, group: int | None, expected: int) -> None:
    """Columns that share a scale, by the sources' rows and the checkpoint's groups; a matrix that does not divide takes 8 bits, in
    groups of 32 columns if it divides into these."""
    language = LanguageConfig(
        vocab_size=8,
        hidden_size=8,
        rms_norm_eps=1,
        layers=(
            LayerConfig(mixer=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8), feed_forward=MlpConfig(intermediate_size=8)),
        ),
        ropes=(RopeConfig(theta=1),),
    )
    known = None if group is None else how("awq", group_size=group)
    config = ModelConfig(
        family="", language=language, dtype="float32", weights="int4", quantization=known, max_context=1, eos_token_ids=()
    )
    spec = TensorSpec("w", (sum(rows), columns), tuple(Source("s", (n, columns)) for n in rows), is_matrix=True)
    matrix, scales = stored_parts(spec, config)
    if expected:
        assert (matrix.dtype, matrix.shape) == ("uint8", (sum(rows), columns // 2))
        assert scales.shape == (sum(rows), columns // expected, 2)
    else:
        in_groups = not columns % 32 and not any(n % 32 for n in rows)
        assert (matrix.dtype, scales.shape) == ("int8", (sum(rows), columns // 32) if in_groups else (sum(rows),))


# --------------------------------------------------------------------------------------------- refusals

AWQ, GPTQ = {"quant_method": "awq", "bits": 4}, {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantization_config is of method 'bitsandbytes': 'awq', 'gptq', 'fp8', 'modelopt' and 'compressed-tensors' are",
        ),
        ({}, "quantization_config is of method None"),
        ([], "quantization_config is of method None"),
        ({"quant_method": ["awq"]}, "quantization_config is of method ['awq']"),
        ({**AWQ, "bits": 3}, "quantization_config of method 'awq': bits is 3, expected 4"),
        ({**AWQ, "bits": True}, "method 'awq': Expected `int`, got `bool` - at `$.bits`"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv', expected 'gemm'"),
        ({**AWQ, "zero_point": False}, "zero_point is False, expected True"),
        ({**AWQ, "group_size": 0}, "group_size is 0, expected -1 or a number of columns"),
        ({**GPTQ, "bits": 2}, "bits is 2, expected 4 or 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected 'gptq' or 'gptq_v2'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is True, expected False"),
        ({"quant_method": "compressed-tensors"}, "missing required field `config_groups`"),
        (compressed("naive-quantized", {"num_bits": 8, "type": "float"}), "format is 'naive-quantized', expected 'pack-quantized' or"),
        (compressed("pack-quantized", {**PACKED, "num_bits": 3}), "num_bits is 3, expected 4 or 8"),
        (compressed("pack-quantized", {**PACKED, "type": "float"}), "type is 'float', expected 'int'"),
        (compressed("int-quantized", {"num_bits": 8, "strategy": "tensor"}), "strategy is 'tensor', expected 'group' or 'channel'"),
        ({**compressed("dense", PACKED), "config_groups": {}}, "config_groups have 0 formats of weights, expected one"),
        ({**compressed("dense", PACKED), "config_groups": {"a": {}}}, "config_groups have no weights"),
        (
            {**compressed("pack-quantized", PACKED), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse weights are not supported",
        ),
        ({**compressed("pack-quantized", PACKED), "transform_config": {"config_groups": {"a": 1}}}, "transformed weights are not"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        find_quantization({"quantization_config": config})
    with pytest.raises(ValueError, match=re.escape(message.removeprefix("quantization_config"))):
        find_quantization({"thinker_config": {"compression_config": config}})


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (AWQ, "int4"),
        ({**AWQ, "group_size": -1}, "int4"),
        ({**AWQ, "group_size": 16}, "bfloat16"),
        (GPTQ, "int4"),
        ({**GPTQ, "format": "gptq_v2"}, "int4"),
        ({**GPTQ, "desc_act": True}, "bfloat16"),
        ({**GPTQ, "bits": 8}, "int8g"),
        ({**GPTQ, "bits": 8, "sym": False}, "bfloat16"),
        ({**GPTQ, "bits": 8, "desc_act": True}, "bfloat16"),
        (CONFIGS["packed8"], "int8g"),
        (compressed("pack-quantized", {**PACKED, "num_bits": 8, "symmetric": False}), "bfloat16"),
        (CONFIGS["packed"], "int4"),
        (compressed("pack-quantized", {**PACKED, "actorder": "group"}), "bfloat16"),
        (compressed("pack-quantized", {"num_bits": 8, "strategy": "channel"}), "int8"),
        (CONFIGS["int8"], "int8"),
        (compressed("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}), "bfloat16"),
    ],
    ids=str,
)
def test_the_format_that_holds_the_integers(config: dict[str, Any], form: str) -> None:
    found = find_quantization({"quantization_config": config})
    assert found is not None and found.form == form


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qzeros", None, r"tensor 'language.layers.1.mlp.up_proj.qzeros' of shape \[4, 32\] is missing"),
        (
            "scales",
            lambda found: found[:2],
            r"scales' has dtype F16 and shape \[2, 256\], expected F16 or BF16 or F32 and \[4, 256\] by",
        ),
        ("qweight", lambda found: found[:, :3].contiguous(), r"has dtype I32 and shape \[128, 3\], expected I32 and \[128, 32\]"),
        ("scales", lambda found: found * torch.inf, "up_proj.weight' has a scale that is not finite"),
    ],
    ids=["missing", "groups", "codes", "infinite"],
)
def test_broken_matrices(pair: Callable[[str], Pair], tmp_path: Path, part: str, change: Any, message: str) -> None:
    broken = Path(shutil.copytree(pair("awq")[0], tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_weights(broken, load_model_config(broken))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (torch.arange(128) % 4, "has groups of columns that are no neighbours, which int4 cannot hold"),
        (torch.arange(128) // 16, "has columns in groups 0 to 7, expected 0 to 3"),
    ],
    ids=["order", "range"],
)
def test_groups_that_are_not_as_the_configuration_says(pair: Callable[[str], Pair], tmp_path: Path, groups: Any, message: str) -> None:
    broken = Path(shutil.copytree(pair("gptq")[0], tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.g_idx"] = groups.int()
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor 'language.layers.1.self_attn.q_proj.weight' {message}"):
        read_weights(broken, load_model_config(broken, weights="int4"))


def test_an_order_that_is_missing(pair: Callable[[str], Pair], tmp_path: Path) -> None:
    broken = Path(shutil.copytree(pair("gptq")[0], tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.g_idx"]
    save_file(tensors, broken / "model.safetensors")
    read_weights(broken, load_model_config(broken))
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"tensor 'language.layers.1.self_attn.q_proj.g_idx' of shape \[128\] is missing"):
        read_weights(broken, load_model_config(broken))


@pytest.mark.parametrize("name", ["model.norm", "visual.patch_embed.proj"])
def test_only_matrices_are_quantized(pair: Callable[[str], Pair], tmp_path: Path, name: str) -> None:
    """Integers in place of a vector or of a convolution's kernel, in the shapes that a matrix of its rows would have."""
    broken = Path(shutil.copytree(pair("int8")[0], tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    old = tensors[f"{name}.weight"]
    tensors[f"{name}.weight"] = torch.zeros(old.shape[0], old.shape[-1], dtype=torch.int8)
    tensors[f"{name}.weight_scale"] = torch.ones(old.shape[0], 1)
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name.partition('.')[2]}.weight' has shape .* expected"):
        read_weights(broken, load_model_config(broken))
