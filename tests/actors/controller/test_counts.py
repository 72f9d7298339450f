"""The work that the controller says is left: what a medium's share of tokens under load follows (VL9)."""

import msgspec

from mmrt.actors.controller.counts import stats_of
from mmrt.runtime.bus import messages as m
from mmrt.runtime.controller.scheduling.facts import Cost, Facts
from mmrt.schema.media import MediaOptions
from mmrt.shm.controller_stats import StatsSnapshot
from mmrt.tests.runtime.controller.test_machine import KEY, SHAPE, Driver, image, sent


def work_left_s(driver: Driver) -> float:
    driver.state.facts = Facts(encode=Cost(0.5, 0.01, 100), prefill=Cost(0.25, 0.1, 100))
    return round(stats_of(driver.state, StatsSnapshot()).work_left_s, 6)


def picture(num_pixels: int, share: float) -> m.RequestSpec:
    item = m.MediaItem("image", 10, num_pixels=num_pixels, options=MediaOptions(token_share=share))
    return msgspec.structs.replace(image(), items=[item])


def test_a_picture_counts_before_its_analysis_by_its_pixels_and_then_by_its_rows() -> None:
    driver = Driver(row_pixels=100, most_pixels=1000, rows_per_token=4)
    assert work_left_s(driver) == 0.0
    driver.submit(picture(800, 1.0))
    assert work_left_s(driver) == round(0.5 + 8 * 0.01 + 0.25 + (5 + 8 // 4) * 0.1, 6), "8 rows, and 5 tokens with the placeholder"
    driver.submit(picture(10**6, 0.5), KEY + 1)
    assert work_left_s(driver) == round(0.5 + (8 + 5) * 0.01 + 0.25 + (10 + 13 // 4) * 0.1, 6), "of no more pixels than are left of it"
    driver.submit(picture(-1, 1.0), KEY + 2)
    assert work_left_s(driver) == round(0.5 + 13 * 0.01 + 0.25 + (15 + 13 // 4) * 0.1, 6), "it does not say how many it has"


def test_the_gateway_hears_of_the_least_share() -> None:
    driver = Driver()
    assert not sent(driver.submit(picture(800, 0.25)), m.Prepared)
    driver.receive("gateway", m.Filled(1, KEY))
    driver.tick()
    (prepared,) = sent(driver.done("video", m.Analysed(SHAPE)), m.Prepared)
    assert isinstance(prepared, m.Prepared) and prepared.media_share == 0.25
    (left,) = {request.rows_left for request in driver.state.requests.values()}
    assert work_left_s(driver) == round(0.5 + 0.01 * left + 0.25 + 0.1 * driver.state.requests[KEY].tokens_left, 6)
