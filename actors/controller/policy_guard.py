"""The limits of calls into a user's policy, and the measurement of every policy's calls (controller process, main thread).

A call gets ``CALL_S`` of processor time. Then a signal handler raises an exception in it, again and again. It raises nowhere but in
frames that the call made, so a late signal harms nothing. Code that no handler interrupts, such as an endless loop in C, is ended with
the process ``KILL_S`` later: SIGPROF prints the place and kills, also where no supervisor looks. The call is declared as a step of the
controller whose number is the file's version. So the next controller knows in which it died (``runtime/process/crash_cause.py``), and
does not load it again.
"""

import faulthandler
import resource
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

from ...runtime.controller.scheduling.policy import Policy, PolicyFailure
from ...shm.status import ActorStatus
from .policy_file import FilePolicy, PolicyFile

T = TypeVar("T")

CALL_S = 0.05  # of processor time
LOAD_S = 1.0
PATIENCE = 5  # times its limit may pass on the clock: the process may wait for a processor
KILL_S = 1.0
ROOM_BYTES = 1 << 30  # that a policy may allocate
_AGAIN_S = 0.01
_STEP_S = 2.0  # after KILL_S, for what does not even use a processor
_NUM_CALLS = 1000
_MAX_WORDS = 1000  # characters


class _TimeIsUp(BaseException):
    """Raised in a call of a policy's file."""


class PolicyGuard:
    """Makes the calls of policies. Without ``status`` no step is declared."""

    def __init__(self, status: ActorStatus | None = None, is_debugged: bool = False) -> None:
        """``is_debugged``: a user may sit at a prompt in a call, which then has no limit."""
        self.seconds: deque[float] = deque(maxlen=_NUM_CALLS)
        self.longest_s = 0.0
        self._status = status
        self._is_debugged = is_debugged
        self._is_prepared = False
        self._memory = resource.getrlimit(resource.RLIMIT_DATA)

    def watch(self, policy: Policy) -> None:
        """Begin anew with the policy that is in charge from now on. One of a file may allocate ``ROOM_BYTES``."""
        self.seconds.clear()
        self.longest_s = 0.0
        resource.setrlimit(resource.RLIMIT_DATA, self._bounded_memory() if isinstance(policy, FilePolicy) else self._memory)

    def __call__(self, policy: Policy, call: Callable[[], T]) -> T:
        """Call a policy. Only one of a file is limited: ``unified`` may take its place at any moment.

        Raises: PolicyFailure for whatever a file's policy raises; the exceptions of mmrt's policies as they are.
        """
        began_s = time.perf_counter()
        try:
            return self._limited(policy.file, call, CALL_S) if isinstance(policy, FilePolicy) else call()
        finally:
            took_s = time.perf_counter() - began_s
            self.seconds.append(took_s)
            self.longest_s = max(self.longest_s, took_s)

    def load(self, file: PolicyFile, call: Callable[[], T]) -> T:
        """Run the code of a file for the first time. Raises PolicyFailure."""
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, self._bounded_memory())
        try:
            return self._limited(file, call, LOAD_S)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)

    def _bounded_memory(self) -> tuple[int, int]:
        soft, hard = self._memory
        most = _data_bytes() + ROOM_BYTES
        return most if soft == resource.RLIM_INFINITY else min(soft, most), hard

    def _limited(self, file: PolicyFile, call: Callable[[], T], limit_s: float) -> T:
        self._prepare()
        num_threads = threading.active_count()
        status = self._status
        if status is not None and not self._is_debugged:
            status.begin_step(int(file.version, 16), PATIENCE * limit_s + KILL_S + _STEP_S)
        try:
            result = call() if self._is_debugged else _within(call, limit_s, time.thread_time(), time.monotonic())
        except BaseException as error:
            raise PolicyFailure(self._explain(file, error, limit_s)) from None
        finally:
            if status is not None and not self._is_debugged:
                status.end_step()
        if threading.active_count() > num_threads:
            raise PolicyFailure(f"{file.path.name}: it started a thread, which a policy must not")
        return result

    def _prepare(self) -> None:
        if not self._is_prepared:
            signal.signal(signal.SIGALRM, _on_alarm)
            faulthandler.register(signal.SIGPROF, 2, all_threads=False, chain=True)
            self._is_prepared = True

    def _explain(self, file: PolicyFile, error: BaseException, limit_s: float) -> str:
        """Describe an exception in words that a message can carry."""
        if isinstance(error, _TimeIsUp):
            error = _TimeIsUp(f"took more than {1000 * limit_s:.0f} ms").with_traceback(error.__traceback__)
        try:
            words = _within(lambda: file.explain(error), limit_s, time.thread_time(), time.monotonic())
        except BaseException:
            words = f"{file.path.name}: {type(error).__name__}, which cannot be printed"
        words = words.replace(f"{_TimeIsUp.__module__}.{_TimeIsUp.__qualname__}: ", "")
        return words[:_MAX_WORDS].encode(errors="backslashreplace").decode()


def _within(call: Callable[[], T], limit_s: float, cpu_s: float, wall_s: float) -> T:
    """Make a call that began at these times, and interrupt it in time: in its own frames, not in this one."""
    signal.setitimer(signal.ITIMER_PROF, limit_s + KILL_S)
    signal.setitimer(signal.ITIMER_REAL, limit_s, _AGAIN_S)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _on_alarm(_: int, frame: FrameType | None) -> None:
    if frame is None or frame.f_code is _within.__code__:
        return
    while frame.f_code is not _within.__code__:
        frame = frame.f_back
        if frame is None:
            return
    limits = frame.f_locals
    limit_s = limits["limit_s"]
    if time.thread_time() - limits["cpu_s"] >= limit_s or time.monotonic() - limits["wall_s"] >= PATIENCE * limit_s:
        raise _TimeIsUp


def _data_bytes() -> int:
    """Return how much private memory this process has, which RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
