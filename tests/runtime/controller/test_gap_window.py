"""What the last window of times between tokens says, and that policies are told."""

import pytest

from mmrt.runtime.controller.scheduling.facts import Objective
from mmrt.runtime.controller.scheduling.gap_window import ENOUGH, LEAST_S, MOST_S, SLICE_S, GapWindow
from mmrt.schema.gap_buckets import NUM_BUCKETS, bucket_of
from mmrt.tests.runtime.controller.test_machine import Driver, text


class Histogram:
    def __init__(self) -> None:
        self.counts = [0] * NUM_BUCKETS

    def add(self, gap_s: float, count: int) -> list[int]:
        self.counts[bucket_of(int(gap_s * 1e9))] += count
        return list(self.counts)


def fed(*seconds: tuple[float, int, int], objective_s: float = 0.1) -> GapWindow:
    """Each (how long, gaps of 50 ms per slice, gaps of 200 ms per slice)."""
    window, histogram, now = GapWindow(), Histogram(), 0.0
    histogram.add(3.0, 1000)  # from before
    window.look(now, list(histogram.counts), objective_s)
    for length_s, num_good, num_late in seconds:
        for _ in range(round(length_s / SLICE_S)):
            now += SLICE_S
            histogram.add(0.05, num_good)
            window.look(now, histogram.add(0.2, num_late), objective_s)
    return window


def test_nothing_is_known_before_the_first_gap_and_without_any() -> None:
    assert (fed().late_share, fed().p99_s) == (None, None)
    assert fed((5.0, 100, 1), (2 * MOST_S, 0, 0)).late_share is None


def test_the_share_of_late_gaps_and_p99() -> None:
    window = fed((5.0, 98, 2))
    assert window.late_share == pytest.approx(0.02) and window.p99_s == pytest.approx(0.2, rel=0.07)
    window = fed((5.0, 998, 2))
    assert window.late_share == pytest.approx(0.002) and window.p99_s == pytest.approx(0.05, rel=0.07)


def test_with_many_gaps_the_window_is_short_and_with_few_long() -> None:
    many, few = ENOUGH, 4
    assert fed((20.0, 0, many), (LEAST_S, many, 0)).late_share == 0
    assert fed((20.0, 0, few), (LEAST_S, few, 0)).late_share == pytest.approx(1 - LEAST_S / MOST_S)
    assert fed((20.0, 0, few), (MOST_S, few, 0)).late_share == 0
    assert (fed((20.0, many, 0)).began_s, fed((20.0, few, 0)).began_s) == (20.0 - LEAST_S, 20.0 - MOST_S)


def test_looks_within_a_slice_cost_nothing() -> None:
    window, histogram = GapWindow(), Histogram()
    window.look(0.0, histogram.add(0.05, 1), 0.1)
    window.look(SLICE_S / 2, histogram.add(0.2, 1), 0.1)
    assert window.late_share is None
    window.look(SLICE_S, list(histogram.counts), 0.1)
    assert window.late_share == 1


def test_policies_are_told() -> None:
    driver, histogram = Driver(), Histogram()
    driver.machine.tick(driver.now, (), (), histogram.add(0.01, 5))
    assert driver.state.facts.late_share is None and driver.state.facts.tbt_s == 0.05
    driver.machine.tick(driver.now + 1, (), (), histogram.add(0.2, 5))
    assert driver.state.facts.late_share == 1 and driver.state.facts.tbt_p99_s == pytest.approx(0.2, rel=0.07)
    driver.machine.tick(driver.now + 1 + SLICE_S / 2, (), (), list(histogram.counts))
    assert driver.state.facts.tbt_window_s == pytest.approx(1 + SLICE_S / 2), "since the first look, also where none is due"


@pytest.mark.parametrize(
    ("own_s", "undisturbed_s", "objective_s"), [(0.0, None, 0.05), (0.2, None, 0.2), (0.02, None, 0.02), (0.02, 0.03, 0.06)]
)
def test_the_objective_is_that_of_who_decodes(own_s: float, undisturbed_s: float | None, objective_s: float) -> None:
    """One that a step alone does not meet gives way."""
    driver = Driver(objectives={"text": Objective(1.0, own_s)})
    assert driver.state.tbt_objective_s == 0.05
    driver.submit(text())
    driver.done("prefill")
    assert driver.state.num_decoding == 1
    driver.state.steering.undisturbed_s = undisturbed_s
    assert driver.state.tbt_objective_s == pytest.approx(objective_s)
