"""Page ledger: conservation, no double lease, no page reused before every holder dropped it, restore, constant-time growth."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmrt.runtime.controller.pages import Owner, PageLedger, User

NUM_PAGES = 12


class Ledgers(RuleBasedStateMachine):
    """The ledger beside a model of sets, in which every page remembers who may still touch it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(NUM_PAGES)
        self.owned: dict[Owner, set[int]] = {}
        self.used: dict[User, set[int]] = {}

    def held(self) -> set[int]:
        return set().union(*self.owned.values(), *self.used.values())

    @rule(row=st.integers(0, 3), count=st.integers(0, NUM_PAGES))
    def allocate(self, row: int, count: int) -> None:
        free, before = NUM_PAGES - len(self.held()), list(self.ledger.generations)
        run = self.ledger.allocate(Owner("row", row), count)
        if count > free:
            assert run is None and self.ledger.generations == before
            return
        assert run is not None and len(set(run.pages)) == count
        assert not set(run.pages) & self.held(), "a page was leased twice"
        for page, generation in zip(run.pages, run.generations, strict=True):
            assert generation == self.ledger.generations[page] == before[page] + 1
        self.owned.setdefault(Owner("row", row), set()).update(run.pages)

    @rule(row=st.integers(0, 3), cached=st.integers(0, 1))
    def share(self, row: int, cached: int) -> None:
        pages = self.owned.get(Owner("row", row), set())
        self.ledger.share(Owner("cache", cached), pages)
        self.owned.setdefault(Owner("cache", cached), set()).update(pages)

    @rule(user=st.sampled_from([User("plan", 1), User("plan", 2), User("decode", 0)]), row=st.integers(0, 3))
    def use(self, user: User, row: int) -> None:
        pages = self.owned.get(Owner("row", row), set())
        self.ledger.use(user, pages)
        self.used.setdefault(user, set()).update(pages)

    @rule(data=st.data())
    def retire_some(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned) or [Owner("row", 0)]))
        pages = data.draw(st.sets(st.sampled_from(sorted(self.owned[owner])))) if self.owned.get(owner) else set()
        self.ledger.retire(owner, pages)
        self.owned.get(owner, set()).difference_update(pages)

    @rule(row=st.integers(0, 3))
    def retire_all(self, row: int) -> None:
        self.ledger.retire(Owner("row", row))
        self.owned.pop(Owner("row", row), None)

    @rule(user=st.sampled_from([User("plan", 1), User("plan", 2), User("decode", 0)]))
    def drop(self, user: User) -> None:
        self.ledger.drop(user)
        self.used.pop(user, None)

    @precondition(lambda self: any(self.used.values()))
    @rule()
    def retired_pages_cannot_be_named(self) -> None:
        for page in set().union(*self.used.values()) - set().union(*self.owned.values()):
            assert self.ledger.is_retired(page)
            with pytest.raises(AssertionError):
                self.ledger.use(User("plan", 9), [page])
            with pytest.raises(AssertionError):
                self.ledger.share(Owner("cache", 9), [page])
            self.ledger.drop(User("plan", 9))
            self.ledger.retire(Owner("cache", 9))

    @rule()
    def restore(self) -> None:
        self.ledger = PageLedger.restore(NUM_PAGES, self.ledger.generations, self.owned, self.used)

    @precondition(lambda self: self.owned.get(Owner("row", 0)))
    @rule()
    def restore_refuses_two_rows_with_one_page(self) -> None:
        twice = self.owned | {Owner("row", 9): {min(self.owned[Owner("row", 0)])}}
        with pytest.raises(AssertionError, match="belongs to two rows"):
            PageLedger.restore(NUM_PAGES, self.ledger.generations, twice, self.used)

    @invariant()
    def conserved(self) -> None:
        self.ledger.check()
        assert self.ledger.num_used == len(self.held())
        assert self.ledger.num_free + self.ledger.num_used == NUM_PAGES
        for owner, pages in self.owned.items():
            assert self.ledger.owned_by(owner) == pages and self.ledger.num_owned(owner) == len(pages)


Ledgers.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgers = Ledgers.TestCase


def test_two_phases() -> None:
    ledger = PageLedger(4)
    row, plan, decode = Owner("row", 0), User("plan", 1), User("decode", 0)
    run = ledger.allocate(row, 3)
    assert run is not None
    ledger.use(plan, run.pages)
    ledger.use(decode, run.pages[:2])
    ledger.retire(row)
    assert ledger.num_free == 1 and ledger.allocate(Owner("row", 1), 2) is None
    ledger.drop(plan)
    assert ledger.num_free == 2
    ledger.drop(decode)
    assert ledger.num_free == 4


def test_growth_does_not_depend_on_the_size_of_pool_or_sequence() -> None:
    """A loop over the pages of either would not end within the time limit of a test."""
    ledger = PageLedger(100_000)
    row = Owner("row", 0)
    ledger.allocate(row, 50_000)
    for _ in range(20_000):
        run = ledger.allocate(row, 1)
        assert run is not None
        ledger.use(User("decode", 0), run.pages)
