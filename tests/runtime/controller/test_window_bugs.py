"""The simulated run finds rules about pages of windows that are broken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrt.runtime.bus.copy_plans import LoadedWindows
from mmrt.runtime.controller import recovery
from mmrt.runtime.controller.caches import prefix_cache, window_pages
from mmrt.runtime.controller.plans.kinds import load
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


def load_tokens_without_their_windows(patch: pytest.MonkeyPatch) -> None:
    """Whatever the files have of KV pages is loaded, and a window without some of its pages."""
    patch.setattr(prefix_cache, "_up_to_window", _all)


def _all(state: ControllerState, request: Request, member: int, names: list[bytes], find: Callable[[bytes], int | None]) -> Any:
    found = [(name, slot) for name in names if (slot := find(name)) is not None]
    return 0, len(names), LoadedWindows([name for name, _ in found[-1:]], [slot for _, slot in found[-1:]])


def name_places_that_were_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """Tokens are loaded, and the row keeps the places before their window."""
    patch.setattr(load, "leave_before", lambda state, request, member: None)


BUGS: dict[Bug, tuple[int, ...]] = {
    leave_a_token_too_early: (0, 6),
    leave_what_a_plan_in_flight_reads: (1,),
    take_hits_without_their_windows: (98,),
    give_windows_away_under_a_plan: (27,),
    keep_what_decode_has_left: (56,),
    name_pages_by_the_places_that_are_left: (0, 6),
    load_tokens_without_their_windows: (6,),
    name_places_that_were_not_loaded: (6,),
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
