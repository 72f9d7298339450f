"""Rows that are prefilled on one device and decoded on another, message by message; ``test_recovery_world`` has all interleavings."""

import random
import tempfile
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus.copy_plans import Load, Transfer
from mmrt.runtime.bus.plans import Plan, Prefill
from mmrt.runtime.controller.recovery import recover
from mmrt.runtime.controller.rows.instances import drained
from mmrt.runtime.controller.rows.lifecycle import preempt
from mmrt.runtime.controller.scheduling.routing import Routing
from mmrt.runtime.controller.state.effects import (
    AppendPages,
    AppendSourcePages,
    ClearSource,
    Effect,
    SetPhase,
    SetPrefilled,
    WriteState,
)
from mmrt.runtime.stage_table import InstanceId, actors_of, devices_of
from mmrt.schema.outage import Outage
from mmrt.schema.rows import EndCode, Phase
from mmrt.tests.runtime.controller.kv_contents import positions
from mmrt.tests.runtime.controller.recovery_world import World, make_request
from mmrt.tests.runtime.controller.test_machine import KEY, Driver, index, phases, sent, several, text
from mmrt.tests.runtime.controller.test_recovery import remains
from mmrt.tests.settings import examples

SECOND = InstanceId("decode.1")


def on_devices(layout: str, **changes: object) -> Driver:
    devices = {actor: int(device) for actor, device in devices_of(layout).items()}
    return several(layout, num_devices=2, devices=devices, **{"num_rows": 8, **changes})


def apart(**changes: object) -> Driver:
    return on_devices("EP@0+D@1", **changes)


def used(driver: Driver) -> list[int]:
    return [driver.state.pools[pool].num_used for pool in driver.state.kv_pools]


def copied(driver: Driver) -> list[tuple[int, int, int]]:
    """The copies that decode is making, as (member, start, end)."""
    _, plan = driver.plan("decode")
    assert isinstance(plan, Transfer) and plan.source == "kv"
    return [(chunk.member, chunk.start, chunk.end) for chunk in plan.chunks]


def follows(driver: Driver) -> bool:
    """Whether decode copies behind the plan that prefill is at."""
    (_, plan), (plan_id, _) = driver.plan("decode"), driver.plan("prefill")
    assert isinstance(plan, Transfer)
    return plan.behind == (plan_id, driver.state.plans[plan_id].slot)


def result_of(plan: Plan) -> m.Result | None:
    """All that a plan is to copy has been copied."""
    if isinstance(plan, Load):
        return m.Loaded([chunk.end for chunk in plan.chunks], [True] * len(plan.chunks), 8)
    return m.Transferred(8) if isinstance(plan, Transfer) else None


def finish(driver: Driver, key: int, decode: str = "decode") -> list[Effect]:
    """Let all plans of a request be done, and decode end it."""
    effects: list[Effect] = []
    while driver.state.plans:
        inflight = next(iter(driver.state.plans.values()))
        effects += driver.done(inflight.actor, result_of(inflight.plan))
    request = driver.state.requests[key]
    driver.counts[request.row] = (4, EndCode.LENGTH)
    (drop,) = sent(driver.tick(), m.Drop)
    assert isinstance(drop, m.Drop)
    driver.receive(decode, m.Dropped(1, drop.row, drop.row_generation, drop.ticket))
    del driver.counts[drop.row]
    return [*effects, *driver.receive("gateway", m.Delivered(1, key)).tick()]


def test_pages_are_copied_behind_prefill_and_then_given_back() -> None:
    driver = apart(prefill_budget=6)
    effects = driver.submit(text(12))
    assert index(effects, WriteState) < index(effects, AppendSourcePages) < index(effects, AppendPages), "the pools are known first"
    assert used(driver) == [3, 4], "11 tokens to prefill; decode gets room for what is to come"
    assert copied(driver) == [(0, 0, 4)] and follows(driver), "this chunk does not fill the second page"
    driver.done("prefill")
    driver.done("prefill")
    assert copied(driver) == [(0, 0, 4)], "one plan at a time"
    driver.done("decode", m.Transferred(8))
    assert copied(driver) == [(0, 4, 11)] and driver.state.requests[KEY].phase == Phase.PREPARE
    effects = driver.done("decode", m.Transferred(16))
    assert index(effects, WriteState) < index(effects, ClearSource) < index(effects, SetPhase) < index(effects, m.Admit)
    assert phases(effects) == [Phase.DECODE] and used(driver) == [0, 4] and driver.state.totals.transferred_bytes == 24
    finish(driver, KEY)
    assert driver.is_empty


def test_a_row_that_is_copied_first_leaves_its_source_after_prefill() -> None:
    """Prefill's word that its plan is done comes to decode, and its message later, or never."""
    driver = apart(prefill_budget=6)
    driver.submit(text(12))
    driver.done("decode", m.Transferred(8))
    assert not [one for one in driver.state.plans.values() if one.actor == "decode"], "prefill is still said to be at the first chunk"
    driver.done("prefill")
    assert copied(driver) == [(0, 4, 11)] and follows(driver)
    effects = driver.done("decode", m.Transferred(16))
    assert not phases(effects) and used(driver) == [3, 4], "prefill may still write the source's pages"
    effects = driver.done("prefill")
    assert index(effects, WriteState) < index(effects, ClearSource) < index(effects, SetPhase)
    assert phases(effects) == [Phase.DECODE] and used(driver) == [0, 4]
    finish(driver, KEY)
    assert driver.is_empty


def test_one_copy_at_a_time_waits_for_prefill() -> None:
    """Of two rows in prefill's plans the first one is followed, and the other copied afterwards: those that wait keep nobody up."""
    driver = apart()
    for key in (1, 2, 3):
        driver.submit(text(12), key)
    assert [one.actor for one in driver.state.plans.values()] == ["prefill", "decode", "prefill"] and follows(driver)
    for _ in range(3):
        driver.done("prefill")
    assert [one.actor for one in driver.state.plans.values()] == ["decode", "decode"], "no more than it may have"


def test_a_long_prompt_is_copied_in_parts() -> None:
    """So a decode that dies within a copy does only its plan again."""
    driver = apart(num_kv_pages=512, prefill_budget=2048, max_context=2048)
    driver.submit(m.RequestSpec(m.Generation("r"), [1] * 1200, [], 4))
    driver.done("prefill")
    for part in ((0, 0, 1024), (0, 1024, 1199)):
        assert copied(driver) == [part]
        driver.done("decode", m.Transferred(8))
    finish(driver, KEY)
    assert driver.is_empty


def test_pages_behind_a_prefill_that_left_the_table_are_copied_once_they_are_filled() -> None:
    """decode says that nobody has done the plan."""
    driver = on_devices("E@0+2P@0+D@1")
    driver.submit(text(12))
    plan_id, _ = driver.plan("prefill")
    driver.machine.set_outages([Outage("prefill", "it crashes", driver.now + 50)])
    driver.tick()
    driver.tick(gone={InstanceId("prefill")})
    assert plan_id not in driver.state.plans
    driver.done("decode", m.Skipped())
    assert copied(driver) == [(0, 0, 11)]
    (_, plan), (other, _) = driver.plan("decode"), driver.plan("prefill.1")
    assert isinstance(plan, Transfer) and plan.behind == (other, driver.state.plans[other].slot) and plan.chunks[0].filled == 0
    finish(driver, KEY)
    assert driver.is_empty


def test_the_last_stage_of_a_pipeline_is_followed() -> None:
    """Never a chunk that is at an earlier one, though a later chunk's plan there was made before the last stage's."""
    driver = on_devices("E@0+P@0+P@1+P@0+D@1", prefill_ranks=3, prefill_budget=8, num_plan_slots=32)
    driver.submit(text(25))
    assert driver.state.requests[KEY].prefill_pool == "kv" and used(driver) == [6, 7]
    driver.done("prefill")
    driver.done("prefill")
    assert not [one for one in driver.state.plans.values() if one.actor == "decode"], "two chunks are at the second stage"
    driver.done("prefill.1")
    (_, plan), (last, _) = driver.plan("decode"), driver.plan("prefill.2")
    assert isinstance(plan, Transfer) and plan.behind == (last, driver.state.plans[last].slot) and copied(driver) == [(0, 0, 8)]
    driver.done("prefill.1")
    driver.done("decode", m.Transferred(8))
    assert not [one for one in driver.state.plans.values() if one.actor == "decode"], "the first chunk is said to be at the last stage"
    driver.done("prefill.2")
    (_, plan), (last, _) = driver.plan("decode"), driver.plan("prefill.2")
    assert isinstance(plan, Transfer) and plan.behind == (last, driver.state.plans[last].slot) and copied(driver) == [(0, 8, 16)]
    finish(driver, KEY)
    assert driver.is_empty


@pytest.mark.parametrize("layout", ["P@1+EPD@0", "EPD@1+EPD@0"])
def test_prompts_are_prefilled_in_the_pool_of_the_first_stage(layout: str) -> None:
    driver = on_devices(layout, prefill_ranks=2, num_plan_slots=32)
    for key in range(1, 5):
        driver.submit(text(12), key)
    assert {request.prefill_pool for request in driver.state.requests.values()} == {"kv.1"}
    homes = {request.kv_pool for request in driver.state.requests.values()}
    assert homes == ({"kv"} if layout.startswith("P") else {"kv", "kv.1"})


def test_a_pair_is_copied_as_a_whole() -> None:
    driver = apart(prefill_budget=16)
    driver.submit(text(6, companion_ids=[1, 2, 3]))
    driver.done("prefill")
    assert copied(driver) == [(0, 0, 5), (1, 0, 2)]
    assert phases(driver.done("decode", m.Transferred(8))) == [Phase.DECODE]


def test_a_prompt_of_one_token_needs_no_other_device() -> None:
    driver = apart()
    assert Phase.DECODE in phases(driver.submit(text(1))) and used(driver)[0] == 0


def test_pages_of_both_pools_are_granted_or_none() -> None:
    driver = apart(num_kv_pages=7)
    driver.submit(text(16, 8), 1)
    driver.submit(text(12, 4), 2)
    assert used(driver) == [4, 6], "the second has nothing: its own pool is full, the other is not"
    assert driver.state.requests[2].row < 0
    finish(driver, 1)
    assert driver.state.requests[2].kv.source_tables[0] and driver.state.requests[2].kv.tables[0]
    finish(driver, 2)
    assert driver.is_empty


def test_a_new_decode_does_the_copies_of_the_last_one_again() -> None:
    driver = apart()
    driver.submit(text(12))
    driver.done("prefill")
    plan_id, _ = driver.plan("decode")
    driver.receive("decode", m.Hello("decode", 2, 1, True), generation=2)
    assert [run.plan_id for run in sent(driver.tick(), m.Run) if isinstance(run, m.Run)] == [plan_id]
    driver.receive("decode", m.PlanDone("decode", 1, plan_id, 0.1, m.Transferred(8))).tick()
    assert plan_id in driver.state.plans, "the dead one's word counts no more"
    driver.receive("decode", m.PlanDone("decode", 2, plan_id, 0.1, m.Transferred(8)), generation=2).tick()
    assert driver.state.requests[KEY].phase == Phase.DECODE


def test_a_new_prefill_disturbs_no_copy() -> None:
    driver = apart(prefill_budget=6)
    driver.submit(text(12))
    driver.done("prefill")
    driver.receive("prefill", m.Hello("prefill", 2, 1, True), generation=2).tick()
    assert copied(driver) == [(0, 0, 4)]
    driver.done("decode", m.Transferred(8))
    assert copied(driver) == [(0, 4, 11)] and follows(driver)


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_a_new_controller_goes_on(num_done: int) -> None:
    driver = apart(prefill_budget=6)
    driver.submit(text(12))
    for actor in ("prefill", "decode")[:num_done]:
        driver.done(actor, m.Transferred(8) if actor == "decode" else None)
    machine = driver.machine = recover(driver.state.limits, 4, remains(driver))
    driver.state = machine.state
    driver.tick()
    assert used(driver) == [3, 4]
    finish(driver, KEY)
    assert driver.is_empty


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_new_controller_gives_back_what_was_copied(is_recorded: bool) -> None:
    """The last one died around the record that all is copied; the source table was still full."""
    driver = apart()
    driver.submit(text(12))
    driver.done("prefill")
    before = remains(driver)
    driver.done("decode", m.Transferred(8))
    after = remains(driver)
    (full,), (saved,) = before.rows, after.rows
    row = full._replace(state=saved.state) if is_recorded else full
    machine = recover(driver.state.limits, 4, before._replace(rows=[row], plans=[] if is_recorded else before.plans))
    assert [machine.state.pools[pool].num_used for pool in ("kv", "kv.1")] == ([0, 4] if is_recorded else [3, 4])
    assert (ClearSource(0) in machine.tick(200.0)) == is_recorded


def test_a_grant_that_was_cut_short_in_either_pool_is_given_back() -> None:
    driver = apart()
    driver.submit(text(12))
    snapshot = remains(driver)
    (row,) = snapshot.rows
    for cut in (row._replace(source_tables=(row.source_tables[0][:-1], [])), row._replace(block_tables=([], []))):
        machine = recover(driver.state.limits, 4, snapshot._replace(rows=[cut], plans=[]))
        assert [pool.num_used for name, pool in machine.state.pools.items() if name in ("kv", "kv.1")] == [0, 0]


def test_a_row_that_is_preempted_keeps_its_pages_until_nobody_copies_them() -> None:
    driver = apart(prefill_budget=6)
    driver.submit(text(12))
    driver.done("prefill")
    preempt(driver.state, driver.state.requests[KEY])
    driver.tick()
    driver.done("prefill")
    assert used(driver) == [3, 4], "decode reads the ones and writes the others"
    driver.done("decode", m.Transferred(8))
    driver.tick()
    finish(driver, KEY)
    assert driver.is_empty


def cached(layout: str, num_devices: int = 2) -> Driver:
    devices = {actor: int(device) for actor, device in devices_of(layout).items()}
    return several(layout, num_devices=num_devices, devices=devices, prefix_cache=True, positions=positions, num_rows=8)


def test_a_prompt_is_found_again_where_it_was_prefilled() -> None:
    driver = cached("EP@0+D@1")
    driver.submit(text(12), 1)
    finish(driver, 1)
    driver.submit(text(12), 2)
    assert driver.state.totals.cached_tokens == 8, "all but the page of the last token"
    driver.done("prefill")
    assert copied(driver) == [(0, 8, 11)], "decode's pool has the first pages as well: they are not copied"
    finish(driver, 2)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_pages_that_decode_has_are_not_copied_and_not_written(is_restarted: bool) -> None:
    driver = cached("EP@0+D@1")
    driver.submit(text(12), 1)
    finish(driver, 1)
    cache, before = driver.state.pools["kv.1"].cache, driver.state.totals.transferred_bytes
    driver.submit(text(12), 2)
    table, free = driver.state.requests[2].kv.tables[0], driver.state.pools["kv.1"].num_free
    assert [cache.key_of(page) is not None for page in table[:3]] == [True, True, False]
    if is_restarted:
        driver.machine = recover(driver.state.limits, 4, remains(driver))
        driver.state = driver.machine.state
        driver.tick()
        assert driver.state.pools["kv.1"].num_free == free
    driver.done("prefill")
    assert copied(driver) == [(0, 8, 11)]
    finish(driver, 2)
    assert driver.state.totals.transferred_bytes == 8 + (0 if is_restarted else before), "a page's"


def test_a_page_that_decode_has_can_be_needed_by_prefill() -> None:
    """Its pool has lost it: prefill fetches it, and it does not go back."""
    driver = cached("EP@0+D@1")
    driver.submit(text(12), 1)
    finish(driver, 1)
    driver.state.pools["kv"].forget_idle()
    driver.submit(text(12), 2)
    _, plan = driver.plan("prefill")
    assert isinstance(plan, Load) and [(chunk.start, chunk.end) for chunk in plan.chunks] == [(0, 8)]
    driver.done("prefill", m.Loaded([8], [True], 8))
    driver.done("prefill")
    assert copied(driver) == [(0, 8, 11)]
    finish(driver, 2)


def test_an_answer_is_fetched_from_the_device_that_decoded_it() -> None:
    """The next turn of a conversation: prefill has the first prompt, and decode of the other device the answer as well."""
    driver = cached("EP@0+D@1")
    prompt, answer = list(range(1, 13)), list(range(500, 504))
    driver.submit(m.RequestSpec(m.Generation("r"), prompt, [], 4), 1)
    finish(driver, 1)
    free = [driver.state.pools[pool].num_free for pool in ("kv", "kv.1")]
    driver.submit(m.RequestSpec(m.Generation("r"), [*prompt, *answer, 1, 2, 3], [], 4), 2)
    _, plan = driver.plan("prefill")
    assert isinstance(plan, Load) and plan.source == "kv.1"
    assert [(chunk.member, chunk.start, chunk.end) for chunk in plan.chunks] == [(0, 8, 12)], "15 of 16 tokens were written"
    page = plan.chunks[0].slots[0]
    assert driver.state.pools["kv.1"].cache.key_of(page) == plan.chunks[0].keys[0]
    assert not driver.state.pools["kv.1"].cache.is_idle(page), "the page stays until it has been copied"
    before = driver.state.totals.transferred_bytes
    driver.done("prefill", m.Loaded([12], [True], 8))
    assert driver.state.totals.transferred_bytes == before + 8 and driver.state.totals.cached_tokens == 12
    _, plan = driver.plan("prefill")
    assert isinstance(plan, Prefill) and [(chunk.start, chunk.end) for chunk in plan.chunks] == [(12, 18)]
    driver.done("prefill")
    assert copied(driver) == [(0, 12, 18)], "nothing goes back to where it came from"
    finish(driver, 2)
    driver.submit(m.RequestSpec(m.Generation("r"), [*prompt, *answer, 1, 2, 3], [], 4), 3)
    assert driver.state.totals.cached_tokens == 12 + 16, "now they are in the pool of prefill"
    finish(driver, 3)
    assert [driver.state.pools[pool].num_free for pool in ("kv", "kv.1")] == free


def test_pages_are_fetched_from_any_other_device() -> None:
    """Of two conversations each was decoded on a device of its own."""
    driver = cached("EP@0+D@1+D@2", num_devices=3)
    prompts = {1: list(range(1, 13)), 2: list(range(21, 33))}
    for key, prompt in prompts.items():
        driver.submit(m.RequestSpec(m.Generation("r"), prompt, [], 4), key)
    pools = {key: driver.state.requests[key].kv_pool for key in prompts}
    assert {*pools.values()} == {"kv.1", "kv.2"}
    for key, pool in pools.items():
        finish(driver, key, "decode" if pool == "kv.1" else "decode.1")
    for key, prompt in prompts.items():
        driver.submit(m.RequestSpec(m.Generation("r"), [*prompt, *range(500, 504), 1, 2, 3], [], 4), key + 2)
        (plan,) = [inflight.plan for inflight in driver.state.plans.values() if isinstance(inflight.plan, Load)]
        assert plan.source == pools[key]
        driver.done("prefill", m.Loaded([12], [True], 8))


def test_a_row_that_is_preempted_while_its_pages_are_fetched_begins_anew() -> None:
    driver = cached("EP@0+D@1")
    driver.submit(m.RequestSpec(m.Generation("r"), list(range(1, 13)), [], 4), 1)
    finish(driver, 1)
    free = [driver.state.pools[pool].num_free for pool in ("kv", "kv.1")]
    driver.submit(m.RequestSpec(m.Generation("r"), [*range(1, 13), *range(500, 507)], [], 4), 2)
    assert isinstance(driver.plan("prefill")[1], Load)
    preempt(driver.state, driver.state.requests[2])
    effects = [*driver.done("prefill", m.Loaded([12], [True], 8)), *driver.tick()]
    assert [effect.num_tokens for effect in effects if isinstance(effect, SetPrefilled)] == [8], "what the cache of its device has"
    assert isinstance(driver.plan("prefill")[1], Load)
    finish(driver, 2)
    assert [driver.state.pools[pool].num_free for pool in ("kv", "kv.1")] == free


def test_pages_that_are_being_filled_from_elsewhere_stay_when_their_row_leaves() -> None:
    driver = cached("EP@0+D@1")
    driver.submit(m.RequestSpec(m.Generation("r"), list(range(1, 13)), [], 4), 1)
    finish(driver, 1)
    driver.submit(m.RequestSpec(m.Generation("r"), [*range(1, 13), *range(500, 507)], [], 4), 2)
    assert [type(inflight.plan) for inflight in driver.state.plans.values()] == [Load]
    before = used(driver)
    driver.receive("gateway", m.Cancel(1, 2)).tick()
    assert used(driver) == before, "prefill writes the ones and reads the others, and may do so to the plan's end"
    driver.done("prefill", m.Loaded([12], [True], 8))
    assert used(driver) == [0, 0]


@pytest.mark.parametrize("is_skipped", [False, True])
def test_pages_that_are_not_fetched_are_computed(is_skipped: bool) -> None:
    driver = cached("EP@0+D@1")
    driver.submit(m.RequestSpec(m.Generation("r"), list(range(1, 13)), [], 4), 1)
    finish(driver, 1)
    driver.submit(m.RequestSpec(m.Generation("r"), [*range(1, 13), *range(500, 507)], [], 4), 2)
    driver.done("prefill", m.Skipped() if is_skipped else m.Loaded([8], [False]))
    _, plan = driver.plan("prefill")
    assert isinstance(plan, Prefill) and [(chunk.start, chunk.end) for chunk in plan.chunks] == [(8, 18)]
    assert driver.state.totals.cached_tokens == 8
    finish(driver, 2)


def test_prompts_go_where_their_beginnings_are() -> None:
    """Conversations about two things, which one pool would find again as well."""
    found = []
    for layout in ("EPD", "EPD@0+EPD@1"):
        driver = cached(layout, 2 if "@" in layout else 1)
        for key in range(1, 9):
            ids = [*range(100 * (key % 2), 100 * (key % 2) + 24), *range(1000 + key, 1003 + key)]
            driver.submit(m.RequestSpec(m.Generation("r"), ids, [], 4), key)
            finish(driver, key, str(driver.state.requests[key].ownership.decode or "decode"))
        found.append(driver.state.totals.cached_tokens)
        assert driver.state.totals.transferred_bytes == 0
    assert found[1] >= 0.9 * found[0] > 0


@pytest.mark.parametrize(("num_others", "device"), [(2, 0), (13, 1)])
def test_a_prompt_goes_where_less_is_to_do_and_fetches_its_beginning(num_others: int, device: int) -> None:
    """12 tokens before it, and a page for decode, are fewer than its 48, and more than it costs to fetch them; 1 is not."""
    driver = cached("EPD@0+EPD@1")
    driver.submit(m.RequestSpec(m.Generation("r"), list(range(100, 149)), [], 4), 1)
    finish(driver, 1)
    driver.submit(m.RequestSpec(m.Generation("r"), list(range(500, 500 + num_others)), [], 4), 2)
    assert driver.state.requests[2].kv_pool == "kv"
    driver.submit(m.RequestSpec(m.Generation("r"), list(range(100, 151)), [], 4), 3)
    assert driver.state.requests[3].kv_pool == driver.state.kv_pools[device]
    if device:
        _, plan = driver.plan("prefill.1")
        assert isinstance(plan, Load) and plan.source == "kv" and [(chunk.start, chunk.end) for chunk in plan.chunks] == [(0, 48)]
    else:
        assert driver.state.totals.cached_tokens == 48


def test_rows_are_spread_over_devices() -> None:
    driver = on_devices("EPD@0+EPD@1", prefill_budget=64)
    for key in range(1, 5):
        driver.submit(text(12), key)
    assert [request.kv_pool for request in driver.state.requests.values()] == ["kv", "kv.1", "kv", "kv.1"]
    assert {plan.actor: len(plan.plan.parts) for plan in driver.state.plans.values()}.keys() == {"prefill", "prefill.1"}


def test_a_long_prompt_keeps_others_away_and_a_known_beginning_brings_them() -> None:
    """What counts are the tokens to be prefilled before a row has its first one, in the pool that it would be prefilled in."""
    driver = cached("EPD@0+EPD@1")
    driver.submit(text(60, 4), 1)
    for key in (2, 3):
        driver.submit(m.RequestSpec(m.Generation("r"), list(range(100 * key, 100 * key + 12)), [], 4), key)
    assert [driver.state.requests[key].kv_pool for key in (1, 2, 3)] == ["kv", "kv.1", "kv.1"], "not in turn"
    finish(driver, 3, "decode.1")
    driver.submit(m.RequestSpec(m.Generation("r"), [*range(200, 212), 7, 8], [], 4), 4)
    assert driver.state.requests[4].kv_pool == "kv.1", "it has two pages of it, and as many rows"


def test_pages_of_a_plan_that_a_new_controller_finds_are_not_copied_before_its_end() -> None:
    """The last controller died between the word that they are prefilled and the end of the plan: it is done again."""
    driver = apart(prefill_budget=6)
    driver.submit(text(12))
    plans = [plan for plan in remains(driver).plans if plan.actor == "prefill"]
    driver.done("prefill")
    snapshot = remains(driver)
    machine = driver.machine = recover(driver.state.limits, 4, snapshot._replace(plans=plans))
    driver.state = machine.state
    driver.tick()
    assert driver.state.requests[KEY].kv.prefilled[0] == 6
    assert copied(driver) == [(0, 0, 4)] and follows(driver)
    _, plan = driver.plan("decode")
    assert isinstance(plan, Transfer) and plan.chunks[0].filled == 0
    finish(driver, KEY)
    assert driver.is_empty


def test_a_device_that_has_decode_alone_gets_its_share() -> None:
    driver = on_devices("EPD@0+D@1", prefill_budget=64)
    for key in range(1, 5):
        driver.submit(text(12), key)
    assert [request.kv_pool for request in driver.state.requests.values()] == ["kv", "kv.1", "kv", "kv.1"]
    assert [request.prefill_pool for request in driver.state.requests.values()] == ["kv"] * 4


def test_a_row_goes_to_the_decode_that_has_room() -> None:
    driver = on_devices("EP@0+D@0+D@1", num_kv_pages=12, prefill_budget=64)
    driver.submit(text(4, 2), 1)
    driver.submit(text(16, 8), 2)
    while driver.state.plans:
        inflight = next(iter(driver.state.plans.values()))
        driver.done(inflight.actor, m.Transferred(8) if isinstance(inflight.plan, Transfer) else None)
    driver.submit(text(4, 2), 3)
    assert [request.kv_pool for request in driver.state.requests.values()] == ["kv", "kv.1", "kv"] and used(driver) == [4, 6]
    driver.submit(text(20, 8), 4)
    assert driver.state.requests[4].kv_pool == "kv", "kv.1 has fewer rows, and not enough pages"


def test_a_row_goes_where_there_is_room() -> None:
    driver = on_devices("EPD@0+EPD@1", num_kv_pages=6)
    for key in range(1, 3):
        driver.submit(text(16, 8), key)
    assert used(driver) == [6, 6]


def test_rows_of_a_device_without_decode_are_prefilled_again_on_another() -> None:
    driver = on_devices("EPD@0+EPD@1")
    for key in (1, 2):
        driver.submit(text(1, 40), key)
    assert [request.ownership.decode for request in driver.state.requests.values()] == ["decode", SECOND]
    driver.machine.set_instances(actors_of("2EPD"), [SECOND])
    (drop,) = sent(driver.tick(), m.Drop)
    assert isinstance(drop, m.Drop)
    driver.receive(SECOND, m.Dropped(1, drop.row, drop.row_generation, drop.ticket)).tick()
    driver.tick()
    assert drained(driver.state) == [SECOND]
    assert driver.state.requests[2].kv_pool == "kv" and driver.state.requests[2].ownership.decode == "decode"


def test_another_decode_makes_the_copies_of_a_broken_one() -> None:
    driver = on_devices("EP@0+2D@1")
    driver.submit(text(12))
    driver.done("prefill")
    plan_id, plan = driver.plan("decode")
    driver.machine.set_outages([Outage("decode", "it crashes", driver.now + 50)])
    assert not sent(driver.tick(), m.Failed)
    assert driver.plan("decode")[0] == plan_id, "it may still make them at any time: nobody else is given the pages"
    driver.tick(gone={InstanceId("decode")})
    chunks = [[(chunk.start, chunk.end) for chunk in one.chunks] for one in (driver.plan(SECOND)[1], plan)]
    assert chunks[0] == chunks[1] and plan_id not in driver.state.plans
    driver.done(SECOND, m.Transferred(8))
    assert driver.state.requests[KEY].ownership.decode == SECOND
    finish(driver, KEY, SECOND)
    assert driver.is_empty


def test_a_row_whose_device_loses_its_only_decode_in_the_middle_of_a_copy_is_prefilled_again() -> None:
    driver = on_devices("EP@0+D@1+D@0")
    driver.submit(text(1, 40), 1)
    driver.submit(text(12), 2)
    driver.done("prefill")
    assert copied(driver) == [(0, 0, 11)]
    driver.machine.set_outages([Outage("decode", "it crashes", driver.now + 50)])
    assert not sent(driver.tick(), m.Failed) and not sent(driver.tick(gone={InstanceId("decode")}), m.Failed)
    driver.tick()
    assert driver.state.requests[2].kv_pool == "kv" and driver.state.requests[2].record.source_pool is None
    driver.done("prefill")
    assert driver.state.requests[2].ownership.decode == SECOND and used(driver)[1] == 0


def test_copies_that_fail_end_their_request_alone() -> None:
    driver = apart()
    driver.submit(text(12))
    driver.done("prefill")
    (failed,) = sent(driver.done("decode", m.ItemError(500, "a bug")), m.Failed)
    assert isinstance(failed, m.Failed) and failed.status == 500
    driver.receive("gateway", m.Delivered(1, KEY)).tick()
    assert driver.is_empty


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**32),
    st.sampled_from(["EP@0+D@1", "E@0+P@0+P@1+2D@1", "P@0+EPD@1", "EPD@0+P@1+D@0"]),
    st.sampled_from(get_args(Routing)),
)
def test_rows_never_wait_for_each_other_in_a_circle(seed: int, layout: str, routing: Routing) -> None:
    """Much more work than pages, in both pools: every request comes to its end without help."""
    with tempfile.TemporaryDirectory(prefix="mmrt-test-", dir="/dev/shm") as name:
        world = World(random.Random(seed), Path(name), crowded=True, faults=False, layouts=(layout,), routing=routing)
        try:
            world.storm = False
            for key in range(1, 9):
                world.submit(make_request(world.random, key, world.now, True, list(world.wanted.values())))
            world.calm_down()
        finally:
            world.close()


def test_round_robin_goes_from_device_to_device() -> None:
    """TI7: whatever each has to do. ``least_load`` sends a text to the device that another has left."""
    pools = {}
    for routing in ("round_robin", "least_load"):
        driver = on_devices("EPD@0+EPD@1", routing=routing)
        for key in range(1, 5):
            driver.submit(text(4), key)
            driver.tick()
            pools[routing, key] = driver.state.requests[key].kv_pool
            if key == 1:
                driver.receive("gateway", m.Cancel(1, key)).tick()
    assert [pools["round_robin", key] for key in range(1, 5)] == ["kv", "kv.1", "kv", "kv.1"]
    assert [pools["least_load", key] for key in range(1, 5)] == ["kv", "kv", "kv.1", "kv"]
