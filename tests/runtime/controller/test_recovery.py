"""What a new controller makes of what the last one left: single cases; test_recovery_world.py has all interleavings."""

from collections.abc import Sequence

import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus.wire import encode
from mmrt.runtime.controller.machine import Controller
from mmrt.runtime.controller.recovery import PlanSnapshot, RowSnapshot, RunSnapshot, recover
from mmrt.runtime.controller.rows.progress import Progress
from mmrt.runtime.controller.state.effects import AppendPages, ClearPages, Send
from mmrt.runtime.controller.state.records import CacheEra, JournalState, Rehomed, Submitted
from mmrt.runtime.controller.state.row_record import encode_record
from mmrt.runtime.stage_table import InstanceId
from mmrt.schema.rows import Phase
from mmrt.tests.runtime.controller.test_machine import Driver, encoding_beside_decode, text


def remains(driver: Driver) -> RunSnapshot:
    """What lies in shared memory and in the journal when the driver's controller is killed between two ticks."""
    state = driver.state
    rows = [
        RowSnapshot(
            r.row, r.row_generation, r.phase, r.kv.tables, (r.kv.prefilled[0], r.kv.prefilled[1]), r.answer.committed,
            r.answer.end_code, encode_record(r.record), r.answer.ids, r.ownership.decode, r.kv.source_tables,
            windows=r.kv.windows.tables, source_windows=r.kv.source_windows.tables,
        )
        for r in state.rows
        if r is not None
    ]  # fmt: skip
    live = {r.key: Submitted(r.key, r.gateway_generation, r.arrival, r.spec) for r in state.requests.values()}
    plans = [PlanSnapshot(plan.slot, plan.plan_id, plan.actor, encode(plan.plan)) for plan in state.plans.values()]
    generations = {name: list(pool.generations) for name, pool in state.pools.items()}
    keys = {name: {page: pool.cache.key_of(page) or b"" for page in pool.cache.pages()} for name, pool in state.pools.items()}
    journal = JournalState(live, {}, [], state.next_arrival, CacheEra(state.era, dict(state.codes), state.kept_era))
    return RunSnapshot(journal, rows, state.row_generations, plans, generations, state.actors, keys, state.secret, state.kept_era)


def actors_asked(machine: Controller, now: float, counts: Sequence[Progress]) -> set[str]:
    """Who is sent a plan by one tick."""
    effects = machine.tick(now, counts)
    return {effect.actor for effect in effects if isinstance(effect, Send) and isinstance(effect.message, m.Run)}


def test_the_next_controller_knows_who_took_a_request_over_and_waits_for_the_others() -> None:
    driver = Driver()
    driver.submit(text(6, 3))
    journal = JournalState()
    for record in (Submitted(1, 1, 0, text(6, 3)), Submitted(2, 1, 1, text(6, 3)), Rehomed(1, 2), Rehomed(9, 2)):
        journal.apply(record)
    snapshot = remains(Driver())._replace(journal=journal, actors={InstanceId("gateway"): 2})
    machine = recover(driver.state.limits, 4, snapshot)
    assert {key: request.gateway_generation for key, request in machine.state.requests.items()} == {1: 2, 2: 1}
    machine.on_message(InstanceId("gateway"), 2, m.Hello("gateway", 2, 1, True), 200.0)
    assert machine.state.requests.keys() == {1}


@pytest.mark.parametrize("committed", [0, 1, 2, 3])
def test_a_grant_for_all_tokens_is_whole(committed: int) -> None:
    """The last token is never fed and has no room: a row that has all of its tokens, and nothing that says so, needs no more pages."""
    driver = Driver()
    driver.submit(text(6, 3))
    snapshot = remains(driver)
    (row,) = snapshot.rows
    assert row.phase == Phase.PREPARE and [len(table) for table in row.block_tables] == [2, 0]
    machine = recover(driver.state.limits, 4, snapshot._replace(rows=[row._replace(committed=committed)]))
    effects = machine.tick(200.0)
    assert not [effect for effect in effects if isinstance(effect, ClearPages | AppendPages)]
    assert machine.state.pools["kv"].num_used == 2, "a plan is writing them"
    machine.state.pools["kv"].check()


def test_a_grant_that_was_cut_short_is_given_back() -> None:
    driver = Driver()
    driver.submit(text(6, 3))
    snapshot = remains(driver)
    (row,) = snapshot.rows
    cut = row._replace(block_tables=(row.block_tables[0][:1], []))
    machine = recover(driver.state.limits, 4, snapshot._replace(rows=[cut], plans=[]))
    assert any(isinstance(effect, ClearPages) for effect in machine.tick(200.0))


def test_what_the_last_controller_had_begun_counts_as_under_way() -> None:
    """Beside decode either the encoder or prefill works, whoever sent them to it; and for no longer than usual if it hangs."""
    driver = encoding_beside_decode()
    assert [plan.actor for plan in driver.state.plans.values()] == ["encoder"]
    machine = recover(driver.state.limits, 4, remains(driver))
    progress = [(row, generation, 0, 0) for row, generation in machine.watched()]
    assert actors_asked(machine, 200.0, progress) == {"encoder"}
    assert "prefill" in actors_asked(machine, 206.0, progress)
