"""Limits of one API key: requests and tokens per minute, and requests at a time. Pure; time comes in (monotonic seconds)."""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....runtime.errors import RequestError
from .key_file import ApiKey

_BUSY_RETRY_S = 1


class Words(Protocol):
    """Numbers that may be shared with other gateways."""

    def __getitem__(self, place: int, /) -> Any: ...
    def __setitem__(self, place: int, number: Any, /) -> None: ...


@dataclass(frozen=True)
class Counts:
    """The words in which the use of a key is counted. ``open``: requests under way, of each gateway; ``gateway``: whose numbers these
    are. ``requests``, ``tokens``: of an allowance each. ``lock``: keeps others from them."""

    gateway: int = 0
    open: Any = field(default_factory=lambda: [0])
    requests: Words = field(default_factory=lambda: [0.0] * 3)
    tokens: Words = field(default_factory=lambda: [0.0] * 3)
    lock: Callable[[], AbstractContextManager[None]] = nullcontext


def own_counts(_: str) -> Counts:
    """Return counts of a key that are shared with nobody."""
    return Counts()


class Allowance:
    """Units that come back evenly, ``per_minute`` of them in a minute and that many at most. It may go below zero: the cost of a
    request is known when it ends. ``words``: the units per minute, those that are left, and since when."""

    def __init__(self, per_minute: int, now_s: float, words: Words | None = None) -> None:
        """Go on with the words where they are of the same units per minute."""
        self.per_minute = per_minute
        self._words = [0.0] * 3 if words is None else words
        if self._words[0] != per_minute:
            self._words[0], self._words[1], self._words[2] = per_minute, per_minute, now_s

    def left(self, now_s: float) -> float:
        """Return the units that may be spent now."""
        level, at_s = float(self._words[1]), float(self._words[2])
        level = min(self.per_minute, level + max(0.0, now_s - at_s) * self.per_minute / 60)
        self._words[1], self._words[2] = level, max(now_s, at_s)
        return level

    def spend(self, units: int, now_s: float) -> None:
        self._words[1] = self.left(now_s) - units

    def wait_s(self, units: float, now_s: float) -> float:
        """Return the seconds until that many units are there; at most all count."""
        return max(0.0, (min(units, self.per_minute) - self.left(now_s)) * 60 / self.per_minute)


class Quota:
    """The use of one key, and its limits, which may change meanwhile. ``refused``: requests by the limit that they broke. Several
    gateways may share its ``counts``."""

    def __init__(self, key: ApiKey, now_s: float, counts: Counts | None = None) -> None:
        self._counts = Counts() if counts is None else counts
        self.answers: Counter[int] = Counter()  # by hundreds of their status
        self.refused: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._requests: Allowance | None = None
        self._tokens: Allowance | None = None
        self.limit(key, now_s)

    def limit(self, key: ApiKey, now_s: float) -> None:
        """Take the key's limits. What is used stays used where a limit stays the same."""
        self._key = key
        with self._counts.lock():
            self._requests = _allowance(key.requests_per_minute, now_s, self._counts.requests)
            self._tokens = _allowance(key.tokens_per_minute, now_s, self._counts.tokens)

    @property
    def num_open(self) -> int:
        """The requests under way, at all gateways."""
        return int(sum(self._counts.open))

    def begin(self, now_s: float, *, is_known: bool = False) -> None:
        """Count a request that begins; ``end`` must follow. Raises: RequestError (429) where it breaks a limit: then it counts for
        nothing. ``is_known``: a gateway before has let it in."""
        with self._counts.lock():
            if not is_known:
                self._let_in(now_s)
            self._counts.open[self._counts.gateway] += 1

    def _let_in(self, now_s: float) -> None:
        key = self._key
        if key.max_requests and self.num_open >= key.max_requests:
            raise self._refusal("max_requests", f"{key.max_requests} requests at a time", _BUSY_RETRY_S)
        for allowance, limit, what in (
            (self._requests, "requests_per_minute", "requests per minute"),
            (self._tokens, "tokens_per_minute", "tokens per minute"),
        ):
            if allowance is not None and (wait_s := allowance.wait_s(1, now_s)) > 0:
                raise self._refusal(limit, f"{allowance.per_minute} {what}", math.ceil(wait_s))
        if self._requests is not None:
            self._requests.spend(1, now_s)

    def end(self) -> None:
        self._counts.open[self._counts.gateway] -= 1

    def spend(self, prompt_tokens: int, completion_tokens: int, now_s: float) -> None:
        """Count the tokens of a request that has ended."""
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        if self._tokens is not None:
            with self._counts.lock():
                self._tokens.spend(prompt_tokens + completion_tokens, now_s)

    def headers(self, now_s: float) -> dict[str, str]:
        """Return OpenAI's headers on the limits per minute: how much they are, what is left, and when all of it is back."""
        if self._requests is None and self._tokens is None:
            return {}
        with self._counts.lock():
            return self._headers(now_s)

    def _headers(self, now_s: float) -> dict[str, str]:
        headers = {}
        for allowance, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if allowance is not None:
                headers[f"X-RateLimit-Limit-{what.title()}"] = str(allowance.per_minute)
                headers[f"X-RateLimit-Remaining-{what.title()}"] = str(max(0, math.floor(allowance.left(now_s))))
                headers[f"X-RateLimit-Reset-{what.title()}"] = duration(allowance.wait_s(allowance.per_minute, now_s))
        return headers

    def _refusal(self, limit: str, what: str, retry_s: int) -> RequestError:
        self.refused[limit] += 1
        message = f"the API key {self._key.name!r} may use {what} ({limit}); try again in {retry_s} s"
        return RequestError(message, status=429, type="rate_limit_error", retry_after_s=retry_s, code="rate_limit_exceeded")


def _allowance(per_minute: int, now_s: float, words: Words) -> Allowance | None:
    if not per_minute:
        words[0] = 0.0
        return None
    return Allowance(per_minute, now_s, words)


def duration(seconds: float) -> str:
    """Write a time as OpenAI does: 0s, 250ms, 1.5s, 2m3s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms" if seconds else "0s"
    if (rounded := round(seconds, 3)) < 60:
        return f"{rounded:g}s"
    minutes, rest = divmod(round(rounded), 60)
    return f"{minutes}m{rest}s"
