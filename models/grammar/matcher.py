"""Matchers: where an answer stands in its grammar, and which tokens may come next. Used by decode and the gateway's grammar process.

llguidance compiles step by step while an answer grows. Its limits bound each step, so a hostile grammar ends its own answer with an
error: it neither takes the time of others nor memory without end. The matcher of an answer follows from its grammar and ids
alone, so a new process rebuilds it.
"""

import re
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from ..errors import GrammarError
from .vocabulary import WORD_BITS, GrammarVocabulary

_MAX_ERROR_CHARS = 300
MAX_DIGITS = 40  # tokens of a JSON number in a row: an integer of 128 bits has 39
_JSON = re.compile(r'"json_schema": ?\{')  # in the text of a grammar, which writes quotes of literals otherwise
_SHOWN_SOURCE = re.compile(r"<|\s*(\d+ \||\^)")  # lines of a message


class Matcher:
    """The state of one answer in its grammar. Errors stay: a matcher that ``failed`` allows nothing more."""

    def __init__(self, vocabulary: GrammarVocabulary, start: LLMatcher, *, ends_numbers: bool = False) -> None:
        """``start``: the grammar's matcher before the first token, which is copied. ``ends_numbers``: JSON numbers have an end."""
        self._ends_numbers = ends_numbers
        self._vocabulary = vocabulary
        self._start = start
        self._matcher = start.deep_copy()
        self._has_way_on = True
        self.count = 0  # ids taken
        self._num_digits = 0  # ids of digits alone, the last ones

    @property
    def num_words(self) -> int:
        """int32 words of a mask."""
        return len(self._vocabulary.permitted)

    @property
    def failed(self) -> bool:
        return not self._has_way_on or self._matcher.is_error()

    @property
    def is_complete(self) -> bool:
        """The answer follows the grammar, and nothing can be added."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def check(self) -> None:
        """Raises: GrammarError if it has failed."""
        check(self._matcher)
        if not self._has_way_on:
            raise GrammarError("leads to a place where no token of a text can follow")

    def follow(self, ids: Sequence[int]) -> None:
        """Come to the state behind exactly these ids, the answer so far."""
        if self.count > len(ids):
            self._matcher, self._has_way_on, self.count, self._num_digits = self._start.deep_copy(), True, 0, 0
        if self.count < len(ids):
            more = [int(id) for id in ids[self.count :]]
            self._matcher.consume_tokens(more)
            self.count = len(ids)
            for id in more:
                self._note(id)

    def allows(self, id: int) -> bool:
        """Return whether this id may come next, as ``fill`` says, at a fraction of its cost."""
        word, bit = divmod(id, WORD_BITS)
        if self._num_digits >= MAX_DIGITS and self._vocabulary.digits[word] >> bit & 1:
            mask = np.empty(self.num_words, np.int32)
            self.fill(mask)
            return bool(mask[word] >> bit & 1)
        if self._vocabulary.permitted[word] >> bit & 1:
            return self._matcher.validate_tokens([id]) == 1
        return bool(self._vocabulary.permitted_at_end[word] >> bit & 1) and self._matcher.is_accepting()

    def num_allowed(self, ids: Sequence[int]) -> int:
        """Return how many of these ids may come next, one behind the other, as far as the grammar alone says."""
        return self._matcher.validate_tokens(list(ids))

    def forced(self, most: int) -> list[int]:
        """Return up to ``most`` ids that the grammar leaves no choice about: as its text would be written, though not as it must be."""
        return self._matcher.compute_ff_tokens()[:most]

    def take(self, id: int) -> bool:
        """Add the next id. Returns False, and has failed, if the grammar does not allow it."""
        self.count += 1
        self._note(id)
        return self._matcher.consume_token(id)

    def _note(self, id: int) -> None:
        word, bit = divmod(id, WORD_BITS)
        self._num_digits = self._num_digits + 1 if self._vocabulary.digits[word] >> bit & 1 else 0

    def _end_number(self, mask: NDArray[np.int32]) -> None:
        """Take away digits behind a JSON number that has many, where something else may follow: models can write them for ever."""
        others = mask & ~self._vocabulary.digits
        if self._ends_numbers and others.any() and not (mask & self._vocabulary.beside_numbers).any():
            mask[:] = others

    def fill(self, mask: NDArray[np.int32]) -> None:
        """``fill_masks`` of one: ``mask`` int32 [words]."""
        fill_masks([self], mask[None])


def fill_masks(matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
    """Write the tokens that may come next in each of some answers over one vocabulary into ``masks`` int32 [matchers, words]. An
    end-of-sequence id is one only where the grammar is satisfied. A mask is of no use if its matcher has failed afterwards."""
    assert masks.flags.c_contiguous and masks.dtype == np.int32
    vocabulary = matchers[0]._vocabulary
    first, num_bytes = masks.ctypes.data, masks.nbytes // len(masks)
    for number, matcher in enumerate(matchers):
        matcher._matcher.unsafe_compute_mask_ptr(first + number * num_bytes, num_bytes)
    np.bitwise_and(masks, vocabulary.permitted_at_end, out=masks)
    words, bits = vocabulary.ends
    for number in np.flatnonzero((masks[:, words] & bits).any(1)).tolist():
        if not matchers[number]._matcher.is_accepting():
            np.bitwise_and(masks[number], vocabulary.permitted, out=masks[number])
    for matcher, mask in zip(matchers, masks, strict=True):
        if matcher._num_digits >= MAX_DIGITS:
            matcher._end_number(mask)
    for matcher, has_way_on in zip(matchers, np.any(masks, axis=1).tolist(), strict=True):
        matcher._has_way_on = has_way_on


class Matchers:
    """Makes matchers of grammars. The last ``max_kept`` grammars stay compiled. ``compile`` may run in another thread than the rest."""

    def __init__(self, vocabulary: GrammarVocabulary, max_kept: int = 64) -> None:
        self._vocabulary = vocabulary
        self._limits = _limits()
        self._max_kept = max_kept
        self._starts: OrderedDict[str, LLMatcher] = OrderedDict()

    def begin(self, grammar: str) -> Matcher:
        """Return the matcher of an answer without ids. Raises: GrammarError if the grammar (``text``) does not compile."""
        return self.begin_kept(grammar) or self.keep(grammar, self.compile(grammar))

    def begin_kept(self, grammar: str) -> Matcher | None:
        """Return the same if the grammar is kept."""
        start = self._starts.get(grammar)
        if start is None:
            return None
        self._starts.move_to_end(grammar)
        return self._matcher(grammar, start)

    def compile(self, grammar: str) -> LLMatcher:
        """Return llguidance's matcher before the first token. Other threads run meanwhile. Raises: GrammarError."""
        start = LLMatcher(self._vocabulary.tokenizer, grammar, log_level=0, limits=self._limits)
        check(start)
        return start

    def keep(self, grammar: str, start: LLMatcher) -> Matcher:
        """Keep a grammar that has been compiled, and begin with it."""
        self._starts[grammar] = start
        self._starts.move_to_end(grammar)
        if len(self._starts) > self._max_kept:
            self._starts.popitem(last=False)
        return self._matcher(grammar, start)

    def _matcher(self, grammar: str, start: LLMatcher) -> Matcher:
        return Matcher(self._vocabulary, start, ends_numbers=_JSON.search(grammar) is not None)


def _limits() -> LLParserLimits:
    """About 15 ms of a core for each; a state of the lexer takes 1 to 2 kB."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def check(matcher: LLMatcher) -> None:
    """Raises: GrammarError, with llguidance's message, if the matcher has failed."""
    if matcher.is_error():
        if matcher.get_error().startswith("panic:"):
            raise GrammarError("the library for grammars fails on it; names of control tokens (<|...|>) are not supported")
        lines = [line for line in matcher.get_error().splitlines() if not _SHOWN_SOURCE.match(line)]
        raise GrammarError(" ".join(" ".join(lines).split())[:_MAX_ERROR_CHARS])
