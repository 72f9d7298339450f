"""Section ``sampling``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from mmrt.triton_kernels.sampling import SamplingRows, SamplingWorkspace, count_tokens, reference, sample
from mmrt.triton_kernels.sampling.kernel import IN_PROMPT

from .case import Check, Size, Timing, WrongResult, require_equal
from .results import Row
from .timing import Clock

Columns = Mapping[str, float]

_VOCABULARY = 151936
_SPREAD = 4.0  # of logits
_FILTERS: Columns = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
_EVERYTHING: Columns = {**_FILTERS, "repetition": 1.1, "presence": 0.2, "frequency": 0.1, "guidance": 1.5}
_BORDER = 1e-6  # of the kept mass: two sums of up to 152k float32 weights differ by less


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """Check that the kernel draws the reference's tokens: greedily, with each filter, with all, and with guidance and penalties."""
    num_rows, vocabulary = (4, 700) if size == "tiny" else (8, _VOCABULARY)
    greedy, plain, top_k = {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 40}
    settings: dict[str, Sequence[Columns]] = {
        "greedy": [greedy],
        "plain": [plain],
        "min-p": [{"temperature": 1.0, "min_p": 0.05}],
        "top-k": [top_k],
        "top-p": [{"temperature": 0.7, "top_p": 0.8}],
        "all filters": [_FILTERS],
        "greedy, plain, top-k, padding": [greedy, plain, top_k, {"logits_row": -1}],
    }
    for name, kinds in settings.items():
        yield Check(f"{name}, {num_rows} x {vocabulary}", partial(_check, device, num_rows, vocabulary, kinds))
    cramped = partial(SamplingWorkspace.allocate, max_candidates=16)
    many = partial(_check, device, num_rows, vocabulary, [top_k, {**top_k, "top_p": 0.9}], allocate=cramped)
    yield Check(f"more candidates than there is room for, {num_rows} x {vocabulary}", many)
    everything = partial(_check, device, num_rows, vocabulary, [_EVERYTHING], with_counts=True)
    yield Check(f"everything, {num_rows} x {vocabulary}", everything)
    yield Check("count_tokens", partial(_check_counts, device, 40 if size == "tiny" else _VOCABULARY))


def timings(quick: bool) -> Iterator[Timing]:
    """64 rows of a vocabulary of 152k."""
    yield Timing("bf16 logits, 64 rows, all filters", partial(_time, 64, torch.bfloat16, _FILTERS, False, "sampling"))
    if quick:
        return
    yield Timing("fp32 logits, 64 rows, all filters", partial(_time, 64, torch.float32, _FILTERS, False, "sampling"))
    yield Timing("bf16 logits, 64 rows, filters, guidance, penalties", partial(_time, 64, torch.bfloat16, _EVERYTHING, True, ""))
    yield Timing(
        "bf16 logits, 64 rows, top-p alone", partial(_time, 64, torch.bfloat16, {"temperature": 1.0, "top_p": 0.95}, False, "")
    )
    yield Timing("bf16 logits, 64 rows, greedy", partial(_time, 64, torch.bfloat16, {"temperature": 0.0}, False, ""))
    yield Timing("bf16 logits, 1 row, all filters", partial(_time, 1, torch.bfloat16, _FILTERS, False, ""))


def _make_rows(num_rows: int, kinds: Sequence[Columns], with_counts: bool, device: torch.device) -> SamplingRows:
    """Kinds take turns."""
    rows = SamplingRows(num_rows, device)
    numbers = torch.arange(num_rows, device=device)
    rows.logits_row.copy_(numbers)
    rows.seed.copy_(numbers * 7919 + 1)
    rows.index.copy_(numbers + 3)
    for first, columns in enumerate(kinds):
        for name, value in columns.items():
            getattr(rows, name)[first :: len(kinds)].fill_(value)
    if with_counts:
        rows.companion_row.copy_(numbers + num_rows)
        rows.counts_row.copy_(numbers)
    return rows


def _make_counts(num_rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """Make counts of some tokens, every third of them of the prompt."""
    counts = (torch.rand(num_rows, vocabulary, device=device) < 0.01).to(torch.int32)
    counts[:, ::300] = IN_PROMPT
    return counts


def _check(
    device: torch.device,
    num_rows: int,
    vocabulary: int,
    kinds: Sequence[Columns],
    *,
    with_counts: bool = False,
    allocate: Callable[[int, int, torch.device], SamplingWorkspace] = SamplingWorkspace.allocate,
) -> float:
    logits = torch.randn(2 * num_rows, vocabulary, device=device) * _SPREAD
    rows = _make_rows(num_rows, kinds, with_counts, device)
    counts = _make_counts(num_rows, vocabulary, device) if with_counts else None
    workspace = allocate(num_rows, vocabulary, device)
    out = torch.full((num_rows,), -7, dtype=torch.int64, device=device)
    sample(logits, rows, workspace, counts=counts, out=out)
    expected = reference.sample(logits, rows, counts=counts)
    for row in (out != expected).nonzero().flatten().tolist():
        score = reference.scores(logits, rows, row, counts)
        if rows.temperature[row] <= 0 or not _is_at_border(score, rows, row, int(out[row])):
            raise WrongResult(f"tokens are {out.tolist()}, expected {expected.tolist()}")
    return 0.0


def _is_at_border(score: Tensor, rows: SamplingRows, row: int, token: int) -> bool:
    """True if the draw falls on this token or within ``_BORDER`` of it, where rounding decides."""
    drawn = reference.draw(score, rows, row)
    weights = torch.exp(score[drawn.kept] - score.max()).double()
    place = reference.uniform(int(rows.seed[row]), int(rows.index[row])) * drawn.kept_mass
    ends, margin = weights.cumsum(0), _BORDER * drawn.kept_mass
    near = (ends - weights - margin <= place) & (place <= ends + margin)
    return bool((near & (drawn.kept == token)).any())


def _check_counts(device: torch.device, vocabulary: int) -> float:
    num_rows, length = 3, 9
    tokens = torch.randint(0, vocabulary, (num_rows, length), dtype=torch.int64, device=device)
    tokens[:, 1] = tokens[:, 0]
    numbers = torch.tensor([length, 2, 0], dtype=torch.int32, device=device)
    table_rows = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    counts = torch.zeros(num_rows, vocabulary, dtype=torch.int32, device=device)
    expected = counts.clone()
    count_tokens(counts, table_rows, tokens, numbers, is_prompt=False)
    count_tokens(counts, table_rows, tokens[:, 2:], (numbers - 2).clamp(min=0), is_prompt=True)
    for row, (table_row, number) in enumerate(zip(table_rows.tolist(), numbers.tolist(), strict=True)):
        for token in tokens[row, :number].tolist():
            expected[table_row, token] += 1
        for token in tokens[row, 2 : max(number, 2)].tolist():
            expected[table_row, token] |= IN_PROMPT
    return require_equal("counts", counts, expected)


def _time(num_rows: int, dtype: torch.dtype, columns: Columns, with_counts: bool, target: str, clock: Clock) -> list[Row]:
    logits = (torch.randn(2 * num_rows, _VOCABULARY, device=clock.device) * _SPREAD).to(dtype)
    rows = _make_rows(num_rows, [columns], with_counts, clock.device)
    counts = _make_counts(num_rows, _VOCABULARY, clock.device) if with_counts else None
    workspace = SamplingWorkspace.allocate(num_rows, _VOCABULARY, clock.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=clock.device)
    timed = clock.time([partial(sample, logits, rows, workspace, counts=counts, out=out)])
    num_logits = num_rows * _VOCABULARY * (2 if "guidance" in columns else 1)
    num_bytes = num_logits * dtype.itemsize + (0 if counts is None else counts.nbytes)
    note = f"{_VOCABULARY} tokens; the rate is of logits and counts read once"
    return [timed.moved(num_bytes, target=target, note=note)]
