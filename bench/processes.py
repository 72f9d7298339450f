"""Processes of a run, from outside: their kinds, their memory, and whether they are there. Called by the benches that start runs."""

import os
import select
import signal
from pathlib import Path

from ..runtime.stage_table import ALL_ACTORS

SUPERVISOR, ZYGOTE, SPARE = "supervisor", "zygote", "spare"  # the last takes the zygote's place when that dies
GRAMMARS = "grammars"  # the gateway's, for the grammars of its clients
OTHER = "other"  # none of ours: a program that a library starts for a moment
# The kernel keeps 15 bytes of a name. "mmrt-" can take five of them.
_SHORT_NAMES = {length: actor for actor in ALL_ACTORS for length in (actor, actor[:10])}


def descendants(supervisor_pid: int) -> dict[int, str]:
    """pid -> kind of the supervisor and of all that descends from it."""
    found = {supervisor_pid: SUPERVISOR}
    waiting = children(supervisor_pid)
    while waiting:
        pid = waiting.pop()
        found[pid] = what_is(pid)
        waiting += children(pid)
    return found


def children(pid: int) -> list[int]:
    """Its direct children; none if it is gone."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []


def what_is(pid: int) -> str:
    """Kind of a process: an actor, the zygote, its spare, the gateway's for grammars, or ``OTHER``. A forked actor has the zygote's
    command line, but its own name."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip().removeprefix("mmrt-")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return OTHER
    if name in _SHORT_NAMES:
        return _SHORT_NAMES[name]
    if b"mmrt.runtime.supervisor.zygote" in command:
        return SPARE if name == SPARE else ZYGOTE
    if b"mmrt.actors.gateway.grammar.process" in command:
        return GRAMMARS
    *_, last = command.rstrip(b"\0").split(b"\0")
    return last.decode() if last.decode(errors="replace") in ALL_ACTORS else OTHER


def is_gone(pid: int) -> bool:
    """True if dead with all its threads, reaped or not: a zombie in /proc may be just the first thread of a process still ending."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 0)[0])
    finally:
        os.close(fd)


def send_signal(pid: int, number: int) -> bool:
    """Signal a process by descriptor; False if it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def memory_of(pid: int) -> tuple[int, int]:
    """(proportional set size, private dirty) of a process in bytes; zeros if it is gone.

    A page of a shared mapping that only one process has touched counts as private dirty in the kernel's sums, although no other
    process would need a copy of it: private dirty is counted over private mappings alone.
    """
    proportional = private = 0
    is_shared = False
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, *rest = line.split()
        if not name.endswith(":"):
            is_shared = rest[0].endswith("s")
        elif name == "Pss:":
            proportional += int(rest[0]) * 1024
        elif name == "Private_Dirty:" and not is_shared:
            private += int(rest[0]) * 1024
    return proportional, private
