"""Children of the supervisor: start, signal, wait and measure them, by pidfd and never by a bare pid.

Runs in the supervisor; the measuring functions also in ``mmrt status``. Every child gets a process group of its own, so that the
terminal's Ctrl-C reaches the supervisor alone, and never a session of its own (with sched_autogroup that would undo niceness).
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..environment import CHILD_LISTEN_FD

_PR_SET_CHILD_SUBREAPER = 36
CHILD_LIFELINE_FD = 3
MAX_NICE = 19
TERMINATE = signal.SIGTERM  # in class Process ``signal`` is a method
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that it can wait for the zygote's forks."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def keep_descriptors() -> None:
    """Let no program that this process starts inherit a descriptor that it was given itself, the standard ones aside."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):  # the descriptor of this listing
                os.set_inheritable(fd, False)


def now_s() -> float:
    """Return the time of the running event loop: CLOCK_MONOTONIC."""
    return asyncio.get_running_loop().time()


class Process(ABC):
    """A process as decisions see it: it takes signals and ends once. A subclass sends them and calls ``_finish``; ``Child`` is real.

    Belongs to the running event loop.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.started_s = now_s()
        self.ended_s = 0.0
        self.returncode: int | None = None  # exit status, or minus the signal
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @abstractmethod
    def _send(self, number: signal.Signals) -> None: ...

    def _finish(self, returncode: int) -> None:
        self.returncode = returncode
        self.ended_s = now_s()
        if not self._ended.done():
            self._ended.set_result(self.returncode)

    @property
    def alive(self) -> bool:
        return self.returncode is None

    @property
    def lifetime_s(self) -> float:
        return (now_s() if self.alive else self.ended_s) - self.started_s

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; no effect if the process has ended."""
        if self.alive:
            self._send(number)

    async def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the exit status; None if the time is over first."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._ended), timeout_s)
        except TimeoutError:
            return None

    @property
    def exit_status(self) -> int:
        """Return the exit status of an ended process, or minus the signal."""
        assert self.returncode is not None, "it runs"
        return self.returncode

    async def stop(self, grace_s: float, first: int = TERMINATE) -> None:
        """Send ``first``, and SIGKILL after ``grace_s``; wait for the end."""
        self.signal(signal.Signals(first))
        if await self.wait(grace_s) is None:
            self.signal(signal.SIGKILL)
            await self.wait()


class Child(Process):
    """One child. Construct it while the pid is certainly the child's: not yet waited for."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.pidfd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.pidfd, self._reap)

    def _reap(self) -> None:
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        if result is None:
            return
        exited = result.si_code == os.CLD_EXITED
        self._finish(result.si_status if exited else -result.si_status)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def _finish(self, returncode: int) -> None:
        self._loop.remove_reader(self.pidfd)
        os.close(self.pidfd)
        super()._finish(returncode)


class ForeignProcess(Child):
    """A process that is not a child: its end is known, but not its exit status (``returncode`` 0)."""

    def _reap(self) -> None:
        self._finish(0)


def spawn(
    command: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    output_fd: int,
    lifeline_fd: int,
    listen_fds: Sequence[int] = (),
) -> Child:
    """Start a program: no input, both outputs to ``output_fd``, the lifeline as descriptor 3, ``listen_fds`` from 4 on, no others."""
    pid = os.posix_spawn(
        command[0],
        command,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output_fd, 1),
            (os.POSIX_SPAWN_DUP2, output_fd, 2),
            (os.POSIX_SPAWN_DUP2, lifeline_fd, CHILD_LIFELINE_FD),
            *((os.POSIX_SPAWN_DUP2, fd, CHILD_LISTEN_FD + index) for index, fd in enumerate(listen_fds)),
        ],
        setpgroup=0,
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
    )
    return Child(pid)


def make_nicer(pid: int, nice: int) -> None:
    """Give every thread of the process this niceness on top of ours. No effect on threads that have ended, or on those with more."""
    wanted = min(os.getpriority(os.PRIO_PROCESS, 0) + nice, MAX_NICE)
    done: set[int] = set()
    with contextlib.suppress(OSError):  # the process has ended
        while tasks := {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()} - done:  # one may start another meanwhile
            for task in tasks:
                with contextlib.suppress(ProcessLookupError):
                    if os.getpriority(os.PRIO_PROCESS, task) < wanted:
                        os.setpriority(os.PRIO_PROCESS, task, wanted)
            done |= tasks


def reap_strangers(known: set[int]) -> None:
    """Wait for ended children that this process did not start: a subreaper inherits the orphans of its actors."""
    while True:
        try:
            result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if result is None or result.si_pid in known:
            return
        os.waitpid(result.si_pid, 0)


def children() -> list[int]:
    """Return the pids of this process's children, including ended ones not yet waited for."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def is_ending(pid: int) -> bool:
    """Return whether this child has given back its memory, and with it its command line, but cannot be waited for yet: its own children
    become ours only then."""
    try:
        if Path(f"/proc/{pid}/cmdline").read_bytes():
            return False
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except OSError:
        return False


def end_strangers(timeout_s: float = 2.0) -> None:
    """Kill and reap every remaining child at the end of a run: no other process would."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        pids = children()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)  # a child not waited for: the pid is still its own
                os.waitpid(pid, 0)


def descends_from_us(pid: int) -> bool:
    """Return whether this process, a subreaper, has started the other one or an ancestor of it; true also if one has just ended."""
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return not _is_of_another_user(pid)
        if pid == os.getpid():
            return True
    return False


def _is_of_another_user(pid: int) -> bool:
    """Return whether such a process exists. Where /proc hides it, the kernel still refuses signals to it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False


def pss_bytes(pid: int) -> int | None:
    """Return the proportional set size; None if the process is gone. The kernel walks the page tables for it: some ms."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    for line in rollup.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None


def tree_pss_bytes(pid: int) -> int | None:
    """Return the proportional set size of a process and all that descend from it; None if it is gone."""
    total = pss_bytes(pid)
    for child in _children_of(pid) if total is not None else ():
        total = (total or 0) + (tree_pss_bytes(child) or 0)
    return total


def _children_of(pid: int) -> list[int]:
    """Return the children of all its threads; those of one that is gone are none."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def anonymous_bytes(pid: int) -> int | None:
    """Return the memory of a process that is of no file and in no shared segment, and its part of what it shares with the process that
    forked it; None if it is gone, or the system does not say (Linux before 5.4)."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss_Anon:")), None)


def cpu_seconds(pid: int) -> float | None:
    """Return the processor time used so far, user and system; None if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


class Activity(NamedTuple):
    """Activity of a process and its children: processor time used, and a flag: one of them runs or waits for a processor or disk."""

    used_s: float
    wants_processor: bool


def activity(pid: int) -> Activity | None:
    """Measure the activity; None if the process is gone."""
    try:
        pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        stats = [Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split() for one in pids]
    except OSError:  # a child that has just ended: the next measurement shows it
        return None
    used_s = sum(int(field) for stat in stats for field in stat[11:13]) / _CLOCK_TICKS
    return Activity(used_s, any(stat[0] in "RD" for stat in stats))
