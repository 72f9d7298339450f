"""When a dead actor starts again: backoff, crash loops, probes, and that none of them cancels another."""

from typing import NamedTuple, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.runtime.supervisor.restart_policy import (
    PROBE_MAX_S,
    PROBE_S,
    Broken,
    Cause,
    Decision,
    RestartHistory,
    RestartPolicy,
    StartAgain,
    decide,
)

POLICY = RestartPolicy(limit=4, window_s=30.0, backoff_s=0.1, backoff_max_s=0.3)


class Death(NamedTuple):
    lifetime_s: float
    cause: Cause = "itself"
    status: int = 1


def outcomes(deaths: list[Death], policy: RestartPolicy = POLICY, jitter: float = 0.0) -> list[Decision]:
    """Decisions after these deaths, one after another."""
    history, found = RestartHistory(), []
    for death in deaths:
        decision, history = decide(policy, history, lifetime_s=death.lifetime_s, status=death.status, jitter=jitter, cause=death.cause)
        found.append(decision)
    return found


def after_lives(*lifetimes_s: float) -> list[Decision]:
    return outcomes([Death(lifetime_s) for lifetime_s in lifetimes_s])


DEATHS = st.builds(
    Death, st.one_of(st.just(0.0), st.floats(0.001, 1e6)), st.sampled_from(get_args(Cause)), st.sampled_from((0, 1, -9, -11, -15))
)


def test_delays_double_up_to_the_limit_and_then_it_is_broken() -> None:
    *again, last = after_lives(0.0, 0.0, 0.0, 0.0)
    assert again == [StartAgain(0.1), StartAgain(0.2), StartAgain(0.3)]
    assert last == Broken("4 failures within 30 s of running (supervisor.restart_limit)", PROBE_S)


def test_a_long_life_forgets() -> None:
    decisions = after_lives(0.0, 0.0, 31.0, 0.0, 0.0)
    assert decisions[2:] == [StartAgain(0.1), StartAgain(0.2), StartAgain(0.3)]


def test_a_steady_trickle_is_no_crash_loop() -> None:
    assert all(isinstance(decision, StartAgain) for decision in after_lives(*[11.0] * 100))


def test_long_backoff_does_not_hide_a_crash_loop() -> None:
    slow = RestartPolicy(limit=4, window_s=30.0, backoff_s=60.0, backoff_max_s=600.0)
    assert isinstance(outcomes([Death(0.1)] * 4, slow)[-1], Broken)


@pytest.mark.parametrize(("jitter", "delay_s"), [(0.0, 0.1), (0.5, 0.075), (0.999, 0.05005)])
def test_jitter_shortens_by_up_to_half(jitter: float, delay_s: float) -> None:
    assert outcomes([Death(0.0)], jitter=jitter) == [StartAgain(pytest.approx(delay_s))]


def test_a_configuration_error_breaks_at_once_and_success_is_a_failure_too() -> None:
    assert isinstance(outcomes([Death(0.0, status=2)])[0], Broken)
    assert isinstance(outcomes([Death(0.0, "work", status=2)])[0], Broken)
    assert isinstance(outcomes([Death(0.0, status=0)] * 4)[-1], Broken)


def test_deaths_in_the_work_of_requests_are_no_crash_loop() -> None:
    """Whoever sends what kills an actor must not be able to break it: the request is quarantined instead."""
    deaths = [Death(0.1), Death(0.1), *[Death(0.0, "work", -11)] * 100, Death(0.0)]
    decisions = outcomes(deaths)
    assert decisions[2:-1] == [StartAgain(POLICY.backoff_s)] * 100
    assert isinstance(decisions[-1], StartAgain)


@pytest.mark.parametrize("cause", ["work", "outside"])
def test_the_time_of_a_process_counts_whatever_it_died_of(cause: Cause) -> None:
    """Four starts that fail, each followed by an hour of good work and a death that does not count: the fifth is no crash loop."""
    decisions = outcomes([Death(0.0), Death(3600.0, cause, -9)] * 50)
    assert all(isinstance(decision, StartAgain) for decision in decisions)


def test_the_time_of_a_process_that_made_room_for_another_counts_too() -> None:
    """Failed starts, each followed by an hour and a restart on purpose."""
    history = RestartHistory()
    for _ in range(20):
        decision, history = decide(POLICY, history, lifetime_s=0.0, status=1, jitter=0.0)
        assert decision == StartAgain(0.1)
        history = history.aged(3600.0, POLICY.window_s)


def test_kills_only_delay_and_the_first_not_even_that() -> None:
    decisions = outcomes([Death(0.0, "outside", -9)] * 5)
    assert decisions == [StartAgain(0.0), StartAgain(0.1), StartAgain(0.2), StartAgain(0.3), StartAgain(0.3)]
    assert outcomes([Death(0.0), Death(0.0, "outside", -9)])[-1] == StartAgain(0.1)


def test_probes_come_at_growing_intervals() -> None:
    delays_s = [decision.delay_s for decision in after_lives(*[0.0] * 12)[3:]]
    assert delays_s == [5.0, 10.0, 20.0, 40.0, *[PROBE_MAX_S] * 5]


def test_a_probe_that_serves_for_a_moment_only_is_followed_by_the_next() -> None:
    decisions = after_lives(0.0, 0.0, 0.0, 0.0, 0.0, 3.0)
    assert decisions[-1] == Broken("4 failures within 30 s of running (supervisor.restart_limit)", 20.0)


def test_a_probe_that_serves_for_long_forgets_all() -> None:
    assert after_lives(0.0, 0.0, 0.0, 0.0, 0.0, 31.0, 0.0) == [
        *after_lives(0.0, 0.0, 0.0, 0.0, 0.0),
        StartAgain(0.1),
        StartAgain(0.2),
    ]


def test_a_probe_that_somebody_kills_leaves_it_as_it_was() -> None:
    """While it starts; once it has served, the kill is as harmless as any."""
    broken = [Death(0.0)] * 4
    assert outcomes([*broken, Death(0.0, "outside", -9), Death(0.0)])[-2:] == [Broken(outcomes(broken)[-1].reason, 10.0)] * 2  # type: ignore[union-attr]
    assert isinstance(outcomes([*broken, Death(1.0, "outside", -9)])[-1], StartAgain)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(DEATHS, max_size=50), st.floats(0.001, 100), st.integers(1, 10), st.floats(0, 1, exclude_max=True))
def test_what_is_kept_and_waited_for_is_bounded(deaths: list[Death], backoff_s: float, limit: int, jitter: float) -> None:
    policy = RestartPolicy(limit=limit, window_s=30.0, backoff_s=backoff_s, backoff_max_s=100.0)
    history = RestartHistory()
    for death in deaths:
        was_broken = history.reason
        decision, history = decide(policy, history, lifetime_s=death.lifetime_s, status=death.status, jitter=jitter, cause=death.cause)
        assert len(history.failure_ages_s) <= limit and len(history.kill_ages_s) <= limit
        assert all(0 <= age_s <= policy.window_s for age_s in (*history.failure_ages_s, *history.kill_ages_s))
        if isinstance(decision, Broken):
            assert PROBE_S / 2 <= decision.delay_s <= PROBE_MAX_S
            assert history.reason == decision.reason
            # Only its own doing breaks it.
            assert death.cause == "itself" or was_broken and death.lifetime_s == 0
        else:
            assert backoff_s / 2 <= decision.delay_s <= 100.0 or decision.delay_s == 0 and death.cause == "outside"
            assert not history.reason


@settings(deadline=None)
@given(st.lists(DEATHS.filter(lambda death: death.cause != "itself"), max_size=200), st.integers(1, 3))
def test_nobody_else_can_break_it(deaths: list[Death], limit: int) -> None:
    policy = RestartPolicy(limit=limit)
    assert all(isinstance(decision, StartAgain) for decision in outcomes(deaths, policy))


@settings(deadline=None)
@given(st.lists(st.tuples(DEATHS, st.floats(30.1, 1e6)), max_size=50))
def test_lives_longer_than_the_window_never_add_up(deaths: list[tuple[Death, float]]) -> None:
    """Each death, of whatever kind, behind a long life."""
    policy = RestartPolicy(limit=2)
    found = outcomes([death._replace(lifetime_s=long_s) for death, long_s in deaths], policy)
    assert all(isinstance(decision, StartAgain) for decision in found)
