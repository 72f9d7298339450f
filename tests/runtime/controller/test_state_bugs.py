"""The simulated runs find what can be wrong with pages of recurrent states: each of these bugs fails within some seeds."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mmrt.runtime.bus.messages import Dropped
from mmrt.runtime.bus.plans import Plan, Prefill
from mmrt.runtime.controller import recovery
from mmrt.runtime.controller.caches import embedding_cache, prefix_cache, snapshots
from mmrt.runtime.controller.machine import Controller
from mmrt.runtime.controller.plans import planner
from mmrt.runtime.controller.plans.kinds import load, prefill
from mmrt.runtime.controller.rows import kv_manager, lifecycle, ownership, placement
from mmrt.runtime.controller.scheduling.guidance import wanted_pages
from mmrt.runtime.controller.scheduling.types import Limits
from mmrt.runtime.controller.state.inflight_plan import InflightPlan
from mmrt.runtime.controller.state.parts import Kv
from mmrt.runtime.controller.state.request import Request
from mmrt.runtime.controller.state.state import ControllerState, membership, owner
from mmrt.runtime.pools import is_kv_pool, state_pool
from mmrt.schema.rows import SNAPSHOT_SLOT, Phase
from mmrt.tests.runtime.controller import recovery_world
from mmrt.tests.runtime.controller.injected_bugs import Bug, must_find, name_of
from mmrt.tests.settings import also_slow

SEARCH = random.Random(8).sample(range(10**6), 600)


def forget_which_state_is_the_last(patch: pytest.MonkeyPatch) -> None:
    """A new controller takes the first of two states for the one of the prefilled tokens."""
    restore = Kv.restore
    patch.setattr(Kv, "restore", lambda kv, *words: restore(kv, *words[:-3], (0, 0), *words[-2:]))


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
    patch.setattr(Kv, "swap_states", lambda kv, member: -1)


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


def take_hits_without_their_states(patch: pytest.MonkeyPatch) -> None:
    """A row goes on at the end of all KV pages that the cache has, from the last state that it has."""
    cut, at = snapshots.cut_to_snapshot, snapshots.snapshots_at

    def last_states(state: ControllerState, request: Request, pool: str, num_pages: list[int]) -> list[int]:
        tables = enumerate(num_pages)
        return at(state, request, pool, [len(cut(state, request, pool, member, [0] * count)) for member, count in tables])

    def uncut(state: ControllerState, request: Request, pool: str, member: int, pages: list[int]) -> list[int]:
        return pages if cut(state, request, pool, member, pages) else []

    patch.setattr(prefix_cache, "cut_to_snapshot", uncut)
    patch.setattr(kv_manager, "snapshots_at", last_states)
    patch.setattr(placement, "snapshots_at", last_states)


def forget_the_pages_of_snapshots(patch: pytest.MonkeyPatch) -> None:
    """A new controller gives the pages away in which a plan leaves snapshots."""

    def recover(*arguments: Any) -> Controller:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(Prefill, "snapshots", lambda plan, key: [])
            return recovery.recover(*arguments)

    patch.setattr(recovery_world, "recover", recover)


def name_last_states_by_an_old_count(patch: pytest.MonkeyPatch) -> None:
    """The last words of a row that decode has dropped are not read."""
    ended_by = Controller.ended_by
    patch.setattr(Controller, "ended_by", lambda machine, message: [] if isinstance(message, Dropped) else ended_by(machine, message))


def name_last_states_before_the_record(patch: pytest.MonkeyPatch) -> None:
    """A row that is preempted names its states before its record says that it gives them up."""
    keep, save = lifecycle.keep_last_states, ControllerState.save
    patch.setattr(lifecycle, "keep_last_states", lambda state, request: None)

    def save_after(state: ControllerState, request: Request) -> None:
        if request.record.evicting and request.record.member_of is None and request.phase == Phase.PREPARE:
            keep(state, request)
        save(state, request)

    patch.setattr(ControllerState, "save", save_after)


def write_the_snapshot(patch: pytest.MonkeyPatch) -> None:
    """The first chunk writes into the page that it reads."""

    def chunk(state: ControllerState, request: Request, choice: Any) -> Any:
        found = states(state, request, choice)
        return found if request.kv.slots[choice.member] != SNAPSHOT_SLOT else (found[0], found[0], *found[2:])

    states = prefill._states
    patch.setattr(prefill, "_states", chunk)


def give_the_snapshot_away_at_once(patch: pytest.MonkeyPatch) -> None:
    """Nobody holds the snapshot that a row is to begin from."""
    share = kv_manager._share_snapshots

    def share_and_retire(state: ControllerState, request: Request, hits: prefix_cache.Hits) -> list[int]:
        pages = share(state, request, hits)
        state.pools[state_pool(request.kv_pool)].retire(owner(request), {page for page in pages if page >= 0})
        return pages

    patch.setattr(kv_manager, "_share_snapshots", share_and_retire)
    swap = Kv.swap_states
    patch.setattr(Kv, "swap_states", lambda kv, member: swap(kv, member) * 0 - 1)
    pages = InflightPlan.pages
    patch.setattr(InflightPlan, "pages", lambda plan: [(pool, _without_snapshots(plan, pages)) for pool, pages in pages(plan)])


def _without_snapshots(plan: InflightPlan, pages: list[int]) -> list[int]:
    read = {chunk.state_from for chunk in plan.plan.chunks} if isinstance(plan.plan, Prefill) else set()
    own = {page for request in plan.requests for states in request.kv.states for page in states.bases}
    return [page for page in pages if page not in read - own]


def name_states_where_they_are_not(patch: pytest.MonkeyPatch) -> None:
    """States of a row that is prefilled on another device get their keys in the cache of its own."""

    def name(state: ControllerState, request: Request, *which: int) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(Request, "prefill_pool", property(lambda request: request.kv_pool))
            named(state, request, *which)

    named = snapshots._name
    patch.setattr(snapshots, "_name", name)


def keep_states_where_they_were_prefilled(patch: pytest.MonkeyPatch) -> None:
    """A row whose states have been copied reads and writes those that it has left."""
    leave = Kv.leave_source

    def leave_source(kv: Kv) -> None:
        states = kv.source_states
        leave(kv)
        kv.states = tuple(ours._replace(log=theirs.log) for ours, theirs in zip(kv.states, states, strict=True))

    patch.setattr(Kv, "leave_source", leave_source)


def count_pages_before_their_state(patch: pytest.MonkeyPatch) -> None:
    """Pages that were loaded count at once, whether or not the state at their end was loaded as well."""
    patch.setattr(load, "has_states", lambda state: False)


def name_states_that_were_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """The cache keeps the page for a state, whatever became of the plan."""

    def keep(state: ControllerState, request: Request, plan: Plan) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(request.kv, "prefilled", [64, 64])
            keep_snapshots(state, request, plan)

    keep_snapshots = snapshots.keep_snapshots
    patch.setattr(load, "keep_snapshots", keep)


BUGS: dict[Bug, tuple[int, ...]] = {
    forget_which_state_is_the_last: (237718, 739054, 45905),
    give_states_away_under_a_plan: (850672,),
    give_states_away_under_decode: (237718, 388404, 393603),
    swap_no_states: (237718, 388404, 393603),
    end_chunks_anywhere: (202497, 739054, 45905),
    miss_an_interrupted_grant: (795894, 45905),
    swap_states_again: (724881, 127949, 780089),
    keep_states_when_preempted: (237718, 388404, 393603),
    take_hits_without_their_states: (761268, 545445),
    forget_the_pages_of_snapshots: (739054, 237718, 20962),
    name_last_states_by_an_old_count: (735911, 545445, 427466),
    name_last_states_before_the_record: (388404, 795894, 945882),
    write_the_snapshot: (388404, 202497, 850672),
    give_the_snapshot_away_at_once: (388404, 202497, 850672),
    name_states_where_they_are_not: (940928, 955418, 395528),
    keep_states_where_they_were_prefilled: (202497, 739054, 475143),
    count_pages_before_their_state: (673047, 422244, 945882),
    name_states_that_were_not_loaded: (422244,),
}


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_world_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(BUGS[bug], place, has_states=True, has_media=False)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_search_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(SEARCH, place, has_states=True, has_media=False)


def count_pages_that_wait_for_the_grid(patch: pytest.MonkeyPatch) -> None:
    """Embedding pages of tokens before a medium, which prefill reads with it, count as the row's share of the pool."""

    def num_held_pages(state: ControllerState, request: Request) -> int:
        return state.pools["embedding"].num_owned(owner(request))

    for module in (embedding_cache, planner):
        patch.setattr(module, "num_held_pages", num_held_pages)


def forget_that_a_medium_comes_again(patch: pytest.MonkeyPatch) -> None:
    """Its pages are given back when they have been read the first time."""

    def give_back_read(state: ControllerState, request: Request, pages: Iterable[int]) -> None:
        state.pools["embedding"].retire(owner(request), pages)

    for module in (prefix_cache, prefill):
        patch.setattr(module, "give_back_read", give_back_read)


BUGS_OF_MEDIA: dict[Bug, tuple[int, ...]] = {
    count_pages_that_wait_for_the_grid: (4, 12),
    forget_that_a_medium_comes_again: (52, 65),
}


@pytest.mark.parametrize("bug", [forget_that_a_medium_comes_again, *also_slow(count_pages_that_wait_for_the_grid)], ids=name_of)
def test_the_world_finds_with_media(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(BUGS_OF_MEDIA[bug], place, has_states=True)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS_OF_MEDIA, ids=name_of)
def test_a_search_finds_with_media(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(range(100), place, has_states=True)
