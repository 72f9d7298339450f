"""The choice of a place: the least busy, unless one that knows the work is nearly as idle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.runtime.controller.scheduling.routing import Routes, choose

UNITS = st.tuples(st.integers(0, 20).map(float), st.integers(0, 3).map(float))
PLACES = st.sampled_from("abcdef")


def test_examples() -> None:
    pending = {"a": (10.0,), "b": (5.0,), "c": (5.0,)}
    assert choose(pending) == "b", "the first of the least busy"
    assert choose({"a": (1.0, 2.0), "b": (1.0, 1.0)}) == "b", "the second number decides between equal ones"
    assert choose(pending, {"a": 7.0}, slack=4.0) == "b", "what it knows is not worth the wait"
    assert choose(pending, {"a": 7.0}, slack=5.0) == "a"
    assert choose(pending, {"a": 7.0, "c": 8.0}, slack=5.0) == "c"
    with pytest.raises(ValueError):
        choose({})


@given(st.dictionaries(PLACES, UNITS, min_size=1), st.dictionaries(PLACES, st.integers(0, 9).map(float)), st.integers(0, 9).map(float))
def test_no_place_is_chosen_that_is_much_busier(pending: dict[str, tuple[float, ...]], known: dict[str, float], slack: float) -> None:
    place = choose(pending, known, slack)
    least = min(units[0] for units in pending.values())
    assert pending[place][0] <= least + slack
    near = [other for other in pending if pending[other][0] <= least + slack]
    assert known.get(place, 0) == max(known.get(other, 0) for other in near)
    assert choose(pending) == min(pending, key=lambda other: (pending[other], other))


@given(st.dictionaries(PLACES, UNITS, min_size=1), st.integers(1, 30))
def test_round_robin_gives_every_place_its_turn(pending: dict[str, tuple[float, ...]], num_choices: int) -> None:
    routes = Routes("round_robin")
    places = sorted(pending)
    assert [routes.choose(pending) for _ in range(num_choices)] == [places[at % len(places)] for at in range(num_choices)]


def test_round_robin_passes_over_a_place_that_is_away() -> None:
    routes = Routes("round_robin")
    both = {"a": (0.0,), "b": (0.0,)}
    assert [routes.choose(places) for places in (both, {"b": (9.0,)}, both, both)] == ["a", "b", "a", "b"]


def test_random_is_the_same_in_equal_runs_and_even() -> None:
    pending = {"a": (0.0,), "b": (100.0,), "c": (0.0,)}
    first, again = Routes("random"), Routes("random")
    chosen = [first.choose(pending) for _ in range(3000)]
    assert chosen == [again.choose(pending) for _ in range(3000)]
    assert all(900 < chosen.count(place) < 1100 for place in pending)
    follows = [chosen[at + 1] for at, place in enumerate(chosen[:-1]) if place == "a"]
    assert all(250 < follows.count(place) < 420 for place in pending), "one choice does not tell the next"


def test_least_load_is_what_choose_says() -> None:
    routes = Routes("least_load")
    assert [routes.choose({"a": (2.0,), "b": (1.0,)}) for _ in range(3)] == ["b"] * 3
