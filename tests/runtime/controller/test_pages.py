"""Page ledger: conservation, no double lease, no page reused before every holder dropped it, restore, constant-time growth; the
cache in it: keys, hits, eviction."""

import random
from itertools import takewhile

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmrt.runtime.controller.state.pages import Owner, PageLedger, User
from mmrt.tests.settings import examples

NUM_PAGES = 12


class Ledgers(RuleBasedStateMachine):
    """The ledger beside a model of sets, in which every page remembers who may still touch it, and of the cache's keys."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(NUM_PAGES)
        self.owned: dict[Owner, set[int]] = {}
        self.used: dict[User, set[int]] = {}
        self.keys: dict[int, bytes] = {}  # in the order in which the pages got them
        self.idle: list[int] = []

    def held(self) -> set[int]:
        return set().union(*self.owned.values(), *self.used.values())

    def note_idle(self) -> None:
        """Pages that have become idle together: the one keyed last is evicted first."""
        self.idle = [page for page in self.idle if page not in self.held()]
        self.idle += [page for page in reversed(self.keys) if page not in self.held() and page not in self.idle]

    @rule(row=st.integers(0, 3), count=st.integers(0, NUM_PAGES))
    def allocate(self, row: int, count: int) -> None:
        free, before = NUM_PAGES - len(self.held()), list(self.ledger.generations)
        run = self.ledger.allocate(row, count)
        if count > free:
            assert run is None and self.ledger.generations == before
            return
        assert run is not None and len(set(run.pages)) == count
        assert not set(run.pages) & self.held(), "a page was leased twice"
        for page, generation in zip(run.pages, run.generations, strict=True):
            assert generation == self.ledger.generations[page] == before[page] + 1
        evicted = self.idle[: max(0, count - (free - len(self.idle)))]
        assert set(run.pages) & self.keys.keys() == set(evicted), "other pages were evicted than those used least recently"
        for page in evicted:
            del self.keys[page]
            self.idle.remove(page)
        self.owned.setdefault(row, set()).update(run.pages)

    @rule(row=st.integers(0, 3), numbers=st.lists(st.integers(0, 7), max_size=4))
    def name(self, row: int, numbers: list[int]) -> None:
        """Twice the same key: the second page stays without one. A page that has a key keeps it."""
        pages = sorted(self.owned.get(row, set()))[: len(numbers)]
        keys = [number.to_bytes(16, "little") for number in numbers[: len(pages)]]
        expected = []
        for place, (page, key) in enumerate(zip(pages, keys, strict=True)):
            if key not in self.keys.values() and page not in self.keys:
                self.keys[page] = key
                expected.append(place)
        assert self.ledger.name(pages, keys) == expected

    @rule(row=st.integers(0, 3), numbers=st.lists(st.integers(0, 7), min_size=1, max_size=4))
    def share(self, row: int, numbers: list[int]) -> None:
        """A hit: pages found by their keys, idle or not, get one more owner."""
        page_of = {key: page for page, key in self.keys.items()}
        keys = [number.to_bytes(16, "little") for number in numbers]
        wanted = [page_of[key] for key in takewhile(page_of.__contains__, keys)]
        found = self.ledger.cache.find_leading(keys)
        assert found == wanted
        self.ledger.share(row, found)
        self.owned.setdefault(row, set()).update(found)
        self.note_idle()

    @rule(user=st.sampled_from([User("plan", 1), User("plan", 2), User("decode", 0)]), row=st.integers(0, 3))
    def use(self, user: User, row: int) -> None:
        pages = self.owned.get(row, set())
        self.ledger.use(user, pages)
        self.used.setdefault(user, set()).update(pages)

    @rule(data=st.data())
    def retire_some(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned) or [0]))
        pages = data.draw(st.sets(st.sampled_from(sorted(self.owned[owner])))) if self.owned.get(owner) else set()
        self.ledger.retire(owner, pages)
        self.owned.get(owner, set()).difference_update(pages)
        self.note_idle()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A row and some of its users have no more to do with pages, although they go on."""
        owner = data.draw(st.sampled_from(sorted(self.owned) or [0]))
        pages = data.draw(st.sets(st.sampled_from(sorted(self.owned[owner])))) if self.owned.get(owner) else set()
        users = data.draw(st.lists(st.sampled_from([User("plan", 1), User("decode", 0), User("decode", 7)]), unique=True))
        self.ledger.leave(owner, users, sorted(pages))
        self.owned.get(owner, set()).difference_update(pages)
        for user in users:
            self.used.get(user, set()).difference_update(pages)
        self.note_idle()

    @rule(row=st.integers(0, 3))
    def retire_all(self, row: int) -> None:
        self.ledger.retire(row)
        self.owned.pop(row, None)
        self.note_idle()

    @rule(user=st.sampled_from([User("plan", 1), User("plan", 2), User("decode", 0)]))
    def drop(self, user: User) -> None:
        self.ledger.drop(user)
        self.used.pop(user, None)
        self.note_idle()

    @precondition(lambda self: any(self.used.values()))
    @rule()
    def retired_pages_cannot_be_named(self) -> None:
        for page in set().union(*self.used.values()) - set().union(*self.owned.values()) - self.keys.keys():
            assert self.ledger.is_retired(page)
            with pytest.raises(AssertionError):
                self.ledger.use(User("plan", 9), [page])
            with pytest.raises(AssertionError):
                self.ledger.share(9, [page])
            self.ledger.drop(User("plan", 9))
            self.ledger.retire(9)

    @rule()
    def forget_idle(self) -> None:
        before = list(self.ledger.generations)
        run = self.ledger.forget_idle()
        assert run.pages == self.idle and run.generations == [before[page] + 1 for page in run.pages]
        assert all(self.ledger.generations[page] == generation for page, generation in zip(run.pages, run.generations, strict=True))
        for page in self.idle:
            del self.keys[page]
        self.idle = []

    @rule()
    def restore(self) -> None:
        """A new controller knows owners, users and keys, and takes the pages of the highest generations for the most useful ones."""
        self.ledger = PageLedger.restore(NUM_PAGES, self.ledger.generations, self.owned, self.used, self.keys)
        self.keys = {page: self.keys[page] for page in sorted(self.keys, key=self.ledger.generations.__getitem__, reverse=True)}
        self.idle = []
        self.note_idle()

    @precondition(lambda self: self.owned.get(0, set()) - self.keys.keys())
    @rule()
    def restore_refuses_two_rows_with_one_page(self) -> None:
        twice = self.owned | {9: {min(self.owned[0] - self.keys.keys())}}
        with pytest.raises(AssertionError, match="belongs to two rows"):
            PageLedger.restore(NUM_PAGES, self.ledger.generations, twice, self.used, self.keys)

    @invariant()
    def conserved(self) -> None:
        self.ledger.check()
        assert self.ledger.num_used == len(self.held())
        assert self.ledger.num_free + self.ledger.num_used == NUM_PAGES
        for owner, pages in self.owned.items():
            assert self.ledger.owned_by(owner) == pages and self.ledger.num_owned(owner) == len(pages)
        assert set(self.ledger.cache.pages()) == self.keys.keys() and len(self.ledger.cache) == len(self.keys)
        assert all(self.ledger.cache.key_of(page) == key for page, key in self.keys.items())


Ledgers.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestLedgers = Ledgers.TestCase


def test_two_phases() -> None:
    ledger = PageLedger(4)
    row, plan, decode = 0, User("plan", 1), User("decode", 0)
    run = ledger.allocate(row, 3)
    assert run is not None
    ledger.use(plan, run.pages)
    ledger.use(decode, run.pages[:2])
    ledger.retire(row)
    assert ledger.num_free == 1 and ledger.allocate(1, 2) is None
    ledger.drop(plan)
    assert ledger.num_free == 2
    ledger.drop(decode)
    assert ledger.num_free == 4


def test_growth_does_not_depend_on_the_size_of_pool_or_sequence() -> None:
    """A loop over the pages of either would not end within the time limit of a test."""
    ledger = PageLedger(100_000)
    row = 0
    ledger.allocate(row, 50_000)
    for _ in range(20_000):
        run = ledger.allocate(row, 1)
        assert run is not None
        ledger.use(User("decode", 0), run.pages)


@pytest.mark.parametrize("num_keys", [40_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_keys_do_not_make_the_index_grow(num_keys: int) -> None:
    """However many keys pass through: known are those of the pool's pages, and asking for a key leaves nothing behind."""
    ledger = PageLedger(64)
    rng = random.Random(0)
    for row in range(num_keys // 4):
        run = ledger.allocate(row, 4)
        assert run is not None
        ledger.name(run.pages, [rng.randbytes(16) for _ in run.pages])
        assert ledger.cache.find_leading([rng.randbytes(16) for _ in range(4)]) == []
        ledger.retire(row)
    assert len(ledger.cache) == ledger.num_free == 64
    ledger.check()


def test_the_tail_of_a_prompt_is_evicted_first() -> None:
    ledger = PageLedger(6)
    for row in (0, 1):
        run = ledger.allocate(row, 3)
        assert run is not None
        ledger.name(run.pages, [bytes([row, index]).ljust(16) for index in range(3)])
    ledger.retire(0)
    ledger.retire(1)
    ledger.allocate(2, 1)
    assert [ledger.cache.find(bytes([0, index]).ljust(16)) is not None for index in range(3)] == [True, True, False]
    ledger.allocate(2, 3)
    assert [ledger.cache.find(bytes([row, 0]).ljust(16)) is not None for row in (0, 1)] == [False, True]
