"""The simulated runs find what can be wrong with rows of two pools: each of these bugs fails within some seeds."""

import random
from pathlib import Path

import pytest

from mmrt.runtime.bus.copy_plans import Load, Transfer
from mmrt.runtime.bus.plans import Prefill
from mmrt.runtime.controller.caches import prefix_cache
from mmrt.runtime.controller.plans.kinds import load, prefill, transfer
from mmrt.runtime.controller.rows import kv_manager
from mmrt.runtime.controller.state.inflight_plan import InflightPlan
from mmrt.runtime.controller.state.request import Request
from mmrt.runtime.controller.state.state import ControllerState, owner
from mmrt.schema.rows import Phase
from mmrt.tests.runtime.controller import recovery_world
from mmrt.tests.runtime.controller.injected_bugs import Bug, must_find, name_of

SEARCH = random.Random(7).sample(range(10**6), 600)
LAYOUTS = ("EP@0+D@1", "E@0+2P@0+P@1+2D@1")


def decode_before_all_is_copied(patch: pytest.MonkeyPatch) -> None:
    """Decode gets a row whose pages are still in the other pool."""

    def is_prepared(request: Request) -> bool:
        return (
            request.phase == Phase.PREPARE
            and request.has_kv
            and not request.has_kv_plan
            and request.answer.counts_known
            and request.is_prefilled
        )

    patch.setattr(kv_manager, "_is_prepared", is_prepared)


def copy_what_is_being_filled(patch: pytest.MonkeyPatch) -> None:
    """Pages are copied that a prefill plan may still write: after the death of the controller that had its result."""
    patch.setattr(Request, "prefill_plan", property(lambda _: None))


def give_pages_away_under_a_copy(patch: pytest.MonkeyPatch) -> None:
    """A plan that copies pages holds none of them."""
    pages = InflightPlan.pages
    patch.setattr(InflightPlan, "pages", lambda plan: iter(()) if isinstance(plan.plan, Transfer) else pages(plan))
    patch.setattr(Request, "has_kv_plan", property(lambda request: any(isinstance(p, Prefill | Load) for p in request.plans.values())))


def leave_the_source_early(patch: pytest.MonkeyPatch) -> None:
    """The pages that were prefilled are given back with the first copies."""
    leave = transfer.leave_source

    def leave_source(state: ControllerState, request: Request) -> None:
        if request.record.source_pool is not None:
            state.pools[request.record.source_pool].retire(owner(request))
        leave(state, request)

    patch.setattr(transfer, "leave_source", leave_source)


def leave_the_source_under_prefill(patch: pytest.MonkeyPatch) -> None:
    """The pages that were prefilled are given back once they are copied, though prefill may do its plan again."""
    leave = transfer.leave_source

    def leave_source(state: ControllerState, request: Request) -> None:
        with patch.context() as meanwhile:
            meanwhile.setattr(Request, "is_ready", True)
            leave(state, request)

    for module in (prefill, transfer):
        patch.setattr(module, "leave_source", leave_source)


def name_what_is_not_there(patch: pytest.MonkeyPatch) -> None:
    """Pages that prefill has filled are named in the row's own pool, to which they have not been copied."""

    def name_pages(state: ControllerState, request: Request) -> None:
        source, request.record.source_pool = request.record.source_pool, None
        prefix_cache.name_pages(state, request)
        request.record.source_pool = source

    for module in (prefill, load):
        patch.setattr(module, "name_pages", name_pages)


def grant_one_side_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """A row gets its own pages, and those to be prefilled in later."""
    patch.setattr(kv_manager, "_append_source", lambda *_: None)


BUGS: dict[Bug, tuple[int, ...]] = {
    decode_before_all_is_copied: (339563, 50631, 75954),
    copy_what_is_being_filled: (339563, 993908, 414002),
    give_pages_away_under_a_copy: (90122, 968859, 709145),
    leave_the_source_early: (339563, 414002, 682554),
    leave_the_source_under_prefill: (382050, 569823, 686112),
    name_what_is_not_there: (339563, 993908, 414002),
    grant_one_side_at_a_time: (339563, 993908, 414002),
}


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_world_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    monkeypatch.setattr(recovery_world, "LAYOUTS", LAYOUTS)
    must_find(BUGS[bug], place)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_search_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    monkeypatch.setattr(recovery_world, "LAYOUTS", LAYOUTS)
    must_find(SEARCH, place)
