"""Prefill's pipeline in the controller (RS1, RS6): the order of chunks in each stage, and what a failed stage or request leads to."""

import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.wire import encode
from mmrt.runtime.controller.recovery import PlanSnapshot, recover
from mmrt.runtime.controller.rows.absence import AWAY_S
from mmrt.runtime.controller.state.effects import Effect, SetPrefilled
from mmrt.runtime.stage_table import InstanceId
from mmrt.schema.outage import Outage
from mmrt.schema.rows import Phase
from mmrt.tests.runtime.controller.test_absence import die
from mmrt.tests.runtime.controller.test_machine import Driver, phases, refused, sent, several, text
from mmrt.tests.runtime.controller.test_recovery import remains

FIRST, SECOND = InstanceId("prefill"), InstanceId("prefill.1")


def pipeline(num_ranks: int = 2, **changes: object) -> Driver:
    """Plans have 8 tokens at most."""
    return several(f"E+{num_ranks}P+D", prefill_ranks=num_ranks, num_plan_slots=32, num_rows=4, prefill_budget=8, **changes)


def held(driver: Driver) -> list[tuple[str, list[tuple[int, int, int]]]]:
    """The plans in flight: actor and chunks (row, start, end), in the order of their making."""
    plans = [(one.actor, one.plan) for one in driver.state.plans.values()]
    return [(actor, [(chunk.row, chunk.start, chunk.end) for chunk in plan.chunks]) for actor, plan in plans]


def told(effects: list[Effect]) -> list[int]:
    return [command.plan_id for command in sent(effects, m.Run) if isinstance(command, m.Run)]


def test_chunks_of_a_prompt_follow_one_another_and_none_overtakes() -> None:
    driver = pipeline()
    driver.submit(text(21), 1)
    assert held(driver) == [(FIRST, [(0, 0, 8)])]
    driver.done(FIRST)
    assert held(driver) == [(SECOND, [(0, 0, 8)]), (FIRST, [(0, 8, 16)])]
    relays = [one.plan.relay for one in driver.state.plans.values()]
    effects = driver.done(FIRST)
    assert held(driver) == [(SECOND, [(0, 0, 8)]), (SECOND, [(0, 8, 16)]), (FIRST, [(0, 16, 20)])]
    _, waiting, third = driver.state.plans
    assert told(effects) == [third] and waiting not in told(driver.tick(1.0)), "the chunk before it is there still"
    assert [one.plan.relay for one in driver.state.plans.values()][:2] == relays and len({*relays, driver.plan(FIRST)[1].relay}) == 3
    effects = driver.done(SECOND)
    assert [effect for effect in effects if isinstance(effect, SetPrefilled)] == [SetPrefilled(0, 0, 8, 0)]
    assert waiting in told(effects)
    driver.done(FIRST)
    driver.done(SECOND)
    assert Phase.DECODE in phases(driver.done(SECOND)) and not driver.state.plans


def test_chunks_of_a_skipped_one_count_for_nothing() -> None:
    """Those behind it leave the pipeline before it is done again."""
    driver = pipeline()
    driver.submit(text(21), 1)
    driver.done(FIRST)
    driver.done(FIRST)
    driver.done(SECOND, m.Skipped())
    assert held(driver) == [(SECOND, [(0, 8, 16)]), (FIRST, [(0, 16, 20)])]
    driver.done(FIRST)
    assert held(driver) == [(SECOND, [(0, 8, 16)]), (SECOND, [(0, 16, 20)])]
    for _ in range(2):
        driver.done(SECOND, m.Skipped())
    assert held(driver) == [(FIRST, [(0, 0, 8)])]


def test_a_suspect_has_one_chunk_in_the_pipeline() -> None:
    driver = pipeline()
    driver.submit(text(21), 1)
    driver.done(FIRST, m.Died())
    driver.done(FIRST)
    assert held(driver) == [(SECOND, [(0, 0, 8)])]
    driver.done(SECOND)
    driver.done(FIRST)
    assert held(driver) == [(SECOND, [(0, 8, 16)]), (FIRST, [(0, 16, 20)])], "it was not this one"


@pytest.mark.parametrize("actor", [FIRST, SECOND])
def test_a_pipeline_without_one_of_its_stages_is_broken(actor: InstanceId) -> None:
    driver = pipeline()
    driver.submit(text(21), 1)
    driver.machine.set_outages([Outage(actor, "it crashes", driver.now + 4.5)])
    failed = refused(driver.tick())
    assert (failed.key, failed.status, failed.message) == (1, 503, f"{actor} is broken: it crashes")
    assert refused(driver.submit(text(), 2)).retry_after_s == 6


def test_a_dead_stage_keeps_its_plans() -> None:
    """No other one has its layers."""
    driver = pipeline()
    driver.submit(text(21), 1)
    driver.done(FIRST)
    die(driver, SECOND, seconds=10 * AWAY_S)
    assert not driver.machine.unanswering() and held(driver)[0] == (SECOND, [(0, 0, 8)])


def test_a_request_that_ends_the_last_stage_is_tried_alone_and_given_up() -> None:
    driver = pipeline()
    for key in (1, 2):
        driver.submit(text(4), key)
    driver.done(FIRST)
    driver.done(FIRST)
    assert held(driver) == [(SECOND, [(0, 0, 3)]), (SECOND, [(1, 0, 3)])]
    driver.done(SECOND, m.Died())
    assert driver.state.requests[1].record.strikes and not driver.state.requests[2].record.strikes
    driver.done(FIRST)
    assert driver.state.requests[1].record.strikes, "the first stage says nothing of the last"
    driver.done(SECOND)
    failed = refused(driver.done(SECOND, m.Died()))
    assert failed.key == 1 and "prefill process 2 times" in failed.message
    assert Phase.DECODE in phases(driver.tick()) or driver.state.requests[2].phase == Phase.DECODE


def test_a_chunk_that_is_done_does_not_go_through_the_other_stages_again() -> None:
    """A controller died between the plan of the next stage and the end of this one's, and the next ones were faster than it."""
    driver = pipeline(3)
    driver.submit(text(9), 1)
    plan_id, first = driver.plan(FIRST)
    driver.done(FIRST)
    snapshot = remains(driver)
    machine = recover(
        driver.state.limits, 4, snapshot._replace(plans=[PlanSnapshot(31, plan_id, FIRST, encode(first)), *snapshot.plans])
    )
    driver.machine, driver.state = machine, machine.state
    driver.tick()
    assert held(driver) == [(FIRST, [(0, 0, 8)]), (SECOND, [(0, 0, 8)])] and isinstance(first, p.Prefill)
    driver.done(SECOND)
    driver.done("prefill.2")
    assert held(driver) == [(FIRST, [(0, 0, 8)])]
    assert Phase.DECODE in phases(driver.done(FIRST)) and not driver.state.plans
