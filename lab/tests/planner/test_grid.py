"""The search for goodput on a shared grid: it encloses known goodputs, in few loads, and goes on only where ranks are open."""

from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt_lab.planner.grid import LEAST_RATE, MOST_RATE, Bracket, Grid, undecided
from mmrt_lab.planner.measure import Outcome
from mmrt_lab.planner.report import choose, report_layouts
from mmrt_lab.planner.search import Search


def searched(start: float, goodput: float, width: int = 1) -> tuple[Bracket, int]:
    """The bracket of a layout that serves up to ``goodput``, and how many loads it took."""
    grid = Grid(0.05)
    bracket, count = Bracket(grid, grid.step(start)), 0
    while (step := bracket.next(width)) is not None:
        bracket.note(step, grid.rate(step) <= goodput)
        count += 1
        assert count < 60
    return bracket, count


@given(st.floats(0.02, 5000), st.floats(0.02, 5000))
def test_a_goodput_is_enclosed(start: float, goodput: float) -> None:
    grid, (bracket, _) = Grid(0.05), searched(start, goodput)
    assert bracket.passes is not None and bracket.fails == bracket.passes + 1
    assert grid.rate(bracket.passes) <= goodput < grid.rate(bracket.fails)


def test_a_search_that_begins_near_is_short() -> None:
    assert searched(50, 60)[1] <= 5 and searched(60, 50, width=3)[1] <= 4


def test_rates_end_at_the_limits() -> None:
    assert searched(1.0, 0.0)[0].passes is None and searched(1.0, 1e9)[0].fails is None
    grid = Grid(0.05)
    assert grid.rate(grid.step(1e-9)) <= LEAST_RATE and MOST_RATE / 1.05 <= grid.rate(grid.step(1e9)) <= MOST_RATE


@given(st.floats(0.01, 10000), st.sampled_from([0.02, 0.05, 0.3]))
def test_the_step_of_a_rate_is_the_last_one_not_above_it(rate: float, precision: float) -> None:
    grid = Grid(precision)
    step = grid.step(rate)
    assert grid.rate(step) <= rate * 1.001 and grid.rate(step + 1) > rate * 0.999


def instant(goodputs: dict[str, float], log: list[tuple[str, float]]) -> object:
    def measure(layout: str, rate: float) -> "Future[Outcome]":
        log.append((layout, rate))
        future: Future[Outcome] = Future()
        future.set_result(Outcome(rate=rate, num_requests=1, attainment=float(rate <= goodputs[layout]), missed="TBT"))
        return future

    return measure


@pytest.mark.parametrize("num_at_once", [1, 2, 5])
def test_ranks_are_exact_where_it_matters_and_few_loads_are_simulated(num_at_once: int) -> None:
    goodputs = {f"{n}EP+D": 10.0 * n for n in range(1, 8)} | {"near": 68.0, "nearer": 76.0}
    log: list[tuple[str, float]] = []
    search = Search(Grid(0.05), dict.fromkeys(goodputs, 40.0), ["6EP+D", "2EP+D"], 0.9)
    search.run(instant(goodputs, log), num_at_once, lambda text: None)  # type: ignore[arg-type]
    layouts = report_layouts(Grid(0.05), search.brackets, search.outcomes, dict.fromkeys(goodputs, 40.0), list(goodputs))
    assert layouts[0].layout == "nearer" and layouts[0].is_exact and layouts[0].missed == "TBT"
    chosen = choose(layouts, ["6EP+D", "2EP+D"])
    assert (chosen.layout, chosen.rank) == ("6EP+D", 4)
    by_name = {one.layout: one for one in layouts}
    assert not by_name["1EP+D"].is_exact and by_name["1EP+D"].rank == 9
    assert len(log) == len({*log}) < 60
    for one in layouts:
        assert one.goodput is not None and one.fails is not None and one.goodput <= goodputs[one.layout] < one.fails


def test_equal_layouts_share_a_rank() -> None:
    goodputs = {"a": 50.0, "b": 51.0, "c": 20.0}
    search = Search(Grid(0.05), dict.fromkeys(goodputs, 40.0), ["b"], 0.9)
    search.run(instant(goodputs, []), 1, lambda text: None)  # type: ignore[arg-type]
    layouts = report_layouts(Grid(0.05), search.brackets, search.outcomes, goodputs, list(goodputs))
    assert {one.layout: one.rank for one in layouts} == {"a": 1, "b": 1, "c": 3}


@given(st.lists(st.tuples(st.integers(40, 60), st.floats(1.0, 100.0)), min_size=2, max_size=6))
def test_all_that_share_the_rank_of_the_choice_are_known(layouts: list[tuple[int, float]]) -> None:
    """Each has a goodput, as a step of the grid, and a rate at which its search begins."""
    grid = Grid(0.05)
    steps = {str(number): step for number, (step, _) in enumerate(layouts)}
    search = Search(grid, {str(number): start for number, (_, start) in enumerate(layouts)}, ["0"], 0.9)
    search.run(instant({name: grid.rate(step) for name, step in steps.items()}, []), 1, lambda text: None)  # type: ignore[arg-type]
    ranks = {
        one.layout: one.rank for one in report_layouts(grid, search.brackets, search.outcomes, dict.fromkeys(steps, 1.0), [*steps])
    }
    assert ranks["0"] == 1 + sum(step > steps["0"] for step in steps.values())
    assert {name for name, rank in ranks.items() if rank == ranks["0"]} == {name for name, step in steps.items() if step == steps["0"]}


def test_nothing_is_open_once_all_are_exact() -> None:
    brackets = {name: searched(50, goodput)[0] for name, goodput in (("a", 40), ("b", 70))}
    assert undecided(brackets, ["a"]) == []
