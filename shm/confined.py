"""Whether a process may do less than this one: then it parses what strangers send, and is served as if it were one of them.

As root such a process has a user id of its own, which follows from its pid.

Whoever accepts connections in a run asks. The kernel tells how many filters of system calls a process has (Linux 5.9); they only ever
become more, and children inherit them. In a container all processes may have one.
"""

import os
from pathlib import Path


def is_confined(pid: int) -> bool:
    """Return whether the process has more filters than this one. One that is gone counts as such: nobody knows what it was."""
    try:
        return _num_filters(pid) > _num_filters(os.getpid())
    except OSError:
        return True


def own_ids(pid: int) -> tuple[int, int]:
    """Return the user ids that a process may take: one that nobody else has, and one for a container that maps the usual 65,536."""
    return 0x7F000000 + pid, 40_000 + pid % 20_000


def is_of_this_user(uid: int, pid: int) -> bool:
    """Return whether a process with this id belongs to this process's user. Only root can have given it an id of its own."""
    return uid == os.getuid() or (os.getuid() == 0 and uid in own_ids(pid))


def _num_filters(pid: int) -> int:
    """Raises: OSError if there is no such process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("Seccomp_filters:")), 0)
