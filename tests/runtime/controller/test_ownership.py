"""Rows and their decode actors: who gets a row, and how it goes from one to another."""

from mmrt.runtime.bus import messages as m
from mmrt.runtime.controller.recovery import recover
from mmrt.runtime.controller.state.effects import (
    AppendPages,
    ClearPages,
    Effect,
    Send,
    SetOwner,
    SetPageGenerations,
    SetPhase,
    SetPrefilled,
    WriteState,
)
from mmrt.runtime.stage_table import InstanceId
from mmrt.schema.outage import Outage
from mmrt.schema.rows import Phase
from mmrt.tests.runtime.controller.test_machine import Driver, index, sent, several, text
from mmrt.tests.runtime.controller.test_recovery import remains

FIRST, SECOND = InstanceId("decode"), InstanceId("decode.1")


def two(*keys: int) -> Driver:
    """Two decodes, and rows that decode from their first token on."""
    driver = several("E+P+2D", num_rows=8)
    for key in keys:
        driver.submit(text(1, 40), key)
    return driver


def owners(driver: Driver) -> list[str | None]:
    return [request.ownership.decode for request in driver.state.requests.values()]


def asked(effects: list[Effect], kind: type) -> list[tuple[str, int]]:
    """Who is sent this kind of message, about which row."""
    return [(e.actor, e.message.row) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def ticket_of(effects: list[Effect]) -> int:
    (drop,) = sent(effects, m.Drop)
    assert isinstance(drop, m.Drop)
    return drop.ticket


def break_second(driver: Driver) -> list[Effect]:
    driver.machine.set_outages([Outage(SECOND, "it crashes", driver.now + 50)])
    return driver.tick()


def test_a_row_goes_to_the_decode_with_the_fewest_sequences() -> None:
    driver = two(1)
    driver.submit(text(1, 40, companion_ids=[1]), 2)
    driver.submit(text(1, 40), 3)
    assert owners(driver) == [FIRST, SECOND, FIRST], "a pair is two"
    driver.counts[0] = (9, 0)
    driver.tick()
    driver.submit(text(1, 40), 4)
    assert owners(driver)[-1] == SECOND, "as many sequences, with fewer tokens"


def test_no_row_goes_to_a_decode_that_is_dead_while_another_is_there() -> None:
    """It would wait until the dead one is back."""
    driver = two(1)
    assert driver.machine.twins() == [FIRST, SECOND]
    driver.machine.set_absent([SECOND])
    driver.submit(text(1, 40), 2)
    assert owners(driver) == [FIRST, FIRST], "not to the one with fewer sequences"
    driver.machine.set_absent([FIRST, SECOND])
    driver.submit(text(1, 40), 3)
    assert owners(driver)[-1] == SECOND, "nobody is there: as usual"
    driver.machine.set_absent([])
    driver.submit(text(1, 40), 4)
    assert owners(driver)[-1] == SECOND


def test_the_owner_is_written_before_the_phase_and_told_last() -> None:
    driver = two(1)
    effects = driver.submit(text(1, 40), 2)
    saved = max(n for n, effect in enumerate(effects) if isinstance(effect, WriteState))
    owned, phase = index(effects, SetOwner), max(n for n, effect in enumerate(effects) if isinstance(effect, SetPhase))
    assert saved < owned < phase < index(effects, m.Admit)
    assert effects[owned] == SetOwner(1, SECOND) and asked(effects, m.Admit) == [(SECOND, 1)]


def test_only_the_decode_that_has_a_row_can_drop_it() -> None:
    driver = two(1, 2)
    effects = driver.receive("gateway", m.Cancel(1, 2)).tick()
    assert asked(effects, m.Drop) == [(SECOND, 1)]
    driver.receive("decode", m.Dropped(1, 1, 1, ticket_of(effects))).tick()
    assert driver.state.rows[1] is not None
    driver.receive("decode.1", m.Dropped(1, 1, 1, ticket_of(effects))).tick()
    assert driver.state.rows[1] is None and owners(driver) == [FIRST]


def test_a_new_generation_is_asked_again_and_the_other_is_not() -> None:
    driver = two(1, 2)
    for key in (1, 2):
        driver.receive("gateway", m.Cancel(1, key))
    assert asked(driver.tick(), m.Drop) == [(FIRST, 0), (SECOND, 1)]
    assert asked(driver.receive("decode.1", m.Hello("decode.1", 2, 1, True), generation=2).tick(), m.Drop) == [(SECOND, 1)]


def test_rows_of_a_broken_decode_go_on_at_the_other_once_it_is_dead() -> None:
    driver = two(1, 2)
    pages = [list(driver.state.requests[key].kv.tables[0]) for key in (1, 2)]
    effects = break_second(driver)
    assert not sent(effects, m.Failed) and asked(effects, m.Drop) == [(SECOND, 1)]
    assert index(effects, SetOwner) < index(effects, m.Drop) and SetOwner(1, None) in effects
    assert driver.machine.unanswering() == {SECOND} and owners(driver) == [FIRST, None]
    assert not asked(driver.tick(), m.Admit), "it may still live"
    effects = driver.tick(gone=[SECOND])
    assert SetOwner(1, FIRST) in effects and asked(effects, m.Admit) == [(FIRST, 1)] and owners(driver) == [FIRST, FIRST]
    assert not [e for e in effects if isinstance(e, AppendPages | ClearPages | SetPageGenerations | SetPrefilled | SetPhase)]
    assert [list(driver.state.requests[key].kv.tables[0]) for key in (1, 2)] == pages, "nothing is copied or computed again"
    assert driver.state.totals.handed_over == 1 and not driver.machine.unanswering()
    assert all(getattr(effect, "row", 1) == 1 for effect in effects), "the other's row is left alone"


def test_a_broken_decode_that_comes_back_may_answer() -> None:
    driver = two(1, 2)
    ticket = ticket_of(break_second(driver))
    driver.machine.set_outages([])
    driver.receive("decode.1", m.Hello("decode.1", 2, 1, True), generation=2)
    driver.receive("decode.1", m.Dropped(2, 1, 1, ticket), generation=2)
    assert asked(driver.tick(), m.Admit) == [(SECOND, 1)], "it has fewer again"


def test_a_row_that_has_just_left_is_not_held_to_be_dropped_by_what_was_seen_before() -> None:
    driver = two(1, 2)
    driver.machine.set_outages([Outage(SECOND, "it crashes", driver.now + 50)])
    driver.tick(gone=[SECOND])
    assert owners(driver) == [FIRST, None], "the lock was looked at before the owner word was written"


def test_new_rows_go_to_the_decodes_that_serve() -> None:
    driver = two()
    break_second(driver)
    for key in (1, 2, 3):
        driver.submit(text(1, 40), key)
    assert owners(driver) == [FIRST] * 3
    late = several("E+P+2D", num_rows=8)
    del late.state.actors[FIRST]
    late.submit(text(1, 40), 1)
    assert owners(late) == [SECOND]


def test_without_any_decode_all_end_and_nothing_is_held() -> None:
    driver = two(1, 2)
    driver.machine.set_outages([Outage(FIRST, "it hangs"), Outage(SECOND, "it crashes", driver.now + 4.5)])
    failed = sent(driver.tick(), m.Failed)
    assert {(one.key, one.message) for one in failed} == {(key, "decode.1 is broken: it crashes") for key in (1, 2)}  # type: ignore[union-attr]
    for key in (1, 2):
        driver.receive("gateway", m.Delivered(1, key))
    driver.tick()
    assert driver.machine.unanswering() == {FIRST, SECOND}
    driver.tick(gone=[FIRST, SECOND])
    assert driver.is_empty


def test_a_finished_row_of_a_broken_decode_is_free_once_that_is_dead() -> None:
    driver = two(1, 2)
    driver.counts[1] = (4, 2)
    driver.tick()
    break_second(driver)
    driver.tick(gone=[SECOND])
    assert driver.state.requests[2].kv.tables == ([], []) and driver.state.totals.handed_over == 0


def test_a_new_controller_finishes_a_change_of_owner() -> None:
    driver = two(1, 2)
    break_second(driver)
    machine = recover(driver.state.limits, 4, remains(driver))
    machine.set_outages([Outage(SECOND, "it crashes", driver.now + 50)])
    machine.tick(200.0)
    assert machine.unanswering() == {SECOND}
    effects = machine.tick(200.1, (), (), (), [SECOND])
    assert SetOwner(1, FIRST) in effects and machine.state.requests[2].phase == Phase.DECODE


def test_a_new_controller_gives_a_row_that_nobody_has_to_somebody() -> None:
    """The last one died between the acknowledgement and the next owner."""
    driver = two(1, 2)
    ticket = ticket_of(break_second(driver))
    driver.receive("decode.1", m.Dropped(1, 1, 1, ticket))
    effects = recover(driver.state.limits, 4, remains(driver)).tick(200.0)
    assert [effect for effect in effects if isinstance(effect, SetOwner)] == [SetOwner(1, SECOND)]
