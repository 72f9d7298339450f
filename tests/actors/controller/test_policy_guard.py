"""A call of a user's policy ends in time, whatever it does, and what it says of its failure names the line."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrt.actors.controller.policy_file import FilePolicy, PolicyFile
from mmrt.actors.controller.policy_guard import CALL_S, PATIENCE, PolicyGuard
from mmrt.cli.policy_trial import try_policy
from mmrt.runtime.controller.scheduling.facts import Facts
from mmrt.runtime.controller.scheduling.policy import UNIFIED, PolicyFailure
from mmrt.runtime.controller.scheduling.types import StepLimits, View

HEAD = """\
from mmrt.runtime.controller.scheduling.unified import Unified
class Mine(Unified):
    def plan(self, view, limits, memory):
"""
LIMITS = StepLimits(16, 16)


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """Keep pytest's own use of the signal."""
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def file_of(path: Path, source: str) -> PolicyFile:
    path.write_text(source)
    return PolicyFile.read(path)


def planning(path: Path, body: str) -> str:
    return HEAD + textwrap.indent(body, " " * 8) + "\npolicy = Mine()\n"


class Guarded:
    def __init__(self, path: Path, source: str) -> None:
        file = file_of(path, source)
        self.guard = PolicyGuard()
        self.policy: FilePolicy = self.guard.load(file, file.load)
        self.guard.watch(self.policy)

    def plan(self) -> Any:
        return self.guard(self.policy, lambda: self.policy.plan(View(()), LIMITS, None))

    def close(self) -> None:
        self.guard.watch(UNIFIED)


@pytest.mark.parametrize(
    ("body", "line", "words"),  # line 0: any
    [
        ("1 / 0", 4, "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", 4, "SystemExit: 3"),
        ("raise KeyboardInterrupt", 4, "KeyboardInterrupt"),
        ("return self.plan(view, limits, memory)", 4, "RecursionError: maximum recursion depth exceeded"),
        ("while True: pass", 4, "took more than 50 ms"),
        ("import time\ntime.sleep(60)", 5, "took more than 50 ms"),
        ("sorted(range(5 * 10**6), key=lambda number: -number)", 4, "took more than 50 ms"),
        ("view.requests = ()", 4, "AttributeError: immutable type: 'View'"),
        ("return bytearray(1 << 40)", 4, "MemoryError"),
        ("return [None] * (1 << 28)", 4, "MemoryError"),
        ("class Odd(Exception):\n    def __str__(self):\n        while True: pass\nraise Odd", 7, "Odd"),
        ("raise ValueError(chr(0xd800))", 4, "ValueError: \\ud800"),  # a message cannot carry it
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(1,)).start()\nreturn None, None",
            0,
            "mine.py: it started a thread",
        ),
        ("for _ in range(3):\n    try:\n        while True: pass\n    except BaseException: pass\nraise ValueError", 0, "mine.py:"),
    ],
)
def test_a_call_that_fails(tmp_path: Path, body: str, line: int, words: str) -> None:
    guarded = Guarded(tmp_path / "mine.py", planning(tmp_path, body))
    began_s = time.monotonic()
    try:
        with pytest.raises(PolicyFailure) as failure:
            guarded.plan()
    finally:
        guarded.close()
    assert words in str(failure.value)
    assert not line or str(failure.value).startswith(f"mine.py:{line}: ")
    assert time.monotonic() - began_s < 30, "it was ended"
    assert len(guarded.guard.seconds) == 0 and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_request_cannot_be_changed(tmp_path: Path) -> None:
    source = HEAD + "        return None\n    def rank(self, request, facts):\n        request.arrival = 0\npolicy = Mine()\n"
    guarded = Guarded(tmp_path / "mine.py", source)
    with pytest.raises(PolicyFailure, match=r"mine.py:6: AttributeError: a policy cannot set 'arrival' of a request"):
        guarded.guard(guarded.policy, lambda: guarded.policy.rank(object(), Facts()))  # type: ignore[arg-type]
    guarded.close()


@pytest.mark.parametrize(
    ("body", "num_rounds", "num_illegal"),
    [
        ("return super().plan(view, limits, memory)", 2, 0),
        ("return StepPlan(), None", 0, 0),
        ("return StepPlan(analyse=((9, 9),) if view.requests else ()), None", 0, 2),
    ],
)
def test_a_trial_counts_plans_and_illegal_choices(tmp_path: Path, body: str, num_rounds: int, num_illegal: int) -> None:
    file = file_of(tmp_path / "mine.py", "from mmrt.runtime.controller.scheduling.types import StepPlan\n" + planning(tmp_path, body))
    assert try_policy(file.path) == (file.version, num_rounds, num_illegal)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\ndef plan(:\n", "mine.py:2: SyntaxError: invalid syntax"),
        ("import no_such_module\n", "mine.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1\n", "mine.py must end with policy = SomePolicy()"),
        ("class policy:\n    pass\n", "mine.py must end with policy = SomePolicy(), an object"),
        ("class P:\n    def rank(self): ...\npolicy = P()\n", "policy has no method 'plan'"),
        ("raise SystemExit\n", "mine.py:1: SystemExit"),
        ("while True: pass\n", "mine.py:1: took more than 1000 ms"),
        ("x = [None] * (1 << 28)\n", "mine.py:1: MemoryError"),
        ("\0", "source code string cannot contain null bytes"),
        ("x = '\udcff'", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_loaded(tmp_path: Path, source: str, words: str) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(source.encode(errors="surrogateescape"))
    file = PolicyFile.read(path)
    with pytest.raises(PolicyFailure) as failure:
        PolicyGuard().load(file, file.load)
    assert words in str(failure.value)


def test_a_failure_names_the_line_of_the_version_that_ran(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    guarded = Guarded(path, planning(path, "1 / 0"))
    path.write_text("# edited\n" * 10)
    with pytest.raises(PolicyFailure, match="mine.py:4: ZeroDivisionError"):
        guarded.plan()
    guarded.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "mine.py is not a regular file"),  # and nobody waits for a writer
        (os.mkdir, "Is a directory"),
    ],
)
def test_only_a_file_is_read(tmp_path: Path, make: Callable[[Path], None], words: str) -> None:
    make(tmp_path / "mine.py")
    with pytest.raises((OSError, ValueError), match=words):
        PolicyFile.read(tmp_path / "mine.py")


def test_a_file_of_any_size_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        file_of(tmp_path / "mine.py", "#" * (1 << 20) + "\n")


def test_calls_are_measured(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path / "mine.py", planning(tmp_path, "return None, None"))
    for _ in range(3):
        assert guarded.plan() == (None, None)
    assert len(guarded.guard.seconds) == 3 and 0 < guarded.guard.longest_s < CALL_S * PATIENCE
    guarded.close()
    assert guarded.guard.longest_s == 0


def test_a_call_under_a_debugger_has_no_limit(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path / "mine.py", planning(tmp_path, f"import time\nreturn time.sleep({2 * PATIENCE * CALL_S}), None"))
    guarded.guard = PolicyGuard(is_debugged=True)
    assert guarded.plan() == (None, None)
    guarded.close()


def test_a_policy_of_mmrt_is_not_limited_beside_that_of_a_file(tmp_path: Path) -> None:
    """``unified`` ranks for one that cannot rank, and nobody would overrule it."""
    guarded = Guarded(tmp_path / "mine.py", planning(tmp_path, "return None, None"))
    assert guarded.guard(UNIFIED, lambda: time.sleep(2 * PATIENCE * CALL_S)) is None
    guarded.close()


SCRIPT = """
import sys
from pathlib import Path
from mmrt.actors.controller.policy_file import PolicyFile
from mmrt.actors.controller.policy_guard import PolicyGuard
file = PolicyFile.read(Path(sys.argv[1]))
guard = PolicyGuard()
policy = guard.load(file, file.load)
guard.watch(policy)
guard(policy, lambda: policy.plan(None, None, None))
"""


def test_a_loop_in_c_ends_the_process_and_its_line_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(planning(path, "sum(range(10**13))"))
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.returncode == -signal.SIGPROF
    assert f'File "{path}", line 4 in plan' in done.stderr
