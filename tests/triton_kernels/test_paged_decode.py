"""Paged decode against its reference, torch's SDPA and the CPU path."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.models.config import GPU_HEADS
from mmrt.tests.settings import examples
from mmrt.tests.triton_kernels.paged_cache import (
    LAYER,
    NUM_LAYERS,
    TOLERANCES,
    cpu_attention,
    fill,
    hide_before,
    make_cache,
    make_tables,
    poisoned,
)
from mmrt.triton_kernels.paged_decode import DecodeWorkspace, paged_decode, paged_decode_reference, plan_decode
from mmrt.triton_kernels.paged_decode.config import CHUNK_TOKENS, HEAD_DIMS, decode_launch
from mmrt.triton_kernels.paged_decode.reference import gather
from mmrt.triton_kernels.paged_kv import PagedKV

LENGTHS = [0, 1, 16, 97, 700]
DTYPES = [  # of queries and of pages
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.float16, torch.float8_e4m3fn),
]


def make_workspace(
    num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, num_sms: int, device: torch.device
) -> DecodeWorkspace:
    workspace = DecodeWorkspace.allocate(num_rows, num_heads, num_kv_heads, head_dim, num_sms, device)
    for tensor in (workspace.items, workspace.rows):
        tensor.fill_(2**30)
    workspace.partial.fill_(torch.nan)
    workspace.lse.fill_(torch.nan)
    return workspace


def decode(
    q: torch.Tensor, kv: PagedKV, table: torch.Tensor, lengths: list[int], num_sms: int = 4, window: int = 0, **options: Any
) -> torch.Tensor:
    workspace = make_workspace(*q.shape[:2], kv.k_pages.shape[2], q.shape[2], num_sms, q.device)
    plan_decode(torch.tensor(lengths, dtype=torch.int32, device=q.device), workspace, window)
    out = poisoned(*q.shape, dtype=q.dtype, device=q.device)
    assert paged_decode(q, kv, table, workspace, out=out, **options) is out
    return out


def queries(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A slice of a wider projection, as the model's."""
    wide = torch.randn(shape[0], shape[1] + 2, shape[2], generator=torch.Generator().manual_seed(1))
    return wide.to(dtype).to(device)[:, : shape[1]]


@pytest.mark.many
@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
def test_equals_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    kv, table = make_cache(LENGTHS, 2, head_dim, 16, cache_dtype, device)
    q = queries(len(LENGTHS), 6, head_dim, dtype=dtype, device=device)
    expected = paged_decode_reference(q, kv, table, torch.tensor(LENGTHS))
    torch.testing.assert_close(decode(q, kv, table, LENGTHS).float(), expected, rtol=0, atol=TOLERANCES[dtype])


@settings(max_examples=examples(30), derandomize=True, deadline=None)
@given(
    dtypes=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    page_tokens=st.sampled_from([1, 3, 16, 20]),
    heads=st.sampled_from([(1, 1), (5, 1), (4, 2), (17, 1), (14, 2)]),
    head_dim=st.sampled_from(HEAD_DIMS),
    num_sms=st.integers(1, 4),
    window=st.sampled_from([0, 1, 2, 15, 16, 33, 64, 150, 1000]),
    scale=st.sampled_from([0.0, 0.1]),
)
def test_odd_sizes(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    lengths: list[int],
    page_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    num_sms: int,
    window: int,
    scale: float,
) -> None:
    """Pages before a window are nowhere, and their values no numbers."""
    dtype, cache_dtype = dtypes
    num_heads, num_kv_heads = heads
    kv, table = make_cache(lengths, num_kv_heads, head_dim, page_tokens, cache_dtype, device)
    q = queries(len(lengths), num_heads, head_dim, dtype=dtype, device=device)
    expected = paged_decode_reference(q, kv, table, torch.tensor(lengths), window, scale)
    if window:
        hide_before(table, [length - window for length in lengths], page_tokens)
    got = decode(q, kv, table, lengths, num_sms, window, scale=scale)
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=TOLERANCES[dtype])


def test_equals_sdpa(device: torch.device) -> None:
    kv, table = make_cache([150], 2, 64, 16, torch.float32, device)
    q = queries(1, 8, 64, dtype=torch.float32, device=device)
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in gather(kv, table[0], 150))
    expected = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True).squeeze(2)
    torch.testing.assert_close(decode(q, kv, table, [150]), expected, rtol=0, atol=TOLERANCES[torch.float32])


@pytest.mark.parametrize(("window", "scale"), [(0, 0.0), (5, 0.3), (64, 0.0)])
def test_equals_the_cpu_path(window: int, scale: float) -> None:
    device, lengths = torch.device("cuda" if torch.cuda.is_available() else "cpu"), [5, 64, 130]
    generator = torch.Generator().manual_seed(0)
    table, num_pages = make_tables(lengths, 16, generator)
    pool = torch.randn(num_pages, NUM_LAYERS, 16, 2, 2, 32, generator=generator)
    q = torch.randn(3, 6, 32, generator=generator)
    attention = cpu_attention(pool, 6, window, scale)
    attention.begin_decode(torch.tensor(lengths), table.clamp(0).long())
    expected = attention.decode_attend(LAYER, q).view(q.shape)
    layer = pool.to(device)[:, LAYER]
    got = decode(q.to(device), PagedKV(layer[:, :, 0], layer[:, :, 1]), table.to(device), lengths, window=window, scale=scale)
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=TOLERANCES[torch.float32])


@settings(max_examples=examples(12), derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    num_kv_heads=st.integers(1, 8),
    num_sms=st.integers(1, 132),
    window=st.sampled_from([0, 1, 63, 512, 4000]),
)
def test_a_plan_covers_every_row_once(device: torch.device, lengths: list[int], num_kv_heads: int, num_sms: int, window: int) -> None:
    workspace = make_workspace(len(lengths), num_kv_heads, num_kv_heads, 16, num_sms, device)
    plan_decode(torch.tensor(lengths, dtype=torch.int32, device=device), workspace, window)
    firsts = [max(length - window, 0) if window else 0 for length in lengths]
    items = workspace.items.tolist()
    used = [item for item in items if item[0] >= 0]
    assert items[: len(used)] == used and len(used) == workspace.rows[:, 1].sum()
    for row, (length, (first, count)) in enumerate(zip(lengths, workspace.rows.tolist(), strict=True)):
        own = items[first : first + count]
        assert [item[0] for item in own] == [row] * count and own[0][1] == firsts[row] and own[-1][2] == length
        assert all(left[2] == right[1] for left, right in zip(own, own[1:], strict=False))
        assert all(item[3] == (count == 1) for item in own)
        assert all(end > start and (start - firsts[row]) % CHUNK_TOKENS == 0 for _, start, end, _ in own) or length == 0
    shorter = -(-max(end - start for _, start, end, _ in used) // CHUNK_TOKENS) - 1
    if shorter > 0:
        seen = [length - first for length, first in zip(lengths, firsts, strict=True)]
        assert sum(max(-(-length // (CHUNK_TOKENS * shorter)), 1) for length in seen) > len(items), "items could have been shorter"


def test_replays_follow_the_lengths(device: torch.device) -> None:
    """One workspace, one out: as a captured graph has them."""
    kv, table = make_cache([700, 90], 1, 16, 16, torch.float32, device)
    q = queries(2, 4, 16, dtype=torch.float32, device=device)
    workspace = make_workspace(2, 4, 1, 16, 4, device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    for now in ([700, 0], [3, 90], [0, 0], [699, 64]):
        lengths.copy_(torch.tensor(now))
        plan_decode(lengths, workspace)
        out = poisoned(*q.shape, dtype=q.dtype, device=device)
        paged_decode(q, kv, table, workspace, out=out)
        torch.testing.assert_close(out, paged_decode_reference(q, kv, table, lengths), rtol=0, atol=TOLERANCES[torch.float32])


def test_a_row_of_one_item_goes_straight_to_out(device: torch.device) -> None:
    kv, table = make_cache([CHUNK_TOKENS, 1], 1, 16, 16, torch.float32, device)
    q = queries(2, 2, 16, dtype=torch.float32, device=device)
    workspace = make_workspace(2, 2, 1, 16, 2, device)
    plan_decode(torch.tensor([CHUNK_TOKENS, 1], dtype=torch.int32, device=device), workspace)
    out = paged_decode(q, kv, table, workspace)
    assert out.isfinite().all() and workspace.partial.isnan().all() and workspace.lse.isnan().all()


def test_a_row_with_bad_numbers_spoils_no_other(device: torch.device) -> None:
    kv, table = make_cache([40, 40], 1, 16, 16, torch.float32, device)
    q = queries(2, 2, 16, dtype=torch.float32, device=device)
    expected = paged_decode_reference(q, kv, table, torch.tensor([40, 40]))
    kv.k_pages[int(table[0, 1])] = torch.nan
    got = decode(q, kv, table, [40, 40])
    assert got[0].isnan().all()
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=TOLERANCES[torch.float32])


def test_addresses_past_2_to_31(device: torch.device) -> None:
    """Three pages, 2**30 elements apart; only what is touched takes memory."""
    page = 8 * 2 * 16
    memory = torch.empty(2 * 2**30 + 2 * page, dtype=torch.int8, device=device)
    k, v = (memory.as_strided((3, 8, 2, 16), (2**30, 32, 16, 1), offset) for offset in (0, page))
    k_scales, v_scales = torch.zeros(2, 3, 8, 2, device=device)
    kv = PagedKV(k, v, k_scales, v_scales)
    table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32, device=device)
    lengths = [16, 8]
    for row, length in enumerate(lengths):
        fill(kv, table[row], length, torch.Generator().manual_seed(row))
    q = queries(2, 4, 16, dtype=torch.float32, device=device)
    expected = paged_decode_reference(q, kv, table, torch.tensor(lengths))
    torch.testing.assert_close(decode(q, kv, table, lengths), expected, rtol=0, atol=TOLERANCES[torch.float32])


class Call:
    """Arguments that are right, to be made wrong one at a time."""

    def __init__(self) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.kv, self.table = make_cache([20, 5], 2, 32, 16, torch.bfloat16, device)
        self.int8, _ = make_cache([20, 5], 2, 32, 16, torch.int8, device)
        self.q = queries(2, 4, 32, dtype=torch.bfloat16, device=device)
        self.workspace = make_workspace(2, 4, 2, 32, 4, device)

    def __call__(self, **changes: Any) -> torch.Tensor:
        given = {"q": self.q, "kv": self.kv, "block_table": self.table, "workspace": self.workspace} | changes
        return paged_decode(**given)


@pytest.fixture(scope="module")
def call() -> Call:
    return Call()


BAD = {
    "q is torch.float64": lambda c: {"q": c.q.double()},
    "q has shape": lambda c: {"q": c.q[:1]},
    "q has stride 2 in its last axis": lambda c: {"q": c.q.repeat_interleave(2, 2)[..., ::2]},
    "q has stride 136 in axis 0": lambda c: {"q": torch.zeros(2, 136, dtype=torch.bfloat16, device=c.q.device)[:, :128].view(2, 4, 32)},
    "q starts 2 bytes": lambda c: {"q": torch.zeros(257, dtype=torch.bfloat16, device=c.q.device)[1:].view(2, 4, 32)},
    "q is on meta": lambda c: {"q": c.q.to("meta")},
    "k_pages is torch.bfloat16, not one of torch.float16": lambda c: {"q": c.q.half()},
    "k_pages is torch.bfloat16, not one of torch.int8": lambda c: {"kv": PagedKV(*c.kv[:2], *c.int8[2:])},
    "k_pages is torch.int8": lambda c: {"kv": PagedKV(*c.int8[:2])},
    "k_pages has shape": lambda c: {"kv": PagedKV(c.kv.k_pages[..., :16], c.kv.v_pages)},
    "v_pages has shape": lambda c: {"kv": PagedKV(c.kv.k_pages, c.kv.v_pages[1:])},
    "they must be equal": lambda c: {"kv": PagedKV(c.kv.k_pages, c.kv.v_pages.contiguous())},
    "not at least 1": lambda c: {"kv": PagedKV(c.kv.k_pages[:0], c.kv.v_pages[:0])},
    "4 heads of q are no multiple of 3": lambda c: {"kv": PagedKV(*(pages[:, :, [0, 0, 1]] for pages in c.kv[:2]))},
    "one of k_scales and v_scales is missing": lambda c: {"kv": PagedKV(*c.int8[:3])},
    "k_scales has shape": lambda c: {"kv": PagedKV(*c.int8[:2], c.int8.k_scales[1:], c.int8.v_scales)},
    "v_scales is torch.float64": lambda c: {"kv": PagedKV(*c.int8[:3], c.int8.v_scales.double())},
    "k_scales has strides": lambda c: {"kv": PagedKV(*c.int8[:3], c.int8.v_scales.contiguous())},
    "block_table is torch.int64": lambda c: {"block_table": c.table.long()},
    "block_table has shape": lambda c: {"block_table": c.table[:1]},
    "block_table has stride": lambda c: {"block_table": c.table.repeat_interleave(2, 1)[:, ::2]},
    "out is torch.float32": lambda c: {"out": c.q.float()},
    "out has shape": lambda c: {"out": c.q[:1]},
    "out has stride": lambda c: {"out": c.q.repeat_interleave(2, 2)[..., ::2]},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message: str, call: Call) -> None:
    with pytest.raises(ValueError, match=message):
        call(**BAD[message](call))


def test_bad_shapes(device: torch.device) -> None:
    for head_dim, num_heads, message in ((48, 2, "head_dim 48"), (16, 65, "65 query heads per KV head")):
        pages = torch.zeros(1, 16, 1, head_dim, device=device)
        workspace = make_workspace(1, num_heads, 1, head_dim, 1, device)
        q = torch.zeros(1, num_heads, head_dim, device=device)
        with pytest.raises(ValueError, match=message):
            paged_decode(q, PagedKV(pages, pages), torch.zeros(1, 1, dtype=torch.int32, device=device), workspace)


def test_bad_plans(device: torch.device) -> None:
    workspace = make_workspace(2, 2, 1, 16, 4, device)
    for lengths, message in (
        (torch.zeros(2, device=device), "lengths is torch.float32"),
        (torch.zeros(3, dtype=torch.int32, device=device), "lengths has shape"),
        (torch.zeros(4, dtype=torch.int32, device=device)[::2], "lengths has stride 2"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_decode(lengths, workspace)
    for window in (-1, 2**30 + 1):
        with pytest.raises(ValueError, match=f"a window of {window} tokens is not between 0"):
            plan_decode(torch.zeros(2, dtype=torch.int32, device=device), workspace, window)
    for num_rows, num_kv_heads, message in ((0, 1, "0 rows"), (1025, 1, "1025 rows"), (1, 3, "3 KV heads")):
        with pytest.raises(ValueError, match=message):
            DecodeWorkspace.allocate(num_rows, 2, num_kv_heads, 16, 4, device)


def test_kernels_need_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="kernels need a CUDA device"):
        call(q=call.q.cpu())


def test_launch_table() -> None:
    for head_dim in HEAD_DIMS:
        for kv_bytes in (1, 2, 4):
            launch = decode_launch(head_dim, 7, kv_bytes)
            assert launch.tiles["BLOCK_H"] == 16 and math.log2(launch.tiles["TILE"]).is_integer() and launch.tiles["TILE"] >= 16
    assert decode_launch(128, 17, 2).tiles["BLOCK_H"] == 32


@pytest.mark.gpu
def test_in_a_graph_and_without_compiling_again() -> None:
    device, lengths = torch.device("cuda"), torch.tensor([700, 0, 90, 64], dtype=torch.int32, device="cuda")
    kv, table = make_cache(lengths.tolist(), 2, 64, 16, torch.bfloat16, device)
    q, out = queries(4, 8, 64, dtype=torch.bfloat16, device=device), poisoned(4, 8, 64, dtype=torch.bfloat16, device=device)
    workspace = make_workspace(4, 8, 2, 64, 132, device)

    def step() -> None:
        plan_decode(lengths, workspace)
        paged_decode(q, kv, table, workspace, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for now in ([700, 0, 90, 64], [1, 1, 1, 1], [0, 0, 0, 0], [333, 0, 17, 2]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        expected = paged_decode_reference(q, kv, table, lengths)
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=TOLERANCES[torch.bfloat16])


def test_models_with_other_heads_are_refused_before_they_are_loaded() -> None:
    assert GPU_HEADS == HEAD_DIMS
