"""Ownership and use of the pages of one pool, and when pages become free (pure; controller process).

A page is *owned* (by a row, or a cache entry) and *used* (by plans that name it and by decode's running set). ``allocate``
gives pages to an owner, all or none, and bumps their generations. Release has two phases: ``retire`` ends
ownership, after which no new plan may name the page; the page is free once every user has also been acknowledged as dropped. The
free list is never stored: ``restore`` rebuilds it from owners and users.

Nothing here is linear in the size of the pool except construction: growing a sequence by a page is O(1).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from ..bus.messages import PageRun


class Owner(NamedTuple):
    """A row, or a cache entry. Ownership keeps a page alive and lets plans name it."""

    kind: Literal["row", "cache"]
    id: int


class User(NamedTuple):
    """A plan that names pages, or decode's membership of a row. A user only keeps a page from being reallocated."""

    kind: Literal["plan", "decode"]
    id: int


class PageLedger:
    """The pages of one pool. Invariant: a page is on the free list exactly when it has neither owners nor users."""

    def __init__(self, num_pages: int, generations: Sequence[int] | None = None) -> None:
        assert generations is None or len(generations) == num_pages
        self.num_pages = num_pages
        self.generations = list(generations) if generations is not None else [0] * num_pages
        self._num_owners = [0] * num_pages
        self._num_users = [0] * num_pages
        self._owned: dict[Owner, set[int]] = {}
        self._used: dict[User, set[int]] = {}
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: recently used pages are reused first

    @classmethod
    def restore(
        cls,
        num_pages: int,
        generations: Sequence[int],
        owned: Mapping[Owner, Iterable[int]],
        used: Mapping[User, Iterable[int]],
    ) -> "PageLedger":
        """Rebuild from the pages that rows, plans and the running set name. A page with users and no owner is retired."""
        ledger = cls(num_pages, generations)
        rows: set[int] = set()
        for owner, pages in owned.items():
            if members := set(pages):
                ledger._owned[owner] = members
            for page in members:
                ledger._num_owners[page] += 1
                assert owner.kind != "row" or page not in rows, f"page {page} belongs to two rows"
            rows.update(members if owner.kind == "row" else ())
        for user, pages in used.items():
            ledger._used[user] = set(pages)
            for page in ledger._used[user]:
                ledger._num_users[page] += 1
        ledger._free = [p for p in range(num_pages - 1, -1, -1) if not ledger._num_owners[p] and not ledger._num_users[p]]
        return ledger

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of pages that are not free: owned, or retired and still named by a plan or the running set."""
        return self.num_pages - len(self._free)

    def allocate(self, owner: Owner, count: int) -> PageRun | None:
        """Give ``count`` free pages to ``owner``, all or none (None), each with a generation it never had before."""
        assert count >= 0
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        owned = self._owned.setdefault(owner, set())
        for page in pages:
            assert not self._num_owners[page] and not self._num_users[page], f"page {page} leased twice"
            self.generations[page] += 1
            self._num_owners[page] = 1
        owned.update(pages)
        return PageRun(pages, [self.generations[page] for page in pages])

    def share(self, owner: Owner, pages: Iterable[int]) -> None:
        """Add an owner to pages that are owned already."""
        owned = self._owned.setdefault(owner, set())
        for page in pages:
            assert self._num_owners[page] > 0, f"page {page} is retired or free"
            if page not in owned:
                owned.add(page)
                self._num_owners[page] += 1

    def use(self, user: User, pages: Iterable[int]) -> None:
        """Record that a plan or the running set names these pages; refused (assert) for pages that are retired or free."""
        used = self._used.setdefault(user, set())
        for page in pages:
            assert self._num_owners[page] > 0, f"{user} names page {page}, which is retired or free"
            if page not in used:
                used.add(page)
                self._num_users[page] += 1

    def retire(self, owner: Owner, pages: Iterable[int] | None = None) -> None:
        """End ``owner``'s ownership of these pages (None: all of its pages). Those without users and other owners become free."""
        owned = self._owned.get(owner)
        if owned is None:
            assert pages is None or not list(pages), f"{owner} owns nothing"
            return
        for page in list(owned) if pages is None else pages:
            owned.remove(page)
            self._num_owners[page] -= 1
            self._free_if_unheld(page)
        if not owned:
            del self._owned[owner]

    def drop(self, user: User) -> None:
        """Remove a user acknowledged as dropped: it no longer reads or writes any of its pages."""
        for page in self._used.pop(user, ()):
            self._num_users[page] -= 1
            self._free_if_unheld(page)

    def num_owned(self, owner: Owner) -> int:
        return len(self._owned.get(owner, ()))

    def owned_by(self, owner: Owner) -> frozenset[int]:
        return frozenset(self._owned.get(owner, ()))

    def is_retired(self, page: int) -> bool:
        """Return True for a page that waits for its last users."""
        return self._num_owners[page] == 0 and self._num_users[page] > 0

    @property
    def num_retired(self) -> int:
        """Return the number of pages that become free when their last users are done; linear."""
        return sum(map(self.is_retired, range(self.num_pages)))

    def check(self) -> None:
        """Assert the invariants; linear, for tests and for a newly recovered controller."""
        owners = [0] * self.num_pages
        users = [0] * self.num_pages
        for owned in self._owned.values():
            for page in owned:
                owners[page] += 1
        for used in self._used.values():
            for page in used:
                users[page] += 1
        assert owners == self._num_owners and users == self._num_users, "reference counts are wrong"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        for page in range(self.num_pages):
            assert (page in free) == (not owners[page] and not users[page]), f"page {page} is free and held, or lost"

    def _free_if_unheld(self, page: int) -> None:
        if not self._num_owners[page] and not self._num_users[page]:
            self._free.append(page)
