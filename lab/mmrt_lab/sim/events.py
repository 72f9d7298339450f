"""Time of a simulation: integer nanoseconds, so that equal decisions come at equal moments, and the events still to come."""

from collections.abc import Callable
from heapq import heappop, heappush

NS = 1_000_000_000
BEGIN_NS = 100 * NS  # the machine knows times long before the first


def to_ns(seconds: float) -> int:
    """Nanoseconds, rounded."""
    return round(seconds * NS)


class EventQueue:
    """Actions in order of time; those of one moment in the order in which they were added."""

    def __init__(self) -> None:
        self.now_ns = BEGIN_NS
        self.num_events = 0
        self._number = 0
        self._heap: list[tuple[int, int, Callable[..., object], tuple[object, ...]]] = []

    @property
    def now_s(self) -> float:
        return self.now_ns / NS

    def at(self, time_ns: int, action: Callable[..., object], *arguments: object) -> None:
        """Add an action. A time in the past is now."""
        self._number += 1
        heappush(self._heap, (time_ns if time_ns > self.now_ns else self.now_ns, self._number, action, arguments))

    def after(self, delay_ns: int, action: Callable[..., object], *arguments: object) -> None:
        """Add an action so much later."""
        self.at(self.now_ns + delay_ns, action, *arguments)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Do actions until it is over. There must be some until then."""
        heap = self._heap
        while not is_over():
            self.now_ns, _, action, arguments = heappop(heap)
            self.num_events += 1
            action(*arguments)
