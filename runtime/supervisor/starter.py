"""Start processes for the supervisor: keep the zygote, choose fork or plain start, and set each process's environment."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from ...shm.kept_records import KeptRecords
from ..environment import CHILD_LISTEN_FD
from ..errors import RunError
from ..process.crash_cause import is_from_outside, oom_kills
from ..process.server_key import store_key
from ..stage_table import number_of
from .bytecode import missing_bytecode
from .connection_keeper import ConnectionKeeper
from .launcher import Zygote, ZygoteDiedError, ZygoteError, is_fork, pipe_to_logs
from .logs import LogPump
from .managed_actor import ActorSpec
from .processes import CHILD_LIFELINE_FD, Child, children, is_ending, reap_strangers, spawn
from .restart_policy import Broken, Cause, RestartHistory, RestartPolicy, decide

NOTIFY_NAME = "notify"
_FORKS_END_S, _FORKS_POLL_S = 1.0, 0.005


class StarterHost(Protocol):
    """The supervisor's interface for the starter."""

    def on_lines(self, actor: str, lines: Sequence[str], pid: int) -> None: ...
    def on_message(self, actor: str, text: str) -> None: ...


class Starter:
    """Starts the processes of one run. Owns the lifeline: its write end closes with this process, in any case."""

    def __init__(
        self,
        policy: RestartPolicy,
        host: StarterHost,
        run: Path,
        environment: Mapping[str, str],
        stages: Mapping[str, Sequence[str]],
        listeners: Sequence[socket.socket] = (),
        keeper: ConnectionKeeper | None = None,
        key: str = "",
    ) -> None:
        """``stages`` is what a zygote imports; when there are none every process starts plainly. ``listeners`` and ``keeper`` stay the
        caller's. ``key``: ``server.api_key``, for the gateway."""
        self._policy = policy
        self._host = host
        self._run = run
        self._environment = dict(environment)
        self._stages = stages
        self._listeners = listeners
        self._keeper = keeper
        self._zygote: Zygote | None = None
        self._spare: Zygote | None = None  # a copy of the zygote, for its death
        self._pumps: dict[int, LogPump] = {}  # of the two, by pid
        self._children: list[Child] = []
        self._strangers: set[int] = set()
        self._ending = False
        self._clearing = asyncio.Lock()  # held by a start that ends the forks of a dead zygote
        self._lifeline, self._lifeline_end = os.pipe()
        self._key = key
        self._answers: int | None = None  # memory of answers that outlive the gateway

    @property
    def zygote_pids(self) -> list[int]:
        """The zygote and its spare, those that live."""
        return [zygote.process.pid for zygote in (self._zygote, self._spare) if zygote is not None and zygote.process.alive]

    def end(self) -> None:
        """Start no more processes; callers that wait for a fork get a RunError."""
        self._ending = True
        for zygote in (self._zygote, self._spare):
            if zygote is not None:
                zygote.close()

    def close(self) -> None:
        os.close(self._lifeline)
        os.close(self._lifeline_end)
        if self._answers is not None:
            os.close(self._answers)

    async def keep_zygote(self) -> None:
        """Keep a zygote and a spare running until cancelled. While the zygote is broken, actors start plainly."""
        history = RestartHistory()
        try:
            while True:
                if self._zygote is None or not self._zygote.process.alive:  # else a start has put the spare in its place
                    if self._zygote is not None:
                        self._forget(self._zygote)
                    if not self._take_over() and not self._start_zygote():
                        await asyncio.Event().wait()
                zygote, kills = self._zygote, oom_kills()
                assert zygote is not None
                await self._keep_spare(zygote)
                await zygote.process.wait()
                self._forget(zygote)
                is_killed = not zygote.has_hung and is_from_outside(zygote.process.exit_status, False, oom_kills() - kills)
                cause: Cause = "outside" if is_killed else "itself"
                lifetime_s, status = zygote.process.lifetime_s, zygote.process.exit_status
                decision, history = decide(self._policy, history, lifetime_s=lifetime_s, status=status, jitter=0.0, cause=cause)
                if self._ending:
                    return
                if isinstance(decision, Broken):
                    self._host.on_message("zygote", f"is broken: {decision.reason}; actors start without it")
                    if self._spare is not None:
                        await self._end(self._spare)
                    self._zygote = self._spare = None
                if self._spare is None:
                    await asyncio.sleep(max(decision.delay_s, self._policy.backoff_s))
                await self._clear(zygote)
        finally:
            for last in (self._zygote, self._spare):
                if last is not None:
                    await self._end(last)

    def _start_zygote(self) -> bool:
        """Start a zygote, which begins to import. Returns False if that is impossible."""
        if why := missing_bytecode("torch"):
            self._host.on_message("zygote", why)
        read_end, write_end = pipe_to_logs()
        try:
            self._zygote = Zygote.start(self._run, self._stages, {**self._environment, "OMP_NUM_THREADS": "1"}, output_fd=write_end)
        except OSError as error:  # no more processes, no memory
            os.close(read_end)
            self._host.on_message("zygote", f"cannot be started: {error.strerror}; actors start without it")
            self._zygote = None
            return False
        finally:
            os.close(write_end)
        self._pump(self._zygote, read_end)
        self._guard_children()
        return True

    async def _keep_spare(self, zygote: Zygote) -> None:
        """Keep a spare for this zygote until that dies. Returns earlier if there can be none."""
        while True:
            if self._spare is None:
                read_end, write_end = pipe_to_logs()
                try:
                    self._spare = await zygote.copy(write_end)
                except ZygoteError as error:
                    os.close(read_end)
                    if isinstance(error, ZygoteDiedError):
                        await self._clear(zygote)
                    return
                finally:
                    os.close(write_end)
                self._pump(self._spare, read_end)
            spare = self._spare
            ends = [asyncio.create_task(process.wait()) for process in (zygote.process, spare.process)]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
            if not zygote.usable:
                return
            self._spare = None
            await self._end(spare)
            await asyncio.sleep(self._policy.backoff_s)

    def _take_over(self) -> bool:
        """Put the spare in the place of the zygote, which has ended. Returns False if there is none."""
        spare, self._spare = self._spare, None
        if spare is None:
            return False
        if not spare.usable:
            self._forget(spare)
            return False
        self._zygote = spare
        self._guard_children()
        return True

    def _pump(self, zygote: Zygote, read_end: int) -> None:
        self._pumps[zygote.process.pid] = LogPump(read_end, partial(self._on_lines, zygote.process.pid))

    def _forget(self, zygote: Zygote) -> None:
        """Close what is left of one that has ended."""
        zygote.close()
        if (pump := self._pumps.pop(zygote.process.pid, None)) is not None:
            pump.finish()

    async def _end(self, zygote: Zygote) -> None:
        zygote.close()
        await zygote.process.wait()
        self._forget(zygote)

    def _guard_children(self) -> None:
        assert self._zygote is not None
        self._children = [child for child in self._children if child.alive]
        for child in self._children:
            self._zygote.guard(child)

    def _on_lines(self, pid: int, lines: Sequence[str]) -> None:
        self._host.on_lines("zygote", lines, pid)

    def environment(self, spec: ActorSpec) -> dict[str, str]:
        """Return the environment of a process of this actor."""
        environment = {
            **self._environment,
            "MMRT_RUN_DIR": str(self._run),
            "NOTIFY_SOCKET": str(self._run / NOTIFY_NAME),
            "MMRT_LIFELINE_FD": str(CHILD_LIFELINE_FD),
            "WATCHDOG_USEC": str(int(spec.watchdog_s * 1e6)),
            "OMP_NUM_THREADS": str(spec.threads),
        }
        if listen_fds := self.listen_fds(spec):
            environment["MMRT_LISTEN_FDS"] = str(len(listen_fds))
        return environment

    def inheritance(self, spec: ActorSpec, stack: contextlib.ExitStack) -> tuple[dict[str, str], list[int]]:
        """Return environment and descriptors of a process that is no fork. ``stack`` closes those that are for it alone: do so once it
        has them. Raises: OSError."""
        environment, fds = self.environment(spec), self.listen_fds(spec)
        if spec.listens and self._keeper is not None:
            environment["MMRT_KEEPER_FD"] = str(CHILD_LISTEN_FD + len(fds))
            fds.append(stack.enter_context(self._keeper.channel(number_of(spec.name))).fileno())
        if spec.listens and not number_of(spec.name):  # the first gateway alone keeps answers
            if self._answers is None:
                self._answers = KeptRecords.create()
            environment["MMRT_ANSWERS_FD"] = str(CHILD_LISTEN_FD + len(fds))
            fds.append(self._answers)
        if spec.listens:
            key_fd = store_key(self._key)
            stack.callback(os.close, key_fd)
            environment["MMRT_KEY_FD"] = str(CHILD_LISTEN_FD + len(fds))
            fds.append(key_fd)
        return environment, fds

    def listen_fds(self, spec: ActorSpec) -> list[int]:
        """Return the sockets that the actor inherits."""
        return [listener.fileno() for listener in self._listeners] if spec.listens else []

    async def start(self, spec: ActorSpec, output_fd: int) -> Child:
        """Fork the actor from the zygote if possible, else start it plainly.

        Raises: OSError if the program cannot be started; RunError if the run is ending.
        """
        environment = self.environment(spec)
        for _ in range(2 if spec.needs else 0):  # by the zygote, or by its spare
            zygote = await self._living_zygote()
            if zygote is None:
                break
            try:
                process = await zygote.fork(
                    spec.name,
                    needs=spec.needs or "",
                    entry=spec.entry,
                    argument=spec.name,
                    environment=environment,
                    output_fd=output_fd,
                    lifeline_fd=self._lifeline,
                )
                self._remember(process)
                return process
            except ZygoteError as error:
                has_died = isinstance(error, ZygoteDiedError)
                if not self._ending:
                    again = has_died and self._spare is not None
                    self._host.on_message(spec.name, f"{error}: {'its spare takes over' if again else 'starts without it'}")
                    if has_died:
                        await self._clear(zygote)
                if self._ending:
                    raise RunError("the run is ending") from None
                if not has_died:
                    break
        with contextlib.ExitStack() as stack:
            environment, fds = self.inheritance(spec, stack)
            process = spawn(spec.command, environment, output_fd=output_fd, lifeline_fd=self._lifeline, listen_fds=fds)
        self._remember(process)
        return process

    async def _living_zygote(self) -> Zygote | None:
        """Return the zygote, or its spare once it has ended; None if there is neither."""
        zygote = self._zygote
        if zygote is not None and not zygote.usable and self._spare is not None:
            await self._clear(zygote)
            if self._zygote is zygote and not zygote.process.alive:
                self._take_over()
        return self._zygote if self._zygote is not None and self._zygote.usable else None

    async def _clear(self, zygote: Zygote) -> None:
        """End the forks of a dead zygote before another one takes its place: with two they cannot be attributed."""
        async with self._clearing:
            await self._end_forks_of(zygote)

    async def _end_forks_of(self, zygote: Zygote) -> None:
        """Kill unannounced forks of a dead zygote: they may take the role of the process started instead.

        Once there is another zygote, forks cannot be attributed; ``reap_strangers`` handles the remaining ones.
        """
        await zygote.process.wait(_FORKS_END_S)  # then its children are ours
        killed: set[int] = set()
        before: set[int] | None = None
        end_s = time.monotonic() + _FORKS_END_S
        while self._zygote in (zygote, None) and not self._ending and time.monotonic() < end_s:
            # A fork that is under way may have been announced. A fork has two steps: the first is killed, the second appears once the
            # first has ended. So two looks must find the same processes, none of them a fork or one that is ending.
            if not zygote.busy:
                strangers = set(children()) - self._own()
                forks = {pid for pid in strangers if is_fork(pid, self._run)}
                if not forks and strangers == before:
                    return
                for pid in forks - killed:
                    self._kill_stranger(pid)
                killed |= forks
                before = None if forks or any(map(is_ending, strangers)) else strangers
            await asyncio.sleep(_FORKS_POLL_S)

    def _own(self) -> set[int]:
        zygotes = {zygote.process.pid for zygote in (self._zygote, self._spare) if zygote is not None}
        return {child.pid for child in self._children} | zygotes

    def _kill_stranger(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # a child not waited for: the pid is still its own
        self._host.on_message("supervisor", f"killed orphan process {pid}")

    def _remember(self, process: Child) -> None:
        self._children = [child for child in self._children if child.alive] + [process]
        if self._zygote is not None:
            self._zygote.guard(process)

    def reap_strangers(self) -> None:
        """Reap inherited orphans, unless a fork is in progress, whose child is not known yet.

        A live orphan is an unannounced fork of a dead zygote, or was left by an actor: it is not supervised and may hold a role.
        It is killed when it is seen a second time.
        """
        if self._zygote is not None and self._zygote.busy:
            return
        own = self._own()
        reap_strangers(own)
        if os.getpid() == 1:
            return  # a container's orphans are all ours, also those of other commands in it
        strangers = set(children()) - own
        for pid in strangers & self._strangers:
            self._kill_stranger(pid)
        self._strangers = strangers
