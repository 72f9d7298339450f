"""The checked wrappers: ``sample`` a token per row, and ``count_tokens`` for penalties. The decode actor calls them, once per step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_dense, check_device, check_tensor
from . import config, kernel
from .rows import SamplingRows

_LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Data that the kernels of a step pass to each other, for up to ``max_rows`` rows; allocate once: graphs hold its addresses.

    About (V + 2 x max_candidates) x 4 bytes per row. Rows with more candidates than ``max_candidates`` are right, but slow.
    ``kept`` int64 [max_rows] is left for the caller: the mass of what a row's filters kept, in units of 2**-40 of its likeliest token.
    """

    vocabulary: int
    max_rows: int
    max_candidates: int
    scores: Tensor
    tops: Tensor
    top_ids: Tensor
    masses: Tensor
    edge_counts: Tensor
    edge_masses: Tensor
    candidate_scores: Tensor
    candidate_ids: Tensor
    kept: Tensor

    @classmethod
    def allocate(cls, max_rows: int, vocabulary: int, device: torch.device | str, max_candidates: int = 16384) -> "SamplingWorkspace":
        """Raises: ValueError for a size below 1, or a vocabulary above 2**18."""
        if min(max_rows, vocabulary, max_candidates) < 1:
            raise ValueError(f"workspace for {max_rows} rows, {vocabulary} tokens, {max_candidates} candidates, not at least 1 of each")
        if vocabulary > config.MAX_VOCABULARY:
            raise ValueError(f"workspace for a vocabulary of {vocabulary}, not up to {config.MAX_VOCABULARY}")
        tiles, tile = config.num_tiles(vocabulary), config.tile_size(vocabulary)

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(max_rows, *shape, dtype=dtype, device=device)

        return cls(
            vocabulary,
            max_rows,
            max_candidates,
            scores=empty(torch.float32, tiles * tile),
            tops=empty(torch.float32, tiles),
            top_ids=empty(torch.int32, tiles),
            masses=empty(torch.int64, tiles),
            edge_counts=empty(torch.int32, tiles, kernel.NUM_EDGES),
            edge_masses=empty(torch.int64, tiles, kernel.NUM_EDGES),
            candidate_scores=empty(torch.float32, max_candidates),
            candidate_ids=empty(torch.int32, max_candidates),
            kept=empty(torch.int64),
        )


def sample(
    logits: Tensor,
    rows: SamplingRows,
    workspace: SamplingWorkspace,
    *,
    counts: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token per row: guidance (CF1), penalties, temperature, top-k, top-p, min-p, as ``models.sampling``.

    ``logits`` [L, V] float32, bfloat16 or float16; row i draws from ``logits[rows.logits_row[i]]``. ``counts`` int32 [C, V], see
    ``count_tokens``. -> int64 [N], in ``out`` where given: -1 for padding, and 0 for a row in which no token is possible. Equal scores
    are taken in the order of ids. Row numbers are not checked: they lie on the device.

    Raises: ValueError for tensors that do not fit together.
    """
    _check(logits, rows, workspace)
    device = logits.device
    if counts is not None:
        _check_table("counts", counts, workspace.vocabulary, device)
    if out is None:
        out = torch.empty(rows.num_rows, dtype=torch.int64, device=device)
    _check_column("out", out, rows.num_rows, torch.int64, device)
    _launch(logits, rows, workspace, counts, out)
    return out


def _check(logits: Tensor, rows: SamplingRows, workspace: SamplingWorkspace) -> None:
    check_device("logits", logits.device)
    check_tensor("logits", logits, (None, workspace.vocabulary), _LOGITS_DTYPES, logits.device)
    check_dense("logits", logits)
    if rows.num_rows > workspace.max_rows:
        raise ValueError(f"rows are {rows.num_rows}, not up to {workspace.max_rows}, which the workspace holds")
    for name, device in (("rows", rows.buffer.device), ("workspace", workspace.scores.device)):
        if device != logits.device:
            raise ValueError(f"{name} is on {device}, not on {logits.device} as the others")


def _check_table(name: str, table: Tensor, width: int | None, device: torch.device) -> None:
    check_tensor(name, table, (None, width), (torch.int32,), device)
    check_dense(name, table)


def _check_column(name: str, column: Tensor, size: int, dtype: torch.dtype, device: torch.device) -> None:
    check_tensor(name, column, (size,), (dtype,), device)
    check_dense(name, column)


def _launch(logits: Tensor, rows: SamplingRows, workspace: SamplingWorkspace, counts: Tensor | None, tokens: Tensor) -> None:
    vocabulary, space = workspace.vocabulary, workspace
    num_tiles = config.num_tiles(vocabulary)
    longs, ints, floats = rows.columns()
    grid = (rows.num_rows, num_tiles)
    kernel.prepare_kernel[grid](
        logits,
        ints,
        floats,
        counts,
        space.scores,
        space.tops,
        space.top_ids,
        rows.stride,
        vocabulary,
        logits.stride(0),
        0 if counts is None else counts.stride(0),
        **config.prepare_launch(vocabulary).arguments(),
    )
    measured = (space.scores, space.tops, space.masses, space.edge_counts, space.edge_masses)
    kernel.measure_kernel[grid](ints, floats, *measured, rows.stride, **config.measure_launch(vocabulary).arguments())
    candidates = (space.candidate_scores, space.candidate_ids)
    limit = {"MAX_CANDIDATES": space.max_candidates}
    kernel.gather_kernel[grid](
        ints, floats, *measured, *candidates, rows.stride, **limit, **config.measure_launch(vocabulary).arguments()
    )
    kernel.draw_kernel[(rows.num_rows,)](
        longs,
        ints,
        floats,
        space.scores,
        space.tops,
        space.top_ids,
        space.masses,
        space.edge_counts,
        space.edge_masses,
        *candidates,
        space.kept,
        tokens,
        rows.stride,
        num_tiles,
        **limit,
        **config.draw_launch(vocabulary).arguments(),
    )


def count_tokens(counts: Tensor, counts_rows: Tensor, tokens: Tensor, num_tokens: Tensor, *, is_prompt: bool) -> None:
    """Mark the tokens of prompts, or count generated ones, in ``counts`` int32 [C, V]; the caller zeroes a row when it is taken.

    Row i adds the first ``num_tokens[i]`` of ``tokens[i]`` (int64 [N, n]) to ``counts[counts_rows[i]]`` (int32 [N]; -1: skipped). Ids
    outside the vocabulary are skipped, so the output of ``sample``, padding included, can be passed on as it is.

    Raises: ValueError for tensors that do not fit together.
    """
    check_device("tokens", tokens.device)
    check_tensor("tokens", tokens, (None, None), (torch.int64,), tokens.device)
    check_dense("tokens", tokens)
    _check_table("counts", counts, None, tokens.device)
    _check_column("counts_rows", counts_rows, tokens.shape[0], torch.int32, tokens.device)
    _check_column("num_tokens", num_tokens, tokens.shape[0], torch.int32, tokens.device)
    if not tokens.numel():
        return
    launch = config.count_launch()
    grid = (tokens.shape[0], -(-tokens.shape[1] // launch.tiles["BLOCK"]))
    kernel.count_kernel[grid](
        counts,
        counts_rows,
        tokens,
        num_tokens,
        counts.shape[1],
        counts.stride(0),
        tokens.stride(0),
        IS_PROMPT=is_prompt,
        **launch.arguments(),
    )
