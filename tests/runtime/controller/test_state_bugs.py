"""The simulated runs find what can be wrong with pages of recurrent states: each of these bugs fails within some seeds."""

import random
from pathlib import Path

import pytest

from mmrt.runtime.controller import recovery
from mmrt.runtime.controller.rows import kv_manager, ownership
from mmrt.runtime.controller.scheduling.guidance import wanted_pages
from mmrt.runtime.controller.scheduling.types import Limits
from mmrt.runtime.controller.state.inflight_plan import InflightPlan
from mmrt.runtime.controller.state.parts import Kv
from mmrt.runtime.controller.state.request import Request
from mmrt.runtime.controller.state.state import ControllerState, membership, owner
from mmrt.runtime.pools import is_kv_pool
from mmrt.tests.runtime.controller.injected_bugs import Bug, must_find, name_of

SEARCH = random.Random(8).sample(range(10**6), 600)


def forget_which_state_is_the_last(patch: pytest.MonkeyPatch) -> None:
    """A new controller takes the first of two states for the one of the prefilled tokens."""
    restore = Kv.restore
    patch.setattr(Kv, "restore", lambda kv, *words: restore(kv, *words[:-1], (0, 0)))


def give_states_away_under_a_plan(patch: pytest.MonkeyPatch) -> None:
    """A plan holds none of its rows' states."""
    pages = InflightPlan.pages
    patch.setattr(InflightPlan, "pages", lambda plan: (held for held in pages(plan) if is_kv_pool(held[0])))


def give_states_away_under_decode(patch: pytest.MonkeyPatch) -> None:
    """The membership of a row in decode holds none of its states."""

    def hand_over(state: ControllerState, request: Request) -> None:
        ownership.hand_over(state, request)
        for pool in state.pools_beside(request.kv_pool)[1:]:
            state.pools[pool].drop(membership(request))

    patch.setattr(kv_manager, "hand_over", hand_over)


def swap_no_states(patch: pytest.MonkeyPatch) -> None:
    """A chunk reads the state that was written before the last one, and overwrites that."""
    patch.setattr(Kv, "swap_states", lambda kv, member: None)


def end_chunks_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limits, "grid", property(lambda _: 1))


def miss_an_interrupted_grant(patch: pytest.MonkeyPatch) -> None:
    """A grant whose KV pages were written counts as whole."""

    def has_pages(state: ControllerState, request: Request) -> bool:
        record, answer = request.record, request.answer
        least = wanted_pages(request.kv.lengths, answer.committed, record.max_new_tokens, state.limits.kv_page_tokens, ahead_pages=0)
        return all(len(table) >= count for table, count in zip(request.kv.tables, least, strict=False))

    patch.setattr(recovery, "_has_pages", has_pages)


def swap_states_again(patch: pytest.MonkeyPatch) -> None:
    """The result of a plan that was applied before swaps the states once more."""
    advance = Kv.advance

    def advance_or_swap(kv: Kv, member: int, start: int, end: int) -> bool:
        if advance(kv, member, start, end):
            return True
        kv.swap_states(member)
        return False

    patch.setattr(Kv, "advance", advance_or_swap)


def keep_states_when_preempted(patch: pytest.MonkeyPatch) -> None:
    """A preempted row gives its KV pages back, and no states."""

    def retire_kv(state: ControllerState, request: Request) -> None:
        for pool in state.kv_pools:
            state.pools[pool].retire(owner(request))

    patch.setattr(ControllerState, "retire_kv", retire_kv)


BUGS: dict[Bug, tuple[int, ...]] = {
    forget_which_state_is_the_last: (481436, 201568, 735221),
    give_states_away_under_a_plan: (475143, 51303, 792336),
    give_states_away_under_decode: (795894, 523259, 539474),
    swap_no_states: (237718, 388404, 393603),
    end_chunks_anywhere: (202497, 739054, 45905),
    miss_an_interrupted_grant: (420175, 409445, 600965),
    swap_states_again: (119255, 642954, 336412),
    keep_states_when_preempted: (393603, 202497, 45905),
}


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_world_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(BUGS[bug], place, has_states=True)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_search_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(SEARCH, place, has_states=True)
