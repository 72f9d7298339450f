"""Whether a process may do less than this one: then it parses what strangers send, and is served as if it were one of them.

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


def _num_filters(pid: int) -> int:
    """Raises: OSError if there is no such process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("Seccomp_filters:")), 0)
