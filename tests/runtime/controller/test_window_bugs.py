"""The simulated run finds rules about pages of windows that are broken."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mmrt.runtime.controller import recovery
from mmrt.runtime.controller.caches import prefix_cache, window_pages
from mmrt.runtime.controller.rows import windows
from mmrt.runtime.controller.state.inflight_plan import InflightPlan
from mmrt.runtime.controller.state.pages import PageLedger
from mmrt.runtime.controller.state.request import Request
from mmrt.runtime.controller.state.state import ControllerState
from mmrt.runtime.pools import kind_of_pool
from mmrt.tests.runtime.controller.injected_bugs import must_find, name_of

Bug = Callable[[pytest.MonkeyPatch], None]


def leave_a_token_too_early(patch: pytest.MonkeyPatch) -> None:
    """The window of the next token but one."""
    first_live = window_pages.first_live
    patch.setattr(windows, "first_live", lambda state, num_tokens: first_live(state, num_tokens + 1))


def leave_what_a_plan_in_flight_reads(patch: pytest.MonkeyPatch) -> None:
    """A new controller takes the tokens that are prefilled for those that no plan reads behind."""

    def restore(state: ControllerState, request: Request) -> None:
        for member, pages in enumerate(request.kv.windows.tables):
            if pages:
                done = windows.num_computed(request, member) + state.limits.window_chunk * bool(request.prefill_plan)
                request.kv.windows.leave(member, min(len(pages), window_pages.first_live(state, done)))

    patch.setattr(recovery, "restore_windows", restore)


def take_hits_without_their_windows(patch: pytest.MonkeyPatch) -> None:
    """The last page of hits is enough."""

    def cut(state: ControllerState, request: Request, pool: str, member: int, pages: list[int]) -> list[int]:
        cache, names = state.pools[windows.window_pool(pool)].cache, request.caches.keys[member].up_to(4 * len(pages))
        return pages if names and cache.find(names[-1]) is not None else []

    patch.setattr(prefix_cache, "cut_to_windows", cut)


def give_windows_away_under_a_plan(patch: pytest.MonkeyPatch) -> None:
    """A plan holds none of its rows' pages of windows."""
    pages = InflightPlan.pages
    patch.setattr(InflightPlan, "pages", lambda plan: (held for held in pages(plan) if kind_of_pool(held[0]) != "window"))


def keep_what_decode_has_left(patch: pytest.MonkeyPatch) -> None:
    """The membership holds pages that the window has left: they are never free."""
    patch.setattr(PageLedger, "leave", lambda ledger, owner, users, pages: ledger.retire(owner, pages))


def name_pages_by_the_places_that_are_left(patch: pytest.MonkeyPatch) -> None:
    """Keys go to the first pages of the row, not to those in their places."""
    patch.setattr(prefix_cache, "name_windows", _name)


def _name(state: ControllerState, request: Request, member: int, first: int, names: list[bytes]) -> None:
    pages = request.kv.windows.own(member)[: len(names)]
    state.name_pages(windows.window_pool(request.kv_pool), pages, names[: len(pages)], first)


def copy_to_hits_without_their_windows(patch: pytest.MonkeyPatch) -> None:
    """KV pages that the other device has need not be copied, whatever it has of windows."""
    patch.setattr(prefix_cache, "cut_to_copies", lambda state, request, pool, member, pages, target: pages)
    patch.setattr(windows, "windows_at", _leading)


def _leading(state: ControllerState, request: Request, pool: str, member: int, num_hits: int, num_tokens: int) -> list[int]:
    first = window_pages.first_live(state, num_tokens)
    names = request.caches.keys[member].up_to(4 * num_hits, first) if num_hits > first else []
    cache = state.pools[windows.window_pool(pool)].cache
    return [page for name in names if (page := cache.find(name)) is not None]


BUGS: dict[Bug, tuple[int, ...]] = {
    leave_a_token_too_early: (0, 6),
    leave_what_a_plan_in_flight_reads: (1,),
    take_hits_without_their_windows: (98,),
    give_windows_away_under_a_plan: (27,),
    keep_what_decode_has_left: (73,),
    name_pages_by_the_places_that_are_left: (0, 6),
    copy_to_hits_without_their_windows: (33,),
}


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_world_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(BUGS[bug], place, has_windows=True)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_search_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(range(200), place, has_windows=True)
