from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.tests.settings import examples
from mmrt.triton_kernels.embedding_pages import PageIndices, PageSpan, num_consumed_pages, read_embeddings, reference, write_embeddings

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


class Request:
    """Pages of one request, and how far they were written or read."""

    def __init__(self, pages: list[int], rows: torch.Tensor) -> None:
        self.pages, self.rows = pages, rows

    def span(self, done: int, num_tokens: int, page_tokens: int) -> PageSpan:
        return PageSpan(self.pages[done // page_tokens : -(-(done + num_tokens) // page_tokens)], done, num_tokens)


@settings(max_examples=examples(6), deadline=None, derandomize=True)
@given(data=st.data())
def test_written_rows_are_read_back_whatever_the_chunks_and_consumed_pages_can_be_reused(
    device: torch.device, data: st.DataObject
) -> None:
    torch.manual_seed(0)
    page_tokens, hidden = data.draw(st.sampled_from([1, 3, 8, 32])), 2 * data.draw(st.integers(1, 300))
    dtype = data.draw(st.sampled_from(DTYPES))
    totals = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    order = torch.randperm(sum(-(-total // page_tokens) for total in totals) + 3).tolist()
    requests = [
        Request([order.pop() for _ in range(-(-total // page_tokens))], torch.randn(total, hidden, device=device).to(dtype))
        for total in totals
    ]
    pages = poisoned(sum(len(request.pages) for request in requests) + 3, page_tokens, hidden, dtype=dtype, device=device)
    for starts, counts in chunks(data, totals):
        spans = [request.span(start, n, page_tokens) for request, start, n in zip(requests, starts, counts, strict=True)]
        rows = torch.cat([request.rows[start : start + n] for request, start, n in zip(requests, starts, counts, strict=True)])
        write_embeddings(rows, pages, PageIndices.pack(spans, page_tokens, device))
    for starts, counts in chunks(data, totals):
        spans = [request.span(start, n, page_tokens) for request, start, n in zip(requests, starts, counts, strict=True)]
        out = poisoned(sum(counts) + 1, hidden, dtype=dtype, device=device)
        read_embeddings(pages, PageIndices.pack(spans, page_tokens, device), out)
        expected = torch.cat([request.rows[start : start + n] for request, start, n in zip(requests, starts, counts, strict=True)])
        assert torch.equal(out[:-1], expected)
        assert out[-1].isnan().all()
        for span in spans:
            for page in span.pages[: num_consumed_pages(span.cu_page_len, span.num_tokens, page_tokens)]:
                pages[page] = float("nan")


def chunks(data: st.DataObject, totals: list[int]) -> list[tuple[list[int], list[int]]]:
    """(first rows, numbers of rows) per iteration, each request cut somewhere, some iterations with nothing of it."""
    cuts = [sorted([0, data.draw(st.integers(0, total)), data.draw(st.integers(0, total)), total]) for total in totals]
    return [([cut[i] for cut in cuts], [cut[i + 1] - cut[i] for cut in cuts]) for i in range(3)]


@pytest.mark.parametrize("write", [True, False])
def test_agrees_with_the_reference_and_leaves_everything_else_alone(device: torch.device, write: bool) -> None:
    torch.manual_seed(0)
    spans = [PageSpan([5, 2], 3, 9), PageSpan([], 0, 4), PageSpan([4], 8, 0), PageSpan([1, 6, 0], 15, 17)]
    indices = PageIndices.pack(spans, 8, device)
    rows, pages = torch.randn(33, 96, device=device).bfloat16(), torch.randn(8, 8, 96, device=device).bfloat16()
    expected_rows, expected_pages = rows.clone(), pages.clone()
    if write:
        write_embeddings(rows, pages, indices)
        reference.write_embeddings(expected_rows, expected_pages, indices)
    else:
        read_embeddings(pages, indices, rows)
        reference.read_embeddings(expected_pages, indices, expected_rows)
    assert torch.equal(rows, expected_rows) and torch.equal(pages, expected_pages)


def test_rows_between_media_are_stepped_over(device: torch.device) -> None:
    pages = torch.randn(3, 4, 32, device=device)
    text = torch.randn(7, 32, device=device)
    out = text.clone()
    read_embeddings(pages, PageIndices.pack([PageSpan([], 0, 2), PageSpan([2, 1], 1, 5)], 4, device), out)
    assert torch.equal(out[:2], text[:2])
    assert torch.equal(out[2:], torch.cat((pages[2, 1:], pages[1, :2])))


def test_views_of_wider_buffers(device: torch.device) -> None:
    pages, rows = torch.zeros(3, 4, 5, 64, device=device), torch.randn(6, 128, device=device)
    write_embeddings(rows[:, :64], pages[:, :, 2], PageIndices.pack([PageSpan([1, 0], 0, 6)], 4, device))
    assert torch.equal(pages[1, :, 2], rows[:4, :64]) and torch.equal(pages[0, :2, 2], rows[4:, :64])
    assert not pages[:, :, [0, 1, 3, 4]].any()


def test_patch_rows_of_bytes(device: torch.device) -> None:
    rows = torch.randint(0, 256, (5, 1176), dtype=torch.uint8, device=device)
    pages, out = torch.zeros(4, 2, 1176, dtype=torch.uint8, device=device), torch.zeros_like(rows)
    indices = PageIndices.pack([PageSpan([3, 0, 2], 0, 5)], 2, device)
    write_embeddings(rows, pages, indices)
    read_embeddings(pages, indices, out)
    assert torch.equal(out, rows)


def test_addresses_beyond_two_to_the_31(tmp_path: Path, device: torch.device) -> None:
    num_pages, page_tokens, hidden = 33, 128, 1 << 19
    size = num_pages * page_tokens * hidden
    assert (num_pages - 1) * page_tokens * hidden >= 2**31
    if device.type == "cpu":  # a sparse file: only what is touched takes space
        pages = torch.from_file(str(tmp_path / "pages"), shared=True, size=size, dtype=torch.int32)
    else:
        pages = torch.empty(size, dtype=torch.int32, device=device)
    pages = pages.view(num_pages, page_tokens, hidden)[:, :, :64]
    rows = torch.arange(128, dtype=torch.int32, device=device).view(2, 64)
    indices = PageIndices.pack([PageSpan([32], 127, 1), PageSpan([0], 0, 1)], page_tokens, device)
    write_embeddings(rows, pages, indices)
    assert torch.equal(pages[32, 127], rows[0]) and torch.equal(pages[0, 0], rows[1])
    out = torch.zeros_like(rows)
    read_embeddings(pages, indices, out)
    assert torch.equal(out, rows)


def test_nothing_to_do(device: torch.device) -> None:
    pages, rows = torch.zeros(2, 4, 16, device=device), torch.zeros(0, 16, device=device)
    write_embeddings(rows, pages, PageIndices.pack([], 4, device))
    read_embeddings(pages, PageIndices.pack([PageSpan([1], 3, 0)], 4, device), rows)


@pytest.mark.parametrize(("cu_page_len", "num_tokens", "consumed"), [(0, 7, 0), (0, 8, 1), (7, 1, 1), (7, 9, 2), (9, 6, 0), (8, 24, 3)])
def test_consumed_pages(cu_page_len: int, num_tokens: int, consumed: int) -> None:
    assert num_consumed_pages(cu_page_len, num_tokens, 8) == consumed


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (PageSpan([1], 3, 6), "6 rows, its 1 pages room for 5"),
        (PageSpan([1], -1, 2), "-1"),
        (PageSpan([1], 0, -2), "-2 rows"),
    ],
)
def test_bad_spans(device: torch.device, span: PageSpan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PageIndices.pack([span], 8, device)


BAD: dict[str, Callable[[torch.Tensor, torch.Tensor, PageIndices], tuple[torch.Tensor, torch.Tensor, PageIndices]]] = {
    r"rows has shape \[64\]": lambda rows, pages, indices: (rows[0], pages, indices),
    r"pages has shape \[3, 4, 64\], not \[any, any, 32\]": lambda rows, pages, indices: (rows[:, :32], pages, indices),
    "pages is torch.float32": lambda rows, pages, indices: (rows.half(), pages, indices),
    "rows has 64 elements at stride 2": lambda rows, pages, indices: (rows.repeat(1, 2)[:, ::2], pages, indices),
    "rows has 0 elements": lambda rows, pages, indices: (rows[:, :0], pages[:, :, :0], indices),
    "126 bytes, no multiple of 4": lambda rows, pages, indices: (rows.half()[:, :63], pages.half()[:, :, :63], indices),
    "name 6 rows, there are 5": lambda rows, pages, indices: (rows[:5], pages, indices),
    r"pv_indptr has shape \[1\], not \[2\]": lambda rows, pages, indices: (
        rows,
        pages,
        replace(indices, pv_indptr=indices.pv_indptr[:1]),
    ),
    "pv_indptr is torch.int64": lambda rows, pages, indices: (rows, pages, replace(indices, pv_indptr=indices.pv_indptr.long())),
    "pv_page_indices has stride 2": lambda rows, pages, indices: (
        rows,
        pages,
        replace(indices, pv_page_indices=indices.pv_indptr.repeat(2)[::2]),
    ),
    "pages is on meta": lambda rows, pages, indices: (rows, pages.to("meta"), indices),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(device: torch.device, message: str) -> None:
    rows, pages = torch.zeros(6, 64, device=device), torch.zeros(3, 4, 64, device=device)
    bad_rows, bad_pages, indices = BAD[message](rows, pages, PageIndices.pack([PageSpan([1, 2], 0, 6)], 4, device))
    with pytest.raises(ValueError, match=message):
        write_embeddings(bad_rows, bad_pages, indices)
    with pytest.raises(ValueError, match=message):
        read_embeddings(bad_pages, indices, bad_rows)
