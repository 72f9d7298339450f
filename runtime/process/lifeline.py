"""The lifeline: processes of a run notice the supervisor's death, even by kill -9, and then leave nothing behind.

The supervisor alone holds the write end of one pipe; every actor inherits the read end, whose number is in
MMRT_LIFELINE_FD. When the supervisor dies for any reason, the kernel closes the write end and the read end becomes readable
(POLLHUP). Used by ``actors/host/process.py`` in every actor, ``sweep`` by the zygote as guardian. Under systemd there is no lifeline:
the manager stops what it started.
"""

import contextlib
import os
import select
from pathlib import Path

from ...shm.errors import ShmError
from ...shm.run_directory import sweep_dead_run


class Lifeline:
    """The read end. ``fd`` is to be polled with everything else (None: no supervisor); ``is_gone`` checks without waiting."""

    def __init__(self, fd: int | None) -> None:
        self.fd = fd
        self._gone = False
        self._poll = select.poll()
        if fd is not None:
            os.set_inheritable(fd, False)
            self._poll.register(fd, select.POLLIN | select.POLLHUP)

    def is_gone(self) -> bool:
        """Return True once the supervisor has died; permanent from then on. About 1 µs."""
        if not self._gone and self.fd is not None:
            self._gone = bool(self._poll.poll(0))
        return self._gone

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def sweep(path: str) -> None:
    """Remove a run's remains in ``path``, if no process belongs to it any more. Called by the zygote as guardian."""
    with contextlib.suppress(ShmError):
        sweep_dead_run(Path(path))
