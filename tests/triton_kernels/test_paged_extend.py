"""Paged extend against its reference, torch's SDPA and the CPU path."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

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
from mmrt.triton_kernels.launch import Launch
from mmrt.triton_kernels.paged_decode.config import HEAD_DIMS
from mmrt.triton_kernels.paged_decode.reference import gather
from mmrt.triton_kernels.paged_extend import op, paged_extend, paged_extend_reference, plan_extend
from mmrt.triton_kernels.paged_extend.config import extend_launch
from mmrt.triton_kernels.paged_kv import PagedKV

DTYPES = [  # of queries and of pages
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.float16, torch.float8_e4m3fn),
]
SPANS = [(37, 80), (0, 21), (64, 65), (9, 9)]
SMALL = Launch({"BLOCK_M": 32, "TILE": 16}, num_warps=4, num_stages=2)
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Pictures = list[list[tuple[int, int]]]


def projection(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Triple:
    """q, k and v as slices of one projection, as the model's."""
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype).to(device)
    q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], 1)
    return q, k, v


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: PagedKV,
    table: torch.Tensor,
    spans: list[tuple[int, int]],
    window: int = 0,
    pictures: Pictures | None = None,
    **options: Any,
) -> torch.Tensor:
    launch = options.pop("launch", SMALL)
    with nullcontext() if launch is None else patch.object(op, "extend_launch", lambda *_: launch):
        plan = plan_extend(spans, q.shape[1], k.shape[1], q.shape[2], q.dtype, q.device, window=window, pictures=pictures)
    out = poisoned(*q.shape, dtype=q.dtype, device=q.device)
    assert paged_extend(q, k, v, kv, table, plan, out=out, **options) is out
    return out


def check(
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    window: int = 0,
    pictures: Pictures | None = None,
    scale: float = 0.0,
    **options: Any,
) -> None:
    """Nothing but what lies before the chunks is in the pages, and those before a window are nowhere."""
    num_heads, num_kv_heads = heads
    kv, table = make_cache([start for start, _ in spans], num_kv_heads, head_dim, page_tokens, cache_dtype, device)
    q, k, v = projection(sum(end - start for start, end in spans), num_heads, num_kv_heads, head_dim, dtype, device)
    expected = paged_extend_reference(q, k, v, kv, table, spans, window, pictures or (), scale)
    if window:
        hide_before(table, [start + 1 - window for start, _ in spans], page_tokens)
    got = extend(q, k, v, kv, table, spans, window, pictures, scale=scale, **options)
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
def test_equals_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device) -> None:
    check(SPANS, (6, 2), 32, 16, dtype, cache_dtype, device)


@settings(max_examples=examples(30), derandomize=True, deadline=None)
@given(
    dtypes=st.sampled_from(DTYPES),
    spans=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), min_size=1, max_size=3),
    page_tokens=st.sampled_from([1, 3, 16, 20]),
    heads=st.sampled_from([(1, 1), (5, 1), (4, 2), (7, 1)]),
    head_dim=st.sampled_from(HEAD_DIMS),
    tile=st.sampled_from([None, 16, 32]),
)
def test_odd_sizes(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    spans: list[tuple[int, int]],
    page_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    tile: int | None,
) -> None:
    """``tile`` None: the table's own."""
    launch = None if tile is None else Launch({"BLOCK_M": 32, "TILE": tile}, num_warps=4, num_stages=2)
    ranges = [(start, start + length) for start, length in spans]
    check(ranges, heads, head_dim, page_tokens, *dtypes, device, launch=launch)


@st.composite
def chunks_with_pictures(draw: st.DrawFn) -> tuple[list[tuple[int, int]], Pictures]:
    """Chunks that begin anywhere, within a picture, too, and end behind all of theirs."""
    spans, pictures = [], []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(0, 110), min_size=2, max_size=6)))
        its = list(zip(cuts[::2], cuts[1::2], strict=False))
        start = draw(st.integers(0, its[-1][1]))
        spans.append((start, its[-1][1] + draw(st.integers(0, 9))))
        pictures.append(its[draw(st.integers(0, 1)) :])
    return spans, pictures


@settings(max_examples=examples(60), derandomize=True, deadline=None)
@given(
    dtypes=st.sampled_from(DTYPES),
    chunks=chunks_with_pictures(),
    with_pictures=st.booleans(),
    window=st.sampled_from([0, 1, 2, 15, 16, 17, 33, 64, 1000]),
    scale=st.sampled_from([0.0, 0.3]),
    page_tokens=st.sampled_from([1, 3, 16, 20]),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1)]),
    head_dim=st.sampled_from([16, 512]),
    launch=st.sampled_from([None, SMALL, Launch({"BLOCK_M": 16, "TILE": 32}, num_warps=4, num_stages=2)]),
)
def test_windows_and_pictures(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    chunks: tuple[list[tuple[int, int]], Pictures],
    with_pictures: bool,
    window: int,
    scale: float,
    page_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    launch: Launch | None,
) -> None:
    spans, pictures = chunks
    seen = pictures if with_pictures else None
    check(spans, heads, head_dim, page_tokens, *dtypes, device, window=window, pictures=seen, scale=scale, launch=launch)


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize("window", [5, 16, 40, 90])
def test_a_window_over_each_kind_of_pages(dtype: torch.dtype, cache_dtype: torch.dtype, window: int, device: torch.device) -> None:
    """Smaller than a page and than a tile, and larger; its border in the middle of a page, of a tile, and of the chunk."""
    check([(70, 130), (0, 60), (37, 38)], (4, 2), 32, 16, dtype, cache_dtype, device, window=window)


@pytest.mark.many
@pytest.mark.parametrize("spans", [[(70, 160), (0, 20)], [(70, 79), (0, 5)]], ids=["long", "short"])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
def test_the_table_s_own_launches(
    dtype: torch.dtype, cache_dtype: torch.dtype, spans: list[tuple[int, int]], device: torch.device
) -> None:
    check(spans, (7, 1), 128, 16, dtype, cache_dtype, device, launch=None)


def test_equals_sdpa(device: torch.device) -> None:
    kv, table = make_cache([50], 2, 64, 16, torch.float32, device)
    q, k, v = projection(40, 4, 2, 64, torch.float32, device)
    both = (torch.cat(pair).transpose(0, 1).unsqueeze(0) for pair in zip(gather(kv, table[0], 50), (k, v), strict=True))
    mask = torch.ones(40, 90, dtype=torch.bool, device=device).tril(50)
    expected = F.scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), *both, attn_mask=mask, enable_gqa=True)
    got = extend(q, k, v, kv, table, [(50, 90)])
    torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=0, atol=TOLERANCES[torch.float32])


@pytest.mark.parametrize(("window", "scale"), [(0, 0.0), (12, 0.3), (25, 0.0)])
def test_equals_the_cpu_path(window: int, scale: float) -> None:
    """With a picture that began before its chunk, and one that is all of it but a token."""
    device, spans = torch.device("cuda" if torch.cuda.is_available() else "cpu"), [(20, 50), (0, 9), (48, 49)]
    generator = torch.Generator().manual_seed(0)
    table, num_pages = make_tables([end for _, end in spans], 16, generator)
    pool = torch.randn(num_pages, NUM_LAYERS, 16, 2, 2, 32, generator=generator)
    q, k, v = projection(40, 6, 2, 32, torch.float32, torch.device("cpu"))
    attention, pictures = cpu_attention(pool, 6, window, scale, sees_pictures=True), [[(15, 40)], [(1, 9)], []]
    attention.begin_prefill(spans, list(table.clamp(0).long()), pictures)
    expected = attention.prefill_attend(LAYER, q, torch.cat((k, v), 1).flatten(1)).view(q.shape)
    layer = pool.to(device)[:, LAYER]
    kv = PagedKV(layer[:, :, 0], layer[:, :, 1])
    moved = q.to(device), k.to(device), v.to(device), kv, table.to(device)
    got = extend(*moved, spans, window, pictures, scale=scale)
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=TOLERANCES[torch.float32])


def test_chunks_of_any_size_give_the_same(device: torch.device) -> None:
    """A prompt in two chunks, the first one's K and V written to pages between them, as prefill does."""
    q, k, v = projection(60, 4, 2, 32, torch.float32, device)
    kv, table = make_cache([0], 2, 32, 16, torch.float32, device)
    whole = extend(q, k, v, kv, table, [(0, 60)])
    kv, table = make_cache([35], 2, 32, 16, torch.float32, device)
    first = extend(q[:35], k[:35], v[:35], kv, table, [(0, 35)])
    index = torch.arange(35, device=device)
    pages, slots = table[0].long()[index // 16], index % 16
    kv.k_pages[pages, slots], kv.v_pages[pages, slots] = k[:35], v[:35]
    second = extend(q[35:], k[35:], v[35:], kv, table, [(35, 60)])
    torch.testing.assert_close(torch.cat((first, second)), whole, rtol=0, atol=TOLERANCES[torch.float32])


def test_a_sequence_with_bad_numbers_spoils_no_other(device: torch.device) -> None:
    spans = [(20, 30), (20, 30)]
    kv, table = make_cache([20, 20], 1, 16, 16, torch.float32, device)
    q, k, v = projection(20, 2, 1, 16, torch.float32, device)
    expected = paged_extend_reference(q, k, v, kv, table, spans)
    kv.v_pages[int(table[0, 0])] = torch.nan
    got = extend(q, k, v, kv, table, spans)
    assert got[:10].isnan().all()
    torch.testing.assert_close(got[10:], expected[10:], rtol=0, atol=TOLERANCES[torch.float32])


def test_no_tokens(device: torch.device) -> None:
    kv, table = make_cache([5, 0], 1, 16, 16, torch.float32, device)
    q, k, v = projection(0, 2, 1, 16, torch.float32, device)
    assert extend(q, k, v, kv, table, [(5, 5), (0, 0)]).shape == (0, 2, 16)
    assert extend(q, k, v, kv, table[:0], []).shape == (0, 2, 16)


def test_addresses_past_2_to_31(device: torch.device) -> None:
    """Three pages, 2**30 elements apart; only what is touched takes memory."""
    page = 8 * 2 * 16
    memory = torch.empty(2 * 2**30 + 2 * page, dtype=torch.int8, device=device)
    k_pages, v_pages = (memory.as_strided((3, 8, 2, 16), (2**30, 32, 16, 1), offset) for offset in (0, page))
    k_scales, v_scales = torch.zeros(2, 3, 8, 2, device=device)
    kv = PagedKV(k_pages, v_pages, k_scales, v_scales)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
    fill(kv, table[0], 20, torch.Generator().manual_seed(0))
    q, k, v = projection(7, 4, 2, 16, torch.float32, device)
    expected = paged_extend_reference(q, k, v, kv, table, [(20, 27)])
    torch.testing.assert_close(extend(q, k, v, kv, table, [(20, 27)]), expected, rtol=0, atol=TOLERANCES[torch.float32])


@settings(max_examples=examples(50), derandomize=True, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=6),
    group=st.integers(1, 20),
)
def test_a_plan_covers_every_token_once(spans: list[tuple[int, int]], group: int) -> None:
    ranges = [(start, start + length) for start, length in spans]
    plan = plan_extend(ranges, group, 1, 64, torch.bfloat16, torch.device("cpu"))
    blocks = plan.blocks.tolist()
    work = [offset + prefix for _, _, _, offset, prefix in blocks]
    assert work == sorted(work, reverse=True)
    covered = []
    first = [sum(length for _, length in spans[:sequence]) for sequence in range(len(spans))]
    for sequence, row, count, offset, prefix in blocks:
        assert 0 < count * group <= plan.launch.tiles["BLOCK_M"] and prefix == spans[sequence][0] and row == first[sequence] + offset
        covered += range(row, row + count)
    assert sorted(covered) == list(range(plan.num_tokens)) and plan.num_tokens == sum(length for _, length in spans)


class Call:
    """Arguments that are right, to be made wrong one at a time."""

    def __init__(self) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.kv, self.table = make_cache([20, 5], 2, 32, 16, torch.bfloat16, device)
        self.q, self.k, self.v = projection(12, 4, 2, 32, torch.bfloat16, device)
        self.plan = plan_extend([(20, 30), (5, 7)], 4, 2, 32, torch.bfloat16, device)

    def __call__(self, **changes: Any) -> torch.Tensor:
        given = {"q": self.q, "k": self.k, "v": self.v, "kv": self.kv, "block_table": self.table, "plan": self.plan} | changes
        return paged_extend(**given)


@pytest.fixture(scope="module")
def call() -> Call:
    return Call()


BAD = {
    "q is torch.float64": lambda c: {"q": c.q.double()},
    "q has shape": lambda c: {"q": c.q[1:]},
    "q has stride 2 in its last axis": lambda c: {"q": c.q.repeat_interleave(2, 2)[..., ::2]},
    "q is on meta": lambda c: {"q": c.q.to("meta")},
    "2 heads of q for 2 of k_pages are not the 2 per": lambda c: {"q": c.q[:, :2]},
    "k is torch.float32": lambda c: {"k": c.k.float()},
    "k has shape": lambda c: {"k": c.k[:, :1]},
    "v has shape": lambda c: {"v": c.v[1:]},
    "k has strides": lambda c: {"v": c.v.contiguous()},
    "k has stride 2 in its last axis": lambda c: {"k": c.k.repeat_interleave(2, 2)[..., ::2]},
    "k_pages is torch.bfloat16": lambda c: {"q": c.q.half()},
    "v_pages has shape": lambda c: {"kv": PagedKV(c.kv.k_pages, c.kv.v_pages[1:])},
    "block_table is torch.int64": lambda c: {"block_table": c.table.long()},
    "block_table has shape": lambda c: {"block_table": c.table[:1]},
    "block_table has stride": lambda c: {"block_table": c.table.repeat_interleave(2, 1)[:, ::2]},
    "20 tokens before a chunk are more than 1 pages of 16": lambda c: {"block_table": c.table[:, :1]},
    "out is torch.float32": lambda c: {"out": c.q.float()},
    "out has shape": lambda c: {"out": c.q[:1]},
    "out has stride": lambda c: {"out": c.q.repeat_interleave(2, 2)[..., ::2]},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message: str, call: Call) -> None:
    with pytest.raises(ValueError, match=message):
        call(**BAD[message](call))


@pytest.mark.parametrize(
    ("spans", "shape", "message"),
    [
        ([(5, 4)], (2, 1, 64), r"span \(5, 4\)"),
        ([(-1, 4)], (2, 1, 64), r"span \(-1, 4\)"),
        ([(0, 2**31)], (2, 1, 64), "2147483648"),
        ([(0, 2**17)], (64, 1, 128), "131072 tokens make 65536 blocks of up to 2, more than 65535"),
        ([(0, 4)], (3, 2, 64), "3 heads are no multiple of 2 KV heads"),
        ([(0, 4)], (3, 0, 64), "0 KV heads"),
        ([(0, 4)], (2, 1, 80), "head_dim 80"),
        ([(0, 4)], (65, 1, 64), "65 query heads per KV head"),
    ],
)
def test_bad_plans(spans: list[tuple[int, int]], shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_extend(spans, *shape, torch.bfloat16, torch.device("cpu"))


def test_bad_windows_and_pictures() -> None:
    shape = 1, 1, 64, torch.bfloat16, torch.device("cpu")
    with pytest.raises(ValueError, match="a window of -1 tokens"):
        plan_extend([(0, 4)], *shape, window=-1)
    with pytest.raises(ValueError, match="a chunk of tokens 2 to 6 ends within a picture of tokens 4 to 7"):
        plan_extend([(2, 6)], *shape, pictures=[[(4, 7)]])


def test_kernels_need_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="kernels need a CUDA device"):
        call(q=call.q.cpu())


def test_launch_table() -> None:
    for head_dim in HEAD_DIMS:
        for num_bytes in (2, 4):
            for longest_chunk in (1, 8192):
                launch = extend_launch(head_dim, 7, longest_chunk, num_bytes)
                assert launch.tiles["BLOCK_M"] >= (16 if head_dim == 512 else 64) and launch.tiles["TILE"] in (16, 32, 64)
    for head_dim in (256, 512):
        assert extend_launch(head_dim, 33, 1, 2, 80).tiles["BLOCK_M"] == 64, "a token's heads are rows of one tile"
