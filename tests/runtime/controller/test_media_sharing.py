"""Media of equal content and salt: each is analysed, decoded and encoded once, whoever needs it and when."""

import random
from collections import Counter
from pathlib import Path

import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.media_work import estimated_work, is_large
from mmrt.runtime.controller.caches import embedding_cache, media_sharing
from mmrt.runtime.controller.plans import planner
from mmrt.runtime.controller.recovery import recover
from mmrt.runtime.controller.rows.lifecycle import reset_media
from mmrt.runtime.controller.scheduling.types import SegmentChoice
from mmrt.runtime.controller.state.effects import WriteState
from mmrt.runtime.controller.state.known_media import KnownMedia, MediaKey, media_key
from mmrt.runtime.controller.state.row_record import RowRecord
from mmrt.runtime.controller.state.state import ControllerState
from mmrt.schema.media import ItemShape, SegmentShape
from mmrt.tests.runtime.controller.injected_bugs import Bug, must_find, name_of
from mmrt.tests.runtime.controller.test_machine import IMAGE, SHAPE, Driver
from mmrt.tests.runtime.controller.test_recovery import remains

ROOM = dict(num_rows=16, num_kv_pages=200, num_media_pages=64, num_patch_pages=64, num_embedding_pages=64, num_plan_slots=32)
ASKED = ("video", "encoder", "prefill")


def picture(content: bytes = b"a picture", salt: bytes = b"", count: int = 1) -> m.RequestSpec:
    items = [m.MediaItem("image", 10, content=content)] * count
    return m.RequestSpec(m.Generation("r"), [1, 2, *[IMAGE, 3] * count, 4], items, 4, salt=salt)


def fill(driver: Driver, spec: m.RequestSpec, *keys: int) -> None:
    """Submit the request so often, and fill their media pages."""
    for key in keys:
        driver.submit(spec, key)
        driver.receive("gateway", m.Filled(1, key))
    driver.tick()


def work(driver: Driver) -> Counter[str]:
    """Do all plans of the workers until none is left. Returns how many there were of each type."""
    counts: Counter[str] = Counter()
    while plans := [plan for plan in driver.state.plans.values() if plan.actor in ASKED]:
        counts[type(plans[0].plan).__name__] += 1
        is_analysis = isinstance(plans[0].plan, p.Analyse)
        driver.receive(
            plans[0].actor, m.PlanDone(plans[0].actor, 1, plans[0].plan_id, 0.01, m.Analysed(SHAPE) if is_analysis else m.Done())
        )
        driver.tick()
    return counts


def end(driver: Driver, *keys: int) -> None:
    for key in keys:
        driver.receive("gateway", m.Delivered(1, key))
        effects = driver.tick()
        for message in [e.message for e in effects if isinstance(getattr(e, "message", None), m.Drop)]:
            driver.receive("decode", m.Dropped(1, message.row, message.row_generation, message.ticket))
    driver.tick()


def media_work(counts: Counter[str]) -> tuple[int, int, int]:
    return counts["Analyse"], counts["PreprocessSegment"], counts["Encode"]


def test_a_known_picture_asks_neither_video_nor_encoder() -> None:
    driver = Driver(**ROOM)
    fill(driver, picture(), 1)
    assert media_work(work(driver)) == (1, 1, 1)
    end(driver, 1)
    assert driver.is_empty and driver.state.pools["embedding"].cache.num_idle == 2
    fill(driver, picture(), 2)
    counts = work(driver)
    assert media_work(counts) == (0, 0, 0) and counts["Prefill"]
    assert (driver.state.totals.media_hits, driver.state.totals.media_queries) == (1, 2)
    end(driver, 2)
    assert driver.is_empty


@pytest.mark.parametrize("spec", [picture(salt=b"other"), picture(b"another picture"), picture(b"")])
def test_nothing_is_known_of_other_tenants_and_other_contents(spec: m.RequestSpec) -> None:
    driver = Driver(**ROOM)
    fill(driver, picture(), 1)
    work(driver)
    fill(driver, spec, 2, 3)
    count = 1 if spec.items[0].content else 2
    assert media_work(work(driver)) == (count, count, count)
    end(driver, 1, 2, 3)
    assert driver.is_empty


def test_without_the_cache_everything_is_done_anew() -> None:
    driver = Driver(**ROOM, embedding_cache=False)
    for key in (1, 2):
        fill(driver, picture(), key)
        assert media_work(work(driver)) == (1, 1, 1)
        end(driver, key)
    assert driver.is_empty and driver.state.pools["embedding"].cache.num_idle == 0


def test_sixteen_at_once_have_their_picture_encoded_once() -> None:
    driver = Driver(**ROOM)
    keys = range(1, 17)
    fill(driver, picture(), *keys)
    assert media_work(work(driver)) == (1, 1, 1)
    assert all(request.is_prefilled for request in driver.state.requests.values())
    end(driver, *keys)
    assert driver.is_empty and driver.state.totals.media_hits == 15


def test_rows_that_come_while_others_work_take_over() -> None:
    """The first in rank order comes last: what was decoded for the second goes to it, and is not decoded again."""
    driver = Driver(**ROOM)
    driver.submit(picture(), 1)
    fill(driver, picture(), 2)
    driver.done("video", m.Analysed(SHAPE))
    driver.receive("gateway", m.Filled(1, 1))
    driver.done("video")
    _, plan = driver.plan("encoder")
    assert plan.rows == [driver.state.requests[1].key_in_table]
    assert media_work(work(driver)) == (0, 0, 1)
    assert driver.state.requests[1].is_prefilled and driver.state.requests[2].is_prefilled
    end(driver, 1, 2)
    assert driver.is_empty


@pytest.mark.parametrize("num_done", range(3))
@pytest.mark.parametrize("how", ["cancel", "error"])
def test_when_the_first_goes_another_does_it(num_done: int, how: str) -> None:
    driver = Driver(**ROOM)
    fill(driver, picture(), 1, 2, 3)
    for actor in ("video", "video", "encoder")[:num_done]:
        driver.done(actor, m.Analysed(SHAPE) if actor == "video" and not driver.state.requests[1].record.prepared else m.Done())
    actor = ("video", "video", "encoder")[num_done]
    if how == "cancel":
        driver.receive("gateway", m.Cancel(1, 1))
        driver.done(actor, m.Analysed(SHAPE) if num_done == 0 else m.Done())
    else:
        driver.done(actor, m.ItemError(500, "failed"))
        assert driver.state.requests[1].failure is not None
    counts = work(driver)
    assert driver.state.requests[2].is_prefilled and driver.state.requests[3].is_prefilled
    assert counts["Encode"] == 1 and counts["PreprocessSegment"] <= 1
    end(driver, 1, 2, 3)
    assert driver.is_empty


def test_a_medium_twice_in_a_request_is_encoded_once() -> None:
    driver = Driver(**ROOM)
    fill(driver, picture(count=2), 1)
    assert media_work(work(driver)) == (1, 1, 1)
    assert driver.state.requests[1].is_prefilled
    end(driver, 1)
    fill(driver, picture(count=2), 2)
    assert media_work(work(driver)) == (0, 0, 0) and driver.state.requests[2].is_prefilled
    end(driver, 2)
    assert driver.is_empty


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({}, [(2, 2), (6, 2), (10, 2), (14, 1), (16, 0)]),
        ({"num_state_pages": 4, "num_log_pages": 2}, [(4, 2), (8, 2), (12, 2), (16, 0)]),
    ],
)
def test_the_pages_of_a_medium_that_comes_twice_are_held_once(states: dict[str, int], expected: list[tuple[int, int]]) -> None:
    """Until prefill has read both. Where chunks end on a grid it reads the end of the first with the second."""
    driver = Driver(**ROOM, **states, prefill_budget=4)
    fill(driver, picture(count=2), 1)
    for result in (m.Analysed(SHAPE), None):
        driver.done("video", result)
    request, pool = driver.state.requests[1], driver.state.pools["embedding"]
    assert driver.done("encoder") and not list(request.open_segments()) and pool.num_owned(request.row) == 2
    held = []
    while not request.is_prefilled:
        driver.done("prefill")
        held.append((request.kv.prefilled[0], pool.num_owned(request.row)))
    assert held == expected
    end(driver, 1)
    assert driver.is_empty


def test_what_was_evicted_is_encoded_again() -> None:
    driver = Driver(num_embedding_pages=4)
    fill(driver, picture(), 1)
    work(driver)
    end(driver, 1)
    for key, content in ((2, b"second"), (3, b"third")):
        fill(driver, picture(content), key)
        work(driver)
        end(driver, key)
    fill(driver, picture(), 4)
    assert media_work(work(driver)) == (0, 1, 1), "its shape is remembered"
    end(driver, 4)
    assert driver.is_empty


def test_a_row_that_loses_its_pages_takes_them_again() -> None:
    driver = Driver(**ROOM, prefill_budget=1)
    fill(driver, picture(), 1)
    for result in (m.Analysed(SHAPE), m.Done()):
        driver.done("video", result)
    driver.done("encoder")
    request = driver.state.requests[1]
    reset_media(driver.state, request, consumed_too=False)
    driver.state.save(request)
    assert media_work(work(driver)) == (0, 0, 0) and request.is_prefilled
    end(driver, 1)
    assert driver.is_empty


def test_later_rows_leave_the_first_its_room() -> None:
    """The first row needs all pages that are free, and these are in the cache: a later row does not take them again and again."""
    large = ItemShape("image", (1, 4, 4), 12, [SegmentShape("image", (1, 4, 4), 16, 4, 12)])
    driver = Driver(num_embedding_pages=4, num_patch_pages=16, num_rows=3)
    fill(driver, picture(), 1)
    work(driver)
    end(driver, 1)
    fill(driver, picture(b"large"), 2)
    driver.done("video", m.Analysed(large))
    fill(driver, picture(), 3)
    assert driver.state.requests[2].has_kv and driver.state.requests[3].has_kv
    assert driver.state.pools["embedding"].cache.num_idle == 2, "the first may need them"
    counts = work(driver)
    assert all(driver.state.requests[key].is_prefilled for key in (2, 3)) and counts["Encode"] == 2
    end(driver, 2, 3)
    assert driver.is_empty


def test_work_that_was_underestimated_is_known() -> None:
    driver = Driver(**ROOM)
    fill(driver, picture(), 1)
    driver.done("video", m.Overran())
    driver.done("video", m.ItemError(422, "broken"))
    fill(driver, picture(), 2)
    _, plan = driver.plan("video")
    assert isinstance(plan, p.Analyse) and is_large(estimated_work(plan.media))


def test_a_new_controller_finds_the_pages() -> None:
    driver = Driver(**ROOM)
    fill(driver, picture(), 1)
    work(driver)
    end(driver, 1)
    snapshot = remains(driver)
    cache = driver.state.pools["embedding"].cache
    keys = {page: key for page in range(64) if (key := cache.key_of(page)) is not None}
    driver.machine = recover(driver.state.limits, 4, snapshot._replace(page_keys={"embedding": keys}))
    driver.state = driver.machine.state
    driver.effects = []
    fill(driver, picture(), 2)
    assert media_work(work(driver)) == (1, 0, 0), "analyses are lost"
    assert driver.state.requests[2].is_prefilled


def test_a_new_controller_knows_the_media_of_its_rows() -> None:
    driver = Driver(**ROOM)
    fill(driver, picture(), 1)
    driver.done("video", m.Analysed(SHAPE))
    driver.machine = recover(driver.state.limits, 4, remains(driver))
    driver.state = driver.machine.state
    driver.effects = []
    driver.tick()
    fill(driver, picture(), 2)
    assert media_work(work(driver)) == (0, 1, 1)


@pytest.mark.parametrize("actor", ["video", "encoder", "prefill", "decode", "gateway"])
def test_edited_code_outdates_the_caches_and_a_kill_does_not(actor: str) -> None:
    driver = Driver(**ROOM)
    driver.receive(actor, m.Hello(actor, 1, 1, True, code=5))
    fill(driver, picture(), 1)
    work(driver)
    end(driver, 1)
    driver.receive(actor, m.Hello(actor, 2, 2, True, code=5), generation=2)
    assert driver.state.pools["embedding"].cache.num_idle == 2
    driver.receive(actor, m.Hello(actor, 3, 3, True, code=6), generation=3)
    assert driver.state.pools["embedding"].cache.num_idle == (2 if actor == "gateway" else 0)
    assert (driver.state.known_media.find((driver.state.era, b"", b"a picture")).shape is None) == (actor != "gateway")


def test_a_medium_that_could_not_be_decoded_is_analysed_again() -> None:
    """Video may analyse it otherwise by now, refuses the segment, and asks for the request to be sent again: that must help."""
    driver = Driver(**ROOM)
    fill(driver, picture(), 1, 2)
    driver.done("video", m.Analysed(SHAPE))
    driver.done("video", m.ItemError(500, "the medium was analysed differently before; send the request again"))
    assert driver.state.requests[1].failure is not None
    driver.done("video", m.ItemError(500, "the medium was analysed differently before; send the request again"))
    assert driver.state.requests[2].failure is not None, "it has the same analysis"
    end(driver, 1, 2)
    fill(driver, picture(), 3)
    assert media_work(work(driver)) == (1, 1, 1)


def test_nothing_is_written_for_a_row_that_failed_by_a_known_shape() -> None:
    """The second of three known media outgrows the record: the request leaves its row at once, before the third is recorded."""
    large = ItemShape("image", (1, 4, 4), 6 * 30, [SegmentShape("image", (1, 4, 4), 16, 4, 6)] * 30)
    driver = Driver(**{**ROOM, "num_rows": 4}, max_state_bytes=800, max_context=4096)
    for key, (content, shape) in enumerate({b"a": SHAPE, b"b": large, b"c": large}.items(), 1):
        fill(driver, picture(content), key)
        driver.done("video", m.Analysed(shape))
        driver.receive("gateway", m.Cancel(1, key)).tick()
        work(driver)
    items = [m.MediaItem("image", 10, content=content) for content in (b"b", b"c", b"a")]
    driver.submit(m.RequestSpec(m.Generation("r"), [1, 2, *[IMAGE, 3] * 3, 4], items, 4), 9)
    effects = driver.receive("gateway", m.Filled(1, 9)).tick()
    failure = driver.state.requests[9].failure
    assert failure is not None and "the record of the request's media takes" in failure.message
    assert not driver.state.requests[9].has_row
    rows = [effect.row for effect in effects if isinstance(effect, WriteState)]
    assert rows and min(rows) >= 0


def test_an_equal_medium_that_is_cut_otherwise_is_not_found() -> None:
    """As many segments and pages, but of other frames: after new code for video, or once the analysis is forgotten."""

    def clip(*num_frames: int) -> ItemShape:
        segments = [SegmentShape("image", (count, 4, 4), 16 * count, 4, 6) for count in num_frames]
        return ItemShape("image", (sum(num_frames), 4, 4), 6 * len(segments), segments)

    driver = Driver(**ROOM)
    for key, shape, expected in ((1, clip(4, 2), 2), (2, clip(2, 4), 2), (3, clip(4, 2), 0)):
        driver.state.known_media = KnownMedia()
        fill(driver, picture(), key)
        driver.done("video", m.Analysed(shape))
        assert media_work(work(driver)) == (0, expected, expected)
        end(driver, key)
    assert driver.is_empty


def test_a_row_shares_its_media_until_they_are_encoded() -> None:
    driver = Driver(**ROOM)
    fill(driver, picture(), 1)
    assert not driver.state.requests[1].media.is_shared, "there is nobody to share them with"
    fill(driver, picture(), 2)
    requests = [driver.state.requests[key] for key in (1, 2)]
    assert all(request.media.is_shared for request in requests)
    work(driver)
    assert not any(request.media.is_shared for request in requests)
    fill(driver, picture(count=2), 3)
    assert not driver.state.requests[3].media.is_shared, "it has taken both"
    fill(driver, picture(b"new", count=2), 4)
    assert driver.state.requests[4].media.is_shared
    work(driver)
    assert not any(request.media.is_shared for request in driver.state.requests.values())


def test_a_new_controller_shares_the_media_that_others_have() -> None:
    driver = Driver(**ROOM)
    for key, content in ((1, b"one"), (2, b"two"), (3, b"two")):
        fill(driver, picture(content), key)
    driver.done("video", m.Analysed(SHAPE))
    state = recover(driver.state.limits, 4, remains(driver)).state
    assert [request.media.is_shared for request in state.requests.values()] == [False, True, True]


def test_a_round_of_planning_looks_at_no_encoded_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row has encoded some of a long medium, and others take them: none walks through all its segments in every round."""
    shape = ItemShape("image", (1, 4, 4), 600, [SegmentShape("image", (1, 4, 4), 16, 4, 6)] * 100)
    driver = Driver(**ROOM, max_context=1024, max_spec_bytes=1 << 16, max_state_bytes=1 << 16)
    fill(driver, picture(), 1, 2, 3)
    driver.done("video", m.Analysed(shape))
    while not driver.state.requests[3].media.tracker or not driver.state.requests[3].media.tracker.ready_prefix(1000) > 60:
        plan = next(plan for plan in driver.state.plans.values() if plan.actor in ASKED)
        driver.receive(plan.actor, m.PlanDone(plan.actor, 1, plan.plan_id, 0.01, m.Done()))
        driver.tick()
    assert all(request.media.is_shared for request in driver.state.requests.values())
    monkeypatch.setattr(RowRecord, "segments", lambda record: pytest.fail("all segments are looked at"))
    for request in driver.state.requests.values():
        driver.state.touch(request)
    assert all(view.segments or view.key > 1 for view in planner.make_view(driver.state).requests)


def test_known_media_are_bounded_and_the_oldest_go() -> None:
    known, rng = KnownMedia(max_segments=40), random.Random(1)
    for number in range(2000):
        key = (b"", b"", b"%d" % rng.randrange(300))
        draw = rng.random()
        if draw < 0.2:
            known.learn_large(key)
        elif draw < 0.3:
            known.forget_shape(key)
        else:
            segments = [SegmentShape("video", (1, 1, 1), 1, 1, 1)] * rng.randint(1, 5)
            known.learn_shape(key, ItemShape("video", (1, 1, 1), len(segments), segments))
        assert (known.find(key).shape is None) >= (0.2 <= draw < 0.3), "forgotten"
        assert draw >= 0.2 or known.find(key).is_large
        assert draw < 0.3 or known.find(key).shape is not None
        held = [found for n in range(300) if (found := known._media.get((b"", b"", b"%d" % n))) is not None]
        assert sum(medium.num_segments for medium in held) == known._num_segments <= 40, number


# bugs that the recovery world must find


def without_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(spec: m.RequestSpec, era: bytes, item: int) -> MediaKey | None:
        found = media_key(spec, era, item)
        return found and (era, b"", found[2])

    monkeypatch.setattr(media_sharing, "media_key", key)


def without_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    key = embedding_cache._key
    monkeypatch.setattr(embedding_cache, "_key", lambda stem, segment, page: key(stem, 0, page))


def keyed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def issue(state: ControllerState, choices: tuple[SegmentChoice, ...], now: float) -> None:
        issue_encode(state, choices, now)
        embedding_cache.keep_encoded(state, [(state.requests[choice.key], (choice.item, choice.segment)) for choice in choices])

    issue_encode = planner._issue_encode
    monkeypatch.setattr(planner, "_issue_encode", issue)


BUGS: dict[Bug, tuple[int, ...]] = {
    without_salt: (64, 74, 98),
    without_segments: (11, 12, 14),
    keyed_too_early: (1, 6, 7),
}


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_world_finds_bugs(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(BUGS[bug], place, match="foreign|which has a key")


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_search_finds(bug: Bug, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    must_find(range(150), place, match="foreign|which has a key")
