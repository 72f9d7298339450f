"""The results of a request beside its text: log-probabilities of its tokens and of its prompt's, a vector of its prompt.

decode and prefill leave it in the request's row, which is read when a message says how far they have got. Runs in the gateway's event
loop.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ....runtime.bus.messages import Computed, Delta, RequestSpec
from .token_table import Tokens


class TokenReader(Protocol):
    """The part of ``TokenTable`` that requests need."""

    def answer(self, row: int, generation: int, first: int, last: int, num_alternatives: int) -> Tokens: ...
    def prompt(self, row: int, generation: int, num_alternatives: int) -> Tokens: ...
    def vector(self, row: int, generation: int) -> NDArray[np.float64]: ...


class Findings:
    """Of one request. ``prompt``: the prompt's tokens, with log-probabilities; ``vector``: pooled from it. Both only if asked for."""

    def __init__(self, spec: RequestSpec, reader: TokenReader) -> None:
        self.prompt: Tokens | None = None
        self.vector: NDArray[np.float64] | None = None
        self._spec = spec
        self._reader = reader
        self._tokens: list[Tokens] = []
        self.num_read = 0  # tokens of the answer, with their log-probabilities
        self.num_taken = 0  # of these

    def take(self, most: int | None = None) -> Tokens | None:
        """Take the answer's tokens read since the last call, or the first of them; None if there are none or none were asked for."""
        parts, self._tokens = self._tokens, []
        if not parts:
            return None
        tokens = Tokens.joined(parts)
        if most is not None and most < len(tokens.ids):
            self._tokens = [tokens.part(most, len(tokens.ids))]
            tokens = tokens.part(0, most)
        self.num_taken += len(tokens.ids)
        return tokens

    def read(self, delta: Delta) -> None:
        """Read the log-probabilities of the delta's tokens, if asked for, and with the first ones those of the prompt.

        Raises: StaleRow; OSError and ValueError if they cannot be read.
        """
        asked = self._spec.generation.sampling
        if asked.prompt_logprobs is not None and self.prompt is None and delta.finish not in ("abort", "error"):
            self.prompt = self._reader.prompt(delta.row, delta.row_generation, asked.prompt_logprobs)
        if asked.logprobs is not None and delta.token_index > self.num_read:
            place = delta.row, delta.row_generation
            self._tokens.append(self._reader.answer(*place, self.num_read, delta.token_index, asked.logprobs))
            self.num_read = delta.token_index

    def read_computed(self, computed: Computed) -> None:
        """Read what prefill alone has found out. Raises: as ``read``."""
        place, asked = (computed.row, computed.row_generation), self._spec.generation.sampling.prompt_logprobs
        if asked is not None:
            self.prompt = self._reader.prompt(*place, asked)
        if self._spec.generation.pooling is not None:
            self.vector = self._reader.vector(*place)
