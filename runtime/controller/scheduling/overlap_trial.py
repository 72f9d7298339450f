"""Trials of ``auto``: whether encode and prefill at once do more work beside decode than in turns (pure; US1, TI5, RS6).

Now and then a plan of each is sent at once, with half of the time for each, and nothing more until both are done. Such pairs take
``RARE`` of the time, so that they do not show in the P99 of the time between tokens. A pair that takes as long as the longer of its
plans overlaps in full; one that takes as long as both in turns gains nothing. If the last ``NUM_PAIRS`` save ``PAYS`` of their shorter
plans' time, both stages work at once, until more than ``LATE`` of the tokens are late. Then pairs begin anew. gLLM paid 3.4 times the
TPOT for overlap without a guard.
"""

import math
from typing import NamedTuple

from .facts import Facts
from .types import View

FIRST_S = 20.0  # before the first pair
RARE = 0.005
NUM_PAIRS, PAYS = 4, 0.4
LATE = 0.01  # share of tokens


class Pair(NamedTuple):
    """Two plans sent at once. ``encode_s`` and ``prefill_s``: what each takes in turns."""

    sent_s: float
    encode_s: float
    prefill_s: float


class Trial(NamedTuple):
    """The memory of the trials. ``together``: both stages work at once. ``pair``: under way. ``saved``: of the last pairs, the seconds
    that each saved, and those that it could have saved. ``next_s``: no pair before."""

    together: bool = False
    pair: Pair | None = None
    saved: tuple[tuple[float, float], ...] = ()
    next_s: float = math.inf

    def look(self, view: View, late_share: float) -> "Trial":
        """Return the memory after a look at what is in flight. ``late_share``: of the tokens since the last change."""
        now = view.now
        if self.next_s == math.inf or self.together and late_share > LATE:
            return Trial(next_s=now + FIRST_S)
        if self.pair is None:
            return self
        sent_s, encode_s, prefill_s = self.pair
        took_s = now - sent_s
        if not view.num_decoding:  # nothing bounds other plans from now on
            return self._replace(pair=None, next_s=now + took_s / RARE)
        if view.encode_in_flight or view.prefill_in_flight:
            return self
        saved = (*self.saved, (encode_s + prefill_s - took_s, min(encode_s, prefill_s)))[-NUM_PAIRS:]
        pays = len(saved) == NUM_PAIRS and sum([got for got, _ in saved]) >= PAYS * sum([most for _, most in saved])
        return Trial(pays, None, saved, now + took_s / RARE)

    def is_due(self, now: float) -> bool:
        """Return whether plans of both stages should be sent at once."""
        return now >= self.next_s

    def begun(self, facts: Facts, num_rows: int, num_tokens: int) -> "Trial":
        """Return the memory when plans of so many units have been sent at once."""
        return self._replace(pair=Pair(facts.now, facts.encode.seconds(num_rows), facts.prefill.seconds(num_tokens)))
