"""Guesses of an answer's next tokens, which a step checks beside the token that it computes (prompt lookup decoding).

Where the last ids of an answer stood before, in the prompt or the answer, the ids behind them are guessed to follow again: so they do
in copies, edits, code and tables. Tokens that a grammar forces are guessed, too. A step computes a row once more for each guess. It
keeps what it draws behind a guess if that guess, and all before it, were drawn. Draws depend on (seed, index) alone, so the answer is
the one without guesses.

A step on a CPU reads the weights once, so a few more tokens cost little. How little is measured, as is how often a row's guesses are
right: a guess is checked where it is likely to come to more tokens a second.

Array suffixes: N members of the batch, G guesses.
"""

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...shm.sequence_table import SequenceTable
from .batch import Batch, Ints

MOST_GUESSES = 8  # of a row
MOST_TOKENS = 24  # of a step with guesses
_BEHIND = 3  # last ids that stood before
_TRIED_AGAIN = 64  # tokens after which a row whose guesses were wrong tries one
_LEARNT = 0.15  # weight of the newest guess in a row's luck
_SLOPE = 0.1  # of a step's time for one token more, until it is measured
_DOUBT = 0.5  # weight of that, as a variance of tokens
_LEAST_SLOPE = 0.02  # likewise, whatever was measured: one slow step may have come from elsewhere
_MEMORY = 100  # steps


@dataclass(frozen=True, slots=True)
class Guesses:
    """The guesses that a step checks. ``number_G``: their members in the batch, rising; ``place_G``: 1 for a guess of the token that
    every step draws, 2 of the next, and so on; ``id_G``. ``paired``: indices of those of pairs, which both members compute."""

    number_G: Ints
    place_G: Ints
    id_G: Ints
    paired: Ints

    def right(self, place: int, number_N: Ints, drawn_N: Ints) -> Ints:
        """Return the indices of the guesses of a place that equal what these members, rising, have drawn there."""
        at_G = np.flatnonzero(self.place_G == place)
        at_G = at_G[np.isin(self.number_G[at_G], number_N)]
        drawn_G = drawn_N[np.searchsorted(number_N, self.number_G[at_G])]
        found: Ints = at_G[self.id_G[at_G] == drawn_G]
        return found


def look_up(text: NDArray[np.int32], most: int) -> Ints:
    """Return up to ``most`` ids that followed the last ids of ``text`` where these stood last before; none if they never did.

    What reaches the text's end is repeated: the text is then likely to repeat itself.
    """
    if len(text) <= _BEHIND or most < 1:
        return np.empty(0, np.int64)
    *earlier, last = text[-_BEHIND:].tolist()
    ends = np.flatnonzero(text[_BEHIND - 1 : -1] == last) + _BEHIND - 1
    for distance, id in enumerate(reversed(earlier), 1):
        ends = ends[text[ends - distance] == id]
    if not ends.size:
        return np.empty(0, np.int64)
    return np.resize(text[int(ends[-1]) + 1 :], most).astype(np.int64)


class StepTime:
    """A step's time by its number of tokens: a line through the last steps."""

    def __init__(self) -> None:
        self._count = 0
        self._tokens = self._seconds = 0.0  # means
        self._variance = self._covariance = 0.0

    def took(self, num_tokens: int, seconds: float) -> None:
        self._count = min(self._count + 1, _MEMORY)
        weight = 1 / self._count
        tokens, time = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += weight * tokens
        self._seconds += weight * time
        self._variance = (1 - weight) * (self._variance + weight * tokens * tokens)
        self._covariance = (1 - weight) * (self._covariance + weight * tokens * time)

    def growth(self, num_tokens: int) -> float:
        """Return the time of one token more beside that of a step of ``num_tokens``."""
        if not self._seconds:
            return _SLOPE
        slope = (self._covariance + _DOUBT * _SLOPE * self._seconds) / (self._variance + _DOUBT)
        time = max(self._seconds + slope * (num_tokens - self._tokens), 0.1 * self._seconds)
        return max(slope / time, _LEAST_SLOPE)


class PromptLookup:
    """Guesses for the members of one decode process. Called by ``RunningSet`` only."""

    def __init__(self, table: SequenceTable, page_tokens: int) -> None:
        self._table = table
        self._page_tokens = page_tokens
        self._time = StepTime()
        self.num_checked = self.num_right = 0  # guesses

    def guess(self, batch: Batch) -> Guesses | None:
        """Return what the batch's next step should check; None for nothing."""
        num_tokens = len(batch.members) + len(batch.pair_P)
        if num_tokens >= MOST_TOKENS:
            return None
        found: dict[int, Ints] = {}
        due = list[int]()
        for number in np.flatnonzero(batch.may_guess_N).tolist():
            luck, is_due = batch.members[number].luck, self._is_due(batch, number)
            if is_due or self._pays(luck.share, len(batch.members), num_tokens, batch.width(number)):
                luck.tried_at = int(batch.count_N[number])
                ids = self._look_up(batch, number)
                if ids.size:
                    found[number] = ids
                    if is_due:
                        due.append(number)
        chosen = self._choose(batch, found, due, num_tokens) if found else {}
        if not chosen:
            return None
        number_G = np.concatenate([np.full(count, number) for number, count in chosen.items()])
        return Guesses(
            number_G,
            np.concatenate([np.arange(1, count + 1) for count in chosen.values()]),
            np.concatenate([found[number][:count] for number, count in chosen.items()]),
            np.flatnonzero(np.isin(number_G, batch.pair_P)),
        )

    def learn(self, batch: Batch, guesses: Guesses, right_N: Ints) -> None:
        """Note how many of its guesses were right, of each member."""
        for number, count in Counter(guesses.number_G.tolist()).items():
            luck, right = batch.members[number].luck, max(0, int(right_N[number]))
            self.num_checked += count
            self.num_right += right
            for was_right in [1.0] * right + [0.0] * (right < count):
                luck.share += _LEARNT * (was_right - luck.share)

    def give_up(self, batch: Batch, guesses: Guesses) -> None:
        """Guess nothing for these members for a while: their step failed."""
        for number in guesses.number_G.tolist():
            batch.members[number].luck.share = 0.0

    def took(self, num_tokens: int, seconds: float) -> None:
        """Note the time of a step."""
        self._time.took(num_tokens, seconds)

    def _pays(self, share: float, expected: float, num_tokens: int, width: int) -> bool:
        """Return whether ``share`` of a token more a step is worth ``width`` tokens more, where ``expected`` come of ``num_tokens``."""
        return share > expected * width * self._time.growth(num_tokens)

    def _is_due(self, batch: Batch, number: int) -> bool:
        return int(batch.count_N[number]) - batch.members[number].luck.tried_at >= _TRIED_AGAIN

    def _look_up(self, batch: Batch, number: int) -> Ints:
        member = batch.members[number]
        most = min(MOST_GUESSES, batch.room(self._table, self._page_tokens, number))
        if member.matcher is not None and most > 0 and (forced := member.matcher.forced(most)):
            return np.array(forced, np.int64)
        prompt = self._table.prompt_ids(member.row, 0, member.spec.num_prompt_tokens)
        ids = look_up(np.concatenate((prompt, self._table.ids[member.row, : int(batch.count_N[number])])), most)
        if member.matcher is not None and ids.size:
            ids = ids[: member.matcher.num_allowed(ids.tolist())]
        return ids

    def _choose(self, batch: Batch, found: dict[int, Ints], due: list[int], num_tokens: int) -> dict[int, int]:
        """Return how many of its guesses each member checks: the likeliest first, as long as they pay, and one of each that is due."""
        expected = float(len(batch.members))
        likeliest = [(-batch.members[number].luck.share, number) for number in found]
        heapq.heapify(likeliest)
        chosen: dict[int, int] = {}
        while likeliest:
            share, number = heapq.heappop(likeliest)
            width, count = batch.width(number), chosen.get(number, 0)
            if num_tokens + width > MOST_TOKENS:
                continue
            if not self._pays(-share, expected, num_tokens, width):
                break
            chosen[number] = count + 1
            expected -= share
            num_tokens += width
            if count + 1 < len(found[number]):
                heapq.heappush(likeliest, (share * batch.members[number].luck.share, number))
        for number in due:
            if number not in chosen and num_tokens + batch.width(number) <= MOST_TOKENS:
                chosen[number] = 1
                num_tokens += batch.width(number)
        return dict(sorted(chosen.items()))
