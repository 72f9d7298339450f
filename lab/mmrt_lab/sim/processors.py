"""Processor sharing: servers at work on one device, whose rates follow from who else works there."""

from collections import Counter
from typing import Protocol

from .interference import Interference


class Server(Protocol):
    """Something that works on a device: an actor, or a thread of one."""

    @property
    def stage(self) -> str: ...

    def set_rate(self, rate: float) -> None:
        """Go on at this share of the speed alone."""
        ...


class Processors:
    """The servers at work now. ``start`` and ``stop`` change the rates of all of them at once."""

    def __init__(self, interference: Interference) -> None:
        self._interference = interference
        self._rates: dict[Server, float] = {}
        self.together = ""  # the set of stages at work

    def rate_of_one_more(self, stage: str) -> float:
        """Return the rate that another server of this stage would have now."""
        return self._interference.rates(Counter([stage, *self._stages()]))[stage]

    def start(self, server: Server) -> None:
        """This server works from now on."""
        assert server not in self._rates
        self._rates[server] = 0.0
        self._share()

    def stop(self, server: Server) -> None:
        """This server works no more."""
        del self._rates[server]
        self._share()

    def _stages(self) -> tuple[str, ...]:
        return tuple(sorted([server.stage for server in self._rates]))

    def _share(self) -> None:
        self.together, rates = self._interference.together(self._stages())
        for server, before in self._rates.items():
            rate = rates[server.stage]
            if rate != before:
                self._rates[server] = rate
                server.set_rate(rate)
