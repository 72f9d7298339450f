"""Pages of recurrent states: who gets them, what chunks do with them, and when they are free. ``test_recovery_world`` has the rest."""

import msgspec
import pytest

from mmrt.actors.controller.counts import stats_of
from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.copy_plans import Transfer, TransferChunk
from mmrt.runtime.controller.rows.lifecycle import preempt
from mmrt.runtime.controller.scheduling.batches import PrefillBatch
from mmrt.runtime.controller.scheduling.legality import check
from mmrt.runtime.controller.scheduling.types import ChunkChoice, MemberView, RequestView, StepLimits, StepPlan
from mmrt.runtime.controller.state.effects import (
    ClearPages,
    ClearSource,
    Effect,
    SetPhase,
    SetPrefilled,
    SetSourceStatePages,
    SetStatePages,
    WriteState,
)
from mmrt.schema.rows import EndCode, Phase
from mmrt.shm.controller_stats import StatsSnapshot
from mmrt.tests.runtime.controller.test_batches import text as seen
from mmrt.tests.runtime.controller.test_batches import view
from mmrt.tests.runtime.controller.test_machine import IMAGE, KEY, SHAPE, Driver, image, index, sent, text
from mmrt.tests.runtime.controller.test_migration import on_devices

FEW = {"placeholder_ids": {}, "num_state_pages": 4, "num_log_pages": 2}


def used(driver: Driver) -> tuple[int, int]:
    return driver.state.pools["state"].num_used, driver.state.pools["log"].num_used


def given(effects: list[Effect]) -> list[tuple[int, int]]:
    """Rows and members that get states."""
    return [(effect.row, effect.member) for effect in effects if isinstance(effect, SetStatePages) and effect.log >= 0]


def chunks(driver: Driver) -> list[p.PrefillChunk]:
    _, plan = driver.plan("prefill")
    assert isinstance(plan, p.Prefill)
    return plan.chunks


def finish(driver: Driver, key: int = KEY) -> None:
    row = driver.state.requests[key].row
    driver.counts[row] = (4, EndCode.LENGTH)
    (drop,) = sent(driver.tick(), m.Drop)
    assert isinstance(drop, m.Drop)
    driver.receive("decode", m.Dropped(1, drop.row, drop.row_generation, drop.ticket)).tick()
    del driver.counts[row]


def test_chunks_take_turns_with_two_states() -> None:
    """A chunk reads the state that the one before it has written, and writes the other; the last one writes the log as well."""
    driver = Driver(**FEW, prefill_budget=5)
    driver.submit(text(12))
    kv = driver.state.requests[KEY].kv
    (first, second), log, _ = kv.states[0]
    seen: list[tuple[int, ...]] = []
    words: list[tuple[int, int]] = []
    while driver.state.requests[KEY].phase == Phase.PREPARE:
        (chunk,) = chunks(driver)
        seen.append((chunk.start, chunk.end, chunk.state_from, chunk.state_to, chunk.log))
        words += [(effect.num_tokens, effect.slot) for effect in driver.done("prefill") if isinstance(effect, SetPrefilled)]
    assert seen == [(0, 4, -1, second, -1), (4, 8, second, first, -1), (8, 11, first, second, log)]
    assert words == [(4, 1), (8, 0), (11, 1)] and used(driver) == (2, 1)
    finish(driver)
    assert used(driver) == (0, 0)


def test_a_row_waits_for_states_and_keeps_its_place() -> None:
    """Each member of a pair has states of its own. A later request that needs fewer does not pass."""
    driver = Driver(**FEW, num_rows=8)
    assert given(driver.submit(text(companion_ids=[1, 2]))) == [(0, 0), (0, 1)] and used(driver) == (4, 2)
    driver.submit(text(companion_ids=[1]), KEY + 1)
    driver.submit(text(), KEY + 2)
    assert list(driver.state.waiting) == [KEY + 1, KEY + 2]
    assert stats_of(driver.state, StatsSnapshot()).waiting_for == ["states"]
    driver.receive("gateway", m.Cancel(1, KEY))
    driver.done("prefill")
    assert list(driver.state.waiting) == [KEY + 2] and used(driver) == (4, 2)


def test_states_are_held_until_plan_and_decode_are_done() -> None:
    driver = Driver(**FEW)
    driver.submit(text())
    driver.receive("gateway", m.Cancel(1, KEY)).tick()
    assert used(driver) == (2, 1), "prefill may write them"
    driver.done("prefill")
    assert driver.is_empty
    driver.submit(text(), KEY + 1)
    driver.done("prefill")
    (drop,) = sent(driver.receive("gateway", m.Cancel(1, KEY + 1)).tick(), m.Drop)
    assert isinstance(drop, m.Drop) and used(driver) == (2, 1), "decode may write them"
    driver.receive("decode", m.Dropped(1, drop.row, drop.row_generation, drop.ticket)).tick()
    assert driver.is_empty


def test_the_oldest_waits_for_states_alone_and_gets_those_of_younger_ones() -> None:
    driver = Driver(**{**FEW, "placeholder_ids": {"image": IMAGE}}, num_rows=8, patience_s=0.5)
    driver.submit(image(), 1)
    driver.submit(text(companion_ids=[1, 2]), 2)  # takes all states while the image is analysed
    driver.receive("gateway", m.Filled(1, 1)).tick()
    driver.done("video", m.Analysed(SHAPE))
    old, young = driver.state.requests[1], driver.state.requests[2]
    assert not old.has_kv and stats_of(driver.state, StatsSnapshot()).waiting_for == ["states"]
    driver.tick(0.1)
    driver.tick(0.6)
    driver.done("prefill")
    driver.tick()
    assert old.has_kv and not young.has_kv and old.kv.states[0].log >= 0 and young.kv.is_empty


def test_a_row_without_an_answer_has_no_log() -> None:
    """Nobody decodes it. So its last chunk writes none."""
    driver = Driver(**FEW)
    effects = driver.submit(text(9, 0).asking(pooling="last"))
    assert [(one.states, one.log) for one in effects if isinstance(one, SetStatePages)] == [([0, 1], -1)] and used(driver) == (2, 0)
    (chunk,) = chunks(driver)
    assert (chunk.end, chunk.state_to, chunk.log) == (9, 1, -1)
    driver.submit(text(companion_ids=[1]), KEY + 1)
    assert list(driver.state.waiting) == [KEY + 1], "there are logs for a pair, and no states"
    assert stats_of(driver.state, StatsSnapshot()).waiting_for == ["states"]
    driver.done("prefill")
    driver.receive("gateway", m.Delivered(1, KEY)).tick()
    assert used(driver) == (4, 2) and not driver.state.waiting


def test_a_preempted_row_begins_anew() -> None:
    driver = Driver(**FEW)
    driver.submit(text())
    driver.done("prefill")
    request = driver.state.requests[KEY]
    driver.counts[request.row] = (2, 0)
    driver.tick()
    preempt(driver.state, request)
    (drop,) = sent(driver.tick(), m.Drop)
    assert isinstance(drop, m.Drop) and used(driver) == (2, 1)
    driver.receive("decode", m.Dropped(1, drop.row, drop.row_generation, drop.ticket))
    effects = driver.tick() + driver.tick()
    assert [effect.row for effect in effects if isinstance(effect, ClearPages)] == [request.row]
    assert given(effects) == [(request.row, 0)] and used(driver) == (2, 1)
    (chunk,) = chunks(driver)
    assert (chunk.start, chunk.end, chunk.state_from) == (0, 7, -1)


def test_states_are_copied_with_the_last_tokens_and_then_given_back() -> None:
    """A row has states on both devices, all or none. The copies keep their slot: the count tells decode which one is valid."""
    driver = on_devices("EP@0+D@1", **FEW, prefill_budget=4)
    effects = driver.submit(text(7, companion_ids=[1, 2]))
    assert given(effects) == [(0, 0), (0, 1)] and [effect.member for effect in effects if isinstance(effect, SetSourceStatePages)] == [
        0,
        1,
    ]
    driver.submit(text(5), KEY + 1)
    assert held_states(driver) == [(4, 2), (4, 2)] and driver.state.requests[KEY + 1].row < 0, "nobody has states of one device alone"
    request = driver.state.requests[KEY]
    theirs, ours = request.kv.source_states, request.kv.states
    slots, seen = [0, 0], []
    while request.phase == Phase.PREPARE:
        for inflight in list(driver.state.plans.values()):
            for chunk in inflight.plan.chunks:
                if isinstance(chunk, TransferChunk):
                    seen.append((chunk.member, chunk.start, chunk.end, chunk.state, chunk.log))
                else:
                    assert isinstance(chunk, p.PrefillChunk) and chunk.state_to in theirs[chunk.member].bases
                    slots[chunk.member] = theirs[chunk.member].bases.index(chunk.state_to)
            effects = driver.done(inflight.actor, m.Transferred(8) if isinstance(inflight.plan, Transfer) else None)
    last = [((theirs[at].bases[slot], ours[at].bases[slot]), (theirs[at].log, ours[at].log)) for at, slot in enumerate(slots)]
    assert sorted(seen) == [(0, 0, 4, None, None), (0, 4, 6, *last[0]), (1, 0, 1, *last[1])]
    assert index(effects, WriteState) < index(effects, ClearSource) < index(effects, SetPhase)
    assert held_states(driver) == [(0, 0), (4, 2)] and driver.state.requests[KEY + 1].row < 0
    finish(driver)
    assert held_states(driver) == [(2, 1), (2, 1)]


def held_states(driver: Driver) -> list[tuple[int, int]]:
    """Pages of states and logs that are not free, by device."""
    return [(driver.state.pools[f"state{end}"].num_used, driver.state.pools[f"log{end}"].num_used) for end in ("", ".1")]


@pytest.mark.parametrize("is_prefilled", [False, True])
def test_states_on_both_devices_are_free_after_a_preemption(is_prefilled: bool) -> None:
    driver = on_devices("EP@0+D@1", **FEW)
    driver.submit(text(7))
    if is_prefilled:
        driver.done("prefill")
    preempt(driver.state, driver.state.requests[KEY])
    driver.receive("gateway", m.Cancel(1, KEY)).tick()
    assert held_states(driver) == [(2, 1), (2, 1)], "a plan may still touch them"
    if not is_prefilled:
        driver.done("prefill")
    assert held_states(driver) == [(2, 1), (2, 1)], "decode copies behind prefill"
    driver.done("decode", m.Transferred(8))
    assert held_states(driver) == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("budget", "ready", "ends"),
    [(16, (40,), [16]), (31, (40,), [16]), (64, (40,), [40]), (33, (40, 20), [32]), (40, (16, 30), [16, 16]), (7, (40,), [16])],
)
def test_chunks_end_on_the_grid(budget: int, ready: tuple[int, ...], ends: list[int]) -> None:
    assert [chunk.end for chunk in PrefillBatch(view(grid=16), budget).fill([seen(1, *ready)]).chunks] == ends


def test_a_request_without_room_for_its_next_border_is_not_passed() -> None:
    batch = PrefillBatch(view(grid=16), 40).fill([seen(1, 30), seen(2, 50), seen(3, 5)])
    assert [chunk.key for chunk in batch.chunks] == [1] and batch.is_closed
    assert [chunk.end for chunk in PrefillBatch(view(grid=16), 100).fill([seen(1, 40), seen(2, 90)], 20).chunks] == [32, 32]


def test_a_policy_does_not_leave_the_grid() -> None:
    request = RequestView(1, 1, has_kv=True, members=(MemberView(16, 40, 43),))
    around = msgspec.structs.replace(view(grid=16), requests=(request,))
    for end, is_legal in ((32, True), (40, False), (31, False)):
        legal, _ = check(around, StepLimits(64, 64), StepPlan(prefill=(ChunkChoice(1, 0, 16, end),)))
        assert bool(legal) == is_legal
    whole = RequestView(1, 1, has_kv=True, members=(MemberView(16, 43, 43),))
    legal, _ = check(
        msgspec.structs.replace(around, requests=(whole,)), StepLimits(64, 64), StepPlan(prefill=(ChunkChoice(1, 0, 16, 43),))
    )
    assert legal
