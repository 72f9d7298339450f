"""Crashes for the shared-memory tests: here, before any bytecode instruction, and real children killed at random lines."""

import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

import pytest

from mmrt.shm.run_directory import RunDirectory

SHM = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
STORMS_S = [
    1.5,
    pytest.param(30.0, marks=pytest.mark.slow),
]  # a storm ends then
MIN_KILLS = 20
MAX_STEPS, LEAST_STEPS = 3000, 100  # a child dies before one of so many instructions; of fewer where it ends before them
LIFE_S = 0.02  # a child whose instruction never comes is killed wherever it is, after so much processor time
MAX_LIFE_S = 10 * LIFE_S  # after so much time, if it waits


class Crashed(BaseException):
    """Stands for the end of a process, in this one."""


class Child:
    """A forked child; ``wait`` gives its exit status, negative for a signal."""

    is_of_steps = False  # it was to die before one of its first instructions

    def __init__(self, body: Callable[[], object], before: Callable[[], object] = lambda: None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: these children touch none
            self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                before()
                body()
                status = 0
            except BaseException:
                sys.settrace(None)
                traceback.print_exc()
            finally:
                os._exit(status)
        self.status: int | None = None

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def processor_s(self) -> float:
        """The processor time of a child that has not been waited for: on a busy machine much less than what went by."""
        return time.clock_gettime(~self.pid << 3 | 2)  # as clock_getcpuclockid() computes it

    def wait(self) -> int:
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def kill(self) -> int:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


class Crashes:
    """``codes``: the functions in which crashes happen, with the functions that they define."""

    Child = Child

    def __init__(self, storm_s: float, seed: int) -> None:
        self.storm_s = storm_s
        self.seed = seed
        self.random = random.Random(seed)
        self.reach = MAX_STEPS

    @staticmethod
    def codes(*functions: Callable[..., object]) -> frozenset[CodeType]:
        return frozenset(code for function in functions for code in _codes(function.__code__))

    @staticmethod
    @contextmanager
    def before_step(codes: frozenset[CodeType], steps: int) -> Iterator[list[bool]]:
        """Raise Crashed before the ``steps``-th line or instruction of ``codes``, and end the block. Yields [whether it did]."""
        crashed = [False]

        def act() -> None:
            crashed[0] = True
            raise Crashed

        previous = sys.gettrace()
        sys.settrace(_tracer(codes, _Countdown(steps, act)))
        try:
            yield crashed
        except Crashed:
            pass
        finally:
            sys.settrace(previous)

    def victim(self, body: Callable[[], object], codes: frozenset[CodeType]) -> Child:
        """A child that kills itself at a random line of ``codes``, or before a random instruction."""
        lines = sorted({(code, line) for code in codes for _, _, line in code.co_lines() if line}, key=str)
        target = self.random.choice(lines) if self.random.random() < 0.5 else None
        steps = self.random.choice((0, 0, 1, 2, 4, 19)) if target else self.random.randrange(self.reach)

        def act() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        child = Child(body, lambda: sys.settrace(_tracer(codes, _Countdown(steps, act, target))))
        child.is_of_steps = target is None
        return child

    def storm(
        self, spawn: Callable[[], Child], observe: Callable[[], object], kills: int, enough: Callable[[], bool] = lambda: True
    ) -> None:
        """Run one victim after the other until there was ``enough`` to see and ``kills`` of them were killed, or ``storm_s`` are over.

        Looks in between and all the time.
        """
        print(f"seed {self.seed}")
        killed = 0
        end = time.monotonic() + self.storm_s
        while not enough() or killed < min(kills, MIN_KILLS) or (killed < kills and time.monotonic() < end):
            child = spawn()
            deadline = time.monotonic() + MAX_LIFE_S
            while child.poll() is None and child.processor_s() < LIFE_S and time.monotonic() < deadline:
                observe()
            status = child.kill()
            assert status in (0, -signal.SIGKILL), f"a child failed (seed {self.seed})"
            killed += status != 0
            if child.is_of_steps:
                self.reach = min(self.reach * 5 // 4, MAX_STEPS) if status else max(self.reach * 3 // 4, LEAST_STEPS)
            observe()


class _Countdown:
    def __init__(self, steps: int, act: Callable[[], None], target: tuple[CodeType, int] | None = None) -> None:
        self.steps, self.act, self.target = steps, act, target

    def __call__(self, frame: object, event: str, argument: object) -> "_Countdown":
        wanted = event in ("line", "opcode") if self.target is None else event == "line"
        if wanted and (self.target is None or self.target == (frame.f_code, frame.f_lineno)):
            self.steps -= 1
            if self.steps < 0:
                self.act()
        return self


def _tracer(codes: frozenset[CodeType], countdown: _Countdown) -> Callable[..., object]:
    def on_call(frame: object, event: str, argument: object) -> object:
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        return countdown

    return on_call


@pytest.fixture(params=STORMS_S, ids=["short", "long"])
def crashes(request: pytest.FixtureRequest) -> Crashes:
    """Seeded anew each time; ``MMRT_TEST_SEED`` repeats a run."""
    return Crashes(request.param, int(os.environ.get("MMRT_TEST_SEED") or time.time_ns() % 1_000_000))


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory on a tmpfs where there is one; empty again at the end, or the test leaked."""
    with tempfile.TemporaryDirectory(prefix="mmrt-test-", dir=SHM) as name:
        yield Path(name)


@pytest.fixture
def run(place: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(place / "run", {}) as directory:
        yield directory
