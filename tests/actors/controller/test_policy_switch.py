"""Orders and edits put policies in charge; a version that ended a controller is not loaded again."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrt.actors.controller.policy_guard import PolicyGuard
from mmrt.actors.controller.policy_switch import LOOK_S, PolicySwitch, inherited
from mmrt.runtime.controller.plans.policy_calls import MAX_FAILURES
from mmrt.runtime.controller.scheduling.policy import UNIFIED
from mmrt.runtime.process.crash_cause import Death, ExitNote
from mmrt.runtime.process.tuning import TUNING_NAME, read_tuning, write_tuning
from mmrt.schema.policy_report import NO_POLICY_YET, PolicyReport
from mmrt.tests.runtime.controller.test_machine import Driver, text

GOOD = """\
from mmrt.runtime.controller.scheduling.unified import Unified
class Mine(Unified):
    def rank(self, request, facts):
        return (-request.arrival,)
policy = Mine()
"""
FAILING = GOOD.replace(
    "return (-request.arrival,)", "return (request.arrival,)\n    def plan(self, view, limits, memory):\n        raise OSError"
)


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """Keep pytest's own use of the signal."""
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


class Run:
    """A run directory, and one controller after another."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path / "run", path / "mine.py"
        self.path.mkdir()
        self.guard = PolicyGuard()
        self.published: list[PolicyReport] = []
        self.begin()

    def begin(self, before: PolicyReport = NO_POLICY_YET, configured: str = "unified") -> PolicyReport:
        self.now_s = 0.0
        self.driver = Driver()
        publish = self.published.append
        self.switch = PolicySwitch(self.path, configured, self.driver.state, self.guard, before, publish=publish)
        return self.look()

    def look(self) -> PolicyReport:
        self.now_s += LOOK_S
        self.switch.look(self.now_s)
        return self.switch.report()

    def edit(self, source: str) -> PolicyReport:
        """Write the file, and let it be found: an edit is taken at the second look that finds it the same."""
        before = self.switch.report()
        self.file.write_text(source)
        os.utime(self.file, ns=(0, int(1e9 * self.now_s)))
        assert self.look() == before, "it may be half written"
        return self.look()

    def set(self, policy: str) -> PolicyReport:
        write_tuning(self.path, policy)
        return self.look()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.guard.watch(UNIFIED)


def test_an_order_is_followed_and_found_again_by_the_next_controller(run: Run) -> None:
    run.file.write_text(GOOD)
    assert run.switch.report().name == "unified"
    report = run.set(str(run.file))
    tuning = read_tuning(run.path)
    assert tuning is not None and (report.name, report.wanted, report.number) == ("mine.py", str(run.file), tuning.number)
    assert len(report.version) == 16 and report.since_s > 0 and not (report.refused or report.set_aside)
    run.driver.submit(text())
    assert run.switch.report().plans == 1 and run.switch.report().longest_s >= run.switch.report().median_s > 0
    after = run.begin(run.switch.report())
    assert (after.name, after.version, after.since_s, after.plans) == ("mine.py", report.version, report.since_s, 1)
    assert run.set("unified").name == "unified" and not run.switch.report().version


def test_a_file_can_be_configured(run: Run) -> None:
    run.file.write_text(GOOD)
    report = run.begin(configured=str(run.file))
    assert (report.name, report.number) == ("mine.py", 0)
    assert run.set("unified").name == "unified"


def test_an_edit_is_followed(run: Run) -> None:
    run.file.write_text(GOOD)
    first = run.set(str(run.file))
    second = run.edit(GOOD + "# edited\n")
    assert second.version != first.version and second.name == "mine.py"
    broken = run.edit("def plan(:\n")
    assert broken.version == second.version and broken.refused.startswith("mine.py:1: SyntaxError")
    run.driver.submit(text())
    assert run.switch.report().plans == 1, "the previous version goes on"
    assert run.edit(GOOD + "# edited\n").refused == ""
    run.file.unlink()
    run.look()
    assert "cannot be read: No such file" in run.look().refused and run.look().version == second.version


def test_one_that_fails_is_set_aside_until_it_is_edited(run: Run) -> None:
    run.file.write_text(FAILING)
    run.set(str(run.file))
    run.driver.submit(text())
    for _ in range(2 * MAX_FAILURES):
        run.driver.tick(0.2)
        run.driver.submit(text(), 100 + run.driver.state.next_arrival)
    report = run.look()
    assert (report.name, report.wanted, report.overruled) == ("unified", str(run.file), MAX_FAILURES)
    assert "plan: mine.py:6: OSError" in report.set_aside and "plan: mine.py:6: OSError" in report.error
    report = run.edit(GOOD)
    assert report.name == "mine.py" and not report.set_aside


@pytest.mark.parametrize("order", ["no_such_policy", "/nowhere/mine.py", "", "/\0.py"])
def test_an_order_that_nobody_can_follow(run: Run, order: str) -> None:
    report = run.set(order)
    assert report.name == "unified" and report.wanted == order and "cannot be read" in report.refused


@pytest.mark.parametrize(
    "order", ['{"policy": 3', '{"policy": "split", "number": 9223372036854775808}', f'{{"policy": "{"x" * 4097}", "number": 1}}']
)
def test_a_broken_order_is_ignored(run: Run, order: str) -> None:
    (run.path / TUNING_NAME).write_text(order)
    assert run.look().name == "unified" and run.look().number == 0


def test_no_file_is_loaded_that_the_video_process_could_have_written(run: Run, tmp_path: Path) -> None:
    file = run.path / "mine.py"
    file.write_text(GOOD)
    report = run.set(str(file))
    assert report.name == "unified" and f"lies in {run.path}, where the video process may write" in report.refused
    (tmp_path / "link.py").symlink_to(file)
    assert "where the video process may write" in run.set(str(tmp_path / "link.py")).refused
    run.file.write_text(GOOD)
    run.file.chmod(0o646)
    assert "mine.py is not this user's alone to write" in run.set(str(run.file)).refused
    run.file.chmod(0o644)
    assert run.set(str(run.file)).name == "mine.py"


def test_a_version_that_ended_a_controller_is_not_loaded_again(run: Run) -> None:
    run.file.write_text(GOOD)
    before = run.set(str(run.file))
    death = Death(int(before.version, 16), True, "died of SIGSEGV", 1)
    report = run.begin(inherited(before, before.number, death, True, None))
    reason = "the controller died of SIGSEGV in a call of it"
    assert (report.name, report.version, report.set_aside) == ("unified", before.version, reason)
    assert report.loaded == ""
    report = run.begin(inherited(report, before.number, None, False, None))
    assert report.set_aside == reason, "by none of its successors"
    assert run.edit(GOOD + "# other\n").name == "mine.py"
    assert run.edit(GOOD).set_aside == reason, "nor when an edit is undone"
    assert run.set(str(run.file)).name == "mine.py", "only when it is set again"


def test_what_a_refused_file_left_behind_is_blamed_as_well(run: Run) -> None:
    """A thread, say, that ends the process later."""
    run.file.write_text("raise ValueError")
    report = run.set(str(run.file))
    assert report.refused and report.loaded and not report.version
    (loading,) = run.published
    assert (loading.loaded, loading.number, loading.is_loading) == (report.loaded, report.number, True), "before it ran"
    assert not report.is_loading
    first = run.begin(inherited(report, report.number, None, True, EXITED))
    assert (first.ended, first.condemned) == (1, "")
    second = run.begin(inherited(first, report.number, None, True, EXITED))
    assert second.set_aside == "the controller ended 2 times after it had loaded it" and second.loaded == ""


BEFORE = PolicyReport(name="unified", loaded="00000000000000aa", number=7)
KILLED, EXITED, HUNG = (ExitNote(1, status, hang=hang) for status, hang in ((-9, False), (3, False), (-9, True)))


@pytest.mark.parametrize(
    ("before", "death", "ended", "note", "condemned", "num_ended"),
    [
        (BEFORE, None, False, None, "", 0),
        (BEFORE, Death(0xAA, True, "hung", 1), True, HUNG, "00000000000000aa", 0),
        (BEFORE, Death(0xBB, True, "hung", 1), True, HUNG, "00000000000000bb", 0),
        (BEFORE, Death(0xAA, False, "was killed", 0), True, KILLED, "", 0),
        (BEFORE, None, True, KILLED, "", 0),
        (BEFORE, None, True, HUNG, "00000000000000aa", 0),
        (BEFORE, None, True, EXITED, "", 1),
        (BEFORE, None, True, None, "", 1),
        (PolicyReport(loaded=BEFORE.loaded, number=7, ended=1), None, True, EXITED, "00000000000000aa", 1),
        (PolicyReport(), None, True, EXITED, "", 0),
    ],
)
def test_the_blame_for_an_end(
    before: PolicyReport, death: Death | None, ended: bool, note: ExitNote | None, condemned: str, num_ended: int
) -> None:
    after = inherited(before, 9, death, ended, note)
    assert (after.condemned, after.ended) == (condemned, num_ended)
    assert after.condemned_number == (9 if condemned else 0)
