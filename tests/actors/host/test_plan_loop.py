"""The loop around plans: each is done once and answered as often as it is asked for."""

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from mmrt.actors.host.plan_checks import still_wanted
from mmrt.actors.host.plan_loop import KEPT_RESULTS, PlanLoop, serve_plans
from mmrt.runtime.bus.copy_plans import Load, LoadChunk
from mmrt.runtime.bus.messages import Died, Done, ItemError, PlanDone, Result, Run, Skipped, ToController, Welcome
from mmrt.runtime.bus.plans import Plan, Prefill, PrefillChunk
from mmrt.runtime.bus.wire import encode
from mmrt.runtime.process.crash_cause import Death
from mmrt.schema.rows import Phase
from mmrt.shm.errors import StalePage
from mmrt.shm.plan_table import PlanTable
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.sequence_table import SequenceTable
from mmrt.tests.actors.host.fake_actor import FakeActor

PREFILL = 5  # the actor's index


def chunk(row: int, row_generation: int = 1) -> PrefillChunk:
    return PrefillChunk(row, row_generation, 0, 0, 4, [])


class Work:
    """A plan table, and what has been executed by a loop over a script."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.table = PlanTable.create(run, 4, 4096)
        self.rows = SequenceTable.create(run, 4, 64, 4)
        for row in range(3):
            self.rows.begin(row)
            self.rows.set_phase(row, Phase.PREPARE)
        self.num_executed = 0
        self.error: Exception | None = None
        self.during: Callable[[], object] = lambda: None
        self.plan = Prefill([chunk(0)])
        self.seen: list[Plan] = []

    def write(self, slot: int, plan_id: int) -> Run:
        self.table.write(slot, plan_id, PREFILL, encode(self.plan))
        return Run(1, slot, plan_id)

    def execute(self, plan: Plan) -> Result:
        self.seen.append(plan)
        self.num_executed += 1
        self.during()
        if self.error is not None:
            raise self.error
        return Done()

    def serve(self, *script: object, death: Death | None = None, is_aside: Callable[[Plan], bool] | None = None) -> list[ToController]:
        self.actor = FakeActor(self.run, "prefill", script)  # type: ignore[arg-type]
        self.actor.death = death
        serve_plans(self.actor, self.execute, self.rows, is_aside=is_aside)  # type: ignore[arg-type]
        assert self.actor.is_serving
        return self.actor.sent


@pytest.fixture
def work(run: RunDirectory) -> Work:
    return Work(run)


def answers(sent: list[ToController]) -> list[tuple[int, Result]]:
    assert all(isinstance(done, PlanDone) and (done.actor, done.generation) == ("prefill", 1) for done in sent)
    return [(done.plan_id, done.result) for done in sent if isinstance(done, PlanDone)]


def test_plans_are_done_in_order_one_per_turn(work: Work) -> None:
    sent = work.serve([work.write(0, 7), work.write(1, 8)], [], [])
    assert answers(sent) == [(7, Done()), (8, Done())]
    assert work.num_executed == 2
    assert work.actor.num_waits == 1


def test_a_repeated_command_is_answered_with_the_stored_result(work: Work) -> None:
    command = work.write(0, 7)
    sent = work.serve([command, command], [command], [command])
    assert answers(sent) == [(7, Done())] * 3
    assert work.num_executed == 1


def test_the_result_is_kept_when_the_slot_holds_another_plan(work: Work) -> None:
    first = work.write(0, 7)
    second = Run(1, 0, 8)
    sent = work.serve([first], lambda: work.write(0, 8), [first, second], [])
    assert answers(sent) == [(7, Done()), (7, Done()), (8, Done())]
    assert work.num_executed == 2


def test_an_obsolete_command_is_dropped(work: Work) -> None:
    work.write(0, 8)
    assert work.serve([Run(1, 0, 7), Run(1, 3, 9), Welcome(1)], [], []) == []
    assert work.num_executed == 0


def test_a_plan_that_raises_fails_its_request_and_not_the_actor(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    command = work.write(0, 7)
    work.error = StalePage("page 3 has generation 2, not 1")

    def repair() -> None:
        work.error = None

    sent = work.serve([command], [command], repair, [work.write(1, 8)])
    (plan_id, error), again, after = answers(sent)
    assert plan_id == 7 and isinstance(error, ItemError) and error.status == 500
    assert "page" not in error.message, "details are for the log"
    assert again == (7, error) and after == (8, Done())
    assert "page 3 has generation 2, not 1" in caplog.text


def test_the_last_results_are_kept(work: Work) -> None:
    turns = []
    for plan_id in range(1, KEPT_RESULTS + 2):
        turns += [lambda plan_id=plan_id: work.write(0, plan_id), [Run(1, 0, plan_id)]]
    sent = work.serve(*turns, [Run(1, 0, 2), Run(1, 0, 1)], [])
    assert answers(sent)[KEPT_RESULTS + 1 :] == [(2, Done())]
    assert work.num_executed == KEPT_RESULTS + 1


def test_each_plan_is_a_step_in_the_status_words(work: Work) -> None:
    seen = []

    def execute(plan: Plan) -> Result:
        seen.append(work.actor._actors.read("prefill"))
        return Done()

    work.execute = execute  # type: ignore[method-assign]
    work.serve([work.write(0, 7)])
    assert seen[0].step_plan == 7 and seen[0].step_deadline_ns > seen[0].step_start_ns
    after = work.actor._actors.read("prefill")
    assert (after.steps, after.step_deadline_ns) == (1, 0)


def test_what_the_generation_before_died_in_is_not_begun(work: Work) -> None:
    commands = [work.write(0, 7), work.write(1, 8)]
    sent = work.serve(commands, [commands[0]], [], death=Death(7, True, "died of SIGSEGV", 1))
    assert answers(sent) == [(7, Died()), (8, Done()), (7, Died())]
    assert work.num_executed == 1


def test_what_the_generation_before_was_killed_in_from_outside_is_done_again(work: Work) -> None:
    sent = work.serve([work.write(0, 7)], [], death=Death(7, False, "was killed"))
    assert answers(sent) == [(7, Done())]


def test_late_plans_are_skipped(work: Work) -> None:
    late = work.write(0, 7)
    sent = work.serve([Run(1, late.slot, 7, 1.0)], [Run(1, work.write(1, 8).slot, 8, 1e12)], [])
    assert answers(sent) == [(7, Skipped()), (8, Done())]


def test_rows_that_have_ended_are_left_out(work: Work) -> None:
    work.rows.set_phase(1, Phase.ENDING)
    work.plan = Prefill([chunk(0), chunk(1), chunk(2, row_generation=9)])
    assert answers(work.serve([work.write(0, 7)], [])) == [(7, Done())]
    assert work.seen == [Prefill([chunk(0)])]


def test_a_plan_whose_rows_have_all_ended_is_skipped(work: Work) -> None:
    work.rows.set_phase(1, Phase.ENDING)
    work.plan = Prefill([chunk(1), chunk(2, row_generation=9)])
    assert answers(work.serve([work.write(0, 7)], [])) == [(7, Skipped())]
    assert not work.seen


def test_a_free_row_wants_nothing(work: Work) -> None:
    """A video's worker asks about plans that it has done, too: their rows may have been freed since, and not be anybody's yet."""
    assert still_wanted(Prefill([chunk(1)]), work.rows) is not None
    work.rows.set_phase(1, Phase.ENDING)
    work.rows.set_phase(1, Phase.FREE)
    assert still_wanted(Prefill([chunk(1)]), work.rows) is None


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")])
def test_where_memory_runs_out_the_process_ends_in_its_step(work: Work, error: Exception) -> None:
    work.error = error
    with pytest.raises(MemoryError):
        work.serve([work.write(0, 7)], [])
    words = work.actor._actors.read("prefill")
    assert words.raised and words.step_plan == 7 and words.step_deadline_ns > 0


def test_where_the_device_is_lost_the_process_ends_in_its_step(work: Work) -> None:
    work.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        work.serve([work.write(0, 7)], [])
    assert work.actor._actors.read("prefill").raised


def test_deadlines_of_steps_follow_from_their_cost(work: Work) -> None:
    limits_s: list[float] = []

    def execute(plan: Plan) -> Result:
        words = work.actor._actors.read("prefill")
        limits_s.append((words.step_deadline_ns - words.step_start_ns) / 1e9)
        return Done()

    work.execute = execute  # type: ignore[method-assign]
    work.serve([work.write(0, 7)], [work.write(1, 8)], [])
    supervisor = work.actor.config.supervisor
    assert limits_s == [300.0, supervisor.watchdog_s], "all the time while nothing is known, then what is measured"
    assert work.actor._actors.read("prefill").step_cost_ns > 0


class Gate:
    """Plans of row 2 are large: they are done in the other thread, once the gate is open."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.opened, self.entered = threading.Event(), threading.Event()
        self.done: list[int] = []
        self.threads: set[str] = set()
        self.error: BaseException | None = None
        work.execute = self.execute  # type: ignore[method-assign]

    def write(self, slot: int, plan_id: int, row: int) -> Run:
        self.work.plan = Prefill([chunk(row)])
        return self.work.write(slot, plan_id)

    def is_large(self, plan: Plan) -> bool:
        return isinstance(plan, Prefill) and plan.chunks[0].row == 2

    def execute(self, plan: Plan) -> Result:
        assert isinstance(plan, Prefill)
        if self.is_large(plan):
            self.threads.add(threading.current_thread().name)
            self.entered.set()
            assert self.opened.wait(20)
            if self.error is not None:
                raise self.error
        self.done.append(plan.chunks[0].row)
        return Done()

    def open(self) -> None:
        self.opened.set()

    def serve(self, *script: object) -> list[tuple[int, Result]]:
        return answers(self.work.serve(*script, is_aside=self.is_large))


def test_a_large_plan_does_not_keep_others_waiting(work: Work) -> None:
    gate = Gate(work)
    large, small = gate.write(0, 7, 2), gate.write(1, 8, 0)
    sent = gate.serve([large, small], [], [large], gate.open, [])
    assert sent == [(8, Done()), (7, Done())], "what is under way when the actor is to end is done; commands that are repeated are not"
    assert gate.done == [0, 2] and gate.threads != {threading.current_thread().name}


def test_large_plans_are_done_one_at_a_time(work: Work) -> None:
    gate = Gate(work)
    first, second = gate.write(0, 7, 2), gate.write(1, 8, 2)
    assert gate.serve([first, second], [], [], [second], gate.open, []) == [(7, Done())], "the other one is not begun any more"
    assert gate.done == [2] and len(gate.threads) == 1


def test_the_large_plan_is_the_step_while_nothing_else_is_done(work: Work) -> None:
    """Its deadline does not begin anew after a small plan."""
    gate = Gate(work)
    seen = []

    def look() -> None:
        seen.append(work.actor._actors.read("prefill"))

    def enter() -> None:
        assert gate.entered.wait(20)

    large, small = gate.write(0, 7, 2), gate.write(1, 8, 0)
    gate.serve([large], enter, look, [small], look, gate.open, [])
    before, after = seen
    assert before.step_plan == after.step_plan == 7
    assert after.steps == 1 and after.step_start_ns > before.step_start_ns
    assert after.step_deadline_ns - after.step_start_ns < before.step_deadline_ns - before.step_start_ns
    last = work.actor._actors.read("prefill")
    assert (last.steps, last.step_deadline_ns) == (2, 0)


def test_a_process_that_ends_in_its_large_plan_ends_in_that_step(work: Work) -> None:
    gate = Gate(work)
    gate.error = MemoryError()
    with pytest.raises(MemoryError):
        gate.serve([gate.write(0, 7, 2)], [], gate.open, [gate.write(1, 8, 0)])
    words = work.actor._actors.read("prefill")
    assert words.raised and words.step_plan == 7


def test_a_large_plan_that_raises_fails_its_request_alone(work: Work) -> None:
    gate = Gate(work)
    gate.error = ValueError("no")
    ((plan_id, error),) = gate.serve([gate.write(0, 7, 2)], [], gate.open, [])
    assert plan_id == 7 and isinstance(error, ItemError) and error.status == 500


def test_a_large_plan_that_nobody_wants_is_skipped(work: Work) -> None:
    gate = Gate(work)
    late = gate.write(0, 7, 2)
    assert gate.serve([Run(1, late.slot, 7, 1.0)], [], []) == [(7, Skipped())]
    assert not gate.done


def test_waiting_for_its_turn_is_no_work(work: Work) -> None:
    """Neither for the controller, which learns costs, nor for the next limit."""
    worst_s = []

    def wait_in_the_middle() -> None:
        work.actor.turn.waited_ns += 10**12

    work.during = wait_in_the_middle
    sent = work.serve([work.write(0, 7)], [], lambda: worst_s.append(work.actor.status.step_cost_ns))  # type: ignore[union-attr]
    assert isinstance(sent[0], PlanDone) and sent[0].elapsed_s < 0
    assert worst_s == [1]


LONG, SHORT = 600, 200  # tokens


class Breaks:
    """A loop whose plans take a break, in each of which it does what has come; and what it has done, in order."""

    def __init__(self, work: Work, num_breaks: int = 1) -> None:
        self.work, self.num_breaks = work, num_breaks
        self.done: list[object] = []
        self.steps: list[int] = []
        self.do_short = PlanLoop.do_short

    def write(self, slot: int, plan_id: int, num_tokens: int, row: int = 0) -> Run:
        self.work.plan = Prefill([PrefillChunk(row, 1, 0, 0, num_tokens, [])])
        return self.work.write(slot, plan_id)

    def execute(self, plan: Plan) -> Result:
        self.done.append(plan.units)
        for _ in range(self.num_breaks):
            self.done.append(self.do_short(self.plans))
            reading = self.work.actor._actors.read("prefill")
            assert reading.step_deadline_ns > reading.step_start_ns
            self.steps.append(reading.step_plan)
        self.done.append(-plan.units)
        return Done()

    def serve(self, *script: object) -> list[tuple[int, Result]]:
        self.work.actor = FakeActor(self.work.run, "prefill", [*script, [], [], [], []])  # type: ignore[list-item]
        self.plans = PlanLoop(self.work.actor, self.work.rows)  # type: ignore[arg-type]
        self.plans.serve(self.execute)
        return answers(self.work.actor.sent)


def test_a_short_plan_is_done_in_a_break_of_a_long_one(work: Work) -> None:
    breaks = Breaks(work)
    sent = breaks.serve([breaks.write(0, 7, LONG)], [breaks.write(1, 8, SHORT)])
    assert breaks.done == [LONG, SHORT, False, -SHORT, True, -LONG]
    assert sent == [(8, Done()), (7, Done())]
    assert breaks.steps == [8, 7], "each is the step while it is in work"
    after = work.actor._actors.read("prefill")
    assert after.step_deadline_ns == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time in ns, which stands still but for the test."""
    now_ns = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns[0])
    return now_ns


def test_a_plan_of_more_than_half_of_a_long_one_waits_for_its_end(work: Work) -> None:
    breaks = Breaks(work, 3)
    sent = breaks.serve([breaks.write(0, 7, LONG)], [breaks.write(1, 8, LONG // 2 + 1)])
    assert [plan_id for plan_id, _ in sent] == [7, 8]


def test_a_long_plan_has_as_much_time_as_those_in_its_breaks(work: Work, clock: list[int]) -> None:
    """Breaks are 100 ns apart, and a short plan takes 200. Three come at once."""
    breaks = Breaks(work, 6)
    do_short, at = PlanLoop.do_short, list[int]()

    def takes_time(loop: PlanLoop) -> bool:
        if loop._in_work[-1].plan_id != 7:
            clock[0] += 200 // 6 + 1
            return do_short(loop)
        clock[0] += 100
        at.append(clock[0])
        return do_short(loop)

    breaks.do_short = takes_time
    breaks.serve([breaks.write(0, 7, LONG)], [breaks.write(slot, 7 + slot, SHORT) for slot in (1, 2, 3)])
    durations = [after - before for before, after in pairwise(at)]
    short_ns = 6 * (200 // 6 + 1)
    assert durations == [100 + short_ns, 100, 100 + short_ns, 100, 100 + short_ns]


def test_a_plan_that_is_not_long_has_no_breaks(work: Work) -> None:
    breaks = Breaks(work)
    sent = breaks.serve([breaks.write(0, 7, 256)], [breaks.write(1, 8, 4)])
    assert breaks.done == [256, False, -256, 4, False, -4] and [plan_id for plan_id, _ in sent] == [7, 8]


def test_a_command_that_is_repeated_in_a_break_is_not_done_again(work: Work) -> None:
    breaks = Breaks(work, 2)
    long = breaks.write(0, 7, LONG)
    sent = breaks.serve([long], [long], [breaks.write(1, 8, SHORT)], [long])
    assert breaks.done.count(LONG) == 1 and [plan_id for plan_id, _ in sent] == [8, 7, 7]


def test_a_command_that_is_repeated_in_a_break_of_a_break_holds_up_no_other(work: Work, clock: list[int]) -> None:
    breaks = Breaks(work, 2)
    long = breaks.write(0, 7, 2 * LONG)
    sent = breaks.serve([long], [breaks.write(1, 8, 500)], [long], [], [breaks.write(2, 9, 50)])
    assert [plan_id for plan_id, _ in sent] == [8, 9, 7]


def test_an_obsolete_command_holds_up_no_plan_in_a_break(work: Work) -> None:
    breaks = Breaks(work)
    sent = breaks.serve([breaks.write(0, 7, LONG)], [Run(1, 3, 6), breaks.write(1, 8, SHORT)])
    assert [plan_id for plan_id, _ in sent] == [8, 7]


def test_pages_are_loaded_in_a_break(work: Work) -> None:
    breaks = Breaks(work)
    long = breaks.write(0, 7, LONG)
    work.plan = Load([LoadChunk(0, 1, 0, 0, SHORT, [], [])])
    sent = breaks.serve([long], [work.write(1, 8)])
    assert [plan_id for plan_id, _ in sent] == [8, 7]


def test_the_time_of_a_short_plan_is_not_the_long_ones(work: Work, clock: list[int]) -> None:
    breaks = Breaks(work)
    execute = breaks.execute

    def timed(plan: Plan) -> Result:
        clock[0] += plan.units * 10**9
        return execute(plan)

    breaks.execute = timed  # type: ignore[method-assign]
    breaks.serve([breaks.write(0, 7, LONG)], [breaks.write(1, 8, SHORT)])
    sent = [done for done in work.actor.sent if isinstance(done, PlanDone)]
    assert [(done.plan_id, done.elapsed_s) for done in sent] == [(8, SHORT), (7, LONG)]


def test_a_short_plan_that_raises_fails_alone(work: Work) -> None:
    breaks = Breaks(work)
    execute = breaks.execute

    def raises(plan: Plan) -> Result:
        if plan.units == SHORT:
            raise StalePage("gone")
        return execute(plan)

    breaks.execute = raises  # type: ignore[method-assign]
    (first, error), (second, done) = breaks.serve([breaks.write(0, 7, LONG)], [breaks.write(1, 8, SHORT)])
    assert (first, second, done) == (8, 7, Done()) and isinstance(error, ItemError)


def test_a_death_in_a_break_counts_against_the_short_plan(work: Work) -> None:
    breaks = Breaks(work)
    execute = breaks.execute

    def dies(plan: Plan) -> Result:
        if plan.units == SHORT:
            raise MemoryError
        return execute(plan)

    breaks.execute = dies  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        breaks.serve([breaks.write(0, 7, LONG)], [breaks.write(1, 8, SHORT)])
    reading = work.actor._actors.read("prefill")
    assert reading.step_plan == 8 and reading.step_deadline_ns
