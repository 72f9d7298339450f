"""Requests over the control socket, carried out on the actors of the run. Owned by the supervisor."""

import asyncio
import contextlib
import signal
from collections.abc import Mapping
from typing import Protocol

from ...shm.confined import is_confined
from ..errors import RunError
from .control import (
    DebugReply,
    DebugRequest,
    DownReply,
    DownRequest,
    ErrorReply,
    KillReply,
    KillRequest,
    LayoutReply,
    LayoutRequest,
    Reply,
    Request,
    RestartRequest,
    ScaleRequest,
    StatusReply,
)
from .control_server import WithDescriptors
from .handover import expect_free, hand_over_to_debugger, restart
from .managed_actor import Instance, SupervisedActor
from .processes import ForeignProcess, descends_from_us
from .run_report import RunReport
from .scaling import Scaling
from .starter import Starter


class Commanded(Protocol):
    """The supervisor's interface for commands."""

    @property
    def actors(self) -> Mapping[str, SupervisedActor]: ...

    def report(self) -> RunReport: ...
    def say(self, text: str) -> None: ...
    def on_started(self, actor: SupervisedActor, instance: Instance) -> None: ...
    async def end(self, drain_s: float | None) -> None: ...
    @property
    def scaling(self) -> Scaling: ...


class Commands:
    """One method for each request. Several are answered at once, each in the task of its connection.

    ``has_page``: the gateway serves a page with buttons that restart and kill processes.
    """

    def __init__(self, run: Commanded, starter: Starter, has_page: bool) -> None:
        self._run = run
        self._starter = starter
        self._has_page = has_page
        self._loans: set[asyncio.Task[None]] = set()

    async def answer(self, request: Request, pid: int) -> Reply | WithDescriptors:
        """Answer a request of process ``pid``. Raises: RunError if it is refused, as are all requests from processes of the run.

        Otherwise an attacker in the process that parses media could get listening sockets and environment of any role. The
        exceptions are the two commands of the gateway's page, which give nothing to anybody.
        """
        if is_confined(pid):
            raise RunError(
                f"process {pid} has more filters of system calls (seccomp) than the run, as the one that parses media: it may not "
                "command the run; use a terminal outside of its sandbox"
            )
        if self._is_ours(pid) and not (isinstance(request, RestartRequest | KillRequest) and self._is_page(pid)):
            raise RunError(f"process {pid} belongs to the run and may not command it")
        if isinstance(request, RestartRequest):
            return await self._restart(request)
        if isinstance(request, KillRequest):
            return self._kill(request)
        if isinstance(request, ScaleRequest):
            return LayoutReply(*await self._run.scaling.scale(request.stage, request.count))
        if isinstance(request, LayoutRequest):
            return LayoutReply(*await self._run.scaling.change(request.layout))
        if isinstance(request, DebugRequest):
            return self._debug(request, pid)
        if isinstance(request, DownRequest):
            await self._run.end(request.drain_s)
            return DownReply()
        return StatusReply(self._run.report())

    def close(self) -> None:
        for debugging in self._loans:
            debugging.cancel()

    def _is_ours(self, pid: int) -> bool:
        """Return whether the process is an actor's, or was started by one: the gateway has a child that compiles grammars. The video
        process is confined, under a debugger, too."""
        instances = (instance for actor in self._run.actors.values() for instance in actor.instances)
        return any(instance.process.pid == pid and not instance.is_debugger for instance in instances) or descends_from_us(pid)

    def _is_page(self, pid: int) -> bool:
        """Return whether the process is a gateway that serves the page."""
        gateways = (actor for actor in self._run.actors.values() if actor.spec.listens)
        return self._has_page and any(instance.process.pid == pid for actor in gateways for instance in actor.instances)

    def _actor(self, name: str) -> SupervisedActor:
        """Return the supervised actor of the process that ``name`` runs in."""
        for actor in self._run.actors.values():
            if name in actor.spec.roles:
                return actor
        names = [role for actor in self._run.actors.values() for role in actor.spec.roles]
        raise RunError(f"no actor {name!r}; there are {', '.join(names)}")

    async def _restart(self, request: RestartRequest) -> Reply:
        try:
            reply = await restart(self._actor(request.actor))
        except OSError as error:
            raise RunError(f"{request.actor}: no new process can be started: {error.strerror}") from None
        self._run.say(reply.message)
        return reply

    def _kill(self, request: KillRequest) -> Reply:
        """Kill the process that has the role. It counts as killed from outside, so that no number of kills makes the actor broken."""
        actor = self._actor(request.actor)
        instance = actor.current
        if instance is None or not instance.process.alive or instance.is_debugger or actor.stopping.is_set():
            raise RunError(f"{request.actor} is {actor.state}: no process of it can be killed")
        self._run.say(f"{request.actor}: pid {instance.process.pid} is killed by a command")
        instance.process.signal(signal.SIGKILL)
        return KillReply(instance.process.pid)

    def _debug(self, request: DebugRequest, pid: int) -> Reply | WithDescriptors:
        """Lend the role to the asking process: it is the debugger of the actor until it ends."""
        actor = self._actor(request.actor)
        if len(actor.spec.roles) > 1:
            together = ", ".join(actor.spec.roles)
            raise RunError(f"{request.actor} cannot be debugged in a process that is {together}: actors.layout can give it its own")
        expect_free(actor)
        try:
            debugger = Instance(ForeignProcess(pid), None, is_debugger=True)
        except ProcessLookupError:
            return ErrorReply(f"process {pid} has gone")
        stack = contextlib.ExitStack()
        environment, fds = self._starter.inheritance(actor.spec, stack)
        self._run.on_started(actor, debugger)
        debugging = asyncio.create_task(hand_over_to_debugger(actor, debugger))
        self._loans.add(debugging)
        debugging.add_done_callback(self._loans.discard)
        return WithDescriptors(DebugReply(environment), fds, stack.close)
