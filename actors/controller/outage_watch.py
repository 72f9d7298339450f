"""Tells the controller which actors are broken, by the supervisor's table or, in a run without one, by their absence; and which of
these, and of those that have others of their stage, are dead, by their role locks."""

import time
from collections.abc import Iterable, Sequence

from ...runtime.stage_table import InstanceId, replaceable, stage_of
from ...schema.outage import Outage
from ...shm.errors import MissingError
from ...shm.outages import OutageTable
from ...shm.role_lock import RoleLock
from ...shm.run_directory import RunDirectory

_LOOK_S = 1.0
_GLANCE_S = 0.02  # a look at a role costs 20 µs
_GONE_S = 0.1  # a dead process's role is free before its device is closed: see ``host.actor.GRACE_S``


class OutageWatch:
    """``changed`` returns the outages whenever they differ from before."""

    def __init__(self, run: RunDirectory, absence_s: float, actors: Iterable[InstanceId]) -> None:
        """``absence_s``: in a run without a supervisor, an actor counts as broken when no process has held its role for so long."""
        self._run = run
        self._absence_s = absence_s
        self._table: OutageTable | None = None
        try:
            self._table = OutageTable.attach(run)
        except MissingError:  # made by systemd's memory
            pass
        self._version = 0
        self._look_at_s = 0.0
        self._seen_s = dict.fromkeys((actor for actor in actors if stage_of(actor) in replaceable()), time.monotonic())
        self._absent: tuple[str, ...] = ()  # for long
        self._glance_at_s = 0.0
        self._absent_now: frozenset[InstanceId] = frozenset()
        self._free_s: dict[InstanceId, float] = {}  # since when nobody was seen to hold their roles

    def changed(self, now_s: float) -> Sequence[Outage] | None:
        """Return all outages if they differ from the last call's, else None."""
        if self._table is not None:
            if (version := self._table.version) == self._version:
                return None
            self._version = version
            return self._table.read()
        if now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + _LOOK_S
        return self._look(now_s)

    def set_actors(self, actors: Iterable[InstanceId]) -> None:
        """Set the actors that belong to the run from now on."""
        self._seen_s = {actor: self._seen_s.get(actor, time.monotonic()) for actor in actors if stage_of(actor) in replaceable()}

    def gone(self, actors: Iterable[InstanceId], now_s: float) -> list[InstanceId]:
        """Return those of these actors that are dead: nobody holds the role, now and for some time."""
        free = [actor for actor in actors if not RoleLock.is_held(self._run, actor)]
        self._free_s = {actor: self._free_s.get(actor, now_s) for actor in free}
        return [actor for actor, since_s in self._free_s.items() if now_s - since_s >= _GONE_S]

    def absent(self, actors: Iterable[InstanceId], now_s: float) -> frozenset[InstanceId]:
        """Return those of these actors whose role nobody holds, as seen lately."""
        if now_s >= self._glance_at_s:
            self._glance_at_s = now_s + _GLANCE_S
            self._absent_now = frozenset(actor for actor in actors if not RoleLock.is_held(self._run, actor))
        return self._absent_now

    def _look(self, now_s: float) -> Sequence[Outage] | None:
        for actor in self._seen_s:
            if RoleLock.is_held(self._run, actor):
                self._seen_s[actor] = now_s
        absent = tuple(actor for actor, seen_s in self._seen_s.items() if now_s - seen_s > self._absence_s)
        if absent == self._absent:
            return None
        self._absent = absent
        return [Outage(actor, f"no process of it for {self._absence_s:g} s (supervisor.restart_window_s)") for actor in absent]

    def close(self) -> None:
        if self._table is not None:
            self._table.close()
