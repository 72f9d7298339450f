"""Route notifications from ``<run>/notify`` to the instance with the sender's pid. Owned by the supervisor."""

from collections import deque
from collections.abc import Iterable

from ..process.notify import Notification
from .managed_actor import Instance, SupervisedActor

MAX_EARLY = 64  # notifications kept from processes not yet known


class Roster:
    """The live processes of all actors by pid."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[SupervisedActor, Instance]] = {}
        self._early: deque[Notification] = deque(maxlen=MAX_EARLY)

    @property
    def pids(self) -> Iterable[int]:
        return self._known.keys()

    def add(self, actor: SupervisedActor, instance: Instance) -> None:
        """Add a process; its notifications from before its pid was known are delivered. Ended processes are forgotten."""
        self._known = {pid: known for pid, known in self._known.items() if known[1].process.alive}
        self._known[instance.process.pid] = actor, instance
        early, self._early = self._early, deque(maxlen=MAX_EARLY)
        self.pass_on(early)

    def pass_on(self, notifications: Iterable[Notification]) -> None:
        """Pass each notification to its instance, and keep those from unknown processes."""
        for notification in notifications:
            known = self._known.get(notification.pid)
            if known is None:
                self._early.append(notification)
            else:
                actor, instance = known
                actor.on_notification(instance, notification)
