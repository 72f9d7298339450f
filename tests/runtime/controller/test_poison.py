"""A request whose work ends its actor is given up; whoever shared a plan with it goes on."""

import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.bus.wire import encode
from mmrt.runtime.controller.rows.poison import MAX_STRIKES, STRIKE_BYTES
from mmrt.runtime.controller.state.effects import WriteState
from mmrt.runtime.controller.state.row_record import Strike, StrikeKind, decode_record, encode_record
from mmrt.schema.media import ItemShape, SegmentShape
from mmrt.schema.rows import Phase
from mmrt.tests.runtime.controller.test_machine import IMAGE, KEY, SHAPE, Driver, image, phases, refused, sent, text

CRASHED = m.Died()
TWO_SEGMENTS = ItemShape(
    "image", (1, 4, 8), 12, [SegmentShape("image", (1, 4, 4), 16, 4, 6), SegmentShape("image", (1, 4, 4), 16, 4, 6)]
)


def analysing(*keys: int) -> Driver:
    driver = Driver(num_rows=4, num_media_pages=16, num_patch_pages=32, num_embedding_pages=16, num_kv_pages=64)
    for key in keys:
        driver.submit(image(), key=key)
        driver.receive("gateway", m.Filled(1, key)).tick()
    return driver


def encoding_together(*keys: int, shape: ItemShape = SHAPE) -> Driver:
    """All segments of all requests in one plan of the encoder."""
    driver = analysing(*keys)
    driver.state.actors.pop("encoder")
    while any(plan.actor == "video" for plan in driver.state.plans.values()):
        driver.done("video", m.Analysed(shape) if isinstance(driver.plan("video")[1], p.Analyse) else None)
    while any(plan.actor == "prefill" for plan in driver.state.plans.values()):
        driver.done("prefill")
    driver.state.actors["encoder"] = 1
    driver.state.steering.encode = type(driver.state.steering.encode)(256, 16384, 1024)
    driver.tick()
    assert [part.row for part in encode_plan(driver).parts] == sorted(range(len(keys))) or len(keys) == 1
    return driver


def encode_plan(driver: Driver) -> p.Encode:
    _, plan = driver.plan("encoder")
    assert isinstance(plan, p.Encode)
    return plan


def test_a_shared_plan_is_split_and_the_second_death_tells_who_it_is() -> None:
    driver = encoding_together(1, 2, 3)
    assert not sent(driver.done("encoder", CRASHED), m.Failed)
    assert [part.row for part in encode_plan(driver).parts] == [0], "one piece of work of one request"
    driver.done("encoder")
    assert not driver.state.requests[1].record.strikes, "it was not this one"
    assert [part.row for part in encode_plan(driver).parts] == [1]
    failed = refused(driver.done("encoder", CRASHED))
    assert (failed.key, failed.status, failed.error_type) == (2, 500, "internal_error")
    assert "encoder process 2 times" in failed.message
    assert [part.row for part in encode_plan(driver).parts] == [2]
    driver.done("encoder")
    assert driver.state.requests[1].failure is None and driver.state.requests[3].failure is None
    assert driver.state.totals.quarantined == 1


def test_one_request_of_several_segments_is_split_too() -> None:
    driver = encoding_together(1, shape=TWO_SEGMENTS)
    assert len(encode_plan(driver).parts) == 2
    driver.done("encoder", CRASHED)
    assert len(encode_plan(driver).parts) == 1
    driver.done("encoder")
    assert driver.state.requests[1].record.strikes, "the other segment is suspected still"
    failed = refused(driver.done("encoder", CRASHED))
    assert failed.key == 1


@pytest.mark.parametrize("stage", ["analysis", "decoding", "prefill"])
def test_two_deaths_alone(stage: str) -> None:
    driver = analysing(KEY)
    actor = "prefill" if stage == "prefill" else "video"
    if stage != "analysis":
        driver.done("video", m.Analysed(SHAPE))
    assert not sent(driver.done(actor, CRASHED), m.Failed)
    record = driver.state.requests[KEY].record
    assert [strike.kind for strike in record.strikes] == [StrikeKind.CRASHED]
    assert decode_record(encode_record(record)) == record
    failed = refused(driver.done(actor, CRASHED))
    assert failed.status == 500 and actor in failed.message
    for other in ("video", "prefill", "encoder"):
        while any(plan.actor == other for plan in driver.state.plans.values()):
            driver.done(other)
    driver.receive("gateway", m.Delivered(1, KEY)).tick()
    assert driver.is_empty


def test_success_in_between_takes_the_strike_away() -> None:
    driver = Driver()
    driver.submit(text())
    driver.done("prefill", CRASHED)
    driver.done("prefill", m.Skipped())
    assert len(driver.state.requests[KEY].record.strikes) == 1
    driver.done("prefill", m.Done())
    assert not driver.state.requests[KEY].record.strikes


def test_an_error_in_a_batch_and_two_crashes_alone_are_all_that_a_row_keeps() -> None:
    driver = encoding_together(1, 2)
    driver.done("encoder", m.ItemError("an error", 500))
    driver.done("encoder", CRASHED)
    assert len(driver.state.requests[1].record.strikes) == MAX_STRIKES - 1
    driver.done("encoder")  # the other request's
    assert refused(driver.done("encoder", CRASHED)).key == 1
    assert len(driver.state.requests[1].record.strikes) == MAX_STRIKES


def test_the_same_death_is_counted_once() -> None:
    """A controller that dies between noting the strike and clearing the plan is told of it again."""
    driver = Driver()
    driver.submit(text())
    plan_id, _ = driver.plan("prefill")
    request = driver.state.requests[KEY]
    request.record.strikes.append(Strike(plan_id, 2, -1, -1, StrikeKind.CRASHED))
    assert not sent(driver.done("prefill", CRASHED), m.Failed)
    assert len(request.record.strikes) == 1


def test_a_cancelled_request_kills_no_second_time() -> None:
    driver = analysing(KEY)
    driver.receive("gateway", m.Cancel(1, KEY)).tick()
    assert driver.state.plans, "the video process may be at it"
    driver.done("video", CRASHED)
    assert driver.is_empty


def test_strikes_are_written_before_the_plan_is_cleared() -> None:
    driver = Driver()
    driver.submit(text())
    effects = driver.done("prefill", CRASHED)
    first = next(effect for effect in effects if isinstance(effect, WriteState))
    assert decode_record(first.state).strikes
    assert effects.index(first) == 0
    assert len(encode_record(decode_record(first.state))) < 200 and STRIKE_BYTES >= len(encode(Strike(2**63, 2, 99, 9999, 2)))


def test_other_actors_are_another_matter() -> None:
    driver = analysing(KEY)
    driver.done("video", m.Analysed(SHAPE))
    driver.done("video", CRASHED)
    assert not sent(driver.done("prefill", CRASHED), m.Failed), "one death of each is no two of either"


# late and unwanted work


def test_skipped_work_of_the_living_is_planned_again_and_of_the_late_fails() -> None:
    driver = Driver()
    driver.submit(text().asking(deadline_s=driver.now + 10))
    plan_id, _ = driver.plan("prefill")
    driver.done("prefill", m.Skipped())
    again, _ = driver.plan("prefill")
    assert again != plan_id
    driver.now += 11
    driver.receive("prefill", m.PlanDone("prefill", 1, again, 0.0, m.Skipped()))
    failed = refused(driver.tick())
    assert failed.status == 504


def test_what_was_generated_in_time_is_not_late_for_a_skipped_plan() -> None:
    driver = analysing(KEY)
    driver.done("video", m.Analysed(SHAPE))
    request = driver.state.requests[KEY]
    request.spec = image().asking(deadline_s=driver.now + 1)
    request.answer.end_code = 1  # decode ended it just as it was preempted
    driver.now += 2
    driver.done("video", m.Skipped())
    assert request.failure is None


def test_commands_carry_the_deadline_after_which_nobody_needs_them() -> None:
    driver = Driver(num_rows=3)
    (run,) = sent(driver.submit(text().asking(deadline_s=driver.now + 10), key=1), m.Run)
    assert isinstance(run, m.Run) and run.deadline_s == driver.now + 10
    (run,) = sent(driver.submit(text(), key=2), m.Run)
    assert isinstance(run, m.Run) and run.deadline_s == 0.0
    spec = m.RequestSpec(m.Generation("r", deadline_s=driver.now + 3), [1, 2, IMAGE, 3], [m.MediaItem("image", 10)], 4)
    driver.submit(spec, key=3)
    effects = driver.receive("gateway", m.Filled(1, 3)).tick()
    (run,) = sent(effects, m.Run)
    assert isinstance(run, m.Run) and run.deadline_s == driver.now + 3


def test_pages_of_a_dead_encoding_come_back_whoever_had_them_before() -> None:
    parts = [SegmentShape("image", (1, 4, 4), 16, 4, tokens) for tokens in (12, 6)]
    driver = Driver(prefill_budget=8, num_embedding_pages=6)
    driver.submit(image())
    driver.receive("gateway", m.Filled(1, KEY)).tick()
    driver.done("video", m.Analysed(ItemShape("image", (1, 4, 8), 18, parts)))
    for actor in ("prefill", "video", "encoder", "video", "prefill"):
        driver.done(actor)  # tokens 2 to 10 are prefilled: two of three pages are free, and the second segment has got them
    driver.done("encoder", CRASHED)
    driver.done("prefill")
    driver.done("encoder")
    assert Phase.DECODE in phases(driver.done("prefill"))
    assert driver.state.pools["embedding"].num_used == 0
