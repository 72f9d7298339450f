"""The time that a gateway waits until the requests of the one before are submitted again. Runs in its event loop."""

import asyncio
from collections.abc import Callable

ADOPTION_S = 30.0  # for all requests under way to be submitted again, while the controller answers
SILENCE_S = 5.0  # after which it does not


class Patience:
    """Of one gateway. Without a controller nothing can be submitted again, so only the time in which it answers counts."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heard_since_s = self._heard_s = -SILENCE_S

    def heard(self) -> None:
        """The controller has answered: it does so once a second."""
        now_s = self._loop.time()
        if now_s - self._heard_s >= SILENCE_S:
            self._heard_since_s = now_s
        self._heard_s = now_s

    def after(self, give_up: Callable[[], None]) -> None:
        """Call ``give_up`` once the time is over."""

        def look() -> None:
            now_s = self._loop.time()
            left_s = ADOPTION_S if now_s - self._heard_s >= SILENCE_S else self._heard_since_s + ADOPTION_S - now_s
            give_up() if left_s <= 0 else self._loop.call_later(left_s, look)

        self._loop.call_later(ADOPTION_S, look)
