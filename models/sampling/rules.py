"""Rules about single tokens: biases, words that must not appear, ends that come too early.

All that happens to the logits of a row, in this order, as in vLLM:

1. guidance (CF1) combines the members of a pair;
2. rules, here: biases are added, and forbidden tokens masked;
3. penalties (``penalties``);
4. masks of grammars (``masks``), which win over all of these;
5. temperature, top-k, top-p and min-p (``sampler``).

A row's rules touch no other row. Called by the decode actor and its sampler.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .interface import LogitChanges, Pairs

# Finite: guidance takes differences of masked logits, and a row of which all are masked must still give a token.
MASKED = -1e30


@dataclass(frozen=True, slots=True)
class RowRules:
    """The rules of one row. ``bias``: of token ids. ``bad_words``: of each the last id is not drawn behind the ids before it. ``ends``:
    ids not drawn as one of the first ``min_tokens``. ``answer``: the ids drawn so far."""

    row: int
    bias: Sequence[tuple[int, float]]
    bad_words: Sequence[Sequence[int]]
    ends: Sequence[int]
    min_tokens: int
    answer: Sequence[int]


class LogitRules:
    """The rules of a step's rows, and as much of their answers as the rules depend on. At least one row has any."""

    def __init__(self, rows: Sequence[RowRules]) -> None:
        self._rows = rows
        self._counts = [len(one.answer) for one in rows]
        self._tails = [deque(one.answer, maxlen=max(map(len, one.bad_words), default=0)) for one in rows]
        biases = [(one.row, id, bias) for one in rows for id, bias in one.bias]
        self._bias_row = np.array([row for row, _, _ in biases], np.int64)
        self._bias_id = np.array([id for _, id, _ in biases], np.int64)
        self._bias = np.array([bias for _, _, bias in biases], np.float32)

    def advance(self, tokens: NDArray[np.int64]) -> None:
        """Note one more id of each row of the step, int64 [B]."""
        for number, one in enumerate(self._rows):
            self._counts[number] += 1
            self._tails[number].append(int(tokens[one.row]))

    def changes(self) -> LogitChanges:
        """Return the changes of the logits from which the next tokens are drawn."""
        masked = [(one.row, id) for number, one in enumerate(self._rows) for id in self._forbidden(number, one)]
        row, id = np.array(masked, np.int64).reshape(-1, 2).T
        return LogitChanges(self._bias_row, self._bias_id, self._bias, row, id)

    def _forbidden(self, number: int, rules: RowRules) -> set[int]:
        """The ids that must not come next."""
        tail = list(self._tails[number])
        found = {word[-1] for word in rules.bad_words if len(word) == 1 or tail[1 - len(word) :] == list(word[:-1])}
        return found | set(rules.ends) if self._counts[number] < rules.min_tokens else found


@torch.inference_mode()
def change(logits: Tensor, changes: LogitChanges) -> None:
    """Change logits, float32 [L, V], in place."""
    if changes.bias.size:
        bias = torch.from_numpy(changes.bias).to(logits)
        logits.index_put_(_places(logits, changes.bias_row, changes.bias_id), bias, accumulate=True)
    if changes.masked_id.size:
        logits[_places(logits, changes.masked_row, changes.masked_id)] = MASKED


def with_companions(changes: LogitChanges, pairs: Pairs) -> LogitChanges:
    """Repeat the changes of pairs in their companions' rows. Guidance over both gives what it gives before the changes:
    u + b + s ((c + b) - (u + b)) = u + s (c - u) + b."""
    companion_of = dict(zip(pairs.row.tolist(), pairs.companion_row.tolist(), strict=True))

    def doubled(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows and those of their companions, and where in ``rows`` each comes from."""
        at = [number for number, row in enumerate(rows.tolist()) if row in companion_of]
        theirs = np.array([companion_of[row] for row in rows[at].tolist()], np.int64)
        return np.concatenate((rows, theirs)), np.concatenate((np.arange(len(rows)), np.array(at, np.int64)))

    bias_row, bias_at = doubled(changes.bias_row)
    masked_row, masked_at = doubled(changes.masked_row)
    return LogitChanges(bias_row, changes.bias_id[bias_at], changes.bias[bias_at], masked_row, changes.masked_id[masked_at])


def _places(logits: Tensor, rows: NDArray[np.int64], ids: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(ids).to(logits.device)
