"""Who is who: what processes say over ``<run>/notify`` reaches the instance that runs as that pid. Owned by the supervisor."""

from collections import deque
from collections.abc import Iterable

from ..process.notify import Notification
from .managed_actor import Instance, SupervisedActor

MAX_EARLY = 64  # notifications kept of processes that are not known yet


class Roster:
    """The live processes of all actors by pid."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[SupervisedActor, Instance]] = {}
        self._early: deque[Notification] = deque(maxlen=MAX_EARLY)

    @property
    def pids(self) -> Iterable[int]:
        return self._known.keys()

    def add(self, actor: SupervisedActor, instance: Instance) -> None:
        """A process is there; what it has said before we knew its pid counts too. Those that have ended are forgotten."""
        self._known = {pid: known for pid, known in self._known.items() if known[1].process.alive}
        self._known[instance.process.pid] = actor, instance
        early, self._early = self._early, deque(maxlen=MAX_EARLY)
        self.pass_on(early)

    def pass_on(self, notifications: Iterable[Notification]) -> None:
        """Tell each instance what its process has said, and keep what nobody has said yet."""
        for notification in notifications:
            known = self._known.get(notification.pid)
            if known is None:
                self._early.append(notification)
            else:
                actor, instance = known
                actor.on_notification(instance, notification)
