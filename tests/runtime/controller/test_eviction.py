"""Who loses patch and embedding pages to whom, and what prefill is reading to its end is left alone."""

import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.controller.plans.planner import _evict_later
from mmrt.runtime.controller.rows.lifecycle import reset_media
from mmrt.runtime.controller.scheduling.types import SegmentStage
from mmrt.runtime.controller.state.state import owner
from mmrt.schema.media import ItemShape, SegmentShape
from mmrt.schema.rows import Phase
from mmrt.tests.runtime.controller.test_machine import KEY, Driver, image, phases

TWO = ItemShape("image", (1, 4, 8), 12, 2 * [SegmentShape("image", (1, 4, 4), 16, 4, 6)])


def reading(budget: int) -> Driver:
    """Both segments (tokens 2 to 8 and 8 to 14) are encoded, and a chunk from token 2 on is in flight."""
    driver = Driver(prefill_budget=budget)
    driver.submit(image())
    driver.receive("gateway", m.Filled(1, KEY)).tick()
    driver.done("video", m.Analysed(TWO))
    for actor in ("video", "encoder", "video", "encoder", "prefill"):
        driver.done(actor)
    return driver


def evict(driver: Driver) -> None:
    request = driver.state.requests[KEY]
    reset_media(driver.state, request, consumed_too=False)
    driver.state.save(request)
    driver.tick()


@pytest.mark.parametrize("result", [m.Done(), m.Died()])
def test_an_eviction_leaves_what_the_chunk_in_flight_reads_to_its_end(result: m.Result) -> None:
    driver = reading(8)  # tokens 2 to 10
    first, second = driver.state.requests[KEY].record.items[0].segments
    kept, pool = first.embedding, driver.state.pools["embedding"]
    evict(driver)
    assert first.stage == SegmentStage.ENCODED and first.embedding == kept and second.embedding is None
    assert (pool.num_used, pool.num_retired) == (3, 1), "of the second one the page that the plan reads is still held"
    _, plan = driver.plan("video")
    assert isinstance(plan, p.PreprocessSegment) and plan.segment == 1
    driver.done("prefill", result)
    if isinstance(result, m.Died):
        _, again = driver.plan("prefill")
        assert again == p.Prefill([p.PrefillChunk(0, 1, 0, 2, 8, [p.EmbeddingSpan(2, 6, 0, kept)])])
        return
    assert pool.num_used == 0 and [plan.actor for plan in driver.state.plans.values()] == ["video"]
    driver.done("video")
    driver.done("encoder")
    _, rest = driver.plan("prefill")
    assert rest == p.Prefill([p.PrefillChunk(0, 1, 0, 10, 15, [p.EmbeddingSpan(10, 4, 2, second.embedding)])])
    assert phases(driver.done("prefill")) == [Phase.DECODE] and pool.num_used == 0


def test_an_eviction_during_the_last_chunk_keeps_nobody_from_decode() -> None:
    driver = reading(16)
    evict(driver)
    assert [plan.actor for plan in driver.state.plans.values()] == ["prefill"]
    assert phases(driver.done("prefill")) == [Phase.DECODE]
    assert driver.state.pools["patch"].num_used == driver.state.pools["embedding"].num_used == 0


@pytest.mark.parametrize("need", [5, 6])
def test_younger_rows_keep_their_pages_where_all_of_them_would_not_do(need: int) -> None:
    """Of eight pages three are the older row's own and three the younger one's: five can be had, six cannot."""
    driver = Driver()
    for key in (1, 2):
        driver.submit(image(), key=key)
        driver.receive("gateway", m.Filled(1, key)).tick()
    old, young = (driver.state.requests[key] for key in (1, 2))
    pool = driver.state.pools["patch"]
    driver.state.allocate("patch", old, 3)
    driver.state.allocate("patch", young, 3)
    assert pool.num_free == 2
    _evict_later(driver.state, old, "patch", need)
    assert pool.num_owned(owner(young)) == (0 if need == 5 else 3)
    assert driver.state.totals.evicted == (1 if need == 5 else 0)
