"""Blocks of GGUF's types against the package gguf: equal, not close."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from mmrt.cpu_kernels import block_kernels, packing_kernel
from mmrt.models.checkpoint.gguf_blocks import (
    BLOCKS,
    INT4_TYPES,
    INT8G_TYPES,
    READ_TYPES,
    TYPE_NAMES,
    block_codes,
    block_values,
    whole_numbers,
)
from mmrt.models.checkpoint.gguf_matrices import BlockMatrix, StoredBlocks
from mmrt.models.checkpoint.gguf_orders import Orders, Turned
from mmrt.models.checkpoint.safetensors_files import StoredTensor
from mmrt.tests.models.kept import keep

HALVES = {  # where a block has numbers of 16 bits
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)},
}
QUANTIZED = [name for name in READ_TYPES if BLOCKS[name][0] > 1]


def test_types_are_those_of_the_format() -> None:
    for number, name in TYPE_NAMES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, BLOCKS[name])


def random_rows(name: str) -> np.ndarray:
    """Uint8 [300, bytes of three blocks]."""
    generator = np.random.default_rng(0)
    num_rows, num_blocks, num_bytes = 300, 3, BLOCKS[name][1]
    blocks = generator.integers(0, 256, (num_rows * num_blocks, num_bytes), dtype=np.uint8)
    for place in HALVES.get(name, ()):
        halves = generator.normal(0, 0.02, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = halves[:, None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = np.arange(len(blocks)) % 200  # exponents, the smallest among them
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("name", QUANTIZED)
def test_random_blocks_have_the_values_of_the_package(name: str) -> None:
    rows = random_rows(name)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    assert np.array_equal(block_values(torch.from_numpy(rows), name).numpy(), expected)


@pytest.mark.parametrize("name", INT4_TYPES)
def test_codes_say_the_same_values(name: str) -> None:
    rows = torch.from_numpy(random_rows(name))
    codes, scales, shifts = block_codes(rows, name)
    values = (codes.view(*scales.shape, 32).double() - 8) * scales.unsqueeze(2) + shifts.unsqueeze(2)
    torch.testing.assert_close(values.flatten(1).float(), block_values(rows, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", INT8G_TYPES)
def test_whole_numbers_say_the_same_values(name: str) -> None:
    rows = torch.from_numpy(random_rows(name))
    codes, scales = whole_numbers(rows, name)
    assert codes.dtype == torch.int8 and codes.shape == (len(rows), 32 * scales.shape[1])
    assert torch.equal((codes.view(*scales.shape, 32) * scales.unsqueeze(2)).flatten(1), block_values(rows, name))


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_numbers_are_themselves(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(5, 7).to(dtype)
    assert torch.equal(block_values(values.view(torch.uint8), name), values.float())


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("form", ["int4", "int8g", "bfloat16"])
def test_matrices_are_written_alike_without_kernels(kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, and with rows in another order."""
    blocks = torch.from_numpy(random_rows(kind)[:64])
    shape = 64, blocks.shape[1] // BLOCKS[kind][1] * 256
    matrix = BlockMatrix(
        StoredBlocks("m", StoredTensor(tmp_path, kind, shape, 0, blocks.numel()), Orders(rows=Turned(2))), blocks.flatten()
    )

    def written() -> dict[str, torch.Tensor]:
        found = keep(torch.zeros(shape), form)
        for part in (slice(0, 32), slice(32, 64)):
            scales = found.get("w.scales")
            matrix.write(part, found["w"][part], None if scales is None else scales[part])
        return found

    ours = written()
    for module in (block_kernels, packing_kernel):
        monkeypatch.setattr(module, "has_kernel", lambda *_: False)
    theirs = written()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("form", ["int4", "int8g", "bfloat16"])
@pytest.mark.parametrize(("kind", "place"), [("Q2_K", 82), ("Q3_K", 108), ("Q4_K", 0), ("Q4_K", 2), ("Q6_K", 208)])
def test_steps_that_are_not_finite_are_refused(kind: str, place: int, form: str, tmp_path: Path) -> None:
    blocks = torch.from_numpy(random_rows(kind)[:32].copy())
    blocks[7, place : place + 2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # infinity
    shape = 32, blocks.shape[1] // BLOCKS[kind][1] * 256
    matrix = BlockMatrix(StoredBlocks("m", StoredTensor(tmp_path, kind, shape, 0, blocks.numel())), blocks.flatten())
    found = keep(torch.zeros(shape), form)
    with pytest.raises(ValueError, match="has a (value|scale) that is not finite"):
        matrix.write(slice(0, 32), found["w"], found.get("w.scales"))
