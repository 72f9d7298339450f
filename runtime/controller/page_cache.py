"""The keyed pages of one pool: which page holds what, and which of them may be given away (pure; controller process).

A key names the contents of a page: equal keys mean equal bytes. ``PageLedger`` holds every keyed page for the cache and tells it
which of them nobody else holds: these are *idle*, count as free, and are evicted least recently used first. Of pages that become
idle together the one keyed last goes first: the pages of a prompt are keyed in its order, and a page is of no use without those
before it.

The index lies in the pool's segment (``shm/pool.py``): a page's key is valid as long as its generation is the page's own.
Allocation gives a page another generation, so eviction writes nothing, and a new controller reads the index back.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable

from ...schema.page_key import KEY_BYTES


class PageCache:
    """The keys of a pool's pages. Its size is bounded by the pool: a page has at most one key, and a key one page."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, tuple[bytes, int]] = {}  # page -> its key and a number that grows with every key
        self.idle: OrderedDict[int, None] = OrderedDict()  # the pages that nobody else holds; the first is evicted first
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._page_of)

    @property
    def num_idle(self) -> int:
        return len(self.idle)

    def find(self, key: bytes) -> int | None:
        """Return the page with these contents, if there is one."""
        return self._page_of.get(key)

    def find_leading(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the leading keys, up to the first that no page has."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def key_of(self, page: int) -> bytes | None:
        """Return the page's key; None while its contents have no name, and may still be written."""
        entry = self._key_of.get(page)
        return None if entry is None else entry[0]

    def is_idle(self, page: int) -> bool:
        return page in self.idle

    # ------------------------------------------------------------------------------------------- for the page ledger

    def add(self, pages: Iterable[int], keys: Collection[bytes]) -> list[int]:
        """Give pages their keys, except those that have one, and those whose key another page has. Returns the places of the others in
        the lists."""
        assert all([len(key) == KEY_BYTES for key in keys]), "a key of another size"
        key_of, page_of, number, added = self._key_of, self._page_of, self._numbers, []
        for place, (page, key) in enumerate(zip(pages, keys, strict=False)):
            if page not in key_of and key not in page_of:
                number += 1
                page_of[key], key_of[page] = page, (key, number)
                added.append(place)
        self._numbers = number
        return added

    def rest(self, pages: Iterable[int]) -> None:
        """Record that the cache alone holds these pages from now on."""
        key_of = self._key_of
        for page in sorted(pages, key=lambda page: key_of[page][1], reverse=True):
            self.idle[page] = None

    def wake(self, pages: Collection[int]) -> None:
        """Record that a row or a plan holds these pages again."""
        if not self.idle.keys().isdisjoint(pages):
            for page in pages:
                self.idle.pop(page, None)

    def evict(self, count: int) -> list[int]:
        """Forget so many idle pages that were used least recently, and return them."""
        idle, key_of, page_of = self.idle, self._key_of, self._page_of
        pages = [idle.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            del page_of[key_of.pop(page)[0]]
        return pages
