"""The first layers of a prompt, computed by its decode's device while the others come (KT2): work beside decode's steps."""

from collections.abc import Callable

from .events import EventQueue, to_ns
from .processors import Processors


class Recomputing:
    """One prompt's. ``then``: is called at the end, with the time."""

    stage = "prefill"

    def __init__(self, queue: EventQueue, processors: Processors, seconds: float, begin_ns: int, then: Callable[[int], None]) -> None:
        self._queue, self._processors, self._then = queue, processors, then
        self._left_ns, self._since_ns, self._rate = to_ns(seconds), begin_ns, 1.0
        self._version = 0
        queue.at(begin_ns, processors.start, self)

    def set_rate(self, rate: float) -> None:
        """See ``processors.Server``."""
        now_ns = self._queue.now_ns
        self._left_ns = max(0, self._left_ns - round((now_ns - self._since_ns) * self._rate))
        self._since_ns, self._rate = now_ns, rate
        self._version += 1
        self._queue.at(now_ns + round(self._left_ns / rate), self._end, self._version)

    def _end(self, version: int) -> None:
        if version == self._version:
            self._processors.stop(self)
            self._then(self._queue.now_ns)
