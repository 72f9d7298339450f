"""Vision attention against the plain reference and torch's own: frames, windows, odd lengths, heads of every size; and rotation."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.tests.settings import examples
from mmrt.tests.triton_kernels.launch_keys import count
from mmrt.triton_kernels.vision_attention import attend, config, reference, rotate

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LAUNCHES = """
import json, torch
from mmrt.tests.triton_kernels.launch_keys import record
from mmrt.triton_kernels.vision_attention import attend

found = record()
for num_tokens in (1, 16, 100, 1024):
    q, k, v = torch.zeros(num_tokens, 3, 16, 80, dtype=torch.bfloat16).unbind(1)
    for num_sequences in (1, 2, 7, 16, 33):
        bounds = torch.zeros(num_sequences + 4, dtype=torch.int32)[3:]
        for max_length in (64, 65, 1024):
            attend(q, k, v, bounds, max_length)
print(json.dumps({name: len(keys) for name, keys in found.items()}))
"""
BEHIND = 3  # tokens behind the last sequence


def bounds_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def fused(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> list[torch.Tensor]:
    """q, k and v as views of one projection. What lies behind the sequences is NaN, as a buffer's end may be."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_tokens + BEHIND, 3, num_heads, head_dim, generator=generator)
    qkv[num_tokens:] = float("nan")
    return list(qkv.to(dtype).to(device).unbind(1))


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    parts = []
    for three in zip(*(tensor[: sum(lengths)].split(list(lengths)) for tensor in (q, k, v)), strict=True):
        heads = [part.float().transpose(0, 1) for part in three]
        parts.append(torch.nn.functional.scaled_dot_product_attention(*heads).transpose(0, 1))
    return torch.cat(parts)


def check(lengths: Sequence[int], head_dim: int, dtype: torch.dtype, device: torch.device, max_length: int, seed: int = 0) -> None:
    q, k, v = fused(sum(lengths), 2, head_dim, dtype, device, seed)
    bounds = bounds_of(lengths, device)
    out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    assert attend(q, k, v, bounds, max_length, out=out) is out
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out[: sum(lengths)].float(), by_torch(q, k, v, lengths), atol=tolerance, rtol=tolerance)
    expected = reference.attend(q, k, v, bounds)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.many
@pytest.mark.parametrize("head_dim", sorted(config.PARTS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_head_size(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    check([100, 1, 130], head_dim, dtype, device, max_length=130)
    check([64, 20, 1], head_dim, dtype, device, max_length=64)


@given(
    lengths=st.lists(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200]), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(6), derandomize=True, deadline=None)
def test_sequences_of_odd_lengths(lengths: list[int], dtype: torch.dtype, seed: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check(lengths, 80, dtype, device, max(65, *lengths), seed)


@given(lengths=st.lists(st.integers(0, 64), min_size=1, max_size=6), max_length=st.sampled_from([0, 64]), seed=st.integers(0, 1000))
@settings(max_examples=examples(6), derandomize=True, deadline=None)
def test_windows_of_odd_lengths(lengths: list[int], max_length: int, seed: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check(lengths, 80, torch.float32, device, max(max_length, *lengths, 1), seed)


@pytest.mark.parametrize("grid", [(1, 16, 16), (2, 10, 22)], ids=str)
def test_windows_of_qwen(device: torch.device, grid: tuple[int, int, int]) -> None:
    """Windows as transformers cuts them: 8 x 8 patches, fewer at the right and lower edge."""
    from transformers.vision_utils import get_vision_window_index

    _, bounds = get_vision_window_index(torch.tensor([grid]), spatial_merge_size=2, window_size=112, patch_size=14)
    lengths = bounds.unique_consecutive().diff().tolist()
    assert sum(lengths) == grid[0] * grid[1] * grid[2] and max(lengths) == config.MAX_WINDOW
    check(lengths, 80, torch.bfloat16, device, max_length=64)


def test_both_kernels_agree(device: torch.device) -> None:
    lengths = [37, 7, 0, 16]
    q, k, v = fused(sum(lengths), 2, 80, torch.float32, device)
    bounds = bounds_of(lengths, device)
    window, tiled = (attend(q, k, v, bounds, max_length)[: sum(lengths)] for max_length in (64, 65))
    torch.testing.assert_close(window, tiled, atol=1e-6, rtol=1e-5)


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    q, k, v = fused(70, 1, 32, torch.float32, device)
    bounds = bounds_of([70], device)
    out = attend(q * 600, k * 100, v, bounds, 70)
    torch.testing.assert_close(out[:70], reference.attend(q * 600, k * 100, v, bounds)[:70], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("max_length", [2, 100])
def test_tokens_beyond_two_billion_elements(device: torch.device, max_length: int) -> None:
    """Addresses are 64 bits wide: 4 GiB of address space of which two tokens are touched."""
    shape, strides = (2, 1, 32), (2**31, 32, 1)
    near = fused(2, 1, 32, torch.bfloat16, device)
    far = [torch.empty(2**31 + 32, dtype=torch.bfloat16, device=device).as_strided(shape, strides) for _ in range(4)]
    for to, source in zip(far, near, strict=False):
        to.copy_(source[:2])
    bounds = bounds_of([2], device)
    out = attend(*far[:3], bounds, max_length, out=far[3].fill_(float("nan")))
    torch.testing.assert_close(out.float(), by_torch(*near, [2]), atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.many
@pytest.mark.parametrize("head_dim", sorted(config.PARTS))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rotation(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    """As transformers turns heads, in place in the fused projection, of which nothing else changes; all heads in a block, and not."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

    for num_tokens, num_heads in ((1, 1), (5, 3), (2, 19)):
        q, k, v = heads = fused(num_tokens, num_heads, head_dim, dtype, device)
        before = [tensor.clone() for tensor in heads]
        cos, sin = angles(num_tokens, head_dim, device)
        rotate(q[:num_tokens], k[:num_tokens], cos, sin)
        whole = [torch.cat((half, half), -1) for half in (cos, sin)]
        by_transformers = apply_rotary_pos_emb_vision(before[0][:num_tokens], before[1][:num_tokens], *whole)
        for turned, old, expected in zip((q, k), before, by_transformers, strict=False):
            torch.testing.assert_close(turned[:num_tokens], expected, atol=TOLERANCE[dtype] / 2, rtol=TOLERANCE[dtype] / 2)
            exact = reference.rotate(old[:num_tokens], cos, sin).to(dtype)
            torch.testing.assert_close(turned[:num_tokens], exact, atol=TOLERANCE[dtype] / 2, rtol=TOLERANCE[dtype] / 2)
            assert turned[num_tokens:].isnan().all()
        torch.testing.assert_close(v, before[2], atol=0, rtol=0, equal_nan=True)


def angles(num_tokens: int, head_dim: int, device: torch.device) -> list[torch.Tensor]:
    """cos and sin."""
    angle = torch.rand(num_tokens, head_dim // 2, generator=torch.Generator().manual_seed(0)) * 100
    return [angle.cos().to(device), angle.sin().to(device)]


def test_rotation_beyond_two_billion_elements(device: torch.device) -> None:
    near = fused(2, 1, 32, torch.bfloat16, device)
    far = [torch.empty(2**31 + 32, dtype=torch.bfloat16, device=device).as_strided((2, 1, 32), (2**31, 32, 1)) for _ in range(2)]
    for to, source in zip(far, near, strict=False):
        to.copy_(source[:2])
    cos, sin = angles(2, 32, device)
    rotate(far[0], far[1], cos, sin)
    for turned, old in zip(far, near, strict=False):
        torch.testing.assert_close(turned.float(), reference.rotate(old[:2], cos, sin), atol=1e-2, rtol=1e-2)


def test_nothing_to_do(device: torch.device) -> None:
    nothing = torch.empty(0, 2, 64, dtype=torch.bfloat16, device=device)
    assert attend(nothing, nothing, nothing, bounds_of([0, 0], device), 1).shape == (0, 2, 64)
    rotate(nothing, nothing, *angles(0, 64, device))
    some = torch.ones(4, 2, 64, dtype=torch.bfloat16, device=device)
    assert attend(some, some, some, bounds_of([], device), 1, out=some) is some
    assert (some == 1).all()


@pytest.mark.slow  # by day in test_warm_up
def test_one_variant_for_frames_and_one_for_windows() -> None:
    assert count(LAUNCHES) == {"sequences_kernel": 1, "windows_kernel": 1}


def _bad(device: torch.device) -> dict[str, Callable[[], object]]:
    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    q, bounds = zeros(4, 2, 64), bounds_of([4], device)
    cos, sin = angles(4, 64, device)
    meta = torch.device("meta")
    return {
        "dimensions": lambda: attend(q[0], q[0], q[0], bounds, 4),
        "dtype": lambda: attend(q.double(), q.double(), q.double(), bounds, 4),
        "head size": lambda: attend(zeros(4, 2, 96), zeros(4, 2, 96), zeros(4, 2, 96), bounds, 4),
        "shape of k": lambda: attend(q, zeros(5, 2, 64), q, bounds, 4),
        "dtype of v": lambda: attend(q, q, q.half(), bounds, 4),
        "device of k": lambda: attend(q, q.to(meta), q, bounds, 4),
        "last stride": lambda: attend(q, zeros(4, 2, 128)[:, :, ::2], q, bounds, 4),
        "stride of heads": lambda: attend(q, zeros(4, 2, 72)[:, :, :64], q, bounds, 4),
        "stride of tokens": lambda: attend(q, q, zeros(4, 136)[:, :128].unflatten(1, (2, 64)), bounds, 4),
        "address": lambda: attend(zeros(4 * 128 + 1)[1:].view(4, 2, 64), q, q, bounds, 4),
        "shape of out": lambda: attend(q, q, q, bounds, 4, out=zeros(3, 2, 64)),
        "dtype of out": lambda: attend(q, q, q, bounds, 4, out=q.float()),
        "dtype of bounds": lambda: attend(q, q, q, bounds.long(), 4),
        "no bounds": lambda: attend(q, q, q, bounds[:0], 4),
        "stride of bounds": lambda: attend(q, q, q, bounds.repeat(4)[::2], 4),
        "device of bounds": lambda: attend(q, q, q, bounds.to(meta), 4),
        "max_length": lambda: attend(q, q, q, bounds, 0),
        "head size of rotation": lambda: rotate(zeros(4, 2, 96), zeros(4, 2, 96), cos, sin),
        "shape of k in rotation": lambda: rotate(q, q[:, :1], cos, sin),
        "stride of k in rotation": lambda: rotate(q, zeros(4, 2, 72)[:, :, :64], cos, sin),
        "shape of cos": lambda: rotate(q, q, cos[:3], sin),
        "dtype of cos": lambda: rotate(q, q, cos.double(), sin),
        "stride of sin": lambda: rotate(q, q, cos, sin.T.contiguous().T),
        "device of sin": lambda: rotate(q, q, cos, sin.to(meta)),
    }


@pytest.mark.parametrize("what", list(_bad(torch.device("cpu"))))
def test_what_does_not_fit_is_refused(device: torch.device, what: str) -> None:
    with pytest.raises(ValueError, match=r"^(q|k|v|out|cu_seqlens|max_length|cos|sin) .*(not|multiple) "):
        _bad(device)[what]()
