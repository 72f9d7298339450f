"""Who is to blame for a death in the middle of a step: the work, or somebody from outside."""

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from mmrt.runtime.process.crash_cause import (
    FORGET_STEPS,
    Death,
    ExitNote,
    is_crash,
    judge,
    leave_notes,
    oom_kills,
    outlive,
    read_exit_note,
    recent_crashes,
    write_exit_note,
)
from mmrt.shm.run_directory import NOTES
from mmrt.shm.status import ActorReading, ActorState

DEADLINE_NS = 10_000


def reading(**words: Any) -> ActorReading:
    fields: dict[str, Any] = {
        "actor": "video", "state": ActorState.ACTIVE, "generation": 3, "pid": 77, "started_ns": 1, "step_plan": 9, "step_start_ns": 5,
        "step_deadline_ns": DEADLINE_NS, "steps": 4, "busy_ns": 0, "queue_depth": 0,
    }  # fmt: skip
    return ActorReading(**{**fields, **words})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory as runs have it, as far as notes go."""
    (tmp_path / NOTES).mkdir()
    return tmp_path


def blamed(note: ExitNote | None, now_ns: int = 6_000, kills: int = 0, **words: Any) -> bool:
    death = judge(reading(**words), note, now_ns, kills)
    assert death is not None and death.step == 9
    return death.crashed


def test_of_several_actors_of_a_process_the_one_that_ended_it_is_to_blame(run: Path) -> None:
    note = ExitNote(77, 1, hang=True)
    actors = ("encoder", "prefill", "decode")
    assert leave_notes(run, note, actors, ["prefill"]) == ["prefill"]
    assert [blamed(read_exit_note(run, actor, 77), kills=3) for actor in actors] == [False, True, False]


def test_where_nobody_knows_all_are_to_blame_but_for_who_has_been_told_otherwise(run: Path) -> None:
    write_exit_note(run, "encoder", ExitNote(77, 1, other_actor=True))
    write_exit_note(run, "prefill", ExitNote(76, 1, other_actor=True))  # of a process before
    note = ExitNote(77, -signal.SIGSEGV)
    assert leave_notes(run, note, ("encoder", "prefill", "decode"), []) == ["prefill", "decode"]
    assert [blamed(read_exit_note(run, actor, 77)) for actor in ("encoder", "prefill", "decode")] == [False, True, True]


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        (ExitNote(77, -signal.SIGSEGV), True),
        (ExitNote(77, 1), True),
        (ExitNote(77, -signal.SIGKILL, hang=True), True),
        (ExitNote(77, -signal.SIGKILL), False),
        (ExitNote(77, 0), False),
        (ExitNote(77, -signal.SIGSEGV, debugger=True), False),
        (None, False),
    ],
)
def test_who_declares_no_steps_may_crash_too(note: ExitNote | None, expected: bool) -> None:
    last = reading(step_deadline_ns=0)
    assert is_crash(last, note, 0) == expected
    assert not is_crash(reading(step_deadline_ns=0, state=ActorState.STOPPING), note, 0), "it has ended in order"


def test_memory_that_ran_out_and_what_nobody_saw_are_crashes_without_steps_too() -> None:
    last, killed = reading(step_deadline_ns=0, oom_kills=3), ExitNote(77, -signal.SIGKILL)
    assert [is_crash(last, killed, kills) for kills in (3, 4)] == [False, True]
    assert is_crash(last, None, 3, is_supervised=False) and not is_crash(reading(debugged=True), None, 0, is_supervised=False)


def test_no_step_no_death() -> None:
    assert judge(reading(step_deadline_ns=0), ExitNote(77, -11), 6_000, 0) is None
    assert judge(reading(state=ActorState.ABSENT), None, 6_000, 0) is None


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS])
def test_signals_that_a_process_raises_in_itself_are_its_works_fault(number: int) -> None:
    assert blamed(ExitNote(77, -number))


def test_who_exits_in_a_step_is_to_blame() -> None:
    assert blamed(ExitNote(77, 0)) and blamed(ExitNote(77, 3))
    assert blamed(None, raised=True)


@pytest.mark.parametrize(
    ("words", "now_ns", "kills", "reason"),
    [
        ({}, 6_000, 0, "ended, and no supervisor saw how,"),
        ({}, 2 * DEADLINE_NS, 0, "hung"),
        ({"raised": True}, 6_000, 0, "failed with an exception"),
        ({}, 6_000, 1, "was killed because memory ran out"),
    ],
)
def test_without_a_supervisor_the_work_is_suspected(words: dict[str, Any], now_ns: int, kills: int, reason: str) -> None:
    death = judge(reading(**words), None, now_ns, kills, is_supervised=False)
    assert death is not None
    assert (death.crashed, death.reason, death.crashes) == (True, reason, 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_kills_from_outside_condemn_nobody(number: int) -> None:
    assert not blamed(ExitNote(77, -number))
    assert not blamed(ExitNote(77, -number), now_ns=2 * DEADLINE_NS), "the supervisor knows that it was no hang"
    assert not blamed(None)


def test_hangs_are_to_blame() -> None:
    assert blamed(ExitNote(77, -signal.SIGKILL, hang=True))
    assert blamed(None, now_ns=2 * DEADLINE_NS), "nobody tells under systemd: the deadline does"


def test_memory_that_ran_out_is_to_blame() -> None:
    assert blamed(ExitNote(77, -signal.SIGKILL), kills=3, oom_kills=2)
    assert not blamed(ExitNote(77, -signal.SIGKILL), kills=2, oom_kills=2)
    assert not blamed(ExitNote(77, -signal.SIGTERM), kills=3, oom_kills=2)


def test_a_debugger_is_never_to_blame_on_the_work() -> None:
    assert not blamed(ExitNote(77, 1, debugger=True), raised=True, now_ns=2 * DEADLINE_NS)
    assert not blamed(ExitNote(77, 1), raised=True, debugged=True) and not blamed(None, debugged=True)
    unseen = judge(reading(debugged=True), None, 6_000, 0, is_supervised=False)
    assert unseen is not None and not unseen.crashed
    assert judge(reading(crashes=2), ExitNote(77, 0, debugger=True), 6_000, 0) == Death(9, False, "ended in a debugger", 2)


def test_crashes_are_counted_until_many_steps_went_well() -> None:
    crash, kill = ExitNote(77, -11), ExitNote(77, -9)
    first = judge(reading(crashes=0), crash, 6_000, 0)
    again = judge(reading(crashes=1), crash, 6_000, 0)
    killed = judge(reading(crashes=2), kill, 6_000, 0)
    assert first and again and killed and (first.crashes, again.crashes, killed.crashes) == (1, 2, 2)
    assert recent_crashes(reading(crashes=2, steps=2 * FORGET_STEPS - 1), None) == 1
    assert recent_crashes(reading(crashes=2, steps=9 * FORGET_STEPS), None) == 0


def test_a_note_is_about_one_process(run: Path) -> None:
    assert read_exit_note(run, "video", 5) is None
    note = ExitNote(5, -11, True, False)
    write_exit_note(run, "video", note)
    assert read_exit_note(run, "video", 5) == note
    assert read_exit_note(run, "video", 6) is None and read_exit_note(run, "encoder", 5) is None
    (run / NOTES / "video.exit").write_text("torn")
    assert read_exit_note(run, "video", 5) is None
    write_exit_note(run / "gone", "video", note)


def test_the_machine_counts_its_oom_kills() -> None:
    assert oom_kills() >= 0


def test_a_process_is_outlived_and_no_other_with_its_pid() -> None:
    turns: list[float] = []

    def pause(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) == 3:
            sleeper.kill()

    sleeper = subprocess.Popen(["sleep", "100"])
    try:
        while Path(f"/proc/{sleeper.pid}/comm").read_text() != "sleep\n":
            time.sleep(0.001)  # between fork and exec it is called as this process is
        outlive(sleeper.pid, "mmrt-decode", pause)
        assert turns == []
        outlive(sleeper.pid, "sleep", pause)
        assert len(turns) >= 3
    finally:
        sleeper.kill()
        sleeper.wait()
    del turns[:]
    outlive(sleeper.pid, "sleep", pause)
    assert turns == []
