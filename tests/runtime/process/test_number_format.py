"""The dtype that suits a processor: described by files."""

from pathlib import Path

import pytest

from mmrt.runtime.config import parse_config
from mmrt.runtime.process.number_format import has_bfloat16_units, plan_dtype

X86 = "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 f16c {}\nbogomips\t: 1\n"
MIB = 1 << 20


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
    ("text", "has_units", "free_mib", "dtype", "reason"),
    [
        ("", False, 100, "float32", "the processor has no bfloat16 units"),
        ("", False, 8, "float32", "the processor has no bfloat16 units"),
        ("", False, 7, "auto", "the processor has no bfloat16 units, but float32 weights would take 4 of 7 MiB"),
        ("", True, 100, "auto", ""),
        ('[model]\ndtype = "bfloat16"\n', False, 100, "bfloat16", ""),
        ('[model]\ndevice = "cuda"\n', False, 100, "auto", ""),
    ],
)
def test_the_dtype(model: Path, text: str, has_units: bool, free_mib: int, dtype: str, reason: str) -> None:
    config, why = plan_dtype(parse_config(text), model, has_units, free_mib * MIB)
    assert (config.model.dtype, why) == (dtype, reason)


@pytest.mark.parametrize("text", ['{"dtype": "float32"}', '{"torch_dtype": "float32"}'])
def test_a_checkpoint_in_float32_needs_no_reason(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert plan_dtype(parse_config(""), model, False, 100 * MIB)[1] == ""


def test_a_checkpoint_that_cannot_be_read_is_reported_later(model: Path) -> None:
    (model / "config.json").write_text("[")
    assert plan_dtype(parse_config(""), model, False, 100 * MIB)[0].model.dtype == "float32"
