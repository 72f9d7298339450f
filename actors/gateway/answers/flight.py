"""The gateway's entries in its flight recorder: its part of each request."""

import time

from ....runtime.bus.messages import RequestSpec
from ....runtime.observe.flight import Kind, pack_id
from ....shm.flight_recorder import FlightWriter


class GatewayFlight:
    """The gateway's part of each request."""

    def __init__(self, flight: FlightWriter) -> None:
        self._flight = flight

    def received(self, key: int, spec: RequestSpec) -> None:
        """Record that the request was read and goes to the controller."""
        self._flight.event(Kind.RECEIVED, key, *pack_id(spec.generation.request_id), sum(item.num_bytes for item in spec.items))

    def now_ns(self) -> int:
        """The time for ``written``: the registry has no clock."""
        return time.monotonic_ns()

    def written(self, key: int, began_ns: int, num_bytes: int) -> None:
        """Record that its media were written into their pages, just now."""
        self._flight.record(Kind.WRITTEN, began_ns, time.monotonic_ns() - began_ns, key, 0, 0, num_bytes)

    def first_text(self, key: int) -> None:
        """Record its first text."""
        self._flight.event(Kind.FIRST_TEXT, key)

    def sent(self, key: int, num_tokens: int) -> None:
        """Record that its client has been sent the text of so many tokens."""
        self._flight.event(Kind.SENT, key, num_tokens)

    def over(self, key: int, num_tokens: int, status: int) -> None:
        """Record its end for the client: an error of this status, or success (0)."""
        self._flight.event(Kind.OVER, key, num_tokens, status)
