"""Matrices in each format: their products against exact ones, what a row may take from its neighbours, and whole models in them."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from mmrt.bench.accuracy import our_logits
from mmrt.models.architecture import WeightFormat
from mmrt.models.checkpoint.int4 import unpack
from mmrt.models.checkpoint.narrowing import narrow
from mmrt.models.checkpoint.weight_specs import INT4_ROWS
from mmrt.models.lm.matrices import matrix_of

Loaded = Any  # conftest.Loaded

# Of a product's standard deviation, against the exact product of the values that are kept.
ROUNDING = {("float32", torch.float32): 1e-5, ("bfloat16", torch.float32): 1e-5, ("float16", torch.float32): 1e-5}
ROUNDING |= {(form, dtype): 0.04 for form in ("int8", "int4") for dtype in (torch.float32, torch.bfloat16)}
ROUNDING |= {("bfloat16", torch.bfloat16): 0.04}
INT4_GROUP = 32
NUM_ROWS = (1, 2, 3, 4, 5, 10, 11, 16, 17, 48, 49, 300)


def kept(values: Tensor, form: str) -> dict[str, Tensor]:
    """The weights of a model with one matrix, "w"."""
    if form == "int4":
        rows, columns = values.shape
        packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
        groups = torch.empty(columns // INT4_GROUP, rows, 2, dtype=torch.bfloat16)
        narrow(values, packed, groups)
        return {"w": packed, "w.scales": groups}
    target = torch.empty(values.shape, dtype=getattr(torch, form))
    if form != "int8":
        narrow(values, target)
        return {"w": target}
    scales = torch.empty(len(values), dtype=torch.bfloat16)
    narrow(values, target, scales)
    return {"w": target, "w.scales": scales}


def exact(weights: dict[str, Tensor]) -> Tensor:
    """The matrix that is kept, float64."""
    scales = weights.get("w.scales")
    if weights["w"].dtype == torch.uint8:
        assert scales is not None
        out = torch.empty(2 * weights["w"].shape[1], weights["w"].shape[0], dtype=torch.float64)
        unpack(weights["w"], scales, out)
        return out.T
    return weights["w"].double() if scales is None else weights["w"].double() * scales.double().unsqueeze(1)


def make(form: str, num_values: int, num_inputs: int, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """A matrix and its exact values; in int4 larger, if it does not divide into blocks."""
    if form == "int4":
        num_values, num_inputs = -(-num_values // INT4_ROWS) * INT4_ROWS, -(-num_inputs // INT4_GROUP) * INT4_GROUP
    weights = kept(torch.randn(num_values, num_inputs, generator=torch.Generator().manual_seed(num_values)) * 0.04, form)
    return matrix_of(weights, "w", dtype), exact(weights)


@pytest.mark.parametrize(("form", "dtype"), ROUNDING, ids=lambda value: str(value).removeprefix("torch."))
@pytest.mark.parametrize("shape", [(1, 8), (96, 64), (1216, 128), (777, 352), (1500, 1024)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_products_are_exact_but_for_rounding(form: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
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


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "int8"])
def test_parts_and_lookups(form: str) -> None:
    matrix, reference = make(form, 200, 64, torch.float32)
    x = torch.randn(3, 64)
    torch.testing.assert_close(matrix.rows_from(72).product(x), matrix.product(x)[:, 72:], rtol=1e-5, atol=1e-5)
    ids = torch.tensor([0, 199, 7, 7])
    for dtype in (torch.float32, torch.bfloat16) if form != "float32" else (torch.float32,):
        found = matrix.lookup(ids, dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), reference[ids], rtol=1e-6 if dtype == torch.float32 else 0.004, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_matrix_in_int4(dtype: torch.dtype) -> None:
    """K and V of a fused projection, for instance."""
    matrix, _ = make("int4", 256, 96, dtype)
    for num_rows in (3, 40):
        x = torch.randn(num_rows, 96).to(dtype)
        torch.testing.assert_close(matrix.rows_from(192).product(x), matrix.product(x)[:, 192:])


@pytest.mark.parametrize("form", ["bfloat16", "float16", "int8", "int4"])
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


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_a_row_is_computed_alike_beside_few_and_many(form: str) -> None:
    """A cached prefix changes how many rows a prompt has. Sums of another order may round another way, once in a thousand numbers."""
    matrix, _ = make(form, 500, 1024, torch.float32)
    x = torch.randn(200, 1024, generator=torch.Generator().manual_seed(0))
    beside_many = matrix.product(x)
    for num_rows in NUM_ROWS[:-1]:
        alone = matrix.product(x[:num_rows])
        is_alike = torch.isclose(alone, beside_many[:num_rows], rtol=1e-5, atol=1e-5)
        assert is_alike.double().mean() > 0.998, num_rows


# Of logits whose standard deviation is 1; see docs/performance.md. Flips of 48.
LIMITS: dict[WeightFormat, tuple[float, float]] = {
    "bfloat16": (0.04, 0.5),
    "float16": (0.002, 0.05),
    "int8": (0.1, 1.0),
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
