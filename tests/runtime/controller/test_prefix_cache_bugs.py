"""The simulated runs find what can be wrong with the prefix cache: each of these bugs fails within some seeds.

A bug is one line of the rules that is another one here. If a test finds nothing any more, the world has become blind.
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mmrt.runtime.bus.copy_plans import Load, LoadChunk
from mmrt.runtime.bus.messages import Loaded
from mmrt.runtime.controller.caches import prefix_cache
from mmrt.runtime.controller.caches.prefix_cache import FindLeading
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
from mmrt.tests.runtime.controller.test_recovery_world import live_through

NUM_SEEDS = 600


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mmrt-test-", dir="/dev/shm") as name:
        yield Path(name)


def give_the_last_page(patch: pytest.MonkeyPatch) -> None:
    """The page of the last token is given from the cache: decode writes it."""

    def find_hits(state: ControllerState, request: Request, pool: str = "kv") -> list[list[int]]:
        return [state.pools[pool].cache.find_leading(keys.up_to(keys.num_tokens)) for keys in request.keys]

    for module in (prefix_cache, placement):
        patch.setattr(module, "find_hits", find_hits)
    patch.setattr(ownership, "check_unnamed", lambda *_: None)  # else the rules find it themselves


def name_before_the_plan_is_cleared(patch: pytest.MonkeyPatch) -> None:
    """The controller dies between key and plan, which are further apart here; the next one has the plan done again, which writes the
    page."""

    def clear(state: ControllerState, inflight: InflightPlan) -> None:
        for request in inflight.requests:
            prefix_cache.name_pages(state, request)
            for _ in range(30 if request.has_row else 0):
                state.emit(SetPrefilled(request.row, 0, request.prefilled[0]))
        clear_plan(state, inflight)

    patch.setattr(plan_results, "clear_plan", clear)


def name_too_early(patch: pytest.MonkeyPatch) -> None:
    """decode has committed a token, but not fed it yet."""
    name_pages = prefix_cache.name_pages

    def name(state: ControllerState, request: Request) -> None:
        if request.phase == Phase.DECODE:
            request.committed += 1
        name_pages(state, request)
        if request.phase == Phase.DECODE:
            request.committed -= 1

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
        tables, prefilled = request.block_tables, request.prefilled
        clear_pages(state, request)
        for table, num_tokens, keys in zip(tables, prefilled, request.keys, strict=False):
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

    def shifted(state: ControllerState, request: Request, find: FindLeading) -> list[LoadChunk]:
        chunks = chunks_to_load(state, request, find)
        replace = msgspec.structs.replace
        return [replace(c, keys=[*c.keys[1:], c.keys[0]], slots=[*c.slots[1:], c.slots[0]]) for c in chunks]

    patch.setattr(prefix_cache, "chunks_to_load", shifted)


BUGS: list[Any] = [
    give_the_last_page,
    pytest.param(name_before_the_plan_is_cleared, marks=pytest.mark.slow, id="name_before_the_plan_is_cleared"),  # rare
    name_too_early,
    round_up,
    forget_the_salt,
    forget_the_era,
    forget_the_media,
    pytest.param(name_unknown_media, marks=pytest.mark.slow, id="name_unknown_media"),  # rare
    name_pages_given_back,
    believe_old_keys,
    own_nothing_of_a_hit,
    believe_what_was_asked_for,
    load_another_page,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: getattr(bug, "__name__", None))
def test_the_world_finds(bug: Callable[[pytest.MonkeyPatch], None], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError) as found:
        for seed in random.Random(1).sample(range(10**6), NUM_SEEDS):
            live_through(seed, place)
    print(f"{bug.__name__}: {found.value}".splitlines()[0])
