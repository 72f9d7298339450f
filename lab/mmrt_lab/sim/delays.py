"""The times of messages, ticks and a request's way in. They were measured twice: while decode worked, and while it did not."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from random import Random

from .costs import Costs, Delays, Overheads
from .events import EventQueue, to_ns

_PERIOD = 1024  # times after which they come again


class DrawnDelays:
    """``is_busy``: whether decode works. ``seed``: of the order in which measured times come."""

    def __init__(self, costs: Costs, queue: EventQueue, is_busy: Callable[[], bool], seed: int, num_gateways: int = 1) -> None:
        self._overheads = costs.overheads
        self._alone = _Drawn(costs.overheads, costs.alone, seed)
        self._beside = _Drawn(costs.overheads, costs.beside, seed) if costs.beside != Delays() else None
        self._queue, self._is_busy = queue, is_busy
        self._last_ns: dict[str, int] = {}
        self._free_ns = [0] * num_gateways  # when each one's last request has gone its way in

    def message_ns(self) -> int:
        """Draw the time of a message that leaves now."""
        return next(self._drawn().message_ns)

    def tick_ns(self) -> int:
        """Draw the time from a message that arrives now to the decision."""
        return next(self._drawn().tick_ns)

    def arrival_ns(self, way: str) -> int:
        """When a message arrives that leaves now. Those of one way stay in order."""
        arrival_ns, last_ns = self._queue.now_ns + next(self._drawn().message_ns), self._last_ns.get(way, 0)
        if arrival_ns < last_ns:
            return last_ns
        self._last_ns[way] = arrival_ns
        return arrival_ns

    def in_ns(self, num_tokens: int, num_bytes: int) -> int:
        """When a request with so many tokens and bytes of media that is sent now has gone its way in. A gateway has one thread: a
        request waits for the one before it, at the gateway that is free first."""
        overheads = self._overheads
        more_s = overheads.ingress_token_s * num_tokens + overheads.ingress_byte_s * num_bytes
        gateway = self._free_ns.index(min(self._free_ns))
        begin_ns = max(self._queue.now_ns, self._free_ns[gateway])
        self._free_ns[gateway] = begin_ns + next(self._drawn().ingress_ns) + to_ns(more_s)
        return self._free_ns[gateway]

    def _drawn(self) -> "_Drawn":
        return self._alone if self._beside is None or not self._is_busy() else self._beside


class _Drawn:
    """Measured times in a random order, each equally often, again and again; or the only one that there is."""

    def __init__(self, overheads: Overheads, delays: Delays, seed: int) -> None:
        random = Random(seed)

        def drawn(times_s: Sequence[float], otherwise_s: float) -> Iterator[int]:
            times_ns = [to_ns(seconds) for seconds in times_s or (otherwise_s,)]
            times_ns *= -(-_PERIOD // len(times_ns)) if times_s else 1
            random.shuffle(times_ns)
            return cycle(times_ns)

        self.ingress_ns = drawn(delays.ingress_s, overheads.ingress_s)
        self.message_ns = drawn(delays.message_s, overheads.message_s)
        self.tick_ns = drawn(delays.tick_s, overheads.tick_s)
