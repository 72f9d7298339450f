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
    """``row``: numbers of the members in the batch; each has its matcher, which stands behind the committed ids."""

    def __init__(self, row: Sequence[int], matchers: Sequence[Matcher]) -> None:
        self._matchers = matchers
        self._masks = Masks(np.array(row, np.int64), np.empty((len(row), matchers[0].num_words), np.int32))

    def masks(self) -> Masks:
        """Return what each row may draw next, until the next call. A row whose matcher fails may draw anything: it ends with that."""
        fill_masks(self._matchers, self._masks.bits)
        for bits_W, matcher in zip(self._masks.bits, self._matchers, strict=True):
            if matcher.failed:
                bits_W[:] = -1
        return self._masks

    def take(self, tokens_N: NDArray[np.int64], end_N: NDArray[np.int64]) -> None:
        """Take the drawn tokens, and change the EndCodes of rows whose answers are complete, or have gone wrong."""
        for number, row in enumerate(self._masks.row.tolist()):
            matcher, token = self._matchers[number], int(tokens_N[row])
            word = int(self._masks.bits[number, token // WORD_BITS])
            if matcher.failed:
                end_N[row] = EndCode.GRAMMAR
            elif not word >> token % WORD_BITS & 1:
                end_N[row] = EndCode.ERROR  # logits that are no numbers
            elif not matcher.take(token):
                end_N[row] = EndCode.GRAMMAR
            elif matcher.is_complete:
                end_N[row] = EndCode.STOP
