"""An event loop whose clock jumps to the next timer: hours of waiting cost nothing, and a run is the same each time."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StuckError(AssertionError):
    """Everything waits, and nothing will come."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """No descriptors, threads or signals: what comes from outside comes by ``call_at``."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self._now_s = 1000.0

    def time(self) -> float:
        return self._now_s

    def pause(self, seconds: float) -> None:
        """Stop this process for a while; what is due meanwhile comes late."""
        self._now_s += seconds

    def select(self, timeout_s: float | None) -> tuple[()]:
        """Selector: wait for the next timer."""
        if timeout_s is None:
            raise StuckError("everything waits, and nothing will come")
        self._now_s += timeout_s
        return ()

    def _process_events(self, events: tuple[()]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Return what ``main`` returns, in a loop of its own, without tasks left behind."""
    loop = SimulatedLoop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    errors: list[dict[str, Any]] = []
    try:
        result = loop.run_until_complete(main)
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks are left: {left}"
        assert not errors, errors
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        if left := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
