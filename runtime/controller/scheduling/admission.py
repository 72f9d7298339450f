"""Admission, grants of KV pages, and preemption (pure).

A request is refused before work starts when it can never run (400, 413) or when too many wait already (503 with Retry-After;
429 is reserved for a client's own quota, which needs client identities). Admission follows the policy's ranks for each resource: a
request short of a resource blocks it for later requests; those that do not need it pass. A request short of KV pages also
reserves the row that it could have had: rows and pages seldom become free together. The reverse does not hold: rows whose
requests all wait for KV pages would wait for ever.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...bus.messages import RequestSpec
from ...errors import RequestError, answer_too_long, prompt_too_long
from .guidance import Lengths, fitting_new_tokens, limit_pages
from .types import Limits, Rank

RETRY_AFTER_LIMIT_S = 30
_NO_MORE = "the whole KV cache"


@dataclass(frozen=True, slots=True)
class Load:
    """The accepted, unfinished requests."""

    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_rows_used: int = 0
    service_s: float = 1.0  # how long recent requests held their rows


def check_submission(spec: RequestSpec, limits: Limits, load: Load) -> None:
    """Refuse a request that can never run, or that arrives while too many wait. Raises RequestError."""
    if not spec.prompt_ids:
        raise RequestError("the prompt has no tokens", param="messages")
    if spec.companion_ids is not None and not spec.companion_ids:
        raise RequestError("the negative prompt has no tokens", param="negative_prompt")
    if len(spec.items) > limits.max_items:
        raise RequestError(f"{len(spec.items)} media items, the limit is {limits.max_items}", param="messages")
    num_media_pages = sum(media_pages(spec, limits))
    if num_media_pages > limits.num_media_pages:
        num_bytes = sum(item.num_bytes for item in spec.items)
        raise RequestError(
            f"{num_bytes} bytes of media, the limit is {limits.num_media_pages * limits.media_page_bytes}",
            status=413,
            param="messages",
        )
    check_lengths(spec, _shortest(spec), limits)
    if load.num_waiting >= limits.max_waiting + limits.num_rows - load.num_rows_used:  # one with a free row does not wait
        raise overloaded(f"{load.num_waiting} requests are waiting, the limit is {limits.max_waiting}", limits, load)
    num_tokens = load.num_waiting_tokens + len(spec.prompt_ids)
    if load.num_waiting and num_tokens > limits.max_waiting_tokens:
        raise overloaded(f"{num_tokens} prompt tokens are waiting, the limit is {limits.max_waiting_tokens}", limits, load)


def overloaded(message: str, limits: Limits, load: Load) -> RequestError:
    """Return a 503 error with a Retry-After estimated from how fast rows become free: 1 to 30 seconds."""
    wait_s = load.service_s * (load.num_waiting + 1) / max(1, limits.num_rows)
    return RequestError(message, status=503, type="overloaded_error", retry_after_s=max(1, min(RETRY_AFTER_LIMIT_S, round(wait_s))))


def media_pages(spec: RequestSpec, limits: Limits) -> list[int]:
    """Return the media pages per item; at least one each."""
    return [max(1, -(-item.num_bytes // limits.media_page_bytes)) for item in spec.items]


def _shortest(spec: RequestSpec) -> Lengths:
    """Return the prompt lengths if every medium took one token: a lower bound before analysis."""
    lengths: Lengths = (len(spec.prompt_ids),)
    return lengths if spec.companion_ids is None else (*lengths, len(spec.companion_ids))


def check_lengths(spec: RequestSpec, lengths: Lengths, limits: Limits) -> int:
    """Return how many new tokens a row of these lengths may have: one, if it is to have none. Raises RequestError naming tokens and
    limit, unless the request takes fewer."""
    for field, length in zip(("messages", "negative_prompt"), lengths, strict=False):
        if length + 1 > limits.max_context:
            raise prompt_too_long(field, length, limits.max_context)
    room = limits.max_context - max(lengths)
    wanted = 1 if spec.is_prefill_only else spec.max_new_tokens
    if wanted is not None and wanted <= room and sum(limit_pages(lengths, wanted, limits.kv_page_tokens)) <= limits.num_kv_pages:
        return wanted
    fitting = fitting_new_tokens(lengths, limits.num_kv_pages, limits.kv_page_tokens)
    num_pool_tokens = limits.num_kv_pages * limits.kv_page_tokens
    if fitting == 0:
        raise prompt_too_long("messages", sum(lengths), num_pool_tokens, _NO_MORE)
    if wanted is None or spec.clamp_max_new_tokens:
        return min(room, fitting)
    if wanted > room:
        raise answer_too_long("max_tokens", wanted, max(lengths), limits.max_context)
    if wanted > fitting:
        raise answer_too_long("max_tokens", wanted, sum(lengths), num_pool_tokens, _NO_MORE)
    return wanted


class ResourceGate:
    """Admission over several resources in rank order: a request short of one blocks it for all later requests."""

    def __init__(self, *devices: Mapping[str, int], rows: int = 0, media: int = 0) -> None:
        """``devices``: free pages of each one's KV pool and of those beside it, by name."""
        self._free = {"row": rows, "media": media}
        for pools in devices:
            self._free |= pools
        self._devices = [frozenset(pools) for pools in devices]
        self._kv = frozenset().union(*self._devices)
        self._blocked: set[str] = set()
        self._short: set[str] = set()

    def has(self, needs: Mapping[str, int]) -> bool:
        """Return whether ``take`` would take these needs."""
        return all(count <= self._free[resource] and resource not in self._blocked for resource, count in needs.items() if count)

    @property
    def short(self) -> frozenset[str]:
        """What requests wait for."""
        return frozenset(self._short)

    @property
    def has_no_kv(self) -> bool:
        """True if earlier requests wait for KV pages, or what is granted with them, of every device."""
        return not any([self._blocked.isdisjoint(pools) for pools in self._devices])

    def charge(self, resource: str, count: int) -> None:
        """Record resources taken without ``take``."""
        self._free[resource] = max(0, self._free[resource] - count)

    def block(self, resource: str, *, is_short: bool) -> None:
        """Block a resource that an earlier request needs. ``is_short``: it waits for it."""
        self._blocked.add(resource)
        if is_short:
            self._short.add(resource)

    def is_blocked(self, resource: str) -> bool:
        return resource in self._blocked

    def take(self, **needs: int) -> bool:
        """Take all needs; or none, and block the short ones. The first request short of KV pages reserves its row."""
        needs = {resource: count for resource, count in needs.items() if count}
        short = {resource for resource, count in needs.items() if count > self._free[resource]}
        if short or self._blocked & needs.keys():
            if (short - self._blocked) & self._kv:
                self.charge("row", needs.get("row", 0))
            self._blocked |= short
            self._short |= short
            return False
        for resource, count in needs.items():
            self._free[resource] -= count
        return True


class Holder(NamedTuple):
    """A row that holds KV pages. ``media``: 0 none, 1 in a cache, 2 to be decoded again."""

    key: int
    rank: Rank
    media: int
    pages: Collection[int]


def choose_victims(holders: Sequence[Holder], rank: Rank, num_pages: int, num_holders: Callable[[int], int]) -> list[int]:
    """Choose rows to preempt so that the request of this rank gets ``num_pages`` more; [] if that is impossible.

    Only later rows are taken, so the first is never a victim: text first, cached media next, media last, the last of each first.
    ``num_holders``: of a page; one that several hold becomes free with the last of them.
    """
    left: dict[int, int] = {}
    victims: list[int] = []
    later = sorted((holder for holder in holders if holder.rank > rank), key=lambda holder: holder.rank, reverse=True)
    for holder in sorted(later, key=lambda holder: holder.media):
        if num_pages <= 0:
            break
        victims.append(holder.key)
        for page in holder.pages:
            left[page] = left.get(page, num_holders(page)) - 1
            num_pages -= not left[page]
    return victims if num_pages <= 0 else []


def pages_ahead(rate: float, limits: Limits) -> int:
    """Return the pages per member to grant beyond the next token: two pages and two seconds at ``rate`` tokens/s."""
    return _pages_for(limits.ahead_s, rate, limits)


def spare_pages_ahead(rate: float, limits: Limits) -> int:
    """Return the same for ``spare_ahead_s``: what a row gets while at least half of its pool is free."""
    return _pages_for(limits.spare_ahead_s, rate, limits)


def _pages_for(seconds: float, rate: float, limits: Limits) -> int:
    return max(limits.ahead_pages, -(-int(rate * seconds + 1) // limits.kv_page_tokens))
