"""The search for the goodput, and the area under a curve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt_lab.goodput.search import Bounds, area, bounds, find_goodput

LIMITS = dict(target=0.9, precision=0.05, least=0.01, most=1000.0)


@given(st.floats(0.012, 900.0), st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=4), st.floats(0.01, 0.5))
def test_the_goodput_is_enclosed(capacity: float, rates: list[float], precision: float) -> None:
    measured: list[float] = []

    def measure(rate: float) -> float:
        measured.append(rate)
        return 1.0 if rate <= capacity else 0.5

    found = find_goodput(measure, rates, **(LIMITS | {"precision": precision}))
    assert found.fails is not None and found.goodput <= capacity < found.fails <= found.goodput * (1 + precision) * (1 + 1e-9)
    assert len(measured) == len({*measured}) < len(rates) + 30 and set(rates) <= set(measured)


def test_nothing_passes_or_everything() -> None:
    assert find_goodput(lambda rate: 0.0, [1.0], **LIMITS) == Bounds(goodput=0.0, fails=0.01)
    assert find_goodput(lambda rate: 1.0, [1.0], **LIMITS) == Bounds(goodput=1000.0, fails=None)


def test_a_rate_that_passes_by_chance_does_not_count() -> None:
    assert bounds([(4.0, 0.95), (1.0, 1.0), (2.0, 0.5), (3.0, 0.2)], 0.9) == Bounds(goodput=1.0, fails=2.0)
    assert bounds([(1.0, 0.9)], 0.9) == Bounds(goodput=1.0, fails=None)


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 1)), min_size=2, max_size=9, unique_by=lambda point: round(point[0], 3)))
def test_the_area_is_a_mean_attainment(points: list[tuple[float, float]]) -> None:
    found = area(points)
    shares = [share for _, share in points]
    assert found is not None and min(shares) - 1e-9 <= found <= max(shares) + 1e-9
    assert area([(rate, 0.25) for rate, _ in points]) == pytest.approx(0.25)


def test_a_falling_curve_has_half_the_area() -> None:
    assert area([(3.0, 0.0), (1.0, 1.0)]) == 0.5 and area([(1.0, 1.0)]) is None
