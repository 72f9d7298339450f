"""Hits of the prefix cache, message by message; ``test_recovery_world`` has all interleavings."""

from typing import Any

import msgspec
import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.copy_plans import Load, LoadChunk
from mmrt.runtime.bus.sampling import Sampling
from mmrt.runtime.controller.caches.prefix_cache import PagesToCome, find_hits
from mmrt.runtime.controller.recovery import recover
from mmrt.runtime.controller.rows.lifecycle import preempt
from mmrt.runtime.controller.scheduling.page_keys import content_digest
from mmrt.runtime.controller.state.effects import AppendPages, Effect, SetPageKeys, SetPrefilled, WriteState
from mmrt.runtime.controller.state.row_record import decode_record, encode_record
from mmrt.runtime.stage_table import InstanceId
from mmrt.schema.media import ItemShape, SegmentShape
from mmrt.schema.rows import EndCode
from mmrt.tests.runtime.controller.kv_contents import positions
from mmrt.tests.runtime.controller.test_machine import IMAGE, SHAPE, Driver, image, index, sent, text
from mmrt.tests.runtime.controller.test_recovery import remains


def cached(**changes: Any) -> Driver:
    return Driver(prefix_cache=True, positions=positions, embedding_cache=False, **changes)


class Anything(dict[bytes, int]):
    """A file that seems to have every page."""

    def __init__(self) -> None:
        super().__init__({b"": 0})

    def get(self, key: bytes, default: object = None) -> int:  # type: ignore[override]
        return 7


def saving(**changes: Any) -> Driver:
    driver = cached(**changes)
    driver.machine.set_saved({"kv": Anything()})
    return driver


def known_image(content: bytes = b"one", **more: Any) -> m.RequestSpec:
    (item,) = image().items
    return msgspec.structs.replace(image(**more), items=[msgspec.structs.replace(item, content=content)])


def finish(driver: Driver, key: int, num_tokens: int = 4) -> list[Effect]:
    """Let a request's plans be done, decode so many tokens, and the gateway deliver it."""
    effects: list[Effect] = []
    while driver.state.plans:
        actor = next(iter(driver.state.plans.values())).actor
        is_analysis = isinstance(driver.plan(actor)[1], p.Analyse)
        plan = driver.plan(actor)[1]
        nothing = m.Loaded([chunk.start for chunk in plan.chunks], [False] * len(plan.chunks)) if isinstance(plan, Load) else None
        effects += driver.done(actor, m.Analysed(SHAPE) if is_analysis else nothing)
    row = driver.state.requests[key].row
    driver.counts[row] = (num_tokens, EndCode.LENGTH)
    effects += driver.tick()
    (drop,) = sent(effects, m.Drop)
    assert isinstance(drop, m.Drop)
    driver.receive("decode", m.Dropped(1, row, drop.row_generation, drop.ticket))
    del driver.counts[row]
    effects += driver.receive("gateway", m.Delivered(1, key)).tick()
    return effects


def ask(driver: Driver, spec: m.RequestSpec, key: int) -> list[Effect]:
    effects = driver.submit(spec, key)
    if spec.items:
        driver.receive("gateway", m.Filled(1, key))
        driver.tick()
        effects = driver.done("video", m.Analysed(SHAPE))
    return effects


def hits(effects: list[Effect]) -> list[int]:
    return [effect.num_tokens for effect in effects if isinstance(effect, SetPrefilled)]


def test_the_next_turn_of_a_chat() -> None:
    driver = cached()
    effects = ask(driver, text(10, 6), 1) + finish(driver, 1, 6)
    named = [effect for effect in effects if isinstance(effect, SetPageKeys)]
    assert [len(effect.keys) for effect in named] == [2, 1], "two pages of the prompt, and one that decode filled: 15 tokens were fed"
    assert driver.is_empty and len(driver.state.pools["kv"].cache) == 3
    following = m.RequestSpec(m.Generation("r"), [*range(1, 11), *range(500, 506), 7, 8], [], 4)
    effects = ask(driver, following, 2)
    assert index(effects, AppendPages) < index(effects, SetPrefilled) < index(effects, m.Run)
    shared, own = [effect for effect in effects if isinstance(effect, AppendPages)]
    assert shared.pages == [page for effect in named for page in effect.run.pages] and hits(effects) == [12]
    assert [type(e) for e in effects if isinstance(e, AppendPages | SetPrefilled)] == [AppendPages, SetPrefilled, AppendPages]
    assert sent(effects, m.Prepared) == [m.Prepared(3, 2, 18, 12)]
    assert (
        driver.plan("prefill")[1] == p.Prefill([p.PrefillChunk(1, 1, 0, 12, 17, [])]) or driver.plan("prefill")[1].chunks[0].start == 12
    )
    finish(driver, 2)
    assert driver.is_empty


@pytest.mark.parametrize("is_recorded", [True, False])
def test_cached_tokens_are_those_of_the_first_grant_after_a_recovery(is_recorded: bool) -> None:
    """The controller is killed after a first grant that found nothing, or within it; later the row is preempted, and its second grant
    finds the prompt and generated tokens."""
    driver = cached()
    effects = driver.submit(text(5, 30), 1)
    record = decode_record([effect.state for effect in effects if isinstance(effect, WriteState)][-1])
    assert record.num_cached_tokens == 0
    if not is_recorded:
        record.num_cached_tokens = None
    snapshot = remains(driver)
    (row,) = snapshot.rows
    driver.machine = recover(driver.state.limits, 4, snapshot._replace(rows=[row._replace(state=encode_record(record))]))
    driver.state = driver.machine.state
    driver.tick()
    driver.done("prefill")
    request = driver.state.requests[1]
    driver.counts[request.row] = (20, 0)
    driver.tick(1.0)
    preempt(driver.state, request)
    driver.tick(1.0)
    driver.receive("decode", m.Dropped(1, request.row, request.row_generation, request.ownership.drop_ticket))
    driver.tick(1.0)
    assert request.kv.prefilled[0] > 5 and request.record.num_cached_tokens == 0


def test_a_prompt_that_is_cached_whole_does_not_wait_for_prefill() -> None:
    """The gateway waits for the number of its cached tokens."""
    driver = saving(num_rows=4)
    ask(driver, text(9, 4), 1)
    driver.done("prefill", m.Loaded([0], [False]))
    finish(driver, 1)
    for key in range(2, 2 + driver.state.limits.depth):
        ask(driver, m.RequestSpec(m.Generation("r"), [100 * key, *range(9)], [], 4), key)
    effects = ask(driver, text(9, 4), 9)
    assert hits(effects) == [8] and sent(effects, m.Prepared) == [m.Prepared(3, 9, 9, 8)]


def test_a_prompt_of_which_files_have_nothing_is_computed_at_once() -> None:
    driver = cached()
    driver.machine.set_saved({"kv": {bytes(16): 0}})
    effects = ask(driver, text(22), 1)
    assert isinstance(driver.plan("prefill")[1], p.Prefill) and sent(effects, m.Prepared) == [m.Prepared(3, 1, 22, 0)]


def test_of_a_prompt_that_files_have_in_part_that_is_loaded() -> None:
    driver = cached()
    ask(driver, text(22), 1)
    keys = driver.state.requests[1].caches.keys[0].up_to(22)
    finish(driver, 1)
    driver.machine.set_saved({"kv": dict(zip(keys[:3], (4, 9, 2), strict=True))})
    driver.state.pools["kv"].forget_idle()
    ask(driver, text(22), 2)
    assert driver.plan("prefill")[1] == Load([LoadChunk(*driver.state.requests[2].key_in_table, 0, 0, 12, keys[:3], [4, 9, 2])])


def test_a_page_that_cannot_be_loaded_is_asked_for_again_once_it_was_made_anew() -> None:
    driver = saving()
    ask(driver, text(22), 1)
    driver.done("prefill", m.Loaded([8], [False]))
    assert isinstance(driver.plan("prefill")[1], p.Prefill)
    driver.receive("gateway", m.Cancel(1, 1)).tick()
    driver.done("prefill", m.Skipped())
    for key, end in ((2, 8), (3, 20)):
        driver.state.pools["kv"].forget_idle()
        ask(driver, text(22), key)
        plan = driver.plan("prefill")[1]
        assert isinstance(plan, Load) and [(chunk.start, chunk.end) for chunk in plan.chunks] == [(0, end)]
        finish(driver, key)
    assert driver.is_empty


def test_saved_pages_are_loaded_for_the_first_in_rank() -> None:
    driver = saving(depth=1, num_rows=3)
    ask(driver, text(9, 4), 1)
    driver.done("prefill", m.Loaded([0], [False]))  # prefill is busy
    for key, priority in ((2, 0), (3, -5)):
        ask(driver, m.RequestSpec(m.Generation("r"), [100 * key, *range(9)], [], 4, priority=priority), key)
    driver.done("prefill")
    (inflight,) = [inflight for inflight in driver.state.plans.values() if isinstance(inflight.plan, Load)]
    assert [request.key for request in inflight.requests] == [3]


def test_loading_goes_on_where_time_was_short_or_more_may_come() -> None:
    """Of a pair, the file has more of one prompt than of the other."""
    driver = saving()
    ask(driver, text(22, companion_ids=[*range(101, 110)]), 1)
    assert [(chunk.member, chunk.start, chunk.end) for chunk in driver.plan("prefill")[1].parts] == [(0, 0, 20), (1, 0, 8)]
    driver.done("prefill", m.Loaded([12, 0], [True, False]))
    assert [(chunk.member, chunk.start, chunk.end) for chunk in driver.plan("prefill")[1].parts] == [(0, 12, 20)]
    effects = driver.done("prefill", m.Loaded([16], [False]))
    assert sent(effects, m.Prepared) == [m.Prepared(3, 1, 22, 16)]
    plan = driver.plan("prefill")[1]
    assert isinstance(plan, p.Prefill) and [(chunk.member, chunk.start) for chunk in plan.chunks] == [(0, 16), (1, 0)]
    finish(driver, 1)
    assert driver.is_empty


def two_with_much_to_load() -> Driver:
    """Of both the first pages are loaded, and the first one's next are being loaded."""
    driver = saving(num_rows=3, num_kv_pages=64)
    for key in (1, 2):
        ask(driver, m.RequestSpec(m.Generation("r"), [100 * key, *range(30)], [], 4), key)
    driver.done("prefill", m.Loaded([8], [True]))
    driver.done("prefill", m.Loaded([8], [True]))
    return driver


def at_prefill(driver: Driver) -> list[tuple[type, int]]:
    return [(type(inflight.plan), request.key) for inflight in driver.state.plans.values() for request in inflight.requests]


def test_rows_with_much_to_load_leave_prefill_its_turns() -> None:
    driver = two_with_much_to_load()
    ask(driver, m.RequestSpec(m.Generation("r"), [300, *range(9)], [], 4), 3)
    assert at_prefill(driver) == [(Load, 1), (Load, 3)], "2 waits for its turn, and is not computed meanwhile"
    driver.done("prefill", m.Loaded([16], [True]))
    driver.done("prefill", m.Loaded([0], [False]))
    assert at_prefill(driver) == [(Load, 1), (p.Prefill, 3)]
    driver.done("prefill", m.Loaded([20], [False]))
    assert at_prefill(driver) == [(p.Prefill, 3), (Load, 2)]
    for key in (3, 2, 1):
        finish(driver, key)
    assert driver.is_empty


def test_the_turn_of_a_row_that_ends_passes_on() -> None:
    driver = two_with_much_to_load()
    assert at_prefill(driver) == [(Load, 1)]
    driver.receive("gateway", m.Cancel(1, 1)).tick()
    assert at_prefill(driver) == [(Load, 1), (Load, 2)]


def test_pages_that_are_loaded_do_not_clear_the_suspicion_of_a_prompt() -> None:
    """It is preempted after its prompt has ended prefill, and its pages are loaded again."""
    driver = saving()
    ask(driver, text(22), 1)
    driver.done("prefill", m.Loaded([8], [False]))
    driver.done("prefill", m.Died())
    request = driver.state.requests[1]
    assert len(request.record.strikes) == 1
    preempt(driver.state, request)
    driver.machine.set_saved({"kv": {}})
    driver.machine.set_saved({"kv": Anything()})  # pages that could not be loaded are asked for again
    driver.done("prefill", m.Skipped())
    assert isinstance(driver.plan("prefill")[1], Load)
    driver.done("prefill", m.Loaded([16], [False]))
    driver.done("prefill", m.Died())
    assert request.failure is not None and "2 times" in request.failure.message


def test_the_page_of_the_last_token_is_never_given() -> None:
    driver = cached()
    ask(driver, text(8, 4), 1)
    finish(driver, 1)
    assert hits(ask(driver, text(8, 4), 2)) == [4], "token 8 is fed by decode, which writes its page"


def test_a_request_that_shares_needs_only_what_is_missing() -> None:
    """Both run at once in memory that would not hold them apart."""
    driver = cached(num_kv_pages=9, ahead_pages=0, ahead_s=0.0, num_rows=3)
    ask(driver, text(25, 4), 1)
    while driver.state.plans:
        driver.done("prefill")
    assert driver.state.pools["kv"].num_free == 2
    assert hits(ask(driver, text(25, 4), 2)) == [24] and driver.state.pools["kv"].num_free == 1
    ask(driver, msgspec.structs.replace(text(25, 4), salt=b"other"), 3)
    assert not driver.state.requests[3].has_row, "under another salt it shares nothing, and waits"


def test_a_pair_hits_separately() -> None:
    driver = cached()
    spec = text(9, companion_ids=[*range(1, 6)])
    ask(driver, text(9), 1)
    finish(driver, 1)
    effects = ask(driver, spec, 2)
    assert [(e.member, e.num_tokens) for e in effects if isinstance(e, SetPrefilled)] == [(0, 8), (1, 4)]
    assert driver.state.requests[2].kv.tables[0][0] == driver.state.requests[2].kv.tables[1][0], "the same contents"
    assert sent(effects, m.Prepared) == [m.Prepared(3, 2, 9, 8)]
    finish(driver, 2)
    assert driver.is_empty


def test_the_gateway_learns_the_number_of_cached_tokens_with_the_first_pages() -> None:
    """A picture is analysed while another request has all KV pages."""
    driver = cached(num_kv_pages=4, ahead_pages=0, ahead_s=0.0)
    ask(driver, text(13, 4), 1)
    effects = ask(driver, known_image(), 2)
    assert sent(effects, m.Prepared) == [m.Prepared(3, 2, 10, -1)]
    effects = finish(driver, 1)
    assert sent(effects, m.Prepared) == [m.Prepared(3, 2, 10, 0)], "also where nothing was found"


def test_without_the_cache_no_token_is_cached() -> None:
    driver = Driver(prefix_cache=False)
    assert sent(ask(driver, text(8, 4), 1), m.Prepared) == [m.Prepared(3, 1, 8, 0)]


@pytest.mark.parametrize("is_new", [False, True])
def test_pages_that_rows_hold_are_not_found_once_the_caches_are_cleared(is_new: bool) -> None:
    """Neither by requests that come or wait, nor under names that the row gives later, nor after a recovery."""
    driver = cached(num_rows=3, num_kv_pages=8)
    ask(driver, text(10, 10), 1)
    driver.done("prefill")
    assert len(driver.state.pools["kv"].cache) == 2
    ask(driver, text(9, 2), 2)
    ask(driver, text(10, 6), 3)
    assert driver.state.requests[3].caches.keys, "it waits for KV pages, and its keys are made"
    driver.receive("cache", m.ClearCaches())
    if is_new:
        driver.machine = recover(driver.state.limits, 4, remains(driver))
        driver.state, driver.effects = driver.machine.state, []
    finish(driver, 1, 6)
    assert len(driver.state.pools["kv"].cache) >= 3, "the row has named what decode filled"
    driver.tick()
    assert driver.state.requests[3].record.num_cached_tokens == 0
    finish(driver, 2, 2)
    finish(driver, 3, 6)
    assert hits(ask(driver, text(10, 6), 4)) == [8], "what was computed since then is found"


def test_a_new_controller_knows_the_code_that_filled_the_pages() -> None:
    driver = cached()
    driver.receive("prefill", m.Hello("prefill", 1, 1, True, code=5))
    ask(driver, text(10, 6), 1)
    finish(driver, 1, 6)
    driver.machine = recover(driver.state.limits, 4, remains(driver))
    driver.state, driver.effects = driver.machine.state, []
    driver.receive("prefill", m.Hello("prefill", 1, 1, True, code=5))
    assert len(driver.state.pools["kv"].cache) == 3
    driver.receive("prefill", m.Hello("prefill", 2, 2, True, code=6), generation=2)
    assert not driver.state.pools["kv"].cache


def test_a_medium_inside_a_hit_is_not_decoded_again() -> None:
    driver = cached()
    ask(driver, known_image(), 1)
    finish(driver, 1)
    effects = ask(driver, known_image(), 2)
    assert hits(effects) == [8] and sent(effects, m.Prepared) == [m.Prepared(3, 2, 10, 8)]
    assert [plan.actor for plan in driver.state.plans.values()] == ["prefill"]
    finish(driver, 2)
    for content in (b"two", b""):
        effects = ask(driver, known_image(content), 3)
        assert hits(effects) == [], f"content {content!r} is another one, or unknown"
        finish(driver, 3)
        driver.state.ended.clear()


def test_a_medium_that_reaches_beyond_a_hit_is_encoded_again() -> None:
    """Two pictures in one prompt; the cache has the pages of the first one and half of the second."""
    driver = cached(num_kv_pages=64)
    wide = ItemShape("image", (1, 4, 4), 7, [SegmentShape("image", (1, 4, 4), 16, 4, 7)])
    items = [msgspec.structs.replace(image().items[0], content=content) for content in (b"one", b"two")]
    spec = m.RequestSpec(m.Generation("r"), [1, IMAGE, 2, IMAGE, 3, 4], items, 4)

    def prepare(key: int) -> list[Effect]:
        driver.submit(spec, key)
        driver.receive("gateway", m.Filled(1, key)).tick()
        driver.done("video", m.Analysed(wide))
        return driver.done("video", m.Analysed(wide))

    prepare(1)
    finish(driver, 1)
    pool, other = driver.state.pools["kv"], 99
    pool.allocate(other, pool.num_free - 3)  # the tail of the prompt is evicted
    pool.retire(other)
    assert hits(prepare(2)) == [12]
    stages = [segment.stage.name for _, segment in driver.state.requests[2].record.segments()]
    assert stages == ["ENCODED", "PREPROCESSING"]
    finish(driver, 2)
    assert driver.is_empty


def test_preemption_keeps_what_has_a_key() -> None:
    driver = cached()
    ask(driver, text(10, 30), 1)
    driver.done("prefill")
    for num_tokens in (8, 16, 20):
        driver.counts[0] = (num_tokens, 0)
        driver.tick()
    request = driver.state.requests[1]
    preempt(driver.state, request)
    effects = driver.tick(1.0)
    (drop,) = sent(effects, m.Drop)
    assert isinstance(drop, m.Drop)
    driver.receive("decode", m.Dropped(1, 0, 1, drop.ticket))
    effects = driver.tick() + driver.tick()
    assert hits(effects) == [24] and request.targets == (29,), "the last ids came too late to name a page by"
    assert sent(effects, m.Prepared) == [], "what it had itself was not found for its prompt"
    driver.done("prefill")
    assert request.record.member_of == "decode"


def test_a_hit_that_was_cut_short_is_given_back() -> None:
    driver = cached()
    ask(driver, text(10, 6), 1)
    finish(driver, 1, 6)
    ask(driver, text(10, 6), 2)
    snapshot = remains(driver)
    (row,) = snapshot.rows
    cut = row._replace(block_tables=(row.block_tables[0][:2], []), prefilled=(8, 0))
    machine = recover(driver.state.limits, 4, snapshot._replace(rows=[cut], plans=[], secret=driver.state.secret))
    machine.state.pools["kv"].check()
    effects = machine.tick(200.0)
    assert hits(effects) == [8] and machine.state.requests[2].kv.tables[0][:2] == row.block_tables[0][:2]


def test_a_new_controller_with_other_keys_goes_on() -> None:
    """Its code was edited, or the run's secret was lost: pages of its rows keep the keys that they have."""
    driver = cached()
    driver.submit(text(20), 1)
    while driver.state.plans:
        driver.done("prefill")
    snapshot = remains(driver)
    named = dict(snapshot.page_keys["kv"])
    assert len(named) == 4
    machine = recover(driver.state.limits, 4, snapshot._replace(secret=b"another"))
    (row,) = machine.state.requests_in_rows()
    words = [(row.row, row.row_generation, 4, EndCode.LENGTH)]
    ids = [(span, [500 + n for n in range(span.first, span.last)]) for span in machine.wanted_ids(words)]
    effects = machine.tick(200.0, words, ids)
    ledger = machine.state.pools["kv"]
    ledger.check()
    assert {page: ledger.cache.key_of(page) for page in named} == named
    assert not {page for effect in effects if isinstance(effect, SetPageKeys) for page in effect.run.pages} & named.keys()


def test_the_last_words_of_a_request_that_is_delivered_early_are_named() -> None:
    """The detokenizer found a stop string: the gateway ends the request before any tick has seen what decode did meanwhile."""
    driver = cached()
    ask(driver, text(10, 30), 1)
    driver.done("prefill")
    delivered = m.Delivered(1, 1)
    ((row, generation),) = driver.machine.ended_by(delivered)
    words = [(row, generation, 12, 0)]
    ids = [(span, [500 + n for n in range(span.first, span.last)]) for span in driver.machine.wanted_ids(words, all_of_them=True)]
    effects = driver.machine.on_message("gateway", 1, delivered, driver.now, words, ids)
    assert sum(len(effect.keys) for effect in effects if isinstance(effect, SetPageKeys)) == 21 // 4 - 2


def test_a_hit_gives_no_precedence() -> None:
    """Else requests that begin alike would keep all others waiting for as long as they come."""
    driver = cached(prefill_budget=8, num_rows=4)
    ask(driver, text(10), 1)
    finish(driver, 1)
    driver.state.actors.pop(InstanceId("prefill"))
    ask(driver, msgspec.structs.replace(text(10), salt=b"other"), 2)
    assert hits(ask(driver, text(18), 3)) == [8]
    driver.state.actors[InstanceId("prefill")] = 1
    driver.tick()
    (chunk,) = driver.plan("prefill")[1].chunks
    assert chunk.row == driver.state.requests[2].row


def test_an_equal_medium_that_is_cut_otherwise_gives_other_keys() -> None:
    """Its frames or segments are other ones, whatever its positions are."""
    content = b"c" * 32
    whole = ItemShape("video", (2, 4, 4), 8, [SegmentShape("video", (2, 4, 4), 32, 8, 1)])
    halves = ItemShape("video", (2, 4, 4), 8, [SegmentShape("video", (1, 4, 4), 16, 4, 1)] * 2)
    digests = {content_digest(content, whole), content_digest(content, halves), content_digest(b"d" * 32, whole)}
    assert len(digests) == 3 and content_digest(content, whole) in digests
    assert content_digest(b"", whole) == b"", "what is not known stays that"


def prefill_all(driver: Driver) -> int:
    """Let all prefill plans be done; returns how many tokens they had."""
    num_tokens = 0
    while driver.state.plans:
        num_tokens += driver.plan("prefill")[1].units
        driver.done("prefill")
    return num_tokens


def test_of_equal_prompts_that_come_together_one_is_prefilled() -> None:
    driver = cached(num_rows=8)
    for key in range(1, 6):
        driver.receive("gateway", m.Submit(1, key, text(30, 4)))
    driver.tick()
    rows = [driver.state.requests[key].has_row for key in range(1, 6)]
    assert rows == [True, False, False, False, False], "the others take no row until then"
    assert prefill_all(driver) == 29 + 4 * 1, "of each other one the tail behind the last whole page"
    assert all(driver.state.requests[key].is_prefilled for key in range(1, 6))


def test_a_request_waits_for_no_page_that_differs() -> None:
    """Prompts that begin alike: the later one waits for the common pages, and goes on as soon as these are there."""
    driver = cached(num_rows=4, prefill_budget=8)
    driver.submit(text(30, 4), 1)
    other = msgspec.structs.replace(text(30, 4), prompt_ids=[*range(1, 10), *range(700, 720)])
    driver.submit(other, 2)
    driver.submit(msgspec.structs.replace(text(30, 4), salt=b"other"), 3)
    assert not driver.state.requests[2].has_row and driver.state.requests[3].has_row
    driver.done("prefill")
    assert driver.state.requests[1].kv.prefilled[0] == 8 and driver.state.requests[2].kv.prefilled[0] == 8


def test_it_waits_no_longer_when_the_row_ahead_fails() -> None:
    driver = cached(num_rows=4, prefill_budget=8)
    driver.submit(text(30, 4), 1)
    driver.submit(text(30, 4), 2)
    driver.submit(text(30, 4), 3)
    driver.done("prefill")
    driver.receive("gateway", m.Cancel(1, 1)).tick()
    second, third = driver.state.requests[2], driver.state.requests[3]
    assert second.has_kv and second.caches.num_cached[0] == 8 and not third.has_row
    preempt(driver.state, second)
    driver.tick()
    assert third.has_kv or second.has_kv, "one of them prefills"


def test_a_row_behind_is_not_waited_for() -> None:
    driver = cached(num_rows=4)
    driver.submit(text(30, 4), 1)
    driver.submit(text(30, 4), 2)
    first, second = driver.state.requests[1], driver.state.requests[2]
    hits = find_hits(driver.state, second)
    assert PagesToCome(driver.state).have_next_of(second, hits)
    first.rank, second.rank = second.rank, first.rank
    assert not PagesToCome(driver.state).have_next_of(second, hits)


def test_a_new_controller_holds_it_back_as_well() -> None:
    driver = cached(num_rows=4, prefill_budget=8)
    driver.submit(text(30, 4), 1)
    driver.submit(text(30, 4), 2)
    driver.machine = recover(driver.state.limits, 4, remains(driver))
    driver.state = driver.machine.state
    driver.tick()
    assert driver.state.requests[1].has_kv and not driver.state.requests[2].has_row


def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed() -> None:
    """It takes no hits and waits for nobody; others take hits of its pages."""
    driver = cached(num_rows=8)
    asking = text(30, 4).asking(sampling=Sampling(prompt_logprobs=0))
    for key, spec in enumerate((text(30, 4), asking, text(30, 4)), 1):
        driver.receive("gateway", m.Submit(1, key, spec))
    driver.tick()
    assert prefill_all(driver) == 29 + 29 + 1
    driver = cached(num_rows=8)
    for key, spec in enumerate((asking, text(30, 4)), 1):
        driver.receive("gateway", m.Submit(1, key, spec))
    driver.tick()
    assert prefill_all(driver) == 29 + 1


def test_a_row_that_awaits_its_media_holds_up_no_text() -> None:
    """Prompts that begin alike, as by their system prompt. ``monolithic`` prefills nothing before a request's media are encoded."""
    driver = cached(num_rows=4, policy="monolithic")
    picture = msgspec.structs.replace(known_image(), prompt_ids=[*range(1, 10), IMAGE, 10])
    ask(driver, picture, 1)
    ask(driver, picture, 2)
    driver.submit(text(12, 4), 3)
    first, equal, other = [driver.state.requests[key] for key in (1, 2, 3)]
    assert first.has_kv and not first.prefill_plan
    assert other.has_kv and other.prefill_plan, "it has no media to wait for"
    assert not equal.has_kv, "what it waits for needs the same picture"


def test_while_no_row_is_free_nobody_looks_for_pages_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under overload every tick would look at all rows."""
    driver = cached(num_rows=1)
    driver.submit(text(12, 4), 1)
    monkeypatch.setattr("mmrt.runtime.controller.machine.PagesToCome", None)
    driver.submit(text(13, 4), 2)
    driver.tick()
    assert not driver.state.requests[2].has_row
