"""Attention of decode steps over pages, on the CPU: by a kernel, and without one short sequences in groups and long ones alone."""

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from mmrt.cpu_kernels import attention_kernel, kernel
from mmrt.cpu_kernels.attention_kernel import PagedAttention
from mmrt.models.architecture import AttentionConfig, LanguageConfig, LayerConfig, MlpConfig, RopeConfig
from mmrt.models.lm.attention import _PADDED_TOKENS, CpuAttention
from mmrt.models.lm.kv_pages import KvPages

LAYER = 1
LENGTHS = [1, 30, _PADDED_TOKENS + 1, 17, 700, 341, 32, 100, _PADDED_TOKENS, 3]
needs_kernel = pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")


class Sequences:
    """Sequences of ``LENGTHS`` on pages that lie anywhere, and a query of each."""

    def __init__(
        self, dtype: torch.dtype, group: int, head_dim: int, page_tokens: int,
        window: int = 0, scale: float = 0.0, sees_pictures: bool = False,
    ) -> None:  # fmt: skip
        heads = AttentionConfig(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, window=window, scale=scale)
        self.config = LanguageConfig(
            vocab_size=8,
            hidden_size=8,
            rms_norm_eps=1e-6,
            layers=(
                LayerConfig(
                    mixer=replace(heads, sees_pictures=sees_pictures),
                    feed_forward=MlpConfig(intermediate_size=8),
                ),
            )
            * 2,
            ropes=(RopeConfig(theta=1e4),),
        )
        most = -(-max(LENGTHS) // page_tokens)
        generator = torch.Generator().manual_seed(0)
        shape = len(LENGTHS) * most, 2, page_tokens, 2, 2, head_dim
        self.values = torch.randn(shape, generator=generator).to(dtype)
        self.pages = KvPages(self.config, self.values.view(torch.uint8).flatten(1), page_tokens, dtype)
        self.tables = torch.randperm(shape[0], generator=generator).view(-1, most)
        self.queries = torch.randn(len(LENGTHS), 2 * group, head_dim, generator=generator).to(dtype)

    def attend(self, rows: list[int]) -> Tensor:
        attention = CpuAttention(self.pages)
        attention.begin_decode(torch.tensor(LENGTHS)[rows], self.tables[rows])
        return attention.decode_attend(LAYER, self.queries[rows])

    def exact(self, row: int) -> Tensor:
        """In float64."""
        heads = self.config.heads
        first = max(LENGTHS[row] - heads.window, 0) if heads.window else 0
        tokens = self.values[self.tables[row], LAYER].flatten(0, 1)[first : LENGTHS[row]].double()
        k, v = tokens.permute(1, 2, 0, 3).repeat_interleave(heads.num_heads // 2, 1)
        scores = (k @ self.queries[row].double().unsqueeze(-1)).squeeze(-1) * (heads.scale or heads.head_dim**-0.5)
        return (scores.softmax(1).unsqueeze(1) @ v).flatten()


ALL = list(range(len(LENGTHS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_and_sequences_alone(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedAttention, "of", lambda *_: None)
    sequences = Sequences(dtype, 3, 24, 4)
    together = sequences.attend(ALL)
    for row, length in enumerate(LENGTHS):
        if length > _PADDED_TOKENS:
            assert torch.equal(sequences.attend([row])[0], together[row])
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(together[row].double(), sequences.exact(row), rtol=0, atol=tolerance)


@pytest.mark.many
@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim", "page_tokens"), [(1, 32, 4), (3, 64, 20), (4, 64, 16), (7, 128, 16)])
def test_the_kernel(dtype: torch.dtype, group: int, head_dim: int, page_tokens: int) -> None:
    sequences = Sequences(dtype, group, head_dim, page_tokens)
    assert PagedAttention.of(sequences.pages.values, 2, group) is not None
    torch.set_num_threads(1)
    together = sequences.attend(ALL)
    assert together.dtype == dtype
    for row in ALL:
        tolerance = 2e-6 if dtype == torch.float32 else 0.01
        torch.testing.assert_close(together[row].double(), sequences.exact(row), rtol=0, atol=tolerance)
        assert torch.equal(sequences.attend([row])[0], together[row])
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(sequences.attend(ALL), together)


@needs_kernel
@pytest.mark.parametrize("group", [4, 7])
def test_bfloat16_without_its_instructions(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "has_bfloat16", lambda: False)
    monkeypatch.setattr(attention_kernel, "_kernel", attention_kernel._kernel.__wrapped__)  # keeps none for other tests
    sequences = Sequences(torch.bfloat16, group, 64, 16)
    together = sequences.attend(ALL)
    for row in ALL:
        torch.testing.assert_close(together[row].double(), sequences.exact(row), rtol=0, atol=0.01)


@pytest.mark.parametrize("has_kernel", [pytest.param(True, marks=needs_kernel), False])
@pytest.mark.parametrize(("window", "group", "head_dim"), [(1, 2, 64), (33, 8, 256), (48, 1, 512), (200, 2, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows(window: int, group: int, head_dim: int, has_kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages before a window are not read: they hold what is no number."""
    if not has_kernel:
        monkeypatch.setattr(PagedAttention, "of", lambda *_: None)
    sequences = Sequences(dtype, group, head_dim, 16, window, 1.5 / head_dim**0.5)
    for row, length in enumerate(LENGTHS):
        if has_kernel or length > _PADDED_TOKENS:
            sequences.values[sequences.tables[row, : max(length - window, 0) // 16]] = torch.nan
    torch.set_num_threads(1)
    together = sequences.attend(ALL)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for row in ALL:
        torch.testing.assert_close(together[row].double(), sequences.exact(row), rtol=0, atol=tolerance)
        if has_kernel:
            assert torch.equal(sequences.attend([row])[0], together[row])
    torch.set_num_threads(3)
    assert not has_kernel or torch.equal(sequences.attend(ALL), together)


@pytest.mark.parametrize("has_kernel", [pytest.param(True, marks=needs_kernel), False])
@pytest.mark.parametrize("window", [0, 1, 10, 40, 500])
def test_prompts_in_chunks(window: int, has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new token of chunks attends to what the last token of a decode step does."""
    sequences = Sequences(torch.float32, 2, 64, 16, window, 0.2)
    attention = CpuAttention(sequences.pages)
    if not has_kernel:
        monkeypatch.setattr(attention, "_has_kernel", False)
    for start in (0, 16, 37, 160, 170):
        spans = [(start, start + 1), (start, start + 50)]
        rows = [4, 5]
        attention.begin_prefill(spans, [sequences.tables[row] for row in rows])
        new = [
            sequences.values[sequences.tables[row], LAYER].flatten(0, 1)[start:end]
            for row, (start, end) in zip(rows, spans, strict=True)
        ]
        q = sequences.queries[4].expand(51, -1, -1).contiguous()
        found = attention.prefill_attend(LAYER, q, torch.cat(new).flatten(1))
        places = [(4, start), *((5, start + index) for index in range(50))]
        attention.begin_decode(torch.tensor([at + 1 for _, at in places]), sequences.tables[[row for row, _ in places]])
        torch.testing.assert_close(found, attention.decode_attend(LAYER, q), rtol=0, atol=1e-5)


@pytest.mark.parametrize("has_kernel", [pytest.param(True, marks=needs_kernel), False])
@pytest.mark.parametrize("window", [0, 10, 40])
def test_pictures_see_themselves(window: int, has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a dense mask, in chunks that begin before, at and within a picture. One must not end within it."""
    sequences = Sequences(torch.float32, 2, 64, 16, window, 0.2, sees_pictures=True)
    attention, runs = CpuAttention(sequences.pages), ((20, 60), (61, 90), (140, 150))
    if not has_kernel:
        monkeypatch.setattr(attention, "_has_kernel", False)
    keys, values = sequences.values[sequences.tables[5], LAYER].flatten(0, 1)[:160].double().unbind(1)
    places = torch.arange(160)
    is_seen = places <= places[:, None]
    for first, end in runs:
        is_seen[first:end, first:end] = True
    is_seen &= (places > places[:, None] - window) | (window == 0)
    q = sequences.queries[4].expand(160, -1, -1) * torch.linspace(0.5, 2, 160)[:, None, None]
    scores = torch.einsum("qhgd,khd->hgqk", q.double().unflatten(1, (2, 2)), keys) * 0.2
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1)
    for start, end in ((0, 160), (0, 20), (16, 60), (20, 60), (33, 95), (89, 139), (145, 160)):
        new = torch.stack((keys, values), 1)[start:end].float().flatten(1)
        attention.begin_prefill([(start, end)], [sequences.tables[5]], [[run for run in runs if run[0] < end and start < run[1]]])
        found = attention.prefill_attend(LAYER, q[start:end].contiguous(), new)
        torch.testing.assert_close(found.double(), expected[start:end], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="a chunk of tokens 30 to 50 ends within a picture of tokens 20 to 60"):
        attention.begin_prefill([(30, 50)], [sequences.tables[5]], [runs[:1]])


@needs_kernel
def test_a_missing_number_spoils_its_own_head_alone() -> None:
    sequences = Sequences(torch.float32, 4, 64, 16)
    expected = sequences.attend(ALL).view(len(ALL), 8, 64)
    sequences.queries[4, 5, 0] = torch.nan
    found = sequences.attend(ALL).view(len(ALL), 8, 64)
    assert found[4, 5].isnan().all()
    expected[4, 5] = found[4, 5] = 0
    assert torch.equal(found, expected)


@needs_kernel
def test_scores_of_any_size() -> None:
    """A single token of a far larger score is all that counts, wherever it lies; equal ones are a mean."""
    sequences = Sequences(torch.float32, 1, 32, 16)
    length, last = LENGTHS[4], LENGTHS[4] - 1
    for token in (0, 15, 16, 300, last):
        sequences.queries[4, 0] = 0.0
        sequences.queries[4, 0, 0] = 1e4
        keys = sequences.values[:, LAYER, :, 0, 0]
        keys[..., 0] = 0.0
        page, place = sequences.tables[4, token // 16], token % 16
        keys[page, place, 0] = 1.0
        torch.testing.assert_close(sequences.attend([4])[0, :32], sequences.values[page, LAYER, place, 1, 0], rtol=1e-6, atol=0)
    sequences.queries[4] = 0.0
    tokens = sequences.values[sequences.tables[4], LAYER].flatten(0, 1)[:length, 1, 0]
    torch.testing.assert_close(sequences.attend([4])[0, :32], tokens.mean(0), rtol=0, atol=1e-6)


@needs_kernel
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda tables, lengths: tables.__setitem__((4, 3), 10**6), r"pages 0 to 1000000 of \d+"),
        (lambda tables, lengths: tables.__setitem__((4, 3), -1), "pages -1 to"),
        (lambda tables, lengths: lengths.__setitem__(4, 705), "1 to 705 tokens in a table for 704"),
        (lambda tables, lengths: lengths.__setitem__(4, 0), "sequences of 0 to"),
    ],
)
def test_what_lies_beyond_the_pool_is_not_read(change: Callable[[Tensor, Tensor], None], error: str) -> None:
    sequences = Sequences(torch.float32, 4, 64, 16)
    lengths = torch.tensor(LENGTHS)
    change(sequences.tables, lengths)
    attention = PagedAttention.of(sequences.pages.values, 2, 4)
    assert attention is not None
    with pytest.raises(ValueError, match=error):
        attention.begin(lengths, sequences.tables)
    with pytest.raises(ValueError, match="queries"):  # of nothing that was begun
        attention.attend(LAYER, sequences.queries)


@needs_kernel
def test_whole_numbers_of_any_size_and_queries_of_other_shapes() -> None:
    sequences = Sequences(torch.float32, 4, 64, 16)
    expected = sequences.attend(ALL)
    attention = PagedAttention.of(sequences.pages.values, 2, 4)
    assert attention is not None
    attention.begin(torch.tensor(LENGTHS, dtype=torch.int32), sequences.tables.int())
    assert torch.equal(attention.attend(LAYER, sequences.queries), expected)
    with pytest.raises(ValueError, match="queries"):
        attention.attend(LAYER, sequences.queries[:3])
    with pytest.raises(ValueError, match=r"queries torch.float64 .* not torch.float32"):
        attention.attend(LAYER, sequences.queries.double())


@needs_kernel
@pytest.mark.parametrize("num_threads", [1, 3])
def test_queries_that_lie_apart(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among K and V, as a product leaves them, or in another order."""
    sequences = Sequences(torch.float32, 4, 64, 16)
    expected = sequences.attend(ALL)
    attention = PagedAttention.of(sequences.pages.values, 2, 4)
    assert attention is not None
    attention.begin(torch.tensor(LENGTHS), sequences.tables)
    attention._is_small = False
    monkeypatch.setattr(attention_kernel, "available_threads", lambda: num_threads)
    among = torch.cat((sequences.queries, torch.full_like(sequences.queries, 9)), 1)[:, : sequences.queries.shape[1]]
    turned = sequences.queries.transpose(1, 2).contiguous().transpose(1, 2)
    assert not among.is_contiguous() and not turned.is_contiguous()
    assert torch.equal(attention.attend(LAYER, among), expected) and torch.equal(attention.attend(LAYER, turned), expected)


@needs_kernel
def test_pages_after_a_sequences_own_may_be_anything() -> None:
    sequences = Sequences(torch.float32, 4, 64, 16)
    expected = sequences.attend(ALL)
    for row, length in enumerate(LENGTHS):
        sequences.tables[row, -(-length // 16) :] = 10**9
    assert torch.equal(sequences.attend(ALL), expected)


def test_where_there_is_no_kernel() -> None:
    of = Sequences(torch.float32, 3, 24, 4)
    assert PagedAttention.of(of.pages.values, 2, 3) is None  # heads are no whole vectors
    config = Sequences(torch.float32, 1, 64, 16).config
    large = Sequences(torch.float32, 1, 64, 128).pages
    assert PagedAttention.of(large.values, 2, 1) is None
    quantized = KvPages(config, torch.zeros(4, 2 * 16 * 2 * 2 * 68, dtype=torch.uint8), 16, torch.float32, "int8")
    assert PagedAttention.of(quantized.values, 2, 1) is None
