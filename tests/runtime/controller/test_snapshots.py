"""Recurrent states in the prefix cache: where they are left, who goes on behind them, when they are named and when they go.
``test_recovery_world`` has the rest."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.copy_plans import Load, LoadChunk
from mmrt.runtime.controller.caches import prefix_cache
from mmrt.runtime.controller.rows.expansion import expand, expanded_place
from mmrt.runtime.controller.rows.lifecycle import preempt
from mmrt.runtime.controller.state.effects import ClearPlan, Effect, SetPageKeys, SetPrefilled
from mmrt.runtime.controller.state.page_cache import PageCache
from mmrt.runtime.controller.state.request import Request
from mmrt.runtime.controller.state.state_pages import StatePages
from mmrt.runtime.stage_table import InstanceId
from mmrt.schema.media import ItemShape, MediaSpan, SegmentShape
from mmrt.schema.rows import SNAPSHOT_SLOT, EndCode
from mmrt.tests.runtime.controller.test_machine import IMAGE, Driver, index, limits, sent, text
from mmrt.tests.settings import examples

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


def borders_of(driver: Chats, num_tokens: int, borders: m.Borders) -> list[int]:
    """Where a prompt is to leave snapshots."""
    driver.submit(text(num_tokens, borders=borders), 1)
    return driver.state.requests[1].caches.borders[0]


@pytest.mark.parametrize(
    ("num_tokens", "borders", "expected"),
    [
        (50, (0, 0, 0), [48]),
        (50, (21, 47, 0), [20, 44]),
        (50, (7, 47, 0), [44]),
        (50, (21, 47, 27), [20, 44]),
        (50, (21, 47, 28), [20, 28, 44]),
        (50, (21, 39, 0), [20, 48]),
        (50, (50, 99, 0), [48]),
        (5, (0, 0, 0), []),
        (7, (4, 5, 0), [4]),
    ],
)
def test_prompts_leave_states_where_messages_end(num_tokens: int, borders: m.Borders, expected: list[int]) -> None:
    """At ends of pages; the first ones only where they save 8 tokens at least, and that of the prompt where no message ends near."""
    assert borders_of(Chats(snapshot_tokens=8), num_tokens, borders) == expected


def test_borders_lie_behind_media_that_have_become_longer() -> None:
    shapes = [ItemShape("image", (1, 1, 1), n, [SegmentShape("image", (1, 1, 1), 4, 4, n)]) for n in (5, 1)]
    spec = m.RequestSpec(m.Generation("r"), [7, IMAGE, 8, 9, IMAGE, 6], [m.MediaItem("image", 1)] * 2, 4)
    prompt, starts = expand(spec, shapes, limits())
    spans = [MediaSpan(start, shape) for start, shape in zip(starts, shapes, strict=True)]
    found = [expanded_place(spec, place, spans, limits()) for place in range(len(spec.prompt_ids) + 1)]
    assert found == [0, 1, 6, 7, 8, 9, 10] and found[-1] == len(prompt)


def test_a_border_is_learnt_where_other_prompts_parted() -> None:
    """The second prompt leaves a state at the end of what it has in common with the first, and the third goes on there."""
    driver = Chats(learnt_tokens=12, num_state_pages=5, num_log_pages=1)
    starts = []
    for key in range(1, 5):
        common = list(range(1, 19))
        driver.submit(m.RequestSpec(m.Generation("r"), [*common, *([30 + key] * 12)], [], 3), key)
        starts.append(driver.chunk().start)
        driver.prefill()
        driver.finish(key, 3)
    assert starts == [0, 0, 16, 16], "kept though each prompt leaves newer ones, and there is room for few"
    assert driver.is_empty


def test_earlier_states_of_a_chat_go_before_others() -> None:
    """All but the last two, and that of the first message."""
    driver = Chats(num_state_pages=2 + 4, num_log_pages=1, snapshot_tokens=8)
    spec = text(20, 7, borders=(9, 18, 0))
    for key in range(1, 4):
        driver.submit(spec, key)
        driver.prefill()
        driver.finish(key, 7)
        spec = msgspec.structs.replace(next_turn(spec, 7), borders=(9, len(spec.prompt_ids) + 8, 0))
    driver.submit(spec, 9)
    names = driver.state.requests[9].caches.keys[0].up_to(len(spec.prompt_ids))
    found = [PAGE * (number + 1) for number, name in enumerate(names) if driver.cache.find(name) is not None]
    assert found == [8, 32, 36, 44] and driver.chunk().start == 44, "24 made room for the row"


def test_a_state_at_the_first_message_stays_whoever_has_left_it() -> None:
    """Such as a request before a restart of the controller, or one whose whole prompt it was."""
    driver = Chats(num_state_pages=2 + 4, num_log_pages=1, snapshot_tokens=8)
    driver.submit(text(10, 1), 8)
    driver.prefill()
    driver.finish(8, 1)
    spec = text(20, 7, borders=(9, 18, 0))
    for key in range(1, 4):
        driver.submit(spec, key)
        assert driver.chunk().start >= 8
        driver.prefill()
        driver.finish(key, 7)
        spec = msgspec.structs.replace(next_turn(spec, 7), borders=(9, len(spec.prompt_ids) + 8, 0))
    driver.submit(spec, 9)
    assert driver.cache.find(driver.state.requests[9].caches.keys[0].up_to(8)[1]) is not None


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


@pytest.mark.parametrize(
    ("first", "turns", "user", "answer", "keeps_thoughts", "expected"),
    [
        pytest.param(400, 12, 80, 300, True, 1474, id="chat"),
        pytest.param(400, 12, 80, 900, False, 4776, id="chat without its thoughts"),
        pytest.param(6000, 30, 800, 150, True, 30361, id="agent", marks=pytest.mark.slow),
    ],
)
def test_a_conversation_costs_what_is_new(first: int, turns: int, user: int, answer: int, keeps_thoughts: bool, expected: int) -> None:
    """Tokens to be prefilled, with room for three states of a conversation beside the row's: as simulated for the design."""
    driver = Chats(kv_page_tokens=16, num_kv_pages=2304, max_context=40000, num_state_pages=6, num_log_pages=1, max_spec_bytes=1 << 20)
    dice, tail = random.Random(8), [1, 2, 3, 4, 5]
    history, total = [dice.randrange(100) for _ in range(first)], 0
    for key in range(1, turns + 1):
        history += [dice.randrange(100) for _ in range(user)]
        spec = m.RequestSpec(m.Generation("r"), [*history, *tail], [], answer, borders=(first, len(history), 0))
        driver.submit(spec, key)
        while driver.state.plans:
            chunk = driver.chunk()
            total += chunk.end - chunk.start
            driver.done("prefill")
        for committed in range(16, answer, 16):
            driver.counts[driver.state.requests[key].row] = (committed, 0)
            driver.tick(0.1)
        driver.finish(key, answer)
        history += [*tail, *range(500, 500 + answer)] if keeps_thoughts else [dice.randrange(100) for _ in range(answer // 3)]
    assert driver.is_empty and abs(total - expected) <= 16
    assert len(driver.cache.pages()) <= 6


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


def saved(driver: Chats, num_tokens: int, states: Sequence[int]) -> None:
    """Files of an earlier run have the pages of a prompt, and states at these places."""
    key = 90 + num_tokens
    driver.submit(text(num_tokens), key)
    names = driver.state.requests[key].caches.keys[0].up_to(num_tokens)
    driver.prefill()
    driver.finish(key, 1)
    for pool in ("kv", "state"):
        driver.state.pools[pool].forget_idle()
    found = {"kv": {name: 10 + at for at, name in enumerate(names)}, "state": {names[at // PAGE - 1]: at for at in states}}
    driver.machine.set_saved(found)


def loading(driver: Chats) -> LoadChunk:
    _, plan = driver.plan("prefill")
    assert isinstance(plan, Load)
    (chunk,) = plan.chunks
    return chunk


def test_a_prompt_is_loaded_up_to_the_last_state_that_the_file_has() -> None:
    driver = Chats()
    saved(driver, 31, (8, 20))
    driver.submit(text(31), 1)
    chunk, kv = loading(driver), driver.state.requests[1].kv
    assert (chunk.start, chunk.end, chunk.slots) == (0, 20, [10, 11, 12, 13, 14]) and chunk.state is not None
    (first, second) = kv.states[0].bases
    assert (chunk.state.slot, chunk.state.target) == (20, second) and chunk.state.snapshot not in (-1, first, second)
    effects = driver.done("prefill", m.Loaded([20], [True], 0, [True]))
    assert prefilled(effects) == [(20, 1)] and named(effects, "kv") == [4, 8, 12, 16, 20]
    assert named(effects) == [20] and index(effects, ClearPlan) < index(effects, SetPageKeys), "the next one need not load it"
    following = driver.chunk()
    assert (following.start, following.state_from, following.state_to) == (20, second, first)
    assert driver.state.totals.cached_tokens == 20
    driver.prefill()
    driver.finish(1, 1)
    driver.submit(text(31), 2)
    assert driver.state.requests[2].kv.slots[0] == SNAPSHOT_SLOT
    driver.prefill()
    driver.finish(2, 1)
    assert driver.is_empty


def test_pages_wait_for_their_state_and_a_lost_one_gives_way_to_one_before_it() -> None:
    driver = Chats()
    saved(driver, 31, (8, 20))
    driver.submit(text(31), 1)
    assert prefilled(driver.done("prefill", m.Loaded([12], [True], 0, [False]))) == [], "time was short"
    chunk = loading(driver)
    assert (chunk.start, chunk.end) == (12, 20) and chunk.state is not None and chunk.state.slot == 20
    effects = driver.done("prefill", m.Loaded([20], [True], 0, [False]))
    assert prefilled(effects) == named(effects) == [], "the state was damaged"
    chunk = loading(driver)
    assert (chunk.start, chunk.end) == (4, 8) and chunk.state is not None and chunk.state.slot == 8
    assert prefilled(driver.done("prefill", m.Loaded([8], [True], 0, [True]))) == [(8, 1)]
    assert driver.chunk().start == 8 and driver.state.totals.cached_tokens == 8
    driver.prefill()
    driver.finish(1, 1)
    assert driver.is_empty


@pytest.mark.parametrize("states", [(), (8,)])
def test_what_cannot_be_loaded_is_computed(states: Sequence[int]) -> None:
    driver = Chats()
    saved(driver, 31, states)
    driver.submit(text(31), 1)
    if states:
        driver.done("prefill", m.Loaded([4], [False], 0, [False]))  # the file lacks the second page
    assert (driver.chunk().start, driver.chunk().state_from) == (0, -1)
    driver.prefill()
    driver.finish(1, 1)
    assert driver.is_empty


@settings(max_examples=examples(200))
@given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.integers(1, 8), st.lists(st.integers(0, 8), max_size=60), st.randoms())
def test_pieces_reach_the_last_state_that_can_be_loaded(
    num_pages: int, states: set[int], at_once: int, loaded: list[int], dice: random.Random
) -> None:
    """Each plan loads pages behind those that were loaded, at most so many, or what is left; some states turn out to be lost."""
    names = [bytes([number]) for number in range(num_pages)]
    known = {number for number in states if number < num_pages}
    request = Request(1, 1, 1, text(9))
    request.kv.take_states(0, StatePages((5, 6), 7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "PAGES_AT_ONCE", at_once)
        present: set[int] = set()
        for _ in range(2 * num_pages + len(loaded)):
            found = prefix_cache._up_to_state(request, 0, names, lambda key: key[0] if key[0] in known else None)
            begin, end, state = found
            if begin >= end:
                break
            assert end - begin <= at_once and {*range(begin)} <= present, "pages are left out that are not there"
            count = min(loaded.pop(), end - begin) if loaded else end - begin
            present |= {*range(begin, begin + count)}
            if state is not None and count == end - begin:
                assert (state.key, state.slot, state.target) == (names[end - 1], end - 1, 6) and end - 1 == max(known)
                if dice.random() < 0.5:
                    assert {*range(end)} <= present
                    return
                known.discard(end - 1)
            request.caches.load_before_state(0, begin + count)
        assert not known
