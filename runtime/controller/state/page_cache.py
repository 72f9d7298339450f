"""The keyed pages of one pool: which page holds what, and which of them may be given away (pure; controller process).

A key names the contents of a page: equal keys mean equal bytes. ``PageLedger`` holds every keyed page for the cache and tells it
which of them nobody else holds: these are *idle*, count as free, and are evicted least recently used first. Of pages that become
idle together the one keyed last goes first: the pages of a prompt are keyed in its order, and a page is of no use without those
before it.

The index lies in the pool's segment (``shm/pool.py``): a page's key is valid as long as its generation is the page's own.
Allocation gives a page another generation, so eviction writes nothing, and a new controller reads the index back.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from ....schema.page_key import KEY_BYTES


class PageCache:
    """The keys of a pool's pages. Its size is bounded by the pool: a page has at most one key, and a key one page."""

    def __init__(self, num_pages: int) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * num_pages
        self._number_of = [0] * num_pages  # by page; it grows with every key
        self._idle: OrderedDict[int, None] = OrderedDict()  # the pages that nobody else holds; the first is evicted first
        self._numbers = 0
        self._spared: set[int] = set()
        self.follower: PageCache | None = None  # a cache whose pages are of no use without those of this one with the same keys

    def __len__(self) -> int:
        return len(self._page_of)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

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
        return self._key_of[page]

    def pages(self) -> Collection[int]:
        """Return the pages that have keys, as they are when they are read."""
        return self._page_of.values()

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    # ------------------------------------------------------------------------------------------- for the page ledger

    def add(self, pages: Iterable[int], keys: Collection[bytes]) -> list[int]:
        """Give pages their keys, one each, except those that have one, and those whose key another page has. Returns the places of the
        others in the lists."""
        key_of, page_of, number_of, number, added = self._key_of, self._page_of, self._number_of, self._numbers, []
        for place, (page, key) in enumerate(zip(pages, keys, strict=True)):
            assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
            if key_of[page] is None and key not in page_of:
                number_of[page] = number = number + 1
                key_of[page], page_of[key] = key, page
                added.append(place)
        self._numbers = number
        return added

    def rest(self, pages: Iterable[int]) -> None:
        """Record that the cache alone holds these pages from now on."""
        for page in sorted(pages, key=self._number_of.__getitem__, reverse=True):
            self._idle[page] = None

    def wake(self, pages: Collection[int]) -> None:
        """Record that a row or a plan holds these pages again."""
        if not self._idle.keys().isdisjoint(pages):
            for page in pages:
                self._idle.pop(page, None)

    def spare(self, key: bytes) -> None:
        """Note that a page is of use to more than one sequence."""
        if (page := self._page_of.get(key)) is not None:
            self._spared.add(page)

    def is_spared(self, key: bytes) -> bool:
        return self._page_of.get(key) in self._spared

    def demote(self, keys: Sequence[bytes]) -> None:
        """Let the pages with these keys go before others, in this order, those that are idle."""
        for key in reversed(keys):
            if (page := self._page_of.get(key)) is not None and page in self._idle:
                self._idle.move_to_end(page, last=False)

    def evict(self, count: int) -> list[int]:
        """Forget so many idle pages that were used least recently, and return them. Those of the follower go before its others."""
        idle, key_of, page_of, keys = self._idle, self._key_of, self._page_of, list[bytes]()
        pages = [idle.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            key = key_of[page]
            assert key is not None
            del page_of[key]
            key_of[page] = None
            self._spared.discard(page)
            keys.append(key)
        if self.follower is not None:
            self.follower.demote(keys)
        return pages
