"""Tokens from logits on a CUDA device: ``sampler``'s guidance, penalties, temperature and filters in Triton kernels, rules
in torch. Loaded only
for CUDA.

A step sends the rows' parameters to the device in one copy, and does not wait; reading its tokens does.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...triton_kernels import sampling
from .interface import Constraints, LogitChanges, Pairs, SamplingRows
from .masks import mask, mask_companions
from .penalties import History, Penalties
from .rules import change, with_companions

_MAX_TOP_K = 2**31 - 1


class TritonSampler:
    """``sampler.CpuSampler`` for logits of one vocabulary on one device."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._rows: dict[int, tuple[sampling.SamplingRows, sampling.SamplingRows]] = {}
        self._workspace: sampling.SamplingWorkspace | None = None
        self._counts = torch.zeros(0, vocabulary, dtype=torch.int32, device=device)

    def remember(self, histories: Sequence[History]) -> None:
        if not histories:
            return
        if len(histories) > len(self._counts):
            self._counts = self._counts.new_empty(1 << (len(histories) - 1).bit_length(), self._vocabulary)
        self._counts[: len(histories)].zero_()
        numbers = torch.arange(len(histories), dtype=torch.int32, device=self._device)
        for is_prompt, parts in ((True, [one.prompt for one in histories]), (False, [one.answer for one in histories])):
            ids = pad_sequence([torch.from_numpy(part) for part in parts], batch_first=True).to(self._device)
            lengths = torch.tensor([len(part) for part in parts], dtype=torch.int32).to(self._device)
            sampling.count_tokens(self._counts, numbers, ids, lengths, is_prompt=is_prompt)

    def sample(
        self,
        logits: Tensor,
        rows: SamplingRows,
        pairs: Pairs | None = None,
        penalties: Penalties | None = None,
        changes: LogitChanges | None = None,
        masks: Constraints | None = None,
    ) -> Tensor:
        """Draw one token per row. ``logits`` [L, V] float32 or bfloat16; row i draws from ``logits[i]``, guided where it is of a pair.

        Returns int64 [B] on the device, B <= L being the number of ``rows``: what the CPU draws, except where a draw falls within about
        1e-6 of a border. Read them before the next call: it sends its rows from the same buffer.
        Raises: ValueError for more rows than logits.
        """
        num_rows = rows.temperature.shape[0]
        if num_rows > logits.shape[0]:
            raise ValueError(f"{num_rows} rows draw from {logits.shape[0]} rows of logits")
        if not num_rows:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        size = 1 << (num_rows - 1).bit_length()
        if size not in self._rows:
            staged = sampling.SamplingRows(size, "cpu", pin_memory=self._device.type == "cuda")
            self._rows[size] = staged, sampling.SamplingRows(size, self._device)
        if self._workspace is None or self._workspace.max_rows < size:
            self._workspace = sampling.SamplingWorkspace.allocate(size, self._vocabulary, self._device)
        if changes is not None:  # before guidance, which is part of the kernel
            change(logits, changes if pairs is None else with_companions(changes, pairs))
        if masks is not None:  # likewise
            mask(logits, masks.masks() if pairs is None else mask_companions(masks.masks(), pairs))
        staged, sent = self._rows[size]
        _fill(staged, rows, pairs, penalties)
        sent.copy_(staged)
        drawn = sampling.sample(logits, sent, self._workspace, counts=None if penalties is None else self._counts)
        if penalties is not None:
            once = torch.ones(size, dtype=torch.int32, device=self._device)
            sampling.count_tokens(self._counts, sent.counts_row, drawn.unsqueeze(1), once, is_prompt=False)
        return drawn[:num_rows]


def _fill(target: sampling.SamplingRows, rows: SamplingRows, pairs: Pairs | None, penalties: Penalties | None) -> None:
    """Fill ``target``; its rest is padding."""
    num_rows = rows.temperature.shape[0]
    target.clear()
    target.logits_row[:num_rows] = torch.arange(num_rows)
    columns = {
        "temperature": rows.temperature,
        "top_k": np.minimum(rows.top_k, _MAX_TOP_K),
        "top_p": rows.top_p,
        "min_p": rows.min_p,
        "seed": rows.seed.view(np.int64),
        "index": rows.index,
    }
    for name, values in columns.items():
        getattr(target, name)[:num_rows] = torch.from_numpy(values)
    if pairs is not None:
        at = torch.from_numpy(pairs.row)
        target.companion_row[at] = torch.from_numpy(pairs.companion_row).int()
        target.guidance[at] = torch.from_numpy(pairs.scale)
    if penalties is not None:
        at = torch.from_numpy(penalties.row)
        target.counts_row[at] = torch.arange(len(at), dtype=torch.int32)
        target.repetition[at] = torch.from_numpy(penalties.repetition)
        target.presence[at] = torch.from_numpy(penalties.presence)
        target.frequency[at] = torch.from_numpy(penalties.frequency)
