"""Garbage of an actor with an event loop is collected when little is under way: Python would look through all objects of all requests,
in the midst of a burst and for as long as they are many."""

import gc

_YOUNG = (200_000, 10)  # objects, and collections, after which Python looks through the young ones: a thousand requests have fewer
_SOME = 2_000  # young objects that are worth a collection
_NEVER = 1 << 30
QUIET_S = 2.0  # between two collections
LATEST_S = 60.0  # whatever is under way
FEW = 64  # requests


def collect_when_quiet() -> None:
    """Let Python look through young objects alone from now on: ``Garbage`` collects the rest. What there is now it never looks at."""
    gc.freeze()
    gc.set_threshold(*_YOUNG, _NEVER)


class Garbage:
    """Of this process, once ``collect_when_quiet`` was called. Call ``tick`` now and then."""

    def __init__(self, now_s: float) -> None:
        self._collected_s = now_s

    def tick(self, now_s: float, num_requests: int) -> None:
        """Collect all garbage, if something has come since the last time."""
        if gc.get_threshold()[2] != _NEVER:
            return
        since_s = now_s - self._collected_s
        if since_s >= LATEST_S or (since_s >= QUIET_S and num_requests <= FEW):
            self._collected_s = now_s
            young, *older = gc.get_count()
            if young >= _SOME or any(older):
                gc.collect()
