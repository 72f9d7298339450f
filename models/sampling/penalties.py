"""Penalties for repeated tokens: the rows of a step that have them, and their effect on logits on the CPU.

As in vLLM and transformers: ``repetition`` divides the positive and multiplies the negative logits of every id of the prompt or the
answer; ``frequency`` and ``presence`` are subtracted from the logits of ids of the answer, per occurrence or once. All apply
after guidance and before the temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows of a step that have any: ``row`` int64 [Q]; ``repetition`` (1: off), ``presence`` and ``frequency`` (0: off) float32 [Q]."""

    row: NDArray[np.int64]
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]


class History(NamedTuple):
    """Ids of a row's prompt and of its answer so far."""

    prompt: NDArray[np.int64]
    answer: NDArray[np.int64]


class Counts:
    """Tokens seen by each of Q rows: ``seen`` bool [Q, V], ``generated`` int32 [Q, V]. Ids outside the vocabulary do not count."""

    def __init__(self, histories: Sequence[History], vocabulary: int) -> None:
        self.seen = np.zeros((len(histories), vocabulary), np.bool_)
        self.generated = np.zeros((len(histories), vocabulary), np.int32)
        for number, history in enumerate(histories):
            self.seen[number, _inside(history.prompt, vocabulary)] = True
            answer = _inside(history.answer, vocabulary)
            self.seen[number, answer] = True
            np.add.at(self.generated[number], answer, 1)

    def add(self, tokens: NDArray[np.int64]) -> None:
        """One more id of each row's answer."""
        numbers = np.arange(len(tokens))
        self.seen[numbers, tokens] = True
        self.generated[numbers, tokens] += 1

    @torch.inference_mode()
    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        """Change the rows' logits, float32 [B, V], in place."""
        for number, row in enumerate(penalties.row.tolist()):
            ids = np.flatnonzero(self.seen[number])
            at = torch.from_numpy(ids)
            generated = torch.from_numpy(self.generated[number, ids])
            repetition = float(penalties.repetition[number])
            score = logits[row, at]
            score = torch.where(score > 0, score / repetition, score * repetition)
            score -= float(penalties.frequency[number]) * generated + float(penalties.presence[number]) * (generated > 0)
            logits[row, at] = score


def _inside(ids: NDArray[np.int64], vocabulary: int) -> NDArray[np.int64]:
    return ids[(ids >= 0) & (ids < vocabulary)]
