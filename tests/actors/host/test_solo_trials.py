"""Solo trials after a crash, generation by generation: a culprit is found at the second crash, company is never."""

import signal

from mmrt.actors.host.solo_trials import SoloTrials, solo_step
from mmrt.runtime.process.crash_cause import MAX_UNEXPLAINED, Death, ExitNote, judge
from mmrt.shm.status import ActorReading, ActorState

ROWS = [(0, 1), (1, 7)]
CRASH = ExitNote(77, -signal.SIGSEGV)


def next_death(step: int, crashes: int) -> Death | None:
    """Of a generation that crashed in ``step`` and began with so many unexplained crashes."""
    last = ActorReading("decode", ActorState.ACTIVE, 3, 77, 1, step, 5, 10_000, 4, 0, 0, crashes=crashes)
    return judge(last, CRASH, 6_000, 0)


def test_a_culprit_is_found_at_the_second_crash_and_leaves_nothing_unexplained() -> None:
    first = SoloTrials(next_death(5, 0), ROWS)
    assert (first.guilty, first.suspects, first.crashes) == (None, ROWS, 1)
    first.passed(ROWS[0])
    assert first.held == {1}
    second = SoloTrials(next_death(solo_step(ROWS[1]), first.crashes), ROWS)
    assert (second.guilty, second.suspects, second.crashes) == (ROWS[1], ROWS[:1], 0)


def test_crashes_in_company_only_add_up_until_they_count_as_a_crash_loop() -> None:
    crashes = 0
    for number in range(1, MAX_UNEXPLAINED + 1):
        trials = SoloTrials(next_death(5, crashes), ROWS)
        for place in ROWS:
            trials.passed(place)
        assert not trials.held
        crashes = trials.crashes
        assert crashes == number
