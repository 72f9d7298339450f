"""Embedding pages that files have (``cache.dir``) are loaded instead of encoded, message by message."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.copy_plans import Load, LoadPart, LoadSegments
from mmrt.runtime.bus.plan_base import Place
from mmrt.runtime.controller.plans.kinds import load_segments
from mmrt.runtime.controller.recovery import recover
from mmrt.runtime.controller.scheduling.types import SegmentStage
from mmrt.runtime.controller.state.effects import WritePlan
from mmrt.runtime.controller.state.request import Request
from mmrt.runtime.controller.state.saved_index import SavedIndex
from mmrt.runtime.controller.state.state import ControllerState
from mmrt.schema.media import ItemShape, SegmentShape
from mmrt.tests.runtime.controller.injected_bugs import Bug, must_find, name_of
from mmrt.tests.runtime.controller.kv_contents import positions
from mmrt.tests.runtime.controller.test_machine import SHAPE, Driver, sent
from mmrt.tests.runtime.controller.test_media_sharing import ASKED, ROOM, end, fill, media_work, picture
from mmrt.tests.runtime.controller.test_recovery import remains

PART = SegmentShape("image", (1, 4, 4), 16, 4, 6)
LONG = ItemShape("image", (1, 4, 4), 18, [PART] * 3)


def work(driver: Driver, *, is_damaged: bool = False, shape: ItemShape = SHAPE) -> Counter[str]:
    """Do all plans of the workers until none is left. Returns how many there were of each type."""
    counts: Counter[str] = Counter()
    while plans := [plan for plan in driver.state.plans.values() if plan.actor in ASKED]:
        plan = plans[0].plan
        counts[type(plan).__name__] += 1
        result: m.Result = m.Analysed(shape) if isinstance(plan, p.Analyse) else m.Done()
        if isinstance(plan, LoadSegments):
            result = m.Loaded([0 if is_damaged else part.num_tokens for part in plan.parts], [False] * len(plan.parts))
        driver.receive(plans[0].actor, m.PlanDone(plans[0].actor, 1, plans[0].plan_id, 0.01, result))
        driver.tick()
    return counts


def saved(shape: ItemShape = SHAPE, **changes: Any) -> Driver:
    """A run whose files have the embeddings of a picture, its only memory."""
    driver = Driver(**ROOM | changes)
    fill(driver, picture(), 1)
    work(driver, shape=shape)
    end(driver, 1)
    ledger = driver.state.pools["embedding"]
    keys = [key for page in range(ledger.num_pages) if (key := ledger.cache.key_of(page)) is not None]
    ledger.forget_idle()
    assert driver.is_empty and len(keys) == sum(-(-segment.num_tokens // 4) for segment in shape.segments)
    driver.machine.set_saved({"embedding": {key: slot for slot, key in enumerate(keys, 5)}})
    driver.state.totals.media_queries = 0
    return driver


def load(driver: Driver) -> LoadSegments:
    plan = driver.plan("encoder")[1]
    assert isinstance(plan, LoadSegments)
    return plan


def test_a_saved_picture_is_loaded_by_the_encoder() -> None:
    driver = saved()
    fill(driver, picture(), 2)
    (part,) = load(driver).parts
    assert part.num_tokens == 6 and len(part.target.pages) == 2 and sorted(part.slots) == [5, 6]
    counts = work(driver)
    assert media_work(counts) == (0, 0, 0) and counts["LoadSegments"] == 1 and counts["Prefill"]
    assert (driver.state.totals.media_hits, driver.state.totals.media_queries) == (1, 1)
    fill(driver, picture(), 3)
    assert work(driver).keys() == {"Prefill"}, "now the pool has it"
    end(driver, 2, 3)
    assert driver.is_empty and driver.state.pools["embedding"].cache.num_idle == 2


@pytest.mark.parametrize("spec", [picture(salt=b"other"), picture(b"another picture"), picture(b"")])
def test_nothing_else_is_loaded(spec: m.RequestSpec) -> None:
    driver = saved()
    fill(driver, spec, 2)
    assert media_work(work(driver)) == (1, 1, 1)


def test_sixteen_at_once_load_it_once() -> None:
    driver = saved()
    keys = range(2, 18)
    fill(driver, picture(), *keys)
    counts = work(driver)
    assert media_work(counts) == (0, 0, 0) and counts["LoadSegments"] == 1
    assert all(request.is_prefilled for request in driver.state.requests.values())
    end(driver, *keys)
    assert driver.is_empty


def test_a_picture_twice_in_a_request_is_loaded_once() -> None:
    driver = saved()
    fill(driver, picture(count=2), 2)
    counts = work(driver)
    assert media_work(counts) == (0, 0, 0) and counts["LoadSegments"] == 1 and driver.state.requests[2].is_prefilled
    end(driver, 2)
    assert driver.is_empty


def test_a_picture_that_is_damaged_in_the_file_is_encoded_once() -> None:
    driver = saved()
    fill(driver, picture(), *range(2, 18))
    counts = work(driver, is_damaged=True)
    assert media_work(counts) == (0, 1, 1) and counts["LoadSegments"] == 1
    end(driver, *range(2, 18))
    driver.state.pools["embedding"].forget_idle()
    fill(driver, picture(), 18)
    counts = work(driver)
    assert media_work(counts) == (0, 0, 0) and counts["LoadSegments"] == 1, "it was saved again"
    end(driver, 18)
    assert driver.is_empty


def test_a_page_that_the_file_has_overwritten_is_no_longer_asked_for() -> None:
    driver = saved()
    (slots,) = [driver.state.saved["embedding"]._slot_of]
    driver.machine.set_saved({"embedding": dict([*slots.items()][1:])})
    fill(driver, picture(), 2)
    assert media_work(work(driver)) == (0, 1, 1), "one page of two is of no use"


def test_a_killed_encoder_loads_again() -> None:
    driver = saved()
    fill(driver, picture(), 2)
    plan_id, plan = driver.plan("encoder")
    driver.receive("encoder", m.Hello("encoder", 2, 2, True), generation=2)
    (again,) = sent(driver.tick(), m.Run)
    assert isinstance(again, m.Run) and again.plan_id == plan_id and driver.plan("encoder")[1] == plan
    for _ in range(2):  # a repeated answer changes nothing
        driver.receive("encoder", m.PlanDone("encoder", 2, plan_id, 0.01, m.Loaded([6], [False])), generation=2)
        driver.tick()
    assert work(driver).keys() == {"Prefill"} and driver.state.requests[2].is_prefilled


@pytest.mark.parametrize("result", [m.Died(), m.ItemError(500, "no")])
def test_a_load_that_fails_costs_its_request_nothing(result: m.Result) -> None:
    driver = saved()
    fill(driver, picture(), 2)
    driver.done("encoder", result)
    assert media_work(work(driver)) == (0, 1, 1)
    request = driver.state.requests[2]
    assert request.failure is None and request.is_prefilled and not request.record.strikes


@pytest.mark.parametrize("is_written", [True, False])
def test_a_new_controller_goes_on(is_written: bool) -> None:
    """Its predecessor has died before, or after, it wrote the plan."""
    driver = saved()
    slots = driver.state.saved["embedding"]._slot_of
    fill(driver, picture(), 2)
    snapshot = remains(driver)
    driver.machine = recover(driver.state.limits, 4, snapshot if is_written else snapshot._replace(plans=[]))
    driver.state = driver.machine.state
    driver.effects = []
    segment = driver.state.requests[2].record.segment((0, 0))
    assert segment.stage == (SegmentStage.ENCODING if is_written else SegmentStage.PENDING)
    driver.machine.set_saved({"embedding": slots})
    driver.receive("encoder", m.Hello("encoder", 1, 1, True))
    effects = driver.tick()
    assert bool([effect for effect in effects if isinstance(effect, WritePlan)]) != is_written
    for actor in ("gateway", "video", "prefill", "decode"):
        driver.receive(actor, m.Hello(actor, 1, 1, True))
    counts = work(driver)
    assert counts["LoadSegments"] == 1 and not counts["Encode"] and driver.state.requests[2].is_prefilled
    end(driver, 2)
    assert driver.is_empty


def test_what_time_was_short_for_is_loaded_next() -> None:
    driver = saved(LONG)
    fill(driver, picture(), 2)
    first = load(driver)
    assert len(first.parts) == 3
    driver.done("encoder", m.Loaded([6, 0, 0], [False, True, False]))
    assert [part.keys for part in load(driver).parts] == [first.parts[1].keys]
    counts = work(driver)
    assert counts["LoadSegments"] == 1 and media_work(counts) == (0, 1, 1), "the file lacked the third"
    assert driver.state.requests[2].is_prefilled


def test_of_a_long_medium_those_segments_are_loaded_that_the_file_has() -> None:
    driver = saved(LONG)
    fill(driver, picture(), 2)
    lost = load(driver).parts[1].keys[0]
    driver.receive("gateway", m.Cancel(1, 2)).tick()
    driver.done("encoder", m.Skipped())
    slots = driver.state.saved["embedding"]._slot_of
    driver.machine.set_saved({"embedding": {key: slots[key] for key in slots.keys() - {lost}}})
    fill(driver, picture(), 3)
    counts = work(driver)
    assert counts["LoadSegments"] == 2 and media_work(counts) == (0, 1, 1) and driver.state.requests[3].is_prefilled


def test_no_segment_is_decoded_while_an_earlier_one_is_loaded() -> None:
    """It would hold patch pages that the earlier one needs if the file lacks that after all."""
    shape = ItemShape("image", (1, 4, 4), 12, [SegmentShape("image", (1, 4, 4), 8, 4, 6), SegmentShape("image", (1, 4, 4), 4, 4, 6)])
    driver = saved(shape, num_patch_pages=4)
    fill(driver, picture(), 2)
    first, second = load(driver).parts
    driver.done("encoder", m.Loaded([0, 0], [True, False]))
    assert load(driver).parts[0].keys == first.keys and second.keys[0] in driver.state.saved["embedding"]._lacking
    assert "video" not in [inflight.actor for inflight in driver.state.plans.values()], "the second is not decoded yet"
    driver.done("encoder", m.Loaded([0], [False]))
    counts = work(driver, shape=shape)
    assert media_work(counts) == (0, 2, 2) and driver.state.requests[2].is_prefilled
    end(driver, 2)
    assert driver.is_empty


def test_a_full_pool_gives_a_long_medium_its_pages_as_they_are_consumed() -> None:
    driver = saved(LONG, num_embedding_pages=6, prefill_budget=3)
    fill(driver, picture(), 2)
    assert len(load(driver).parts) == 1, "half of the pool"
    counts = work(driver)
    assert counts["LoadSegments"] == 3 and media_work(counts) == (0, 0, 0) and driver.state.requests[2].is_prefilled
    end(driver, 2)
    assert driver.is_empty


def test_a_row_that_ends_while_its_picture_is_loaded() -> None:
    driver = saved()
    fill(driver, picture(), 2, 3)
    driver.receive("gateway", m.Cancel(1, 2)).tick()
    driver.done("encoder", m.Skipped())
    counts = work(driver)
    assert counts["LoadSegments"] == 1 and driver.state.requests[3].is_prefilled
    end(driver, 3)
    assert driver.is_empty


def test_kv_pages_are_loaded_before_media_and_make_them_unnecessary() -> None:
    driver = saved(prefix_cache=True, positions=positions)
    fill(driver, picture(), 2)
    keys = driver.state.requests[2].caches.keys[0].up_to(12)
    work(driver)
    end(driver, 2)
    for pool in driver.state.pools.values():
        pool.forget_idle()
    for count in (2, 1):  # of the two pages that its tokens 2 to 8 reach into
        driver.machine.set_saved({"kv": {key: slot for slot, key in enumerate(keys[:count])}})
        fill(driver, picture(), count + 5)
        plans = [inflight.plan for inflight in driver.state.plans.values()]
        assert [type(plan) for plan in plans] == [Load], "nothing is done with the picture meanwhile"
        driver.done("prefill", m.Loaded([4 * count], [True]))
        assert bool(work(driver)["LoadSegments"]) == (count == 1)
        end(driver, count + 5)
        for pool in driver.state.pools.values():
            pool.forget_idle()
    assert driver.is_empty


# bugs that the recovery world must find


def believe_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All segments of a plan count as loaded, whatever the file had."""
    monkeypatch.setattr(load_segments, "give_up_loading", lambda *_: None)


def load_another_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of a long segment are loaded in another order."""
    begin_load = load_segments.begin_load

    def begin(state: ControllerState, request: Request, place: Place) -> LoadPart:
        part = begin_load(state, request, place)
        return msgspec.structs.replace(part, keys=part.keys[::-1], slots=part.slots[::-1])

    monkeypatch.setattr(load_segments, "begin_load", begin)


def ask_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Media that cannot be loaded are asked for again and again, and never encoded."""
    monkeypatch.setattr(SavedIndex, "note_lacking", lambda *_: None)


BUGS: dict[Bug, tuple[int, ...]] = {
    believe_what_was_asked_for: (12, 21, 45),
    load_another_segment: (1, 16, 21),
    ask_again_at_once: (12, 21, 45),
}


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_world_finds_bugs(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(BUGS[bug], place, match="foreign|not done after")


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_search_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(range(300), place, match="foreign|not done after")
