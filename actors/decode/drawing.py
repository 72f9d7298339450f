"""From a step's logits to tokens: draws, their log-probabilities and ends, and what is drawn behind right guesses.

Array suffixes: N members of the batch, A members that draw, Q of these with log-probabilities, L rows of logits, G guesses, K tokens of
a member, V vocabulary.
"""

import logging
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...models.sampling.interface import LogitChanges, Sampler
from ...models.sampling.logprobs import TokenLogprobs, log_softmax, logprobs_of
from ...models.sampling.penalties import Penalties
from ...schema.rows import EndCode
from ...shm.logprob_file import ANSWER, Logprobs
from ...shm.sequence_table import SequenceTable
from ..host.logprobs import to_host
from .batch import Batch, Draws, Ints
from .prompt_lookup import Guesses

log = logging.getLogger(__name__)


class Drawn(NamedTuple):
    """Tokens [A] that members drew, on the device, and their log-probabilities [Q] where they are asked for."""

    draws: Draws
    tokens: Tensor
    logprobs: TokenLogprobs | None


class Answers(NamedTuple):
    """The tokens that a step adds: of each member the first ``num_N`` of ``tokens`` [N, K], or one each of [N]; and their EndCodes."""

    tokens: Ints
    num_N: Ints
    end_N: Ints


class Drawing:
    """The draws of one decode process. ``eos``: the model's end-of-sequence ids."""

    def __init__(self, sampler: Sampler, table: SequenceTable, eos: Ints) -> None:
        self._sampler, self._table, self._eos = sampler, table, eos

    def draw(self, logits_LV: Tensor, draws: Draws, penalties: Penalties | None = None, changes: LogitChanges | None = None) -> Drawn:
        """Draw from logits of members, and behind them those of companions (``Sampler.sample``)."""
        logprobs_QV = log_softmax(logits_LV, draws.logprob_Q, draws.pairs) if draws.logprob_Q.size else None
        tokens_A = self._sampler.sample(logits_LV, draws.sampling, draws.pairs, penalties, changes, draws.grammars)
        if logprobs_QV is None:
            return Drawn(draws, tokens_A, None)
        tokens_Q = tokens_A[torch.from_numpy(draws.logprob_Q).to(tokens_A.device)]
        return Drawn(draws, tokens_A, logprobs_of(tokens_Q, logprobs_QV, max(draws.num_alternatives)))

    def ends(self, batch: Batch, drawn: Drawn, tokens_A: Ints) -> Ints:
        """Write the log-probabilities of ids that are about to be committed. Returns the EndCodes [A] of those who drew them: ERROR
        where there is no memory."""
        failed = [] if drawn.logprobs is None else self._write_logprobs(batch, drawn.draws, to_host(drawn.logprobs))
        end_A = batch.ends(drawn.draws, tokens_A, self._eos)
        end_A[failed] = EndCode.ERROR
        return end_A

    def _write_logprobs(self, batch: Batch, draws: Draws, logprobs_Q: Logprobs) -> list[int]:
        """Returns the places of members for which there is no memory."""
        failed = []
        for at, (place, asked) in enumerate(zip(draws.logprob_Q.tolist(), draws.num_alternatives, strict=True)):
            number = draws.number_A[place]
            row, generation = int(batch.row_N[number]), int(batch.generation_N[number])
            if self._table.generation[row] == generation:
                try:
                    self._table.logprobs.write(row, ANSWER, int(batch.count_N[number]), logprobs_Q.part(at, at + 1, asked))
                except OSError as error:
                    log.error("row %d ends: its log-probabilities cannot be written: %s", row, error.strerror)
                    failed.append(place)
        return failed

    def check(self, batch: Batch, guesses: Guesses, behind: Tensor, before: Answers) -> Answers:
        """Draw the tokens behind guesses, place by place, for members whose guesses are right so far.

        ``behind``: their logits, [G, and those of pairs again, V]; ``before``: what the members drew in this step, which stays as it
        is. Returns it with what is added.
        """
        tokens_N, num_N, end_N = before.tokens, before.num_N.copy(), before.end_N.copy()
        tokens_NK = np.zeros((len(tokens_N), 1 + int(guesses.place_G.max())), np.int64)
        tokens_NK[:, 0] = tokens_N
        number_A = np.flatnonzero(end_N == EndCode.NONE)
        for place in range(1, tokens_NK.shape[1]):
            right = guesses.right(place, number_A, tokens_NK[number_A, place - 1])
            if not right.size:
                break
            number_A = guesses.number_G[right]
            tokens_A, end_A = self._draw_behind(batch, guesses, behind, right)
            tokens_NK[number_A, place], end_N[number_A] = tokens_A, end_A
            num_N[number_A] += end_A < EndCode.ERROR
            number_A = number_A[end_A == EndCode.NONE]
        return Answers(tokens_NK, num_N, end_N)

    def _draw_behind(self, batch: Batch, guesses: Guesses, behind: Tensor, right: Ints) -> tuple[Ints, Ints]:
        """Draw the tokens behind these right guesses of one place. Returns them and the members' EndCodes."""
        number_A = guesses.number_G[right]
        companions = len(guesses.id_G) + np.flatnonzero(np.isin(guesses.paired, right))
        logits = behind[torch.from_numpy(np.concatenate((right, companions)))]
        drawn = self.draw(logits, batch.draws_of(number_A))
        tokens_A = drawn.tokens.numpy()
        end_A = self.ends(batch, drawn, tokens_A)
        batch.advance_some(number_A, tokens_A)
        return tokens_A, end_A
