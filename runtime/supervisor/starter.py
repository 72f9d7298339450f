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

from ..errors import RunError
from ..process.crash_cause import is_from_outside, oom_kills
from .launcher import Zygote, ZygoteDiedError, ZygoteError, is_fork, pipe_to_logs
from .logs import LogPump
from .managed_actor import ActorSpec
from .processes import CHILD_LIFELINE_FD, Process, children, is_ending, reap_strangers, spawn
from .restart_policy import Broken, Cause, RestartHistory, RestartPolicy, decide

NOTIFY_NAME = "notify"
_FORKS_END_S, _FORKS_POLL_S = 1.0, 0.005


class StarterHost(Protocol):
    """The supervisor's interface for the starter."""

    policy: RestartPolicy

    def on_lines(self, actor: str, lines: Sequence[str], pid: int) -> None: ...
    def on_message(self, actor: str, text: str) -> None: ...


class Starter:
    """Starts the processes of one run. Owns the lifeline: its write end closes with this process, in any case."""

    def __init__(
        self,
        host: StarterHost,
        run: Path,
        environment: Mapping[str, str],
        stages: Mapping[str, Sequence[str]],
        listeners: Sequence[socket.socket] = (),
    ) -> None:
        """``stages`` is what a zygote imports; when there are none every process starts plainly. ``listeners`` stay the caller's."""
        self._host = host
        self._run = run
        self._environment = dict(environment)
        self._stages = stages
        self._listeners = listeners
        self._zygote: Zygote | None = None
        self._children: list[Process] = []
        self._strangers: set[int] = set()
        self._ending = False
        self._clearing = asyncio.Lock()  # held by a start that ends the forks of a dead zygote
        self._lifeline, self._lifeline_end = os.pipe()

    @property
    def zygote_pid(self) -> int | None:
        return self._zygote.process.pid if self._zygote is not None and self._zygote.process.alive else None

    def end(self) -> None:
        """Start no more processes; callers that wait for a fork get a RunError."""
        self._ending = True
        if self._zygote is not None:
            self._zygote.close()

    def close(self) -> None:
        os.close(self._lifeline)
        os.close(self._lifeline_end)

    async def keep_zygote(self) -> None:
        """Keep a zygote running until cancelled. While it is broken, actors start plainly."""
        history = RestartHistory()
        try:
            while True:
                read_end, write_end = pipe_to_logs()
                environment = {**self._environment, "OMP_NUM_THREADS": "1"}
                try:
                    zygote = Zygote.start(self._run, self._stages, environment, output_fd=write_end)
                except OSError as error:  # no more processes, no memory
                    os.close(read_end)
                    self._host.on_message("zygote", f"cannot be started: {error.strerror}; actors start without it")
                    self._zygote = None
                    await asyncio.Event().wait()
                finally:
                    os.close(write_end)
                pump = LogPump(read_end, partial(self._on_lines, zygote.process.pid))
                self._zygote, kills = zygote, oom_kills()
                self._children = [child for child in self._children if child.alive]
                for child in self._children:
                    zygote.guard(child)
                await zygote.process.wait()
                status = zygote.process.exit_status
                pump.finish()
                zygote.close()
                lifetime_s = zygote.process.lifetime_s
                is_killed = not zygote.has_hung and is_from_outside(status, False, oom_kills() - kills)
                cause: Cause = "outside" if is_killed else "itself"
                decision, history = decide(self._host.policy, history, lifetime_s=lifetime_s, status=status, jitter=0.0, cause=cause)
                if self._ending:
                    return
                if isinstance(decision, Broken):
                    self._host.on_message("zygote", f"is broken: {decision.reason}; actors start without it")
                    self._zygote = None
                await asyncio.sleep(max(decision.delay_s, self._host.policy.backoff_s))
                async with self._clearing:  # of the dead one's forks: with two zygotes they cannot be attributed
                    pass
        finally:
            if self._zygote is not None:
                self._zygote.close()
                await self._zygote.process.wait()

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

    def listen_fds(self, spec: ActorSpec) -> list[int]:
        """Return the sockets that the actor inherits."""
        return [listener.fileno() for listener in self._listeners] if spec.listens else []

    async def start(self, spec: ActorSpec, output_fd: int) -> Process:
        """Fork the actor from the zygote if possible, else start it plainly.

        Raises: OSError if the program cannot be started; RunError if the run is ending.
        """
        environment = self.environment(spec)
        zygote = self._zygote
        if spec.needs and zygote is not None and zygote.usable:
            try:
                process = await zygote.fork(
                    spec.name,
                    needs=spec.needs,
                    entry=spec.entry,
                    argument=spec.name,
                    environment=environment,
                    output_fd=output_fd,
                    lifeline_fd=self._lifeline,
                )
                self._remember(process)
                return process
            except ZygoteError as error:
                if not self._ending:
                    self._host.on_message(spec.name, f"{error}: starts without it")
                    if isinstance(error, ZygoteDiedError):
                        async with self._clearing:
                            await self._end_forks_of(zygote)
                if self._ending:
                    raise RunError("the run is ending") from None
        process = spawn(
            spec.command,
            environment,
            output_fd=output_fd,
            lifeline_fd=self._lifeline,
            listen_fds=self.listen_fds(spec),
        )
        self._remember(process)
        return process

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
        return {child.pid for child in self._children} | ({self._zygote.process.pid} if self._zygote else set())

    def _kill_stranger(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # a child not waited for: the pid is still its own
        self._host.on_message("supervisor", f"killed orphan process {pid}")

    def _remember(self, process: Process) -> None:
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
