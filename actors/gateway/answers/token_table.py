"""Tokens and their log-probabilities where decode and prefill have written them: the gateway reads them itself, up to where a delta
says that the answer has got.

A request keeps its row until the gateway has delivered it, so what is read belongs to it, unless it has failed meanwhile.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....runtime.bus.messages import decode_sequence_spec
from ....shm.errors import StaleRow
from ....shm.logprob_file import ANSWER, PROMPT, Logprobs
from ....shm.sequence_table import SequenceTable


class Tokens(NamedTuple):
    """Ids, int32 [N], and their log-probabilities, of N tokens; of a prompt those of its last ones: its first token has none."""

    ids: NDArray[np.int32]
    logprobs: Logprobs

    def likeliest(self, num_alternatives: int) -> "Tokens":
        """Return them with at most so many alternatives."""
        return self._replace(logprobs=self.logprobs.part(0, len(self.ids), num_alternatives))

    def part(self, first: int, last: int) -> "Tokens":
        """Return those of [first, last)."""
        return Tokens(self.ids[first:last], self.logprobs.part(first, last, self.logprobs.ids.shape[1]))

    @classmethod
    def joined(cls, parts: "list[Tokens]") -> "Tokens":
        """Join some, at least one, of one answer."""
        ids = np.concatenate([part.ids for part in parts])
        columns = zip(*(part.logprobs for part in parts), strict=True)
        return cls(ids, Logprobs(*(np.concatenate(column) for column in columns)))


class TokenTable:
    """Reads the sequence table."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table

    def answer(self, row: int, generation: int, first: int, last: int, num_alternatives: int) -> Tokens:
        """Return the answer's tokens [first, last). Raises: StaleRow if the row is another's by now."""
        table = self._table
        ids = table.ids[row, first:last].copy()
        logprobs = table.logprobs.read(row, ANSWER, first, last, num_alternatives)
        self._check(row, generation)
        return Tokens(ids, logprobs)

    def prompt(self, row: int, generation: int, num_alternatives: int) -> Tokens:
        """Return the tokens of the expanded prompt, whose log-probabilities are all there once it is prefilled: of all, or of so many
        of the last as were asked for. Raises: as ``answer``."""
        table = self._table
        spec = decode_sequence_spec(table.read_spec(row, generation))
        length, last = spec.num_prompt_tokens, spec.generation.sampling.prompt_logprobs_last
        ids = table.prompt_ids(row, 0, length).copy()
        logprobs = table.logprobs.read(row, PROMPT, length - last if last else 1, length, num_alternatives)
        self._check(row, generation)
        return Tokens(ids, logprobs)

    def vector(self, row: int, generation: int) -> NDArray[np.float64]:
        """Return the vector pooled from the prompt, float64 [hidden size], once all of it is prefilled. Raises: StaleRow, also where
        it is prefilled again, after a preemption; ValueError where there is none."""
        table = self._table
        spec = decode_sequence_spec(table.read_spec(row, generation))
        try:
            vector = table.vectors.read(row, spec.num_prompt_tokens)
        finally:
            self._check(row, generation)
            if (num_prefilled := table.num_prefilled(row)[0]) < spec.num_prompt_tokens:
                raise StaleRow(f"row {row} has {num_prefilled} of {spec.num_prompt_tokens} tokens prefilled")
        return vector / spec.num_prompt_tokens if spec.generation.pooling == "mean" else vector

    def _check(self, row: int, generation: int) -> None:
        if self._table.generation[row] != generation:
            raise StaleRow(f"row {row} is at generation {self._table.generation[row]}, not {generation}")
