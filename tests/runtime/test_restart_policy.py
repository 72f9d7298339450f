"""When a dead actor starts again: backoff, crash loops, and that the two do not cancel each other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrt.runtime.restart_policy import GiveUp, RestartHistory, RestartPolicy, StartAgain, decide

POLICY = RestartPolicy(limit=4, window_s=30.0, backoff_s=0.1, backoff_max_s=0.3)


def outcomes(lifetimes_s: list[float], policy: RestartPolicy = POLICY, jitter: float = 0.0) -> list[StartAgain | GiveUp]:
    """Decisions for deaths after these lifetimes, one after another."""
    history, found = RestartHistory(), []
    for lifetime_s in lifetimes_s:
        decision, history = decide(policy, history, lifetime_s=lifetime_s, status=1, jitter=jitter)
        found.append(decision)
    return found


def test_delays_double_up_to_the_limit_and_then_it_gives_up() -> None:
    *again, last = outcomes([0.0] * 4)
    assert [decision.delay_s for decision in again if isinstance(decision, StartAgain)] == [0.1, 0.2, 0.3]
    assert isinstance(last, GiveUp) and "4 failures within 30 s" in last.reason


def test_a_long_life_forgets() -> None:
    decisions = outcomes([0.0, 0.0, 31.0, 0.0, 0.0])
    assert all(isinstance(decision, StartAgain) for decision in decisions)
    assert decisions[2:] == [StartAgain(0.1), StartAgain(0.2), StartAgain(0.3)]


def test_a_steady_trickle_is_no_crash_loop() -> None:
    assert all(isinstance(decision, StartAgain) for decision in outcomes([11.0] * 100))


def test_long_backoff_does_not_hide_a_crash_loop() -> None:
    slow = RestartPolicy(limit=4, window_s=30.0, backoff_s=60.0, backoff_max_s=600.0)
    assert isinstance(outcomes([0.1] * 4, slow)[-1], GiveUp)


@pytest.mark.parametrize(("jitter", "delay_s"), [(0.0, 0.1), (0.5, 0.075), (0.999, 0.05005)])
def test_jitter_shortens_by_up_to_half(jitter: float, delay_s: float) -> None:
    assert outcomes([0.0], jitter=jitter) == [StartAgain(pytest.approx(delay_s))]


def test_a_configuration_error_is_final_and_success_is_a_failure_too() -> None:
    assert isinstance(decide(POLICY, RestartHistory(), lifetime_s=0, status=2, jitter=0)[0], GiveUp)
    assert isinstance(decide(POLICY, RestartHistory(), lifetime_s=0, status=0, jitter=0)[0], StartAgain)
    assert isinstance(decide(POLICY, RestartHistory(), lifetime_s=0, status=-9, jitter=0)[0], StartAgain)


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.floats(0, 1e6), max_size=50),
    st.floats(0.001, 100),
    st.integers(1, 10),
    st.floats(0, 1, exclude_max=True),
)
def test_delays_are_bounded_and_history_is_short(lifetimes_s: list[float], backoff_s: float, limit: int, jitter: float) -> None:
    policy = RestartPolicy(limit=limit, window_s=30.0, backoff_s=backoff_s, backoff_max_s=100.0)
    history = RestartHistory()
    for lifetime_s in lifetimes_s:
        decision, history = decide(policy, history, lifetime_s=lifetime_s, status=1, jitter=jitter)
        if isinstance(decision, GiveUp):
            assert history.num_failures == limit
            return
        assert backoff_s / 2 <= decision.delay_s <= 100.0
        assert history.num_failures < limit


def test_deaths_in_the_work_of_requests_are_no_crash_loop() -> None:
    """Whoever sends what kills an actor must not be able to end the run: the request is quarantined instead."""
    history = RestartHistory((0.1, 0.1))
    for _ in range(100):
        decision, history = decide(POLICY, history, lifetime_s=0.0, status=-11, jitter=0.0, in_step=True)
        assert decision == StartAgain(POLICY.backoff_s)
    assert history.num_failures == 2
    assert isinstance(decide(POLICY, history, lifetime_s=0.0, status=2, jitter=0.0, in_step=True)[0], GiveUp)
