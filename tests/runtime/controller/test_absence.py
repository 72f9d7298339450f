"""Work that waits for a dead actor goes to another one of its stage that serves; and what kills each of them is found all the same."""

from collections.abc import Collection

import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.controller.recovery import recover
from mmrt.runtime.controller.rows.absence import AWAY_S
from mmrt.runtime.controller.state.effects import (
    AppendPages,
    ClearPages,
    Effect,
    SetOwner,
    SetPageGenerations,
    SetPhase,
    SetPrefilled,
)
from mmrt.runtime.stage_table import InstanceId
from mmrt.tests.runtime.controller.test_machine import Driver, places, sent, several, text
from mmrt.tests.runtime.controller.test_migration import finish, on_devices
from mmrt.tests.runtime.controller.test_ownership import FIRST, SECOND, asked, owners, two
from mmrt.tests.runtime.controller.test_recovery import remains


def die(driver: Driver, *actors: InstanceId, seconds: float = AWAY_S) -> list[Effect]:
    """These are dead for so long."""
    driver.machine.set_absent(actors)
    driver.tick()
    return driver.tick(seconds)


def seen_dead(driver: Driver, actors: Collection[InstanceId]) -> list[Effect]:
    assert driver.machine.unanswering() >= set(actors)
    return driver.tick(gone=actors)


def test_rows_of_a_decode_that_does_not_come_up_go_on_at_the_other() -> None:
    driver = two(1, 2)
    pages = [list(driver.state.requests[key].kv.tables[0]) for key in (1, 2)]
    assert not sent(die(driver, SECOND, seconds=AWAY_S / 2), m.Drop) and owners(driver) == [FIRST, SECOND], "it is soon back, as a rule"
    effects = driver.tick(AWAY_S / 2)
    assert SetOwner(1, None) in effects and owners(driver) == [FIRST, None]
    assert not asked(driver.tick(), m.Admit), "a process may have taken the role meanwhile"
    effects = seen_dead(driver, [SECOND])
    assert SetOwner(1, FIRST) in effects and asked(effects, m.Admit) == [(FIRST, 1)] and owners(driver) == [FIRST, FIRST]
    assert not [e for e in effects if isinstance(e, AppendPages | ClearPages | SetPageGenerations | SetPrefilled | SetPhase)]
    assert [list(driver.state.requests[key].kv.tables[0]) for key in (1, 2)] == pages, "nothing is copied or computed again"
    assert driver.state.totals.handed_over == 1 and not driver.machine.unanswering()


def test_one_that_is_back_in_time_keeps_its_rows() -> None:
    driver = two(1, 2)
    for _ in range(5):
        assert not sent(die(driver, SECOND, seconds=0.9 * AWAY_S), m.Drop)
        driver.machine.set_absent([])
        driver.tick(AWAY_S)
    assert owners(driver) == [FIRST, SECOND]


@pytest.mark.parametrize("is_broken", [False, True])
def test_rows_wait_where_nobody_else_serves(is_broken: bool) -> None:
    driver = two(1, 2)
    if is_broken:
        del driver.state.actors[FIRST]  # it has not come up yet
    effects = die(driver, SECOND, *(() if is_broken else (FIRST,)), seconds=100)
    assert not sent(effects, m.Drop) and not sent(effects, m.Failed) and owners(driver) == [FIRST, SECOND]


def test_one_that_comes_back_in_the_middle_of_the_change_may_answer() -> None:
    driver = two(1, 2)
    (drop,) = sent(die(driver, SECOND), m.Drop)
    assert isinstance(drop, m.Drop)
    driver.machine.set_absent([])
    driver.receive("decode.1", m.Hello("decode.1", 2, 1, True), generation=2)
    assert not driver.tick(gone=[]) or not driver.machine.unanswering()
    driver.receive("decode.1", m.Dropped(2, 1, 1, drop.ticket), generation=2)
    assert asked(driver.tick(), m.Admit) == [(SECOND, 1)], "it has fewer again"


def test_a_row_that_has_got_on_nowhere_stays_where_it_ended_the_second_one() -> None:
    """The next process of the second one tries its rows alone: otherwise a row that ends each decode would go to and fro for ever."""
    driver = two(1, 2)
    die(driver, SECOND)
    seen_dead(driver, [SECOND])
    driver.machine.set_absent([])
    driver.tick()
    effects = die(driver, FIRST)
    assert owners(driver) == [None, FIRST] and asked(effects, m.Drop) == [(FIRST, 0)], "its own row goes, the one that came stays"
    seen_dead(driver, [FIRST])
    driver.machine.set_absent([])
    driver.tick()
    driver.counts[1] = (3, 0)
    driver.tick()
    die(driver, FIRST)
    assert owners(driver) == [SECOND, None], "it has got on since"


def test_a_new_controller_waits_as_long_and_finishes_the_change() -> None:
    driver = two(1, 2)
    die(driver, SECOND)
    machine = recover(driver.state.limits, 4, remains(driver))
    machine.set_absent([SECOND])
    machine.tick(200.0)
    assert not machine.unanswering()
    machine.tick(200.0 + AWAY_S)
    assert machine.unanswering() == {SECOND}
    effects = machine.tick(200.1 + AWAY_S, (), (), (), [SECOND])
    assert SetOwner(1, FIRST) in effects


def test_a_finished_row_is_free_once_its_decode_is_seen_dead() -> None:
    driver = two(1, 2)
    driver.counts[1] = (4, 2)
    driver.tick()
    die(driver, SECOND)
    seen_dead(driver, [SECOND])
    assert driver.state.requests[2].kv.tables == ([], []) and driver.state.totals.handed_over == 0


def test_a_row_whose_device_has_no_other_decode_is_prefilled_again_on_another() -> None:
    driver = on_devices("EPD@0+EPD@1")
    for key in (1, 2):
        driver.submit(text(1, 40), key)
    assert owners(driver) == [FIRST, SECOND]
    die(driver, SECOND)
    seen_dead(driver, [SECOND])
    driver.tick()
    assert owners(driver) == [FIRST, FIRST] and driver.state.requests[2].kv_pool == "kv"
    for key in (1, 2):
        finish(driver, key, FIRST)
    assert driver.is_empty


def test_plans_go_to_another_prefill_once() -> None:
    """A prompt that ends each process that takes it is found by the second one's next process."""
    first, second = InstanceId("prefill"), InstanceId("prefill.1")
    driver = several("E+2P+D", num_rows=8, prefill_budget=6)
    driver.submit(text(), 1)
    assert places(driver, "prefill") == ["prefill"]
    die(driver, first)
    assert places(driver, "prefill") == ["prefill"], "it may yet write the row's pages"
    seen_dead(driver, [first])
    assert places(driver, "prefill") == ["prefill.1"]
    driver.machine.set_absent([])
    driver.tick()
    die(driver, second)
    assert not driver.machine.unanswering()
    driver.tick(gone=[second])
    assert places(driver, "prefill") == ["prefill.1"]
    driver.machine.set_absent([])
    driver.done("prefill.1")
    assert not driver.state.requests[1].ownership.has_moved
