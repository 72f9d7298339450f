"""The turn of a device whose stages compute one at a time (``actors.turns``), simulated: first come, first served."""

from collections import deque
from collections.abc import Callable

Action = Callable[[], None]


class Turns:
    """As ``shm/turns``, where a step comes after each plan."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Action, Action | None]] = deque()
        self._is_taken = False
        self._on_wanted: Action | None = None

    @property
    def is_wanted(self) -> bool:
        """Somebody waits for the turn."""
        return bool(self._waiting)

    def ask(self, begin: Action, on_wanted: Action | None = None) -> bool:
        """Ask for the turn. True if it is given at once; else ``begin`` is called when it is. ``on_wanted`` is called whenever somebody
        else begins to wait for it."""
        if not self._is_taken:
            self._is_taken, self._on_wanted = True, on_wanted
            return True
        self._waiting.append((begin, on_wanted))
        if self._on_wanted is not None:
            self._on_wanted()
        return False

    def end(self) -> None:
        """Give the turn to the next one."""
        if not self._waiting:
            self._is_taken, self._on_wanted = False, None
            return
        begin, self._on_wanted = self._waiting.popleft()
        begin()
