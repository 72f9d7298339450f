"""The parts of a request, each with the transitions that it can make (pure). ``Request`` has one of each.

A method asserts the state that it starts from; other modules read fields and call methods, and assign none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..scheduling.guidance import Lengths
from ..scheduling.page_keys import PageKeys

Tables = tuple[list[int], list[int]]
"""Pages per member."""


def _no_pages() -> Tables:
    return [], []


def _none() -> list[int]:
    return [0, 0]


@dataclass(slots=True, eq=False)
class Kv:
    """A row's KV pages and the tokens in them, per member: a copy of the row's words, which are written with it."""

    lengths: Lengths = ()  # of the prompts, once prepared
    tables: Tables = field(default_factory=_no_pages)  # that decode reads and writes
    source_tables: Tables = field(default_factory=_no_pages)  # where the prompt is prefilled, if that is another pool
    prefilled: list[int] = field(default_factory=_none)
    copied: list[int] = field(default_factory=_none)  # tokens whose pages are in both pools: see ``transfer``

    def restore(self, tables: Tables, source_tables: Tables, prefilled: Sequence[int]) -> None:
        """Take the words of a row from memory."""
        assert self.is_empty
        self.tables, self.source_tables, self.prefilled = tables, source_tables, list(prefilled)

    @property
    def is_empty(self) -> bool:
        return not (any(self.tables) or any(self.source_tables) or any(self.prefilled))

    def prepare(self, lengths: Lengths) -> None:
        """The prompts are known."""
        assert not self.lengths
        self.lengths = lengths

    def append(self, member: int, pages: Sequence[int]) -> None:
        self.tables[member].extend(pages)

    def append_source(self, member: int, pages: Sequence[int]) -> None:
        self.source_tables[member].extend(pages)

    def advance(self, member: int, start: int, end: int) -> bool:
        """Tokens [start, end) are prefilled, or were loaded. False if they were before."""
        if self.prefilled[member] >= end:
            return False
        assert self.prefilled[member] == start, "tokens were prefilled behind some that are not there"
        self.prefilled[member] = end
        return True

    def copy(self, member: int, start: int, end: int) -> None:
        """Tokens [start, end) are copied. Nothing changes if those before them are not known to be."""
        if self.copied[member] == start:
            self.copied[member] = end

    def is_copied(self, targets: Sequence[int]) -> bool:
        return all(done >= target for done, target in zip(self.copied, targets, strict=False))

    def leave_source(self) -> None:
        """All pages are copied: the row has those of its own pool alone."""
        assert any(self.source_tables)
        self.source_tables, self.copied = _no_pages(), _none()

    def clear(self) -> None:
        """All pages are given back."""
        self.tables, self.source_tables, self.prefilled, self.copied = _no_pages(), _no_pages(), _none(), _none()


@dataclass(slots=True, eq=False)
class Caches:
    """What caches have of a row's KV pages, and what they get of it, per member."""

    keys: tuple[PageKeys, ...] = ()  # if pages have names
    num_cached: list[int] = field(default_factory=_none)  # leading tokens that were not computed
    num_named: list[int] = field(default_factory=_none)  # leading pages of ``prefill_tables`` that have got their names
    may_load: bool = False  # files may have the pages behind those; until they have been asked, nothing is prefilled
    num_loads: int = 0  # plans to load pages, since the grant of its KV pages

    def set_keys(self, keys: tuple[PageKeys, ...]) -> None:
        """Its pages will have these names."""
        assert not self.keys
        self.keys = keys

    def forget_keys(self) -> None:
        """Its names are of another era: it gets others before its grant."""
        assert not any(self.num_named)
        self.keys = ()

    def learn(self, ids: Sequence[int]) -> None:
        """Ids were generated, behind those known."""
        for keys in self.keys:
            keys.extend(ids)

    def hit(self, member: int, num_pages: int, num_tokens: int) -> None:
        """The grant found leading pages, which have names."""
        assert not self.num_cached[member] and not self.num_named[member]
        self.num_named[member], self.num_cached[member] = num_pages, num_tokens

    def begin(self, *, may_load: bool) -> None:
        """KV pages are granted. ``may_load``: others may have those that the cache has not."""
        self.may_load, self.num_loads = may_load, 0

    def load(self) -> None:
        """A plan loads pages."""
        assert self.may_load
        self.num_loads += 1

    def loaded(self, member: int, end: int) -> None:
        """Tokens up to ``end`` were loaded."""
        self.num_cached[member] = end

    def end_loading(self, *, may_load: bool = False) -> None:
        """Nobody has more pages, or, by ``may_load``, the answer of a plan leaves that open."""
        self.may_load = may_load

    def name(self, member: int, num_pages: int) -> None:
        """The next pages have got their names."""
        self.num_named[member] += num_pages

    def forget_names(self) -> None:
        """The pages with names are left behind: those of the row's own pool get theirs."""
        self.num_named = _none()

    def clear(self) -> None:
        """The row's KV pages are given back."""
        self.num_cached, self.num_named = _none(), _none()
