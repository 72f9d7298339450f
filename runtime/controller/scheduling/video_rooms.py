"""The room that video processes have for plans, while choices are made (pure).

A request's media stay with the process that has begun them: it keeps them open. The controller chooses it, by load, when it gets the
first plan of a request; so of requests that have none yet one at a time is chosen, and the next in a view that shows where it went.
"""

from .types import RequestView, View


class VideoRooms:
    """The room of each process: plans that it may be sent, and whether one of them may be large."""

    def __init__(self, view: View) -> None:
        self._several = len(view.videos) > 1
        if self._several:
            self._credits: dict[str, int] = {room.name: room.credit for room in view.videos}
            self._large: set[str] = {room.name for room in view.videos if room.large_in_flight}
        else:
            self._credits = {"": view.video_credit}
            self._large = {""} if view.large_in_flight else set()
        self._is_over = False

    def has(self, request: RequestView, is_large: bool = False) -> bool:
        """Return whether a plan for the request can be chosen."""
        return not self._is_over and any(
            self._credits[name] > 0 and not (is_large and name in self._large) for name in self._of(request)
        )

    def take(self, request: RequestView, is_large: bool = False) -> None:
        """Take room for a plan. There is none for anybody where it is not known whose room that is."""
        name, *others = self._of(request)
        self._is_over = bool(others)
        self._credits[name] -= 1
        if is_large:
            self._large.add(name)

    def is_bound(self, request: RequestView) -> bool:
        """Return whether it is known which process gets the request's next plan."""
        return len(self._of(request)) == 1

    def _of(self, request: RequestView) -> list[str]:
        """Return the processes that may get the request's next plan."""
        if not self._several:
            return [""]
        return [request.video] if request.video in self._credits else [*self._credits]
