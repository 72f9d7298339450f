"""Another layout while the run lives: processes of its stages are added, and others leave when they hold no work.

Owned by the supervisor. New processes come first; the controller gives them work as soon as they say Hello. One that leaves gets no
more: its plans end, its rows go to other decodes, and the controller says that it is drained; then it ends. The layout in ``run.json``
and the actor table tell everybody else. What is impossible is refused before anything changes; what fails is taken back.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from ...shm.errors import MissingError, ShmError
from ...shm.flight_recorder import FlightRecorder
from ...shm.run_directory import RunDirectory
from ...shm.status import ActorTable, Membership
from ..config.runtime_config import RuntimeConfig, with_layout
from ..errors import ConfigError, RunError
from ..process.host_room import read_host_room
from ..stage_table import ALL_ACTORS, InstanceId, devices_of, join_layouts, scale_layout, stage_of
from .actor_tasks import ActorTasks
from .handover import expect_free
from .managed_actor import ActorSpec, CrewApi, SupervisedActor
from .processes import anonymous_bytes
from .specs import actor_specs
from .status_report import StatusTables

_LOOK_S = 0.02
_MEBI = 1 << 20


class Scaled(CrewApi, Protocol):
    """The interface of the run's actors (``crew``) for another layout."""

    actors: dict[str, SupervisedActor]
    tasks: ActorTasks

    @property
    def config(self) -> RuntimeConfig: ...
    @property
    def can_scale(self) -> bool: ...
    def set_config(self, config: RuntimeConfig) -> None: ...
    def say(self, text: str) -> None: ...


class Scaling:
    """Changes of the layout, one at a time."""

    def __init__(self, run: RunDirectory, tables: StatusTables, host: Scaled) -> None:
        self._run = run
        self._tables = tables
        self._host = host
        self._lock = asyncio.Lock()

    async def scale(self, stage: str, count: int) -> tuple[str, list[str]]:
        """Have so many actors of a stage. Returns the layout, and what was done. Raises: RunError, and nothing has changed."""
        async with self._lock:
            try:
                layout = scale_layout(self._host.config.actors.layout, stage, count)
            except ConfigError as error:
                raise RunError(str(error)) from None
            return await self._change(layout)

    async def change(self, layout: str) -> tuple[str, list[str]]:
        """Have another layout, of the same processes, more of them or fewer. Returns and raises as ``scale``; where some have come and
        others stay, the error says so."""
        async with self._lock:
            return await self._change(layout)

    async def _change(self, layout: str) -> tuple[str, list[str]]:
        host = self._host
        try:
            config = with_layout(host.config, layout)
        except ConfigError as error:
            raise RunError(str(error)) from None
        layout, before, after = config.actors.layout, host.config.processes, config.processes
        self._expect_up()
        for name in before.keys() & after.keys():
            if before[name] != after[name]:
                has, wants = " and ".join(before[name]), " and ".join(after[name])
                raise RunError(f"in {layout!r} the process {name} is {wants}, now it is {has}: that needs another start (mmrt up)")
        places = devices_of(host.config.actors.layout)
        for role, device in devices_of(layout).items():
            if places.get(role, device) != device:
                moved = f"{role} is on device {device}, now it is on {places[role]}"
                raise RunError(f"in {layout!r} {moved}: that needs another start (mmrt up)")
        new, going = [name for name in after if name not in before], [name for name in before if name not in after]
        if gateways := [name for name in [*new, *going] if stage_of(name) == "gateway"]:
            raise RunError(f"in {layout!r} {gateways[0]} would come or go: that needs another start (mmrt up)")
        changed = [actor for name in [*new, *going] for actor in (after.get(name) or before[name]) if stage_of(actor) == "prefill"]
        if changed and host.config.scheduling.prefill_pipeline:
            raise RunError(f"in {layout!r} {changed[0]}, a stage of a pipeline, would come or go: that needs another start (mmrt up)")
        if host.config.model.on_cuda:
            raise RunError(f"on {host.config.model.device} pools take the memory that processes leave at the start: set actors.layout")
        for name in going:
            expect_free(host.actors[name])
        self._check_room(new)
        messages = []
        if new:
            await self._grow(join_layouts(host.config.actors.layout, layout) if going else layout, new)
            messages.append(f"{_names(new, after)}: in the run, and serving")
        if going:
            try:
                await self._shrink(layout, going, before)
            except RunError as error:
                if not messages:
                    raise
                raise RunError(f"{error}; {messages[0]}, and the layout is {host.config.actors.layout}") from None
            messages.append(f"{_names(going, before)}: left the run, without work")
        for message in messages:
            host.say(message)
        return host.config.actors.layout, messages

    def _expect_up(self) -> None:
        if not self._host.can_scale:
            raise RunError("the run is starting or ending: its layout can be changed while it serves")

    def _check_room(self, new: Sequence[InstanceId]) -> None:
        """Raise RunError unless there is memory for more processes. Each needs what one of its stage has besides weights and pools."""
        needed = 0
        for name in new:
            process = next(actor for actor in self._host.actors.values() if stage_of(name) in map(stage_of, actor.spec.roles))
            needed += (anonymous_bytes(process.current.process.pid) or 0) if process.current is not None else 0
        if new and needed > (room := read_host_room(self._run.path).memory_bytes):
            raise RunError(f"{', '.join(new)} need {needed // _MEBI} MiB, as those of their stage do; {room // _MEBI} MiB are free")

    async def _grow(self, layout: str, new: Sequence[InstanceId]) -> None:
        """Start processes, and wait until they serve. If one does not, all of them go again."""
        before = self._host.config
        config = with_layout(before, layout)
        specs = [spec for spec in actor_specs(config) if spec.name in new]
        roles = [role for spec in specs for role in spec.roles]
        for role in roles:
            self._make_recorder(role)
        self._host.set_config(config)
        self._set_memberships(roles, Membership.PRESENT)
        self._add(specs)
        failed = await self._all_serve(new)
        if failed is not None:
            self._expect_up()
            tail = "".join(f"\n{failed.name} | {line}" for line in failed.last_tail)
            reason = failed.outage.reason if failed.outage is not None else f"it is {failed.state}"
            self._set_memberships(roles, Membership.LEAVING)  # those that do serve may have work by now
            await self._drain(roles)
            await self._remove(new)
            self._set_memberships(roles, Membership.GONE)
            self._host.set_config(before)
            raise RunError(f"{failed.name} does not come up, and nothing has changed: {reason}{tail}")

    async def _all_serve(self, names: Sequence[InstanceId]) -> SupervisedActor | None:
        """Wait until all serve. Returns one that will not."""
        actors = [self._host.actors[name] for name in names]
        while not all(actor.ready for actor in actors):
            for actor in actors:
                if actor.outage is not None or actor.stopping.is_set():
                    return actor
            await asyncio.sleep(_LOOK_S)
        return None

    async def _shrink(self, layout: str, going: Sequence[InstanceId], processes: dict[InstanceId, tuple[InstanceId, ...]]) -> None:
        """Let processes end once they hold no work. If that takes too long, they stay."""
        host, roles = self._host, [role for name in going for role in processes[name]]
        self._set_memberships(roles, Membership.LEAVING)
        try:
            holding = await self._drain(roles)
        except asyncio.CancelledError:
            self._set_memberships(roles, Membership.PRESENT)
            raise
        if holding:
            self._set_memberships(roles, Membership.PRESENT)
            limit_s = host.config.supervisor.drain_s
            raise RunError(f"{', '.join(holding)} still had work after {limit_s:g} s (supervisor.drain_s), and stays")
        await self._remove(going)
        self._set_memberships(roles, Membership.GONE)
        host.set_config(with_layout(host.config, layout))

    async def _drain(self, roles: Sequence[str]) -> list[str]:
        """Wait until actors that leave hold no work. Returns those that still do when time is over."""
        version, until_s = self._version, time.monotonic() + self._host.config.supervisor.drain_s
        while holding := [role for role in roles if role not in self._tables.drained(version)]:
            if time.monotonic() > until_s:
                break
            self._expect_up()
            await asyncio.sleep(_LOOK_S)
        return holding

    def _add(self, specs: Iterable[ActorSpec]) -> None:
        """Start more processes."""
        actors = self._host.actors
        for spec in specs:
            actors[spec.name] = actor = SupervisedActor(spec, self._host)
            self._host.tasks.begin(actor)
        ordered = sorted(actors.items(), key=lambda item: min(map(ALL_ACTORS.index, map(InstanceId, item[1].spec.roles))))
        actors.clear()
        actors.update(ordered)

    async def _remove(self, names: Sequence[str]) -> None:
        """End processes, and start them no more."""
        actors = self._host.actors
        await asyncio.gather(*(actors[name].stop() for name in names))
        for name in names:
            await actors[name].starts_ended()
            await self._host.tasks.ended(name)
            self._host.on_outage(actors.pop(name))

    def _make_recorder(self, role: str) -> None:
        """Make the flight recorder of an actor, unless it has been here before. Raises: RunError if there is no room for it."""
        try:
            FlightRecorder.attach(self._run, role, writable=False).close()
        except MissingError:
            try:
                FlightRecorder.create(self._run, role).close()
            except ShmError as error:
                raise RunError(str(error)) from None

    @property
    def _version(self) -> int:
        table = ActorTable.attach(self._run, writable=False)
        try:
            return table.version
        finally:
            table.close()

    def _set_memberships(self, roles: Iterable[str], membership: Membership) -> None:
        table, devices = ActorTable.attach(self._run, writable=True), self._host.config.actor_devices
        try:
            for role in roles:
                table.set_membership(role, membership, devices.get(InstanceId(role)))
        finally:
            table.close()


def _names(processes: Iterable[InstanceId], actors_of: dict[InstanceId, tuple[InstanceId, ...]]) -> str:
    return ", ".join("+".join(actors_of[name]) for name in processes)
