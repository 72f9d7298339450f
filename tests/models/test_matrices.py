"""Matrices in each format: their products against exact ones, what a row may take from its neighbours, and whole models in them."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmrt.cpu_kernels import int4_kernels, int8_kernels, int8_rows, int8g_kernels, pair_kernels, unpacking_kernel
from mmrt.cpu_kernels.int8_rows import FULL, PAIRS, level_of_rows, round_rows
from mmrt.cpu_kernels.kernel import has_bfloat16
from mmrt.cpu_kernels.rounding_kernel import has_kernel, round_to
from mmrt.models.architecture import WeightFormat
from mmrt.models.checkpoint import int4, int8g
from mmrt.models.lm import matrices
from mmrt.models.lm.matrices import Int8Matrix, matrix_of
from mmrt.schema.weight_layout import PACKED_ROWS
from mmrt.tests.models.guarded import guarded
from mmrt.tests.models.kept import GROUP, exact, keep
from mmrt.tests.models.logits import our_logits

Loaded = Any  # conftest.Loaded

# Of a product's standard deviation, against the exact product of the values that are kept.
ROUNDING = {("float32", torch.float32): 1e-5, ("bfloat16", torch.float32): 1e-5, ("float16", torch.float32): 1e-5}
ROUNDING |= {(form, dtype): 0.04 for form in ("int8g", "int4") for dtype in (torch.float32, torch.bfloat16)}
ROUNDING |= {("int8", dtype): {FULL: 0.06, PAIRS: 0.12}[level_of_rows()] for dtype in (torch.float32, torch.bfloat16)}
ROUNDING |= {("bfloat16", torch.bfloat16): 0.04}
PACKED = ("int8g", "int4")
NUM_ROWS = (1, 2, 3, 4, 5, 10, 11, 16, 17, 48, 49, 300)


def make(form: str, num_values: int, num_inputs: int, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """A matrix and its exact values; in int4 and int8g larger, if it does not divide into blocks."""
    if form in PACKED:
        num_values, num_inputs = -(-num_values // PACKED_ROWS) * PACKED_ROWS, -(-num_inputs // GROUP) * GROUP
    weights = keep(torch.randn(num_values, num_inputs, generator=torch.Generator().manual_seed(num_values)) * 0.04, form)
    return matrix_of(weights, "w"), exact(weights)


@pytest.mark.many
@pytest.mark.parametrize(("form", "dtype"), ROUNDING, ids=lambda value: str(value).removeprefix("torch."))
@pytest.mark.parametrize("shape", [(1, 8), (96, 64), (1216, 128), (777, 352), (1500, 1024)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_products_are_exact_but_for_rounding(form: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    matrix, reference = make(form, *shape, dtype)
    bias = torch.randn(len(reference)).to(dtype)
    for num_rows in NUM_ROWS:
        x = torch.randn(num_rows, reference.shape[1]).to(dtype)
        expected = x.double() @ reference.T
        scale = 0.04 * reference.shape[1] ** 0.5  # the standard deviation
        for added in (None, bias):
            found = matrix.product(x, added)
            assert found.dtype == dtype and found.is_contiguous()
            error = (found.double() - expected - (0 if added is None else added.double())).abs().max() / scale
            assert error < ROUNDING[form, dtype] * (1 + (added is not None)), (num_rows, float(error))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "int8", "int8g"])
def test_parts_and_lookups(form: str) -> None:
    matrix, reference = make(form, 200, 64, torch.float32)
    x = torch.randn(3, 64)
    torch.testing.assert_close(matrix.rows(64, 96).product(x), matrix.product(x)[:, 64:160], rtol=1e-5, atol=1e-5)
    ids = torch.tensor([[0, 199], [7, 7]])
    for dtype in (torch.float32, torch.bfloat16) if form != "float32" else (torch.float32,):
        found = matrix.lookup(ids, dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), reference[ids], rtol=1e-6 if dtype == torch.float32 else 0.004, atol=0)


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_packed_matrix(form: str, dtype: torch.dtype) -> None:
    """K and V of a fused projection, for instance."""
    matrix, _ = make(form, 256, 96, dtype)
    for num_rows in (3, 40):
        x = torch.randn(num_rows, 96).to(dtype)
        torch.testing.assert_close(matrix.rows(64, 96).product(x), matrix.product(x)[:, 64:160])


@pytest.mark.parametrize("form", ["bfloat16", "float16", "int8", "int8g", "int4"])
@pytest.mark.parametrize("num_rows", [2, 16, 100])
@pytest.mark.parametrize("outlier", [1e4, float("inf"), float("nan")])
def test_an_outlier_stays_in_its_row(form: str, num_rows: int, outlier: float) -> None:
    """One request's huge, infinite or missing number changes not a bit of its neighbours' results."""
    matrix, _ = make(form, 500, 256, torch.float32)
    x = torch.randn(num_rows, 256)
    before = matrix.product(x)
    x[1, 17] = outlier
    after = matrix.product(x)
    others = [row for row in range(num_rows) if row != 1]
    assert torch.equal(after[others], before[others])
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16"])
def test_a_row_is_computed_alike_beside_few_and_many(form: str) -> None:
    """A cached prefix changes how many rows a prompt has. Sums of another order may round another way, once in a thousand numbers."""
    matrix, _ = make(form, 500, 1024, torch.float32)
    x = torch.randn(200, 1024, generator=torch.Generator().manual_seed(0))
    beside_many = matrix.product(x)
    for num_rows in NUM_ROWS[:-1]:
        alone = matrix.product(x[:num_rows])
        is_alike = torch.isclose(alone, beside_many[:num_rows], rtol=1e-5, atol=1e-5)
        assert is_alike.double().mean() > 0.998, num_rows


@pytest.fixture
def w8a8() -> tuple[Any, Tensor]:
    """A matrix in int8, 500 x 1024, with its exact values."""
    return make("int8", 500, 1024, torch.float32)


@pytest.mark.parametrize("form", ["int8", "int8g", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_by_integers_are_the_same_bits_in_any_batch(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows are integers, too, unless values in blocks are faster (with AMX)."""
    monkeypatch.setattr(matrices, "_has_amx", lambda: False)
    matrix, _ = make(form, 500, 1024, torch.float32)
    x = torch.randn(200, 1024, generator=torch.Generator().manual_seed(0))
    x[7, 3] = x[40, 900] = 300.0
    x = x.to(dtype)
    beside_many = matrix.product(x)
    for num_rows in NUM_ROWS[:-1]:
        assert torch.equal(matrix.product(x[:num_rows]), beside_many[:num_rows]), num_rows
        assert torch.equal(matrix.product(x[7 : 7 + num_rows]), beside_many[7 : 7 + num_rows]), num_rows


@pytest.mark.parametrize("codes", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("columns", [64, 1024, 18944])
def test_sums_of_whole_numbers_are_exact_however_large(codes: torch.dtype, columns: int) -> None:
    """Beyond 2^24 float32 has no longer all whole numbers."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (50, columns), generator=generator).to(torch.int8)
    values[0], values[1] = 127, -127
    if not int8_kernels.most_rows(values, codes):
        pytest.skip("this processor has no kernels")
    least, most = (0, 128) if codes == torch.uint8 else (-127, 127)
    for num_rows in (1, 2, 3, 4, 7):
        rows = torch.randint(least, most + 1, (num_rows, columns), generator=generator)
        rows[0] = most
        added = torch.randint(-1000, 1000, (50,), generator=generator, dtype=torch.int32)
        steps, row_steps = torch.rand(50, generator=generator), torch.rand(num_rows, 1, generator=generator)
        sums = rows @ values.long().T + added
        assert columns < 18944 or sums.abs().max() > 1 << 28
        assert torch.equal(int8_kernels.multiply(rows.to(codes), values, added, steps, row_steps), sums.float() * steps * row_steps)


def test_long_rows_by_integers_are_the_same_bits_in_any_batch() -> None:
    x = 2 + torch.randn(80, 18944, generator=torch.Generator().manual_seed(0))
    weights = 2 + torch.randn(64, 18944, generator=torch.Generator().manual_seed(1))
    steps = weights.abs().amax(1) / 127
    matrix = Int8Matrix((weights / steps[:, None]).round().to(torch.int8), steps.bfloat16())
    beside_many = matrix.product(x)
    assert (beside_many.abs() / (x.abs().amax(1, keepdim=True) / 127) / steps).max() > 1 << 24
    for num_rows in (1, 2, 3, 4, 5, 16):
        assert torch.equal(matrix.product(x[:num_rows]), beside_many[:num_rows]), num_rows


@pytest.mark.parametrize("columns", [64, 128, 256, 4096])
def test_an_outlier_is_split_in_short_rows_as_in_long_ones(columns: int) -> None:
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    x[1, 5], x[2, 5] = 500.0, 8.0
    split = round_rows(x, FULL.most, 0).split
    assert split is not None and split.tolist() == [1]


def test_w8a8_keeps_what_lies_beside_an_outlier_in_its_row(w8a8: tuple[Any, Tensor]) -> None:
    """Of 127 steps for 500, every other number would be less than half of one."""
    matrix, reference = w8a8
    x = torch.randn(20, 1024, generator=torch.Generator().manual_seed(0))
    x[3, 17] = 500.0
    error = (matrix.product(x).double() - x.double() @ reference.T).std(1) / (x.double() @ reference.T).std(1)
    assert error[3] < {FULL: 0.001, PAIRS: 0.003}[level_of_rows()]
    assert error.max() < {FULL: 0.01, PAIRS: 0.02}[level_of_rows()]


@pytest.mark.parametrize("most", [FULL.most, PAIRS.most])
def test_rows_in_int8(most: int) -> None:
    """Zeros, small and large numbers, and an outlier: a row is its parts' sum."""
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(0))
    x[1], x[2], x[3, 5], x[4] = 0, 1e-15, 900, 1e15 * x[4]
    bytes_, steps, split = round_rows(x, most, 0)
    codes = bytes_.float()
    assert split is not None and split.tolist() == [3]
    assert codes.shape == (7, 512) and codes.abs().max() == most
    found = codes[:6] * steps[:6]
    found[3] += codes[6] * steps[6]
    assert ((found - x).abs().amax(1) <= steps[[0, 1, 2, 6, 4, 5], 0] * 0.501).all()


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int8g", "int4"])
def test_rows_that_do_not_fit_are_refused(form: str) -> None:
    matrix, _ = make(form, 192, 128, torch.float32)
    for num_rows in (1, 200):
        with pytest.raises((ValueError, RuntimeError), match="64"):
            matrix.product(torch.zeros(num_rows, 64))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int8g", "int4"])
def test_a_product_of_no_rows(form: str) -> None:
    matrix, reference = make(form, 192, 128, torch.float32)
    assert matrix.product(torch.zeros(0, 128), torch.zeros(192)).shape == (0, len(reference))


_LENGTHS = """
from mmrt.tests.models.test_matrices import make, torch
for form in ("bfloat16", "int8", "float16"):
    matrix = make(form, 192, 128, torch.bfloat16)[0]
    for num_rows in range(200, 260):
        matrix.product(torch.zeros(num_rows, 128, dtype=torch.bfloat16))
"""


def test_no_length_of_a_prompt_is_compiled() -> None:
    """oneDNN says when it makes machine code for a product. 200 to 259 rows are few numbers of rows for it."""
    environment = {**os.environ, "ONEDNN_VERBOSE": "profile_create"}
    said = subprocess.check_output([sys.executable, "-c", _LENGTHS], env=environment, text=True)
    made = [line.split(",")[-2] for line in said.splitlines() if "create:cache_miss" in line and "matmul" in line]
    sizes = {int(shapes.split("x")[0]) for shapes in made}
    assert sizes <= {224, 256, 288}
    assert sizes or not has_bfloat16(), "with AVX2 alone oneDNN multiplies nothing here"


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where AMX multiplies bfloat16."""
    monkeypatch.setattr(matrices, "_has_amx", lambda: True)
    monkeypatch.setattr(matrices, "fastest", lambda name, candidates: [candidate() for candidate in candidates.values()] and "blocks")
    matrices._most_in_integers.cache_clear()
    yield
    matrices._most_in_integers.cache_clear()


@pytest.mark.parametrize("form", PACKED)
def test_many_rows_by_blocks_of_values(form: str, by_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as exact as a matrix in bfloat16; few rows, and rows in float32, are multiplied in integers."""
    matrix, reference = make(form, 1500, 1024, torch.bfloat16)
    x = torch.randn(100, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected, scale = x.double() @ reference.T, 0.04 * 1024**0.5
    found = matrix.product(x, torch.ones(len(reference)).bfloat16())
    assert (found.double() - 1 - expected).abs().max() / scale < 2 * ROUNDING["bfloat16", torch.bfloat16]
    if matrix._most_in_integers != 64:
        pytest.skip("this processor has no kernels")
    integers, calls = int4_kernels if form == "int4" else int8g_kernels, []
    multiply = integers.multiply
    monkeypatch.setattr(integers, "multiply", lambda x, *rest: calls.append(x.shape[0]) or multiply(x, *rest))
    for rows in (x[:64], x, x.float()):
        error = (matrix.product(rows).double() - expected[: len(rows)]).abs().max() / scale
        assert error < ROUNDING[form, torch.bfloat16]
    assert calls == [64, 100]


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("shape", [(32, 32), (96, 352), (160, 1024)], ids=str)
def test_values_are_unpacked_as_by_torch(form: str, shape: tuple[int, int]) -> None:
    """Rounded once; in groups of any size."""
    num_groups = shape[1] // 32 if form == "int8g" else shape[1] // GROUP
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (shape[0], shape[1] // (2 if form == "int4" else 1)), generator=generator, dtype=torch.uint8)
    scales = torch.randn((shape[0], num_groups) + (2,) * (form == "int4"), generator=generator).bfloat16()
    packed, expected = codes if form == "int4" else codes.view(torch.int8), torch.empty(shape)
    if not unpacking_kernel.has_kernel(packed):
        pytest.skip("this processor has no kernels")
    (int4 if form == "int4" else int8g).unpack(packed, scales, expected)
    packed, scales, found = (guarded(tensor, at_end=True) for tensor in (packed, scales, torch.full(shape, torch.nan).bfloat16()))
    unpacking_kernel.unpack(packed, scales, found)
    torch.testing.assert_close(found, expected.bfloat16(), rtol=0.008, atol=1e-6)
    assert (found == expected.bfloat16()).double().mean() > 0.999, "a sum is rounded once, by torch twice"


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_rows_of_zeros_behind_others_change_no_bit(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch multiplies them, as it does beside AMX."""
    monkeypatch.setattr(pair_kernels, "can_multiply", lambda values: False)
    matrix, _ = make(form, 192, 128, torch.bfloat16)
    x = torch.randn(300, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for num_rows in (17, 33, 100, 200, 257):
        found = matrix.product(x[:num_rows], torch.ones(192).bfloat16())
        assert found.shape == (num_rows, 192) and found.is_contiguous()
        whole = F.pad(x[:num_rows], (0, 0, 0, -num_rows % 64))
        assert torch.equal(found, matrix.product(whole, torch.ones(192).bfloat16())[:num_rows]), num_rows


@pytest.mark.parametrize("form", PACKED)
def test_packed_matrices_without_kernels(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch, with activations as they are."""
    for kernels in (int4_kernels, int8g_kernels):
        monkeypatch.setattr(kernels, "has_kernel", lambda packed: False)
    matrix, reference = make(form, 1504, 512, torch.float32)
    x = torch.randn(3, 512)
    torch.testing.assert_close(matrix.product(x).double(), x.double() @ reference.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["int8", "int8g", "int4"])
@pytest.mark.parametrize("factor", [1e-26, 1e-20, 1e20, 1e30])
def test_tiny_and_huge_rows_are_as_exact_as_others(form: str, factor: float) -> None:
    """Their squares are too small or too large for float32. An outlier does not spoil the numbers beside it there, either."""
    matrix, reference = make(form, 512, 1024, torch.float32)
    x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(0))
    x[1, 17] = 500.0
    x *= factor
    error = (matrix.product(x).double() - x.double() @ reference.T).std(1) / (x.double() @ reference.T).std(1)
    assert error.max() < 0.02
    if form == "int8":
        split = round_rows(x, FULL.most, 0).split
        assert split is not None and split.tolist() == [1]


@pytest.mark.parametrize(("most", "shift"), [(127, 0), (64, 64), (64, -64)])
def test_rows_are_rounded_as_by_torch(most: int, shift: int) -> None:
    """By the kernel and by torch's operations, which take rows that are no whole vectors."""
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
    if not has_kernel(x):
        pytest.skip("this processor has no kernels")
    x[1], x[2], x[3, 5], x[4], x[5, 5] = 0, 1e-35, 900, 1e15 * x[4], float("inf")
    x[6, 7] = float("nan")
    codes, steps, are_split = round_to(x, most, 1e-30, shift, 16 / 512**0.5)
    expected = int8_rows._round_to(x, most, 1e-30, shift, 16 / 512**0.5)
    torch.testing.assert_close(steps, expected[1], rtol=0, atol=0, equal_nan=True)
    assert are_split.nonzero().flatten().tolist() == expected[2].nonzero().flatten().tolist() == [3]
    finite = [row for row in range(40) if row not in (5, 6)]
    assert torch.equal(codes[finite], expected[0][finite])


@given(
    num_rows=st.integers(1, 20),
    shape=st.tuples(st.integers(2, 100), st.integers(2, 300)),  # of one column torch's products are wrong
    spread=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_sums_of_int8_are_exact(num_rows: int, shape: tuple[int, int], spread: float, seed: int) -> None:
    """Also where all numbers are the largest that there are, of one sign or of both: with AVX2 a pair of products just fits into 16
    bits. Activations are whole numbers, so nothing is rounded."""
    generator = torch.Generator().manual_seed(seed)
    most = level_of_rows().most

    def numbers(rows: int, largest: int) -> Tensor:
        drawn = torch.randint(-largest, largest + 1, (rows, shape[1]), generator=generator)
        ends = largest * torch.randint(0, 2, drawn.shape, generator=generator).mul(2).sub(1)
        found = torch.where(torch.rand(drawn.shape, generator=generator) < spread, drawn, ends if seed % 2 else ends[:, :1])
        found[:, 0] = largest
        return found

    x, values = numbers(num_rows, most), numbers(shape[0], 127)
    found = matrix_of({"w": values.to(torch.int8), "w.scales": torch.ones(shape[0]).bfloat16()}, "w").product(x.float())
    assert torch.equal(found, (x @ values.T).float())


@pytest.mark.parametrize(
    ("isa", "rest"), [("AVX2", {"ATEN_CPU_CAPABILITY": "avx2"}), pytest.param("AVX512_CORE", {}, marks=pytest.mark.slow)]
)
def test_without_instructions_for_exact_sums(isa: str, rest: dict[str, str]) -> None:
    """These tests again, as oneDNN adds up on processors without VNNI."""
    names = "sums_of_int8 or w8a8 or (int8 and (products or outlier or alike or bits) and not 1x8)"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__, "-k", f"({names}) and not without"]
    environment = {**os.environ, **rest, "ONEDNN_MAX_CPU_ISA": isa, "MKL_ENABLE_INSTRUCTIONS": isa.split("_")[0]}
    program = "from mmrt.cpu_kernels.int8_rows import level_of_rows; print(level_of_rows().most)"
    level = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    if int(level) == FULL.most:
        pytest.skip("sums are exact here without such instructions, too")
    tests = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert tests.returncode == 0, tests.stdout


# Of logits whose standard deviation is 1; see docs/performance.md. Flips of 48.
LIMITS: dict[WeightFormat, tuple[float, float]] = {
    "bfloat16": (0.04, 0.5),
    "float16": (0.002, 0.05),
    "int8": (0.1, 1.0) if level_of_rows() == FULL else (0.2, 2.0),
    "int8g": (0.1, 1.0),
    "int4": (1.0, 9.0),
}


@pytest.mark.parametrize("form", LIMITS)
def test_logits_are_close_to_transformers(models: Callable[[str], Loaded], form: WeightFormat) -> None:
    """The tiny checkpoint is in float32: float16 and bfloat16 round it."""
    loaded = models("qwen2_5_vl")
    with torch.inference_mode():
        ids = torch.randint(0, 1000, (4, 52), generator=torch.Generator().manual_seed(1))
        expected = loaded.reference(input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1])).logits[:, 39:]
        logits = our_logits(loaded.path, msgspec.structs.replace(loaded.config, weights=form), ids, 40)
    error = (logits - expected).abs() / expected.std()
    assert (error.mean(), error.max()) < LIMITS[form], (error.mean(), error.max())
