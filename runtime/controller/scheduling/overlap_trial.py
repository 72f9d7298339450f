"""Trials of ``auto``: whether encode and prefill at once do more work beside decode than in turns (pure; US1, TI5, RS6).

Both at once are tried where both stages have had work for ``TURNS_S`` and kept their turns ``BUSY``, while at most ``RARE`` of the
tokens are late. The trial ends at the first window with more than ``LATE``. From ``LOOK_S`` to ``PROVEN_S`` it ends once less than
``PAYS`` times the work of turns was done in a second, by what plans cost before it. The next trial waits twice as long, up to
``MAX_BACKOFF_S``; one that lasts ``PROVEN_S`` resets the wait. gLLM paid 3.4 times the TPOT for overlap without a guard.
"""

import math
from typing import NamedTuple

from .facts import UNKNOWN, Cost, Facts

LATE, RARE = 0.01, 0.002  # shares of tokens
FIRST_BACKOFF_S, MAX_BACKOFF_S, PROVEN_S = 20.0, 300.0, 60.0
TURNS_S, LOOK_S, PAYS = 20.0, 3.0, 1.25
BUSY = 0.6  # of the time: with less, both at once have little to gain
MAX_IDLE_S = 3.0  # of a stage that has work


class Work(NamedTuple):
    """Plans sent beside decode since ``since_s``: how many of each stage, and their units. ``last_rows`` and ``last_tokens`` are of the
    newest plans, which are under way and do not count yet."""

    since_s: float = -math.inf
    num_encodes: int = 0
    num_rows: int = 0
    num_prefills: int = 0
    num_tokens: int = 0
    last_rows: int = 0
    last_tokens: int = 0

    def add(self, num_rows: int, num_tokens: int) -> "Work":
        """Return the work with another plan of one stage or of each; 0 units are no plan."""
        since_s, num_encodes, rows, num_prefills, tokens, last_rows, last_tokens = self
        if num_rows:
            num_encodes, rows, last_rows = num_encodes + (last_rows > 0), rows + last_rows, num_rows
        if num_tokens:
            num_prefills, tokens, last_tokens = num_prefills + (last_tokens > 0), tokens + last_tokens, num_tokens
        return Work(since_s, num_encodes, rows, num_prefills, tokens, last_rows, last_tokens)

    def load(self, encode: Cost, prefill: Cost, until_s: float) -> float:
        """Return the seconds that the counted plans take, per second."""
        encode_s = encode.base_s * self.num_encodes + encode.unit_s * self.num_rows
        prefill_s = prefill.base_s * self.num_prefills + prefill.unit_s * self.num_tokens
        return (encode_s + prefill_s) / max(until_s - self.since_s, 1e-9)


class Trial(NamedTuple):
    """The memory of the trials. ``together``: encode and prefill may run at once, since ``tried_s``, or again from ``retry_s`` on.
    ``work``: since that changed, or, in turns, since both stages have had work, for twice ``TURNS_S`` at most. ``turns_load``: of the
    work in turns up to the trial. ``encode`` and ``prefill``: what plans cost then; during the trial they take longer."""

    together: bool = False
    tried_s: float = 0.0
    retry_s: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    work: Work = Work()
    turns_load: float = 0.0
    encode: Cost = UNKNOWN
    prefill: Cost = UNKNOWN

    def note(self, now: float, idle_s: float, num_rows: int, num_tokens: int) -> "Trial":
        """Return the memory after a plan. ``idle_s``: how long one of the stages has had no plan."""
        restarts = not self.together and (idle_s > MAX_IDLE_S or now - self.work.since_s > 2 * TURNS_S)
        return self._replace(work=(Work(now) if restarts else self.work).add(num_rows, num_tokens))

    def fails(self, facts: Facts) -> bool:
        """Return whether a trial under way makes tokens late, or does not do more work than turns."""
        return self.together and ((facts.late_share or 0.0) > LATE or not self._pays(facts))

    def ended(self, now: float) -> "Trial":
        """Return the memory after the end of a trial that failed."""
        backoff_s = self.backoff_s if now - self.tried_s < PROVEN_S else FIRST_BACKOFF_S
        return Trial(False, self.tried_s, now + backoff_s, min(MAX_BACKOFF_S, 2 * backoff_s), Work(now))

    def may_begin(self, facts: Facts) -> bool:
        """Return whether both at once should be tried."""
        if self.together or facts.now < self.retry_s or facts.now - self.work.since_s < TURNS_S:
            return False
        return (facts.late_share or 0.0) <= RARE and self.work.load(facts.encode, facts.prefill, facts.now) >= BUSY

    def begun(self, facts: Facts) -> "Trial":
        """Return the memory at the beginning of a trial."""
        now, costs = facts.now, (facts.encode, facts.prefill)
        return Trial(True, now, self.retry_s, self.backoff_s, Work(now), self.work.load(*costs, now), *costs)

    def _pays(self, facts: Facts) -> bool:
        """Return whether the trial does enough work. It is judged from ``LOOK_S`` to ``PROVEN_S``: load changes."""
        if not LOOK_S <= facts.now - self.tried_s <= PROVEN_S:
            return True
        return self.work.load(self.encode, self.prefill, facts.now) >= PAYS * self.turns_load
