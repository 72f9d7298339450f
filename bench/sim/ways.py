"""The times of messages, ticks and a request's way in. They were measured twice: while decode worked, and while it did not."""

from collections.abc import Callable

from .costs import Costs, Overheads
from .events import EventQueue, to_ns


class Ways:
    """``is_busy``: whether decode works."""

    def __init__(self, costs: Costs, queue: EventQueue, is_busy: Callable[[], bool]) -> None:
        self._alone, self._beside = costs.overheads, costs.overheads_beside
        self._queue, self._is_busy = queue, is_busy
        self._last_ns: dict[str, int] = {}

    @property
    def now(self) -> Overheads:
        """The times that hold now."""
        return self._alone if self._beside is None or not self._is_busy() else self._beside

    def arrival_ns(self, way: str) -> int:
        """When a message arrives that leaves now. Those of one way stay in order."""
        arrival_ns = max(self._queue.now_ns + to_ns(self.now.message_s), self._last_ns.get(way, 0))
        self._last_ns[way] = arrival_ns
        return arrival_ns
