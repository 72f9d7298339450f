"""Recurrent states in the prefix cache: where they are left, who goes on behind them, when they are named and when they go.
``test_recovery_world`` has the rest."""

from typing import Any

import msgspec

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.controller.rows.lifecycle import preempt
from mmrt.runtime.controller.state.effects import ClearPlan, Effect, SetPageKeys, SetPrefilled
from mmrt.runtime.controller.state.page_cache import PageCache
from mmrt.runtime.stage_table import InstanceId
from mmrt.schema.rows import SNAPSHOT_SLOT, EndCode
from mmrt.tests.runtime.controller.test_machine import Driver, index, sent, text

PAGE = 4


class Chats(Driver):
    """Requests of a model with recurrent states, one after the other. Decode answers with ids from 500 on."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"prefix_cache": True, "placeholder_ids": {}, "num_state_pages": 12, "num_log_pages": 3, **changes})
        self.cache = self.state.pools["state"].cache

    def receive(self, actor: str, message: m.ToController, generation: int = 1) -> "Chats":
        words = [(row, at, *self.counts.get(row, (0, 0))) for row, at in self.machine.ended_by(message)]
        spans = self.machine.wanted_ids(words, all_of_them=True)
        ids = [(span, [500 + number for number in range(span.first, span.last)]) for span in spans]
        self.effects += self.machine.on_message(InstanceId(actor), generation, message, self.now, words, ids)
        return self

    def chunk(self) -> p.PrefillChunk:
        _, plan = self.plan("prefill")
        assert isinstance(plan, p.Prefill)
        (chunk,) = plan.chunks
        return chunk

    def prefill(self) -> list[Effect]:
        effects: list[Effect] = []
        while self.state.plans:
            effects += self.done("prefill")
        return effects

    def drop(self, effects: list[Effect]) -> list[Effect]:
        (drop,) = sent(effects, m.Drop)
        assert isinstance(drop, m.Drop)
        return self.receive("decode", m.Dropped(1, drop.row, drop.row_generation, drop.ticket)).tick()

    def finish(self, key: int, num_tokens: int) -> list[Effect]:
        row = self.state.requests[key].row
        self.counts[row] = (num_tokens, EndCode.LENGTH)
        effects = self.tick()
        effects += self.drop(effects)
        del self.counts[row]
        return effects + self.receive("gateway", m.Delivered(1, key)).tick()


def named(effects: list[Effect], pool: str = "state") -> list[int]:
    """The tokens up to the ends of pages that get keys."""
    keys = [effect for effect in effects if isinstance(effect, SetPageKeys) and effect.pool == pool]
    return [PAGE * (depth + 1) for effect in keys for depth in effect.depths]


def prefilled(effects: list[Effect]) -> list[tuple[int, int]]:
    return [(effect.num_tokens, effect.slot) for effect in effects if isinstance(effect, SetPrefilled)]


def next_turn(spec: m.RequestSpec, num_tokens: int) -> m.RequestSpec:
    """After an answer of so many tokens."""
    return msgspec.structs.replace(spec, prompt_ids=[*spec.prompt_ids, *range(500, 500 + num_tokens), 7, 8])


def test_an_equal_prompt_begins_at_the_end_of_its_last_page() -> None:
    driver = Chats()
    driver.submit(text(11), 1)
    ((border, page),) = driver.chunk().snapshots
    assert border == 8 and not driver.cache.pages()
    effects = driver.prefill()
    assert named(effects) == [8] and index(effects, ClearPlan) < index(effects, SetPageKeys)
    driver.finish(1, 3)
    effects = driver.submit(text(11), 2)
    chunk = driver.chunk()
    (pages, _) = driver.state.requests[2].kv.states
    assert prefilled(effects) == [(8, SNAPSHOT_SLOT)] and not driver.cache.is_idle(page)
    assert (chunk.start, chunk.end, chunk.state_from, chunk.state_to) == (8, 10, page, pages.bases[0]) and not chunk.snapshots
    assert prefilled(driver.prefill()) == [(10, 0)] and driver.cache.is_idle(page), "the row has states of its own now"
    driver.finish(2, 3)
    assert driver.is_empty


def test_the_next_turn_goes_on_behind_the_answer() -> None:
    driver = Chats()
    driver.submit(text(11), 1)
    driver.prefill()
    last = driver.state.requests[1].kv.states[0].bases
    effects = driver.finish(1, 7)
    assert named(effects) == [16], "16 of 18 tokens have been fed"
    assert driver.cache.key_of(last[1]) is not None, "two borders behind that of the prompt: where prefill's state was"
    assert prefilled(driver.submit(next_turn(text(11), 7), 2)) == [(16, SNAPSHOT_SLOT)]
    assert driver.chunk().state_from == last[1]
    driver.prefill()
    driver.finish(2, 1)
    assert driver.is_empty


def test_hits_without_a_state_at_their_end_are_none() -> None:
    driver = Chats()
    driver.submit(text(11), 1)
    driver.prefill()
    driver.finish(1, 7)
    other = m.RequestSpec(m.Generation("r"), [*range(1, 8), 77, 78, 79], [], 4)
    assert prefilled(driver.submit(other, 2)) == [], "a KV page is known, and no state before that at 8"
    assert driver.chunk().start == 0


def test_choices_of_one_prompt_wait_for_its_snapshot() -> None:
    driver = Chats(prefill_budget=4)
    for key in (1, 2):
        driver.submit(text(11), key)
    starts = []
    while driver.state.plans:
        starts += [(chunk.row, chunk.start) for chunk in driver.plan("prefill")[1].chunks]
        driver.done("prefill")
    assert starts == [(0, 0), (0, 4), (0, 8), (1, 8)]


def test_a_preempted_row_goes_on_behind_its_last_state() -> None:
    driver = Chats()
    driver.submit(text(11, 20), 1)
    driver.prefill()
    request = driver.state.requests[1]
    driver.counts[request.row] = (5, 0)
    driver.tick()
    driver.counts[request.row] = (11, 0)
    preempt(driver.state, request)
    effects = driver.drop(driver.tick())
    assert named(effects) == [20] and named(effects, "kv")[-1] == 20, "by the count that decode has left"
    effects += driver.tick()
    assert prefilled(effects) == [(20, SNAPSHOT_SLOT)] and driver.chunk().end == 21
    driver.prefill()
    driver.finish(1, 20)
    assert driver.is_empty


def test_a_row_preempted_in_preparation_goes_on_behind_what_was_prefilled() -> None:
    driver = Chats(prefill_budget=4)
    driver.submit(text(19), 1)
    driver.done("prefill")
    preempt(driver.state, driver.state.requests[1])
    effects = driver.done("prefill") + driver.tick()
    assert prefilled(effects) == [(4, SNAPSHOT_SLOT)] and driver.chunk().start == 4
    driver.prefill()
    driver.finish(1, 4)
    assert driver.is_empty


def test_a_failed_plan_leaves_no_snapshot() -> None:
    driver = Chats()
    driver.submit(text(11), 1)
    effects = driver.done("prefill", m.ItemError(500, "no"))
    assert not named(effects)
    driver.receive("gateway", m.Delivered(1, 1)).tick()
    assert driver.is_empty and not driver.cache.pages()


def test_a_pool_too_small_for_a_third_state_of_a_member_has_no_hits() -> None:
    driver = Chats(num_state_pages=2, num_log_pages=1)
    for key in (1, 2):
        effects = driver.submit(text(11), key)
        driver.prefill()
        driver.finish(key, 7)
        assert not prefilled(effects)
    assert driver.is_empty


def test_a_state_goes_with_the_kv_pages_under_it() -> None:
    kv, states = PageCache(4), PageCache(4)
    kv.follower = states
    keys = [bytes([number]) * 16 for number in range(4)]
    for cache in (kv, states):
        cache.add(range(4), keys)
    kv.rest([0]), kv.rest([1])
    for page in (2, 3, 1, 0):
        states.rest([page])
    assert kv.evict(1) == [0] and states.evict(1) == [0] and states.evict(1) == [2]
    assert kv.evict(1) == [1] and states.evict(2) == [1, 3]
