"""Actors that come and leave while a run lives: who gets work, what becomes of theirs, and when they hold none."""

import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.controller.recovery import recover
from mmrt.runtime.controller.rows.instances import drained
from mmrt.runtime.controller.state.effects import AppendPages, ClearPages, SetOwner, SetPageGenerations, SetPrefilled
from mmrt.runtime.stage_table import InstanceId, actors_of
from mmrt.schema.rows import Phase
from mmrt.tests.runtime.controller.test_machine import KEY, Driver, bring_to, places, sent, several, text
from mmrt.tests.runtime.controller.test_ownership import FIRST, SECOND, asked, owners, two
from mmrt.tests.runtime.controller.test_recovery import remains

TWO = actors_of("E+P+2D")
SECOND_PREFILL = InstanceId("prefill.1")


def test_rows_of_a_decode_that_leaves_go_to_the_other_with_their_pages() -> None:
    driver = two(1, 2, 3, 4)
    assert owners(driver) == [FIRST, SECOND, FIRST, SECOND]
    pages = [request.kv.tables for request in driver.state.requests.values()]
    driver.machine.set_instances(TWO, [SECOND])
    effects = driver.tick()
    drops = [message for message in sent(effects, m.Drop) if isinstance(message, m.Drop)]
    assert asked(effects, m.Drop) == [(SECOND, 1), (SECOND, 3)] and drained(driver.state) == []
    for drop in drops:
        driver.receive("decode.1", m.Dropped(1, drop.row, 1, drop.ticket))
    effects = driver.tick()
    assert asked(effects, m.Admit) == [(FIRST, 1), (FIRST, 3)] and owners(driver) == [FIRST] * 4
    assert drained(driver.state) == [SECOND] and driver.state.totals.handed_over == 2
    assert not [e for e in effects if isinstance(e, AppendPages | ClearPages | SetPageGenerations | SetPrefilled)], "no byte is copied"
    assert [request.kv.tables for request in driver.state.requests.values()] == pages


def test_an_actor_that_leaves_gets_nothing_more() -> None:
    driver = two()
    driver.machine.set_instances(TWO, [FIRST])
    for key in (1, 2):
        driver.submit(text(1, 40), key)
    assert owners(driver) == [SECOND] * 2
    driver.machine.set_instances(TWO)
    driver.submit(text(1, 40), 3)
    assert owners(driver)[-1] == FIRST, "it stays after all"


def test_a_worker_that_leaves_finishes_its_plans() -> None:
    driver = several("E+2P+D", num_rows=8, prefill_budget=6)
    for key in (1, 2):
        driver.submit(text(), key)
    assert places(driver, "prefill") == ["prefill", "prefill.1"]
    driver.machine.set_instances(driver.state.limits.actors, [SECOND_PREFILL])
    driver.submit(text(), 3)
    assert places(driver, "prefill") == ["prefill", "prefill", "prefill.1"] and drained(driver.state) == []
    driver.done("prefill.1")
    assert drained(driver.state) == [SECOND_PREFILL] and driver.state.requests[2].phase == Phase.DECODE
    driver.machine.set_instances(actors_of("E+P+D"))
    driver.submit(text(), 4)
    assert "prefill.1" not in places(driver, "prefill"), "what it says once it has gone brings it no work"


def test_an_actor_that_comes_gets_work_once_it_is_there() -> None:
    driver = Driver(num_rows=8)
    driver.machine.set_instances(TWO)
    driver.submit(text(1, 40), 1)
    driver.submit(text(1, 40), 2)
    assert owners(driver) == [FIRST] * 2
    driver.receive("decode.1", m.Hello("decode.1", 1, 1, True))
    driver.submit(text(1, 40), 3)
    assert owners(driver)[-1] == SECOND


def test_an_actor_that_comes_back_gets_work_once_it_is_there_again() -> None:
    driver = two()
    driver.machine.set_instances(actors_of("E+P+D"))
    driver.machine.set_instances(TWO)
    for key in (1, 2):
        driver.submit(text(1, 40), key)
    assert owners(driver) == [FIRST] * 2, "its process is starting"
    driver.receive("decode.1", m.Hello("decode.1", 2, 2, True), generation=2)
    driver.submit(text(1, 40), 3)
    assert owners(driver)[-1] == SECOND


def test_a_new_controller_goes_on_with_the_draining() -> None:
    driver = two(1, 2)
    driver.machine.set_instances(TWO, [SECOND])
    driver.tick()
    machine = recover(driver.state.limits, 4, remains(driver))
    machine.set_instances(TWO, [SECOND])
    (drop,) = sent(machine.tick(200.0), m.Drop)
    assert isinstance(drop, m.Drop) and drained(machine.state) == []
    machine.on_message(SECOND, 1, m.Dropped(1, drop.row, drop.row_generation, drop.ticket), 200.1)
    assert SetOwner(1, FIRST) in machine.tick(200.1) and drained(machine.state) == [SECOND]


@pytest.mark.parametrize("stage", ["finished", "decode"])
def test_a_request_that_ends_meanwhile_ends(stage: str) -> None:
    driver = several("E+P+2D", num_rows=8)
    bring_to(driver, stage)
    driver.machine.set_instances(TWO, [FIRST])
    driver.tick()
    driver.receive("gateway", m.Cancel(1, KEY)).tick()
    row = driver.state.rows[0]
    assert row is not None and row.ownership.drop_ticket and drained(driver.state) == []
    driver.receive("decode", m.Dropped(1, 0, 1, row.ownership.drop_ticket)).tick()
    assert driver.is_empty and drained(driver.state) == [FIRST]
