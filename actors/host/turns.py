"""Turns of the actors that share a process: one plan or step at a time, first come, first served (``actors.turns``).

So an encode or prefill plan holds up decode, as in an engine that does one thing at a time (US15).
"""

import threading
from collections.abc import Callable
from types import TracebackType

BEAT_S = 0.5  # between signs of life of an actor that waits


class Turns:
    """The queue for the process's one turn. A lock alone would be taken again by whoever has just released it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._last = 0  # number drawn
        self._called = 1  # number whose turn it is

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait for a turn, and call ``beat`` meanwhile."""
        with self._changed:
            self._last += 1
            mine = self._last
            while self._called != mine:
                self._changed.wait(BEAT_S)
                beat()

    def end(self) -> None:
        """Give the turn to the next one."""
        with self._changed:
            self._called += 1
            self._changed.notify_all()


class Turn:
    """An actor's place in the queue, as a context manager around its plan or step."""

    def __init__(self, turns: Turns, beat: Callable[[], None]) -> None:
        self._turns, self._beat = turns, beat

    def __enter__(self) -> None:
        self._turns.wait(self._beat)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._turns.end()
