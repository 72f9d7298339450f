"""Pages of layers with a window: what a row has of them while its window moves on. ``test_recovery_world`` has the rest."""

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.copy_plans import Transfer
from mmrt.runtime.controller.recovery import recover
from mmrt.runtime.controller.state.effects import AppendWindowPages, SetPrefilled
from mmrt.runtime.controller.state.state import owner
from mmrt.schema.rows import Phase
from mmrt.tests.runtime.controller.test_machine import KEY, Driver, index, text
from mmrt.tests.runtime.controller.test_migration import apart
from mmrt.tests.runtime.controller.test_migration import finish as end
from mmrt.tests.runtime.controller.test_recovery import remains
from mmrt.tests.runtime.controller.test_state_grants import finish

SIZES = {"placeholder_ids": {}, "window_tokens": 8, "window_chunk": 8, "num_window_pages": 14, "prefix_cache": True}


def live(driver: Driver, key: int = KEY, member: int = 0) -> list[int]:
    """Places of the row's pages."""
    kv = driver.state.requests[key].kv
    return list(range(kv.windows.firsts[member], len(kv.windows.tables[member])))


def used(driver: Driver) -> int:
    return driver.state.pools["window"].num_used


def prefill(driver: Driver, key: int = KEY) -> list[tuple[int, int, list[int]]]:
    """Prefill the row: its chunks, and the places of its pages in each."""
    seen = []
    while driver.state.requests[key].phase == Phase.PREPARE:
        _, plan = driver.plan("prefill")
        assert isinstance(plan, p.Prefill)
        seen += [(chunk.start, chunk.end, live(driver, key)) for chunk in plan.chunks]
        driver.done("prefill")
    return seen


def test_a_row_has_pages_of_its_window_and_of_what_comes_next() -> None:
    driver = Driver(**SIZES, ahead_s=0.0, spare_ahead_s=0.0)
    driver.submit(text(40, 20))
    seen = prefill(driver)
    assert [end - start for start, end, _ in seen] == [8] * 4 + [7]
    assert [places for *_, places in seen] == [[0, 1], [0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 9]]
    row = driver.state.requests[KEY].row
    for count in range(1, 20):
        driver.counts[row] = (count, 0)
        driver.tick(0.05)
        reached = 40 + count - 8
        assert live(driver)[0] <= reached // 4 and used(driver) == len(live(driver)) <= 2 + 1 + 2 + 1
        assert len(driver.state.requests[KEY].kv.windows.tables[0]) * 4 >= min(40 + count, 59)
    finish(driver)
    assert used(driver) == 0


def test_a_hit_needs_the_pages_of_the_window_at_its_end() -> None:
    """The pages before are not needed, and go first."""
    driver = Driver(**SIZES, num_kv_pages=64)
    driver.submit(text(41, 2))
    prefill(driver)
    finish(driver)
    driver.receive("gateway", m.Delivered(1, KEY)).tick()
    pool = driver.state.pools["window"]
    assert used(driver) == 0 and pool.cache.num_idle == 11
    effects = driver.submit(text(41, 2), KEY + 1)
    request = driver.state.requests[KEY + 1]
    assert effects[index(effects, SetPrefilled)] == SetPrefilled(request.row, 0, 40)
    assert live(driver, KEY + 1)[0] == 8 and pool.num_rows(request.kv.windows.tables[0][8]) == 1
    assert effects[index(effects, AppendWindowPages)].pages[:8] == [0] * 8  # type: ignore[attr-defined]
    taken = pool.allocate(9, pool.num_free)
    assert taken is not None and len(pool.cache) == 2, "pages of the window are held"
    pool.retire(9)
    driver.submit(text(33, 2), KEY + 2)
    assert driver.state.requests[KEY + 2].kv.prefilled[0] == 0, "the KV pages are there, and those of the window are not"


def test_members_of_a_pair_that_share_pages_leave_them_one_after_the_other() -> None:
    driver = Driver(**SIZES, num_kv_pages=64)
    driver.submit(text(17, 1))
    prefill(driver)
    finish(driver)
    driver.receive("gateway", m.Delivered(1, KEY)).tick()
    driver.submit(text(60, 2, companion_ids=list(range(1, 31))), KEY + 1)
    request, pool = driver.state.requests[KEY + 1], driver.state.pools["window"]
    first, second = request.kv.windows.tables
    shared = first[2:4]
    assert shared == second[2:4] and request.kv.prefilled == [16, 16]
    while request.phase == Phase.PREPARE:
        left = request.kv.windows.firsts
        assert all((page in pool.owned_by(owner(request))) == (min(left) <= place) for place, page in enumerate(shared, 2))
        assert pool.owned_by(owner(request)) == {*request.kv.windows.own(0), *request.kv.windows.own(1)}
        driver.done("prefill")


def test_a_plan_that_is_done_again_finds_its_window() -> None:
    """A controller dies once it has recorded what a plan has computed, and before it clears the plan."""
    driver = Driver(**SIZES)
    driver.submit(text(40, 4))
    for _ in range(2):
        driver.done("prefill")
    _, plan = driver.plan("prefill")
    assert isinstance(plan, p.Prefill) and (plan.chunks[0].start, plan.chunks[0].end) == (16, 24)
    snapshot = remains(driver)
    (row,) = snapshot.rows
    again = recover(driver.state.limits, 4, snapshot._replace(rows=[row._replace(prefilled=(24, 0))])).state
    kv, pool = again.requests[KEY].kv, again.pools["window"]
    assert kv.windows.firsts[0] == 2 and set(kv.windows.tables[0][2:]) == pool.owned_by(0)
    alone = recover(driver.state.limits, 4, snapshot._replace(rows=[row._replace(prefilled=(24, 0))], plans=[])).state
    assert alone.requests[KEY].kv.windows.firsts[0] == 4


def test_the_window_at_the_end_of_the_first_message_stays_longer() -> None:
    """Other prompts are likely to begin there. What a window has left before and behind it goes first."""
    driver = Driver(**SIZES, num_kv_pages=64)
    driver.submit(text(45, 2, borders=(18, 45, 0)))
    prefill(driver)
    finish(driver)
    driver.receive("gateway", m.Delivered(1, KEY)).tick()
    pool = driver.state.pools["window"]
    taken = pool.allocate(9, pool.num_free - 5)
    assert taken is not None and len(pool.cache) == 5, "two pages before 16, and those at the end"
    pool.retire(9)
    effects = driver.submit(text(18, 2), KEY + 1)
    assert effects[index(effects, SetPrefilled)].num_tokens == 16  # type: ignore[attr-defined]


def test_a_pool_of_hardly_two_windows_lets_a_row_go_on() -> None:
    """With a KV pool as small as that, memory.kv_tokens, the pool of windows has as many pages."""
    driver = Driver(**{**SIZES, "num_window_pages": 4}, num_kv_pages=4, ahead_s=0.0, spare_ahead_s=0.0)
    driver.submit(text(9, 8))
    prefill(driver)
    row = driver.state.requests[KEY].row
    for count in range(1, 8):
        driver.counts[row] = (count, 0)
        driver.tick(0.05)
        assert len(driver.state.requests[KEY].kv.windows.tables[0]) * 4 >= 9 + count, f"no page for what follows {count} tokens"
    finish(driver)


def test_the_windows_at_a_prompt_s_end_are_copied_to_another_device() -> None:
    """Where the row is prefilled its window moves on, and what is copied stays. A new controller finds both tables."""
    driver = apart(**SIZES)
    driver.submit(text(41, 4))
    pools = [driver.state.pools[name] for name in ("window", "window.1")]
    request = driver.state.requests[KEY]
    windows, home = request.kv.source_windows, request.kv.windows
    assert (windows.firsts, home.firsts) == ([0, 0], [8, 0]) and len(home.tables[0]) * 4 >= 41
    while any(one.actor == "prefill" for one in driver.state.plans.values()):
        done = request.kv.prefilled[0]
        assert windows.firsts[0] == max(0, done - 7) // 4 and pools[0].owned_by(0) == {*windows.own(0)}
        again = recover(driver.state.limits, 4, remains(driver)).state
        found = again.requests[KEY].kv
        assert found.source_windows.own(0) == windows.own(0) and found.windows.own(0) == home.own(0)
        assert [again.pools[name].owned_by(0) for name in ("window", "window.1")] == [pool.owned_by(0) for pool in pools]
        driver.done("prefill")
    _, plan = driver.plan("decode")
    assert isinstance(plan, Transfer) and {chunk.windows for chunk in plan.chunks} == {8}
    assert windows.own(0) == windows.tables[0][8:] and len(windows.tables[0]) == 10, "nothing is for decode"
    end(driver, KEY)
    assert driver.is_empty and not any(pool.num_used for pool in pools)


def test_what_the_other_device_has_is_not_copied_as_far_as_it_has_the_window() -> None:
    """Of KV pages that it has, those count whose pages of the window at the prompt's end are there too."""
    driver = apart(**SIZES, num_kv_pages=64)
    copied = []
    for key in range(KEY, KEY + 3):
        driver.submit(text(41, 4), key)
        copied.append(driver.state.requests[key].kv.copied[0])
        end(driver, key)
        if key == KEY + 1:
            pool = driver.state.pools["window.1"]
            assert pool.allocate(9, pool.num_free) is not None and not len(pool.cache)
            pool.retire(9)
    assert copied == [0, 36, 32]
