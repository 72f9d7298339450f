"""Ownership and use of the pages of one pool, and when pages become free (pure; controller process).

A page is *owned* (by rows, or the cache) and *used* (by plans that name it and by decode's running set). ``allocate``
gives pages to an owner, all or none, and bumps their generations. Release has two phases: ``retire`` ends
ownership, after which no new plan may name the page; the page is free once every user has also been acknowledged as dropped. The
free list is never stored: ``restore`` rebuilds it from owners and users.

A page with a key (``page_cache``) is never written again and also belongs to the cache. Several rows may own it. While the cache alone
holds it, it counts as free, and ``allocate`` evicts it when no other page is left.

Nothing here is linear in the size of the pool except construction: growing a sequence by a page is O(1).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from ...bus.messages import PageRun
from .page_cache import PageCache

Owner = int
"""A row, by its number. Ownership keeps a page alive and lets plans name it."""


class User(NamedTuple):
    """A plan that names pages, or decode's membership of a row. A user only keeps a page from being reallocated."""

    kind: Literal["plan", "decode"]
    id: int


class PageLedger:
    """The pages of one pool. Invariants: a page is on the free list exactly when it has neither owners nor users; the cache owns the
    pages that have keys, and those that it alone holds are idle in it."""

    def __init__(self, num_pages: int, generations: Sequence[int] | None = None) -> None:
        assert generations is None or len(generations) == num_pages
        self.num_pages = num_pages
        self.generations = list(generations) if generations is not None else [0] * num_pages
        self._num_owners = [0] * num_pages  # rows, and the cache
        self._num_users = [0] * num_pages
        self._owned: dict[Owner, set[int]] = {}
        self._used: dict[User, set[int]] = {}
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: recently used pages are reused first
        self.cache = PageCache(num_pages)

    @classmethod
    def restore(
        cls,
        num_pages: int,
        generations: Sequence[int],
        owned: Mapping[Owner, Iterable[int]],
        used: Mapping[User, Iterable[int]],
        keys: Mapping[int, bytes] | None = None,
    ) -> "PageLedger":
        """Rebuild from the pages that rows, plans and the running set name, and from the valid keys of pages. A page with users and no
        owner is retired. Of idle pages the last of ``keys`` is evicted first."""
        ledger = cls(num_pages, generations)
        keys = keys or {}
        rows: set[int] = set()
        for owner, pages in owned.items():
            if members := set(pages):
                ledger._owned[owner] = members
            for page in members:
                ledger._num_owners[page] += 1
                assert page not in rows or page in keys, f"page {page} belongs to two rows"
            rows.update(members)
        for page in keys:
            ledger._num_owners[page] += 1
        for user, pages in used.items():
            ledger._used[user] = set(pages)
            for page in ledger._used[user]:
                ledger._num_users[page] += 1
        ledger._free = [p for p in range(num_pages - 1, -1, -1) if not ledger._num_owners[p] and not ledger._num_users[p]]
        added = ledger.cache.add(keys, keys.values())
        assert len(added) == len(keys), f"{len(keys) - len(added)} pages have the keys of others"
        ledger.cache.rest(page for page in keys if ledger._is_held_by_the_cache_alone(page))
        return ledger

    @property
    def num_free(self) -> int:
        """Number of pages that ``allocate`` can give, idle pages of the cache among them."""
        return len(self._free) + self.cache.num_idle

    @property
    def num_used(self) -> int:
        """Number of pages that are not free: owned, or retired and still named by a plan or the running set."""
        return self.num_pages - self.num_free

    def allocate(self, owner: Owner, count: int) -> PageRun | None:
        """Give ``count`` free pages to ``owner``, all or none (None), each with a generation it never had before."""
        assert count >= 0
        if count > self.num_free:
            return None
        if (num_missing := count - len(self._free)) > 0:
            self._evict(num_missing)
        left = len(self._free) - count
        pages = self._free[left:][::-1]
        del self._free[left:]
        owners, users, generations = self._num_owners, self._num_users, self.generations
        for page in pages:
            assert not owners[page] and not users[page], f"page {page} leased twice"
            generations[page] += 1
            owners[page] = 1
        self._owned.setdefault(owner, set()).update(pages)
        return PageRun(pages, [generations[page] for page in pages])

    def share(self, owner: Owner, pages: Iterable[int]) -> None:
        """Add an owner to pages that are owned already."""
        owned, added = self._owned.setdefault(owner, set()), []
        for page in pages:
            assert self._num_owners[page] > 0, f"page {page} is retired or free"
            if page not in owned:
                owned.add(page)
                self._num_owners[page] += 1
                added.append(page)
        self.cache.wake(added)

    def name(self, pages: Sequence[int], keys: Collection[bytes]) -> list[int]:
        """Give pages their keys, one each: they are never written again, and the cache keeps them while there is room. They must be
        held. Returns the places in the lists of those that got theirs. Nothing changes for a page whose key is in the cache already,
        or that has a key: a controller that makes other keys than its predecessor did finds pages of rows under theirs."""
        owners, users = self._num_owners, self._num_users
        assert 0 not in [owners[page] + users[page] for page in pages], "pages that get keys are free"
        added = self.cache.add(pages, keys)
        for place in added:
            owners[pages[place]] += 1
        return added

    def forget_idle(self) -> PageRun:
        """Free all idle pages of the cache. Each gets a generation that it never had, as if it had been allocated."""
        pages = self._evict(self.cache.num_idle)
        for page in pages:
            self.generations[page] += 1
        return PageRun(pages, [self.generations[page] for page in pages])

    def use(self, user: User, pages: Collection[int]) -> None:
        """Record that a plan or the running set names these pages; refused (assert) for pages that are retired or free."""
        if not pages:
            return
        owners, users = self._num_owners, self._num_users
        assert 0 not in [owners[page] for page in pages], f"{user} names pages that are retired or free"
        if (used := self._used.get(user)) is None:
            added = self._used[user] = set(pages)
        else:
            added = set(pages) - used
            for page in pages:
                used.add(page)
        for page in added:
            users[page] += 1
        self.cache.wake(added)

    def retire(self, owner: Owner, pages: Iterable[int] | None = None) -> None:
        """End ``owner``'s ownership of these pages (None: all of its pages). Those without users and other owners become free."""
        owned = self._owned.get(owner)
        if owned is None:
            assert pages is None or not list(pages), f"row {owner} owns nothing"
            return
        if pages is None:
            pages = owned
            del self._owned[owner]
        else:
            pages = list(pages)
            for page in pages:
                owned.remove(page)
            if not owned:
                del self._owned[owner]
        for page in pages:
            self._num_owners[page] -= 1
        self._free_unheld(pages)

    def drop(self, user: User) -> None:
        """Remove a user acknowledged as dropped: it no longer reads or writes any of its pages."""
        pages = self._used.pop(user, None)
        if pages is not None:
            for page in pages:
                self._num_users[page] -= 1
            self._free_unheld(pages)

    def leave(self, owner: Owner, users: Collection[User], pages: Collection[int]) -> None:
        """End the ownership of these pages, and the use by these users: they will not read or write them again."""
        for user in users:
            if (used := self._used.get(user)) is not None:
                for page in used.intersection(pages):
                    used.discard(page)
                    self._num_users[page] -= 1
        self.retire(owner, pages)

    def num_owned(self, owner: Owner) -> int:
        return len(self._owned.get(owner, ()))

    def owned_by(self, owner: Owner) -> frozenset[int]:
        return frozenset(self._owned.get(owner, ()))

    def num_rows(self, page: int) -> int:
        """Return the number of rows that own the page."""
        return self._num_owners[page] - (self.cache.key_of(page) is not None)

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
        for page in self.cache.pages():
            owners[page] += 1
        for used in self._used.values():
            for page in used:
                users[page] += 1
        assert owners == self._num_owners and users == self._num_users, "reference counts are wrong"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        keyed = [page for page in range(self.num_pages) if self.cache.key_of(page) is not None]
        assert sorted(self.cache.pages()) == keyed, "keys are lost"
        for page in range(self.num_pages):
            assert (page in free) == (not owners[page] and not users[page]), f"page {page} is free and held, or lost"
            assert self.cache.is_idle(page) == self._is_held_by_the_cache_alone(page), f"page {page} is idle and held, or lost"

    def _evict(self, count: int) -> list[int]:
        """Free the idle pages that were used least recently: the cache alone holds them."""
        pages = self.cache.evict(count)
        for page in pages:
            self._num_owners[page] -= 1
        self._free += pages
        return pages

    def _is_held_by_the_cache_alone(self, page: int) -> bool:
        return self._num_owners[page] == 1 and not self._num_users[page] and self.cache.key_of(page) is not None

    def _free_unheld(self, pages: Iterable[int]) -> None:
        """Free those of the pages that nobody holds any more."""
        owners, users, key_of, idle = self._num_owners, self._num_users, self.cache.key_of, []
        for page in pages:
            if users[page]:
                continue
            if not owners[page]:
                self._free.append(page)
            elif owners[page] == 1 and key_of(page) is not None:  # the cache alone holds it
                idle.append(page)
        if idle:
            self.cache.rest(idle)
