"""Limits of this process that it cannot raise again, for the processes that meet strangers' bytes."""

import resource
from collections.abc import Mapping

# No core is so small, so the kernel writes no file. Unlike 0, this also keeps it from piping a core to a program.
NO_CORE_BYTES = 1
MAX_STACK_BYTES = 8 << 20  # of the first thread, which grows; no other limit counts it


def lower_limits(limits: Mapping[int, int]) -> None:
    """Lower these limits of ``resource``, soft and hard; one that is lower already stays."""
    for kind, limit in limits.items():
        lowered = lesser(limit, resource.getrlimit(kind)[1])
        resource.setrlimit(kind, (lowered, lowered))


def lesser(limit: int, hard: int) -> int:
    """Return the limit, or ``hard`` where that is lower."""
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)
