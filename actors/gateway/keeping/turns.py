"""Fair turns between requests that come and answers under way. Runs in the gateway's event loop.

A request costs the loop what many pieces of answers cost. Where hundreds come at once, a few begin in each turn of the loop, in the
order of their first bytes; between these, texts and answers of the controller are taken, and streams written.
"""

import asyncio
from collections import deque
from collections.abc import Callable

NUM_EACH = 16  # requests that begin in one turn of the loop


class Turns:
    """All requests of a gateway ask for their turn. Belongs to the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_left = NUM_EACH
        self._is_due = False

    def ask(self, begin: Callable[[], None]) -> None:
        """Call ``begin`` at once, or once it is its turn."""
        if self._num_left and not self._waiting:
            self._take()
            begin()
        else:
            self._waiting.append(begin)

    async def wait(self) -> None:
        """Wait for a turn."""
        if self._num_left and not self._waiting:
            self._take()
            return
        turn = self._loop.create_future()
        self._waiting.append(lambda: None if turn.done() else turn.set_result(None))
        await turn

    def _take(self) -> None:
        self._num_left -= 1
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._is_due, self._num_left = False, NUM_EACH
        while self._waiting and self._num_left:
            begin = self._waiting.popleft()
            self._take()
            begin()
