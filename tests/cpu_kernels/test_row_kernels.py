"""Products of few rows against float64, for each kind of processor that has kernels. AVX2 is what a process is told that it has."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmrt.cpu_kernels import int4_kernels, int8_kernels, int8g_kernels, kernel, part_rows, row_kernels
from mmrt.cpu_kernels.processor import processor_flags
from mmrt.models.checkpoint import int8g
from mmrt.models.checkpoint.int4 import quantize
from mmrt.models.checkpoint.narrowing import narrow
from mmrt.tests.models.kept import keep
from mmrt.tests.settings import examples

CAPABILITY = torch.backends.cpu.get_cpu_capability()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")


def matrix(num_values: int, num_columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(num_values, num_columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int4_matrix(num_values: int, num_columns: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """A packed matrix, its scales and zeros, and its values in float64."""
    packed = torch.empty(num_values, num_columns // 2, dtype=torch.uint8)
    scales = torch.empty(num_values, num_columns // group, 2, dtype=torch.bfloat16)
    values = matrix(num_values, num_columns, torch.float32)
    codes, steps, zeros = (part.double() for part in quantize(values.clone(), num_columns // group))
    narrow(values, packed, scales)
    exact = (codes.view(num_values, -1, group) - 8) * steps.unsqueeze(2) + zeros.unsqueeze(2)
    return packed, scales, exact.flatten(1)


def rounded(x: Tensor) -> Tensor:
    """Rows as they are multiplied with a matrix in int4: each 32 columns in 127 steps, float64. Halves of a step may go either way."""
    codes, steps = part_rows.round_rows(x)
    values = codes.view(*steps.shape[:2], 32) * steps[..., :1].double()
    assert ((values - x.view_as(values)).abs() <= 0.50001 * steps[..., :1]).all()
    return values.flatten(1)


def assert_product(found: Tensor, x: Tensor, exact: Tensor) -> None:
    """Sums of float32 are off by some units in the last place of what they add up."""
    added = x.double().abs() @ exact.abs().T
    assert found.dtype == torch.float32 and found.shape == added.shape
    assert ((found.double() - x.double() @ exact.T).abs() <= 1e-6 * added + 1e-30).all()


@pytest.mark.parametrize(("has_amx", "has_bfloat16", "most"), [(True, True, 4), (False, True, 16), (False, False, 48)])
def test_bfloat16_is_left_to_units_that_multiply_it(
    has_amx: bool, has_bfloat16: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    found = {dtype: row_kernels.most_rows(matrix(2, 64, dtype, 0), torch.bfloat16) for dtype in (torch.bfloat16, torch.float32)}
    assert found == {torch.bfloat16: most, torch.float32: 48}
    assert row_kernels.most_rows(matrix(2, 64, torch.bfloat16, 0)) == 48  # activations in float32


@settings(max_examples=examples(60), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(1, 13),
    num_values=st.integers(1, 150),
    vectors=st.integers(1, 9),
    narrow_x=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_are_exact(dtype: torch.dtype, num_rows: int, num_values: int, vectors: int, narrow_x: bool, seed: int) -> None:
    values = matrix(num_values, 16 * vectors, dtype, seed)
    x = torch.randn(num_rows, 16 * vectors, generator=torch.Generator().manual_seed(seed)).to(
        torch.bfloat16 if narrow_x else torch.float32
    )
    assert row_kernels.most_rows(values) > 0
    assert_product(row_kernels.multiply(x, values), x, values.double())


@settings(max_examples=examples(30), deadline=None)
@given(
    num_rows=st.integers(1, 13),
    blocks=st.integers(1, 4),
    groups=st.integers(1, 4),
    group=st.sampled_from([32, 64, 96, 128]),
    seed=st.integers(0, 99),
)
def test_products_with_int4_are_exact(num_rows: int, blocks: int, groups: int, group: int, seed: int) -> None:
    packed, scales, exact = int4_matrix(32 * blocks, groups * group, group)
    x = torch.randn(num_rows, groups * group, generator=torch.Generator().manual_seed(seed))
    assert_product(int4_kernels.multiply(x, packed, scales), rounded(x), exact)


@settings(max_examples=examples(30), deadline=None)
@given(num_rows=st.integers(1, 13), blocks=st.integers(1, 4), groups=st.integers(1, 5), seed=st.integers(0, 99))
def test_products_with_int8g_are_exact(num_rows: int, blocks: int, groups: int, seed: int) -> None:
    """Also of codes that are the least that there is, and of zeros."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (32 * blocks, 32 * groups), generator=generator).to(torch.int8)
    codes[0], codes[-1, ::3] = -128, 0
    steps = torch.rand(32 * blocks, groups, generator=generator).bfloat16()
    packed, scales = torch.empty_like(codes), torch.empty_like(steps)
    int8g.pack(codes, steps.float(), packed, scales)
    x = torch.randn(num_rows, 32 * groups, generator=generator)
    exact = codes.double() * steps.double().repeat_interleave(32, 1)
    assert_product(int8g_kernels.multiply(x, packed, scales), rounded(x), exact)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("code", [127, -128])
def test_the_largest_sums_with_int8g_are_exact(sign: int, code: int) -> None:
    """A pair of products of 128 and 127 just fits into 16 bits."""
    packed, scales = torch.full((32, 128), code, dtype=torch.int8), torch.ones(32, 4).bfloat16()
    found = int8g_kernels.multiply(torch.full((4, 128), 127.0 * sign), packed, scales)
    assert torch.equal(found, torch.full((4, 32), code * 127 * 128.0 * sign))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_with_int4_are_exact(sign: int) -> None:
    """Eight pairs of products of 15 and 127 just fit into 16 bits."""
    packed = torch.full((32, 64), 255, dtype=torch.uint8)
    scales = torch.tensor([1.0, 8.0]).bfloat16().expand(32, 4, 2).contiguous()
    found = int4_kernels.multiply(torch.full((4, 128), 127.0 * sign), packed, scales)
    assert torch.equal(found, torch.full((4, 32), 15 * 127 * 128.0 * sign))


def test_rows_in_parts() -> None:
    """Zeros, tiny, small, large and missing numbers: each 32 columns by themselves, a missing number in its own part alone."""
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    x[1], x[2], x[3, 5], x[4], x[5, 40] = 0, 1e-35, 900, 1e36 * x[4], float("nan")
    codes, steps = part_rows.round_rows(x)
    parts, found = x.view(6, 3, 32), codes.view(6, 3, 32) * steps[..., :1]
    assert steps[5, 1].isnan().all() and int(steps.isnan().sum()) == 2
    is_whole = ~steps[..., 0].isnan()
    assert ((found - parts).abs().amax(2) <= 0.501 * steps[..., 0])[is_whole].all()
    assert codes[[0, 3, 4]].view(3, 3, 32).abs().amax(2).eq(127).all() and not codes[1:3].any()
    torch.testing.assert_close(steps[..., 1][is_whole], found.sum(2)[is_whole], rtol=1e-4, atol=1e-4)


@settings(max_examples=examples(40), deadline=None)
@given(num_rows=st.integers(1, 13), num_values=st.integers(1, 150), vectors=st.integers(1, 6), seed=st.integers(0, 99))
def test_sums_of_integers_are_exact(num_rows: int, num_values: int, vectors: int, seed: int) -> None:
    """Also where every pair of products is the largest that there is, of either sign."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 129, (num_rows, 64 * vectors), generator=generator, dtype=torch.uint8)
    values = torch.randint(-127, 128, (num_values, 64 * vectors), generator=generator, dtype=torch.int8)
    codes[0], values[0], values[-1] = 128, 127, -127
    assert int8_kernels.most_rows(values, torch.uint8) > 0
    added = torch.randint(-1000, 1000, (num_values,), generator=generator, dtype=torch.int32)
    steps, row_steps = torch.rand(num_values, generator=generator), torch.rand(num_rows, 1, generator=generator)
    expected = (codes.int() @ values.int().T + added).float() * steps * row_steps
    assert torch.equal(int8_kernels.multiply(codes, values, added, steps, row_steps), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bits_in_any_batch_and_team(dtype: torch.dtype) -> None:
    """The matrix has enough rows for several threads, and blocks that do not divide evenly."""
    values = matrix(1500, 256, dtype)
    x = torch.randn(19, 256)
    expected = row_kernels.multiply(x, values)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for first, last in ((0, 1), (3, 5), (4, 7), (1, 5), (2, 7), (5, 19), (0, 19)):
            assert torch.equal(row_kernels.multiply(x[first:last], values), expected[first:last]), (num_threads, first, last)


@pytest.mark.parametrize(("form", "kernels"), [("int8g", int8g_kernels), ("int4", int4_kernels)])
def test_a_row_of_a_packed_matrix_is_the_same_bits_in_any_batch_and_team(form: str, kernels: ModuleType) -> None:
    packed, scales = keep(matrix(640, 256, torch.float32), form).values()
    x = torch.randn(19, 256)
    expected = kernels.multiply(x, packed, scales)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for first, last in ((0, 1), (3, 5), (4, 7), (1, 5), (5, 19), (0, 19)):
            found = kernels.multiply(x[first:last], packed, scales)
            assert torch.equal(found, expected[first:last]), (num_threads, first, last)


def test_activations_may_be_a_part_of_a_wider_tensor() -> None:
    values = matrix(70, 64, torch.float32)
    wide = torch.randn(5, 200)
    assert_product(row_kernels.multiply(wide[:, 100:164], values), wide[:, 100:164], values.double())


def test_matrices_without_a_kernel() -> None:
    for values in (
        matrix(8, 20, torch.float32),  # no whole vectors
        matrix(32, 32, torch.float32).t()[:, :16],  # not contiguous
        torch.zeros(8, 64, dtype=torch.float64),
        torch.zeros(0, 64),
        torch.zeros(8, 64, device="meta"),
    ):
        assert row_kernels.most_rows(values) == 0


@pytest.mark.skipif(CAPABILITY != "AVX512", reason="the other tests ran with less than AVX512")
def test_all_of_this_with_avx2() -> None:
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    arguments = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "mmrt.tests.settings", "-p", "no:cacheprovider"]
    here = Path(__file__).parent
    arguments += [str(here / f"test_{name}.py") for name in ("row_kernels", "panel_kernels", "layer_kernels", "flash_attention")]
    arguments.append(str(here.parent / "models" / "test_attention.py"))
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0 and "1 skipped" in ended.stdout, ended.stdout + ended.stderr


def test_a_processor_without_avx2_has_no_kernels() -> None:
    program = f"from {kernel.__name__} import vector_width; print(vector_width())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    assert subprocess.check_output([sys.executable, "-c", program], env=environment, text=True) == "None\n"


@pytest.fixture
def _asked_anew() -> Iterator[None]:
    kernel.vector_width.cache_clear()
    yield
    kernel.vector_width.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize("missing", ["f16c", "bmi2"])
def test_a_processor_that_hides_instructions_has_no_kernels(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = processor_flags() - {missing}
    monkeypatch.setattr(kernel, "processor_flags", lambda: flags)
    assert kernel.vector_width() is None and not kernel.has_vnni()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_products_do_not_depend_on_the_default_dtype(default: torch.dtype) -> None:
    x, values = matrix(3, 128, torch.float32), matrix(64, 128, torch.bfloat16)
    packed, scales, _ = int4_matrix(64, 128, 32)

    def products() -> tuple[Tensor, Tensor]:
        return row_kernels.multiply(x, values), int4_kernels.multiply(x, packed, scales)

    expected = products()
    torch.set_default_dtype(default)
    try:
        found = products()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
