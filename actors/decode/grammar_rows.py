"""The rows of a batch that follow grammars: their masks before each draw, and what a drawn token means to them.

Array suffixes: N members of the batch, G of them with a grammar, W words of a mask.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...models.grammar.matcher import Matcher, fill_masks
from ...models.grammar.vocabulary import WORD_BITS
from ...models.sampling.interface import Masks
from ...schema.rows import EndCode


class GrammarRows:
    """``Constraints`` of a batch. ``row``: numbers of its members; each has its matcher, which stands behind the committed ids."""

    def __init__(self, row: Sequence[int], matchers: Sequence[Matcher]) -> None:
        self.row = np.array(row, np.int64)
        self._matchers = matchers
        self._bits: dict[int, tuple[int, NDArray[np.int32]]] = {}  # last masks: the count of ids behind which they stand, and bits [W]

    def some(self, number_A: NDArray[np.int64]) -> "GrammarRows | None":
        """Return those of some members, rising, whose places take the place of their numbers; None if they follow no grammars."""
        place = {number: place for place, number in enumerate(number_A.tolist())}
        chosen = [(place[row], matcher) for row, matcher in zip(self.row.tolist(), self._matchers, strict=True) if row in place]
        return GrammarRows(*zip(*chosen, strict=True)) if chosen else None

    def allows(self, number: int, token: int) -> bool:
        return self._matchers[number].allows(token)

    def masks(self, numbers: Sequence[int] | None = None) -> Masks:
        """Return what rows may draw next. A row whose matcher fails may draw anything: it ends with that."""
        numbers = range(len(self._matchers)) if numbers is None else numbers
        matchers = [self._matchers[number] for number in numbers]
        bits = np.empty((len(matchers), matchers[0].num_words), np.int32)
        fill_masks(matchers, bits)
        for number, matcher, bits_W in zip(numbers, matchers, bits, strict=True):
            if matcher.failed:
                bits_W[:] = -1
            self._bits[number] = matcher.count, bits_W
        return Masks(self.row[list(numbers)], bits)

    def take(self, tokens_N: NDArray[np.int64], end_N: NDArray[np.int64]) -> None:
        """Take the drawn tokens, and change the EndCodes of rows whose answers are complete, or have gone wrong."""
        for number, row in enumerate(self.row.tolist()):
            matcher, token = self._matchers[number], int(tokens_N[row])
            if matcher.failed:
                end_N[row] = EndCode.GRAMMAR
            elif self._is_masked(number, token):
                end_N[row] = EndCode.ERROR  # logits that are no numbers
            elif not matcher.take(token):
                end_N[row] = EndCode.GRAMMAR
            elif matcher.is_complete:
                end_N[row] = EndCode.STOP

    def _is_masked(self, number: int, token: int) -> bool:
        """Return whether the mask of this step, if it was needed, forbids a token."""
        count, bits_W = self._bits.get(number, (-1, None))
        if bits_W is None or count != self._matchers[number].count:
            return False
        return not int(bits_W[token // WORD_BITS]) >> token % WORD_BITS & 1
