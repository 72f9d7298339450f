"""The number formats that suit a processor: described by files."""

import json
from pathlib import Path

import pytest

from mmrt.runtime.config.runtime_config import parse_config
from mmrt.runtime.process.number_format import has_bfloat16_units, plan_formats

X86 = "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 f16c {}\nbogomips\t: 1\n"
MIB = 1 << 20
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
NO_UNITS = "the processor has no bfloat16 units"


@pytest.mark.parametrize(
    ("cpuinfo", "capability", "found"),
    [
        (X86.format(""), "", False),
        (X86.format("avx512f avx512_vnni"), "", False),
        (X86.format("avx512f avx512_bf16"), "", True),
        (X86.format("avx512f amx_bf16 amx_tile"), "", True),
        (X86.format("avx512f avx512_bf16"), "avx2", False),
        (X86.format("avx512f avx512_bf16"), "default", False),
        (X86.format("avx512f avx512_bf16"), "avx512", True),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n", "", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", "", False),
        ("", "", False),
    ],
)
def test_units_are_told_by_flags(tmp_path: Path, cpuinfo: str, capability: str, found: bool) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert has_bfloat16_units(capability, tmp_path) is found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    (tmp_path / "model-1.safetensors").write_bytes(bytes(MIB))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(MIB))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "has_units", "free_mib", "dtype", "weights", "reason"),
    [
        ("", False, 100, "float32", "auto", NO_UNITS),
        ("", False, 8, "float32", "auto", NO_UNITS),
        ("", False, 7, "float32", "bfloat16", f"{NO_UNITS}; float32 weights would take 4 of 7 MiB"),
        ("", True, 100, "auto", "auto", ""),
        ('dtype = "bfloat16"', False, 100, "bfloat16", "auto", ""),
        ('device = "cuda"', False, 100, "auto", "auto", ""),
        ('weights = "bfloat16"', False, 100, "float32", "bfloat16", NO_UNITS),
        ('weights = "bfloat16"', True, 100, "auto", "bfloat16", ""),
        ('weights = "int8"', False, 7, "float32", "int8", NO_UNITS),
        ('weights = "int8"', True, 100, "auto", "int8", ""),
        ('weights = "int8"\ndtype = "bfloat16"', False, 100, "bfloat16", "int8", ""),
        ('weights = "float16"', False, 7, "float32", "float16", "weights in float16 are multiplied in float32"),
        ('weights = "float16"', True, 100, "float32", "float16", "weights in float16 are multiplied in float32"),
        ('weights = "float32"', True, 7, "float32", "float32", "weights in float32 are multiplied in float32"),
    ],
)
def test_the_formats(model: Path, text: str, has_units: bool, free_mib: int, dtype: str, weights: str, reason: str) -> None:
    config, why = plan_formats(parse_config(f"[model]\n{text}\n"), model, has_units, free_mib * MIB)
    assert (config.model.dtype, config.model.weights, why) == (dtype, weights, reason)


@pytest.mark.parametrize(
    ("stored", "weights"),
    [
        (["bfloat16", "bfloat16"], "bfloat16"),
        (["float16", "float16"], "float16"),
        (["float32", "float32"], "auto"),
        (["bfloat16", "float32"], "auto"),
        (["bfloat16", "float16"], "auto"),
    ],
)
def test_weights_stay_in_the_checkpoints_own_half_precision(model: Path, stored: list[str], weights: str) -> None:
    """Only where all tensors of all files are in it: then they are the same numbers. Whatever the room."""
    for number, dtype in enumerate(stored, 1):
        entry = {"dtype": DTYPES[dtype], "shape": [2], "data_offsets": [0, 8 if dtype == "float32" else 4]}
        header = json.dumps({"a": entry, "__metadata__": {"format": "pt"}}).encode()
        (model / f"model-{number}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    config, why = plan_formats(parse_config(""), model, False, 100 * MIB)
    assert (config.model.dtype, config.model.weights, why) == ("float32", weights, NO_UNITS)
    assert plan_formats(parse_config(""), model, True, 100 * MIB)[0].model.weights == "auto"


@pytest.mark.parametrize(
    ("text", "has_units", "dtype", "weights"),
    [
        ("", True, "auto", "int4"),
        ("", False, "float32", "int4"),
        ('dtype = "bfloat16"', False, "bfloat16", "int4"),
        ('weights = "bfloat16"', False, "float32", "bfloat16"),
        ('device = "cuda"', True, "auto", "auto"),
    ],
)
def test_a_quantized_checkpoint_stays_quantized(model: Path, text: str, has_units: bool, dtype: str, weights: str) -> None:
    """Whatever the room. On CUDA its values are computed with."""
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128}
    (model / "config.json").write_text(json.dumps({"dtype": "float16", "quantization_config": quantization}))
    config, _ = plan_formats(parse_config(f"[model]\n{text}\n"), model, has_units, 7 * MIB)
    assert (config.model.dtype, config.model.weights) == (dtype, weights)


@pytest.mark.parametrize(("has_units", "dtype"), [(True, "auto"), (False, "float32")])
def test_fp8_is_kept_in_int8g(model: Path, has_units: bool, dtype: str) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": quantization}))
    config, _ = plan_formats(parse_config(""), model, has_units, 7 * MIB)
    assert (config.model.dtype, config.model.weights) == (dtype, "int8g")


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x03" + bytes(7) + b"{}"], ids=repr)
def test_weights_that_cannot_be_read_are_reported_later(model: Path, content: bytes) -> None:
    (model / "model-2.safetensors").write_bytes(content)
    assert plan_formats(parse_config(""), model, False, 100 * MIB)[0].model.weights == "auto"


@pytest.mark.parametrize("text", ['{"dtype": "float32"}', '{"torch_dtype": "float32"}'])
def test_a_checkpoint_in_float32_needs_no_reason(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert plan_formats(parse_config(""), model, False, 100 * MIB)[1] == ""


def test_a_checkpoint_that_cannot_be_read_is_reported_later(model: Path) -> None:
    (model / "config.json").write_text("[")
    assert plan_formats(parse_config(""), model, False, 100 * MIB)[0].model.dtype == "float32"
