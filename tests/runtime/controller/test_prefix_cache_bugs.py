"""The simulated runs find what can be wrong with the prefix cache: each of these bugs fails within some seeds.

A bug is one line of the rules that is another one here. If a test finds nothing any more, the world has become blind.
"""

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mmrt.runtime.bus.copy_plans import Load, LoadChunk
from mmrt.runtime.bus.messages import Loaded
from mmrt.runtime.controller.caches import prefix_cache
from mmrt.runtime.controller.plans import plan_results
from mmrt.runtime.controller.plans.kinds import load, prefill
from mmrt.runtime.controller.plans.plan_dispatch import clear_plan
from mmrt.runtime.controller.rows import kv_manager, lifecycle, ownership, placement, progress
from mmrt.runtime.controller.scheduling import page_keys
from mmrt.runtime.controller.scheduling.page_keys import PageKeys
from mmrt.runtime.controller.state.effects import SetPrefilled
from mmrt.runtime.controller.state.inflight_plan import InflightPlan
from mmrt.runtime.controller.state.request import Request
from mmrt.runtime.controller.state.state import ControllerState
from mmrt.schema.rows import Phase
from mmrt.shm.pool import PagePool
from mmrt.tests.runtime.controller.injected_bugs import Bug, must_find, name_of

SEARCH = random.Random(1).sample(range(10**6), 600)


def give_the_last_page(patch: pytest.MonkeyPatch) -> None:
    """The page of the last token is given from the cache: decode writes it."""

    def find_hits(state: ControllerState, request: Request, pool: str = "kv") -> list[list[int]]:
        return [state.pools[pool].cache.find_leading(keys.up_to(keys.num_tokens)) for keys in request.caches.keys]

    for module in (prefix_cache, placement):
        patch.setattr(module, "find_hits", find_hits)
    patch.setattr(ownership, "check_unnamed", lambda *_: None)  # else the rules find it themselves


def name_before_the_plan_is_cleared(patch: pytest.MonkeyPatch) -> None:
    """The controller dies between key and plan, which are further apart here; the next one has the plan done again, which writes the
    page."""

    def clear(state: ControllerState, inflight: InflightPlan) -> None:
        for request in [request for request in inflight.requests if request.has_kv and not request.ending]:
            prefix_cache.name_pages(state, request)
            for _ in range(30):
                state.emit(SetPrefilled(request.row, 0, request.kv.prefilled[0]))
        clear_plan(state, inflight)

    patch.setattr(plan_results, "clear_plan", clear)


def name_too_early(patch: pytest.MonkeyPatch) -> None:
    """decode has committed a token, but not fed it yet."""
    name_pages = prefix_cache.name_pages

    def name(state: ControllerState, request: Request) -> None:
        if request.phase == Phase.DECODE:
            request.answer.committed += 1
        name_pages(state, request)
        if request.phase == Phase.DECODE:
            request.answer.committed -= 1

    patch.setattr(progress, "name_pages", name)


def round_up(patch: pytest.MonkeyPatch) -> None:
    """A page gets its key when its first token is there."""
    up_to = PageKeys.up_to
    patch.setattr(PageKeys, "up_to", lambda keys, num_tokens, first=0: up_to(keys, num_tokens + 3, first))


def forget_the_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_cache, "root_key", lambda secret, era, salt: page_keys.root_key(secret, era, b""))


def forget_the_era(patch: pytest.MonkeyPatch) -> None:
    """What was computed before the caches were cleared, and is held by rows, is found afterwards."""
    patch.setattr(prefix_cache, "root_key", lambda secret, era, salt: page_keys.root_key(secret, b"", salt))


def forget_the_media(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_cache, "Medium", lambda start, end, content: page_keys.Medium(start, end, content and b"any"))


def name_unknown_media(patch: pytest.MonkeyPatch) -> None:
    """A medium whose contents nobody knows is taken for every other one."""
    patch.setattr(prefix_cache, "Medium", lambda start, end, content: page_keys.Medium(start, end, content or b"unknown"))


def name_pages_given_back(patch: pytest.MonkeyPatch) -> None:
    """Pages get their keys when the row has given them back, and are free."""
    clear_pages = lifecycle.clear_pages

    def clear(state: ControllerState, request: Request) -> None:
        tables, prefilled = request.kv.tables, request.kv.prefilled
        clear_pages(state, request)
        for table, num_tokens, keys in zip(tables, prefilled, request.caches.keys, strict=False):
            found = keys.up_to(num_tokens)
            state.name_pages("kv", table[: len(found)], found)

    for module in (prefill, load, progress):
        patch.setattr(module, "name_pages", lambda *_: None)
    patch.setattr(lifecycle, "clear_pages", clear)


def believe_old_keys(patch: pytest.MonkeyPatch) -> None:
    """A new controller takes keys for valid that stood for what a page held once."""

    def read_keys(pool: PagePool) -> dict[int, bytes]:
        pages = np.flatnonzero(pool._key_generations)
        return {int(page): bytes(pool._keys[page]) for page in pages}

    patch.setattr(PagePool, "read_keys", read_keys)


def own_nothing_of_a_hit(patch: pytest.MonkeyPatch) -> None:
    """The pages of a hit stay the cache's alone, and are evicted for the next row."""
    patch.setattr(kv_manager, "share_hits", lambda *_: None)


def believe_what_was_asked_for(patch: pytest.MonkeyPatch) -> None:
    """All pages of a plan to load them count as loaded, whatever the files had."""
    apply_loaded = load.apply_loaded

    def apply(state: ControllerState, request: Request, plan: Load, result: Loaded) -> None:
        apply_loaded(state, request, plan, Loaded([chunk.end for chunk in plan.chunks], [True] * len(plan.chunks)))

    patch.setattr(load, "apply_loaded", apply)


def load_another_page(patch: pytest.MonkeyPatch) -> None:
    """Pages are loaded into the places of others."""
    chunks_to_load = prefix_cache.chunks_to_load

    def shifted(state: ControllerState, request: Request, *find: Any) -> list[LoadChunk]:
        chunks = chunks_to_load(state, request, *find)
        replace = msgspec.structs.replace
        return [replace(c, keys=[*c.keys[1:], c.keys[0]], slots=[*c.slots[1:], c.slots[0]]) for c in chunks]

    patch.setattr(prefix_cache, "chunks_to_load", shifted)


BUGS: dict[Bug, tuple[int, ...]] = {
    give_the_last_page: (596853, 30451, 310787),
    name_before_the_plan_is_cleared: (852860, 175605, 327160),
    name_too_early: (140891, 888598, 800875),
    round_up: (140891, 596853, 888598),
    forget_the_salt: (66172, 220153, 408744),
    forget_the_era: (98418, 511554, 32075),
    forget_the_media: (888598, 729633, 107192),
    name_unknown_media: (29724, 579715),
    name_pages_given_back: (140891, 596853, 888598),
    believe_old_keys: (140891, 596853, 888598),
    own_nothing_of_a_hit: (596853, 888598, 123646),
    believe_what_was_asked_for: (66172, 123646, 398055),
    load_another_page: (267459, 123646, 398055),
}


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_world_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(BUGS[bug], place)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_search_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(SEARCH, place)
