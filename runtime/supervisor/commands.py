"""Requests over the control socket, carried out on the actors of the run. Owned by the supervisor."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ..errors import RunError
from .control import (
    DebugReply,
    DebugRequest,
    DownReply,
    DownRequest,
    ErrorReply,
    KeyReply,
    KeyRequest,
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
from .crew import Crew
from .handover import admit_debugger, expect_free, hand_over_to_debugger, restart
from .managed_actor import Instance, SupervisedActor
from .run_report import RunReport
from .scaling import Scaling


class Loan(NamedTuple):
    """What a process gets that is to be an actor: ``close`` once it has the descriptors, or is gone."""

    debugger: Instance
    environment: dict[str, str]
    fds: Sequence[int]
    close: Callable[[], None]


class Asked(Protocol):
    """The supervisor's interface for commands."""

    def report(self) -> RunReport: ...
    def may_ask(self, pid: int) -> str: ...
    def is_descendant(self, pid: int) -> bool: ...
    def lend(self, actor: SupervisedActor, pid: int) -> Loan: ...
    @property
    def scaling(self) -> Scaling: ...


class Commands:
    """One method for each request. Several are answered at once, each in the task of its connection."""

    def __init__(self, crew: Crew, asked: Asked) -> None:
        self._crew = crew
        self._asked = asked
        self._loans: set[asyncio.Task[None]] = set()

    async def answer(self, request: Request, pid: int) -> Reply | WithDescriptors:
        """Answer a request of process ``pid``. Raises: RunError if it is refused, as are all requests from processes of the run.

        Otherwise an attacker in the process that parses media could get listening sockets and environment of any role. The
        exceptions are the two commands of the gateway's page, which give nothing to anybody.
        """
        if refusal := self._asked.may_ask(pid):
            raise RunError(refusal)
        if self._is_ours(pid) and not (isinstance(request, RestartRequest | KillRequest) and self._is_page(pid)):
            raise RunError(f"process {pid} belongs to the run and may not command it")
        if isinstance(request, RestartRequest):
            return await self._restart(request)
        if isinstance(request, KillRequest):
            return self._kill(request)
        if isinstance(request, ScaleRequest):
            return LayoutReply(*await self._asked.scaling.scale(request.stage, request.count))
        if isinstance(request, LayoutRequest):
            return LayoutReply(*await self._asked.scaling.change(request.layout))
        if isinstance(request, DebugRequest):
            return self._debug(request, pid)
        if isinstance(request, DownRequest):
            await self._crew.end(request.drain_s)
            return DownReply()
        if isinstance(request, KeyRequest):
            return KeyReply(self._crew.config.server.api_key)
        return StatusReply(self._asked.report())

    def close(self) -> None:
        for debugging in self._loans:
            debugging.cancel()

    def _is_ours(self, pid: int) -> bool:
        """Return whether the process is an actor's, or was started by one: the gateway has a child that compiles grammars. The video
        process is confined, under a debugger, too."""
        instances = (instance for actor in self._crew.actors.values() for instance in actor.instances)
        return any(instance.process.pid == pid and not instance.is_debugger for instance in instances) or self._asked.is_descendant(pid)

    def _is_page(self, pid: int) -> bool:
        """Return whether the process is a gateway that serves the page."""
        gateways = (actor for actor in self._crew.actors.values() if actor.spec.listens)
        return self._crew.config.server.page and any(instance.process.pid == pid for actor in gateways for instance in actor.instances)

    def _actor(self, name: str) -> SupervisedActor:
        """Return the supervised actor of the process that ``name`` runs in."""
        for actor in self._crew.actors.values():
            if name in actor.spec.roles:
                return actor
        names = [role for actor in self._crew.actors.values() for role in actor.spec.roles]
        raise RunError(f"no actor {name!r}; there are {', '.join(names)}")

    async def _restart(self, request: RestartRequest) -> Reply:
        try:
            reply = await restart(self._actor(request.actor))
        except OSError as error:
            raise RunError(f"{request.actor}: no new process can be started: {error.strerror}") from None
        self._crew.say(reply.message)
        return reply

    def _kill(self, request: KillRequest) -> Reply:
        """Kill the process that has the role. It counts as killed from outside, so that no number of kills makes the actor broken."""
        actor = self._actor(request.actor)
        instance = actor.current
        if instance is None or not instance.process.alive or instance.is_debugger or actor.stopping.is_set():
            raise RunError(f"{request.actor} is {actor.state}: no process of it can be killed")
        self._crew.say(f"{request.actor}: pid {instance.process.pid} is killed by a command")
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
            loan = self._asked.lend(actor, pid)
        except ProcessLookupError:
            return ErrorReply(f"process {pid} has gone")
        admit_debugger(actor, loan.debugger)
        self._crew.on_started(actor, loan.debugger)
        debugging = asyncio.create_task(hand_over_to_debugger(actor, loan.debugger))
        self._loans.add(debugging)
        debugging.add_done_callback(self._loans.discard)
        return WithDescriptors(DebugReply(loan.environment), loan.fds, loan.close)
