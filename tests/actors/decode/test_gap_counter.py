"""Gaps are counted for members that go on, whoever else comes, leaves or waits."""

from hypothesis import given
from hypothesis import strategies as st

from mmrt.actors.decode.gap_counter import GapCounter


def counter_of(found: list[tuple[int, int]]) -> GapCounter:
    """Make a counter; prefill draws no first token for it."""

    def never(gap_ns: int, count: int) -> None:
        raise AssertionError("nobody joined behind a first token")

    return GapCounter(lambda gap_ns, count: found.append((gap_ns, count)), never)


def gaps_of(*steps: tuple[list[int], set[int], int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    counter = counter_of(found)
    for rows, members, now_ns in steps:
        counter.committed(rows, members, now_ns)
    return found


def test_the_same_members_step_after_step() -> None:
    assert gaps_of(([1, 2], {1, 2}, 100), ([1, 2], {1, 2}, 130), ([1, 2], {1, 2}, 200)) == [(30, 2), (70, 2)]


def test_tokens_of_one_step_share_its_time() -> None:
    found: list[tuple[int, int]] = []
    counter = counter_of(found)
    counter.committed([1, 2, 3], {1, 2, 3}, 100, [1, 1, 1])
    counter.committed([1, 2, 3], {1, 2}, 160, [3, 1, 0])
    counter.committed([1, 2], {1, 2}, 200, [2, 2])
    assert found == [(20, 3), (60, 2), (20, 4)]


def test_who_comes_and_who_leaves_makes_no_gap() -> None:
    assert gaps_of(([1, 2], {1}, 100), ([1], {1, 2}, 130), ([1, 2], {1, 2}, 200)) == [(30, 1), (70, 1)]


def test_who_waits_for_pages_meanwhile_has_a_long_gap() -> None:
    assert gaps_of(([1, 2], {1, 2}, 100), ([1], {1, 2}, 130), ([1, 2], {1, 2}, 200)) == [(30, 1), (70, 1), (100, 1)]


def test_a_row_that_leaves_between_two_steps_makes_no_gap_when_it_comes_back() -> None:
    """Its row may be another request's by then; and nobody stepped meanwhile, so its absence does not show in a step."""
    found: list[tuple[int, int]] = []
    counter = counter_of(found)
    counter.committed([1], {1}, 100)
    counter.left(1)
    counter.committed([1], {1}, 9000)
    counter.committed([1, 2], {1, 2}, 9030)
    counter.committed([2], {1, 2}, 9060)
    counter.left(1)
    counter.left(5)
    counter.committed([1, 2], {1, 2}, 9090)
    assert found == [(30, 1), (30, 1), (30, 1)]


def test_who_leaves_while_it_waits_makes_no_gap_when_its_row_comes_back() -> None:
    steps = ([1, 2], {1, 2}, 100), ([1], {1, 2}, 130), ([1], {1}, 160), ([1, 2], {1, 2}, 200)
    assert gaps_of(*steps) == [(30, 1), (30, 1), (40, 1)]


def test_the_next_owner_of_a_row_has_no_gap_behind_the_first_token_of_the_last_one() -> None:
    """Whether that one left, the row was given away, or a step came that it is no member of."""
    found: list[tuple[int, int]] = []
    counter = counter_of(found)
    for row in (1, 2, 3):
        counter.joined(row, 90)
    counter.left(1)
    counter.joined(2, None)
    counter.committed([1, 2], {1, 2}, 100)
    counter.committed([1, 2, 3], {1, 2, 3}, 130)
    counter.joined(1, None)
    counter.committed([1, 2], {1, 2}, 150)
    assert found == [(30, 2), (20, 1)]


def test_the_gap_behind_a_first_token_of_prefill_counts_apart() -> None:
    """Once, however often the row waits for pages; not that of who left before the step, nor of the row's next owner."""
    found: list[tuple[int, int]] = []
    first: list[tuple[int, int]] = []
    counter = GapCounter(lambda gap_ns, count: found.append((gap_ns, count)), lambda gap_ns, count: first.append((gap_ns, count)))
    for row in (1, 2, 3, 4):
        counter.joined(row, 90)
    counter.left(3)
    counter.committed([1], {1, 2}, 100)
    counter.joined(4, None)
    counter.committed([1, 2, 4], {1, 2, 4}, 130, [1, 2, 1])
    counter.committed([1, 2, 4], {1, 2, 4}, 150)
    assert first == [(10, 1), (20, 2)] and found == [(30, 1), (20, 3)]


@given(st.lists(st.tuples(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)), st.integers(1, 50)), max_size=20))
def test_every_member_that_goes_on_counts_once_a_step(plan: list[tuple[set[int], set[int], int]]) -> None:
    """Against a dictionary of last times."""
    steps, now_ns = [], 0
    last_ns: dict[int, int] = {}
    expected: list[int] = []
    for stepped, stays, later_ns in plan:
        now_ns += later_ns
        expected += [now_ns - last_ns[row] for row in stepped if row in last_ns]
        last_ns = {row: at_ns for row, at_ns in (last_ns | dict.fromkeys(stepped, now_ns)).items() if row in stays}
        steps.append((sorted(stepped), stays, now_ns))
    found = gaps_of(*steps)
    assert sorted(gap for gap, count in found for _ in range(count)) == sorted(expected)
