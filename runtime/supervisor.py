"""The supervisor: one run of all actors in one process group tree, from ``mmrt up`` to the last of them.

An asyncio program without torch. It owns the run directory, the notify and control sockets, the lifeline and the zygote; each actor
is a ``SupervisedActor``. Dependencies gate readiness, not spawning: every actor is started at once and waits for what it needs.
"""

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..shm.errors import BusyError, ShmError
from ..shm.run_directory import RunDirectory
from .actor_specs import HURRY_GRACE_S
from .config import RuntimeConfig
from .control import (
    SOCKET_NAME,
    DownReply,
    DownRequest,
    ErrorReply,
    Reply,
    Request,
    RestartRequest,
    StatusReply,
)
from .control_server import ControlServer
from .errors import RunError
from .logs import LogFiles
from .notify import Notification, Notifier, NotifyListener
from .processes import Process, become_subreaper, end_strangers, pss_bytes
from .report import RunReport, endpoint
from .restart_policy import RestartPolicy
from .starter import NOTIFY_NAME, Starter
from .status_report import CpuMeter, StatusTables, report_actor
from .supervised import ActorSpec, Instance, SupervisedActor

TICK_S = 0.5
LATE_S = 1.0  # a tick later than this means that this process was stopped or starved
# Who ends when: what feeds others first, what others write into last.
STOP_ORDER = (
    frozenset({"gateway"}),
    frozenset({"detokenizer", "decode", "prefill", "encoder", "video"}),
    frozenset({"controller"}),
    frozenset({"memory"}),
)


class Reporter(Protocol):
    """Whoever is told what happens: the terminal, or the process that waits for a detached run."""

    def lines(self, actor: str, lines: Sequence[str]) -> None: ...
    def progress(self, actor: str, state: str, status: str) -> None: ...
    def message(self, text: str) -> None: ...
    def ready(self, endpoint: str, seconds: float) -> None: ...
    def failed(self, reason: str, tail: Sequence[str]) -> None: ...


class Supervisor:
    """One run. ``serve`` is all of its life; it must run in the main thread of a process that has no other children."""

    def __init__(
        self,
        path: Path,
        info: dict[str, Any],
        config: RuntimeConfig,
        specs: Sequence[ActorSpec],
        reporter: Reporter,
        *,
        environment: Mapping[str, str],
        log_directory: Path,
        zygote_stages: Mapping[str, Sequence[str]] | None = None,
        preparation: ActorSpec | None = None,
        notify_socket: str | None = None,
        hang_up_ends: bool = True,
    ) -> None:
        """``info`` is what run.json says; without ``zygote_stages`` every actor starts plainly.

        ``preparation`` is a process that must end well before the actors start. ``notify_socket`` is where the run itself is
        reported ready (sd_notify). ``hang_up_ends``: SIGHUP means SIGTERM, rather than nothing.
        """
        settings = config.supervisor
        self.policy = RestartPolicy(
            limit=settings.restart_limit,
            window_s=settings.restart_window_s,
            backoff_s=settings.backoff_s,
            backoff_max_s=settings.backoff_max_s,
        )
        self.actors = {spec.name: SupervisedActor(spec, self) for spec in specs}
        self._path = path
        self._info = info
        self._config = config
        self._reporter = reporter
        self._environment = environment
        self._stages = zygote_stages or {}
        self._preparation = preparation
        self._notifier = Notifier(notify_socket, "supervisor")  # to whoever has started us
        self._hang_up_ends = hang_up_ends
        self._began_s = time.monotonic()
        self._was_ready = False
        self._failure = ""
        self._end = asyncio.Event()
        self._gone = asyncio.Event()
        self._drain_s = settings.drain_s
        self._forced = False
        self._logs = LogFiles(log_directory, reporter.message)
        self._meter = CpuMeter()
        self._started: dict[int, tuple[SupervisedActor, Instance]] = {}
        self._early: deque[Notification] = deque(maxlen=64)

    # ------------------------------------------------------------------------------------------------------ the run

    async def serve(self) -> int:
        """Start everything, keep it running until somebody ends it, and leave nothing behind.

        Returns the exit status: 0 ended as asked, 1 an actor failed, 130 forced by a second Ctrl-C.
        Raises: RunError if a run is up already in this directory, or the directory cannot be used.
        """
        self._run = self._create_run()
        self._tables = StatusTables(self._run)
        self._loop = asyncio.get_running_loop()
        become_subreaper()
        self._starter = Starter(self, self._run.path, self._environment, self._stages)
        self._notify = NotifyListener(self._run.path / NOTIFY_NAME)
        control = ControlServer(self._run.path / SOCKET_NAME, self._answer)
        try:
            await control.start()
            self._loop.add_reader(self._notify.fd, self._on_notify)
            self._handle_signals()
            await self._run_actors()
        finally:
            self._loop.remove_reader(self._notify.fd)
            self._notify.close()
            self._tables.close()
            self._leave()
            self._gone.set()
            self._say("forced to an end" if self._forced else "the run is over")
            await control.close()
            self._starter.close()
            self._notifier.close()
            self._logs.close()
        if self._failure:
            return 1
        return 130 if self._forced else 0

    def _create_run(self) -> RunDirectory:
        try:
            return RunDirectory.create(self._path, self._info)
        except BusyError as error:
            pids = ", ".join(map(str, error.pids)) or "unknown"
            raise RunError(
                f"a run is already up in {self._path} (pid {pids}): see mmrt status, end it with mmrt down, or use --run NAME"
            ) from None
        except ShmError as error:
            raise RunError(str(error)) from None

    def _leave(self) -> None:
        try:
            self._run.destroy()
        except ShmError as error:
            self._say(f"the run directory stays: {error}")

    async def _run_actors(self) -> None:
        background: set[asyncio.Task[Any]] = set()
        actors: set[asyncio.Task[None]] = set()
        ending = asyncio.create_task(self._end.wait())
        try:
            if self._stages:
                background.add(asyncio.create_task(self._starter.keep_zygote()))
                await asyncio.sleep(0)  # it starts first: it is the longest way to ready
            if self._preparation and not await self._prepare(self._preparation):
                return
            background.add(asyncio.create_task(self._tick()))
            actors = {asyncio.create_task(actor.run(), name=actor.name) for actor in self.actors.values()}
            # An exception in one of these is a bug of ours: it must end the run, not hang it.
            watched: set[asyncio.Task[Any]] = {ending, *background, *actors}
            while not ending.done():
                done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            ending.cancel()
            await self._stop_actors()
            self._starter.end()
            await asyncio.gather(*actors, return_exceptions=True)
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            end_strangers()

    async def _prepare(self, spec: ActorSpec) -> bool:
        """Run a process that must succeed before the actors start; the zygote imports meanwhile. False if the run is to end."""
        maker = SupervisedActor(spec, self)
        self._reporter.progress(spec.name, "starting", "making the default model (random weights; once)")
        instance = await maker.start()
        ended = asyncio.create_task(instance.ended())
        asked = asyncio.create_task(self._end.wait())
        await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        instance.kill("the run ends")
        if await ended != 0 and not self._end.is_set():
            self._fail(f"{spec.name} failed: {instance.describe_exit()}", list(instance.pump.tail))
        return not self._end.is_set()

    async def _stop_actors(self) -> None:
        self._say("stopping" if not self._failure else "stopping, since an actor failed")
        self._notifier.stopping()
        for stage in STOP_ORDER:
            members = [actor for name, actor in self.actors.items() if name in stage]
            await asyncio.gather(*(self._stop(actor) for actor in members))

    async def _stop(self, actor: SupervisedActor) -> None:
        if self._forced:
            actor.kill()
        if actor.name == "gateway":
            # The first SIGTERM lets it drain, the second ends its streams with an error frame.
            await actor.stop(HURRY_GRACE_S, hurry_after_s=max(0.1, self._drain_s))
        else:
            await actor.stop()

    def _handle_signals(self) -> None:
        self._loop.add_signal_handler(signal.SIGINT, self._on_signal)
        self._loop.add_signal_handler(signal.SIGTERM, self._on_signal)
        if self._hang_up_ends:
            self._loop.add_signal_handler(signal.SIGHUP, self._on_signal)
        else:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_signal(self) -> None:
        if not self._end.is_set():
            self._end.set()
            return
        self._forced = True
        self._say("forced: killing every actor")
        for actor in self.actors.values():
            actor.kill()

    async def _tick(self) -> None:
        """Watchdog and orphans: what no event tells."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            # What we have not read yet cannot be held against anybody; nor can it when we were stopped ourselves (Ctrl-Z).
            self._on_notify()
            late, last_s = now_s - last_s > TICK_S + LATE_S, now_s
            for actor in self.actors.values():
                words = self._tables.actor(actor.name)
                current = actor.current
                same = current is not None and words.pid == current.process.pid
                if late:
                    actor.excuse(now_s)
                actor.check(now_s, words.step_deadline_s if same and not late else 0.0)
            self._starter.reap_strangers()

    async def start_process(self, spec: ActorSpec, output_fd: int) -> Process:
        """Host: start the process of an actor."""
        return await self._starter.start(spec, output_fd)

    # ------------------------------------------------------------------------------------------ what actors tell

    def _on_notify(self) -> None:
        for notification in self._notify.drain():
            started = self._started.get(notification.pid)
            if started is None:
                self._early.append(notification)
            else:
                actor, instance = started
                actor.on_notification(instance, notification)

    def on_started(self, actor: SupervisedActor, instance: Instance) -> None:
        """Host: a process is there; what it has said before we knew its pid counts too."""
        self._started = {pid: known for pid, known in self._started.items() if known[1].process.alive}
        self._started[instance.process.pid] = actor, instance
        self._meter.watch(self._started)
        early, self._early = self._early, deque(maxlen=self._early.maxlen)
        for notification in early:
            if notification.pid == instance.process.pid:
                actor.on_notification(instance, notification)
            else:
                self._early.append(notification)

    def is_ready(self, names: frozenset[str]) -> bool:
        """Host: whether all of these actors serve."""
        return all(self.actors[name].ready for name in names if name in self.actors)

    def on_lines(self, actor: str, lines: Sequence[str]) -> None:
        """Host: an actor has printed something."""
        self._logs.write(actor, lines)
        self._reporter.lines(actor, lines)

    def on_message(self, actor: str, text: str) -> None:
        """Host: the supervisor itself has something to say about an actor."""
        self._say(f"{actor} {text}")

    def on_state(self, actor: SupervisedActor) -> None:
        """Host: state or status line of an actor have changed."""
        status = actor.current.status if actor.current else ""
        self._reporter.progress(actor.name, actor.state, status)
        if not self._was_ready and self.is_ready(frozenset(self.actors)):
            self._was_ready = True
            seconds = time.monotonic() - self._began_s
            self._logs.write("supervisor", [f"ready after {seconds:.2f} s: {endpoint(self._info)}"])
            self._reporter.ready(endpoint(self._info), seconds)
            self._notifier.active(f"serving at {endpoint(self._info)}")

    def on_failed(self, actor: SupervisedActor, reason: str) -> None:
        """Host: an actor cannot be kept running: the run ends."""
        self._fail(f"{actor.name} failed: {reason}", actor.last_tail)

    def _fail(self, failure: str, tail: Sequence[str]) -> None:
        if self._failure:
            return
        self._failure = failure
        self._drain_s = 0.0
        self._logs.write("supervisor", [failure])
        self._reporter.failed(failure, tail)
        self._end.set()

    def _say(self, text: str) -> None:
        self._logs.write("supervisor", [text])
        self._reporter.message(text)

    # ------------------------------------------------------------------------------------------------------ control

    async def _answer(self, request: Request) -> Reply:
        if isinstance(request, RestartRequest):
            if request.actor not in self.actors:
                return ErrorReply(f"no actor {request.actor!r}; there are {', '.join(self.actors)}")
            reply = await self.actors[request.actor].restart()
            self._say(reply.message)
            return reply
        if isinstance(request, DownRequest):
            if request.drain_s is not None:
                self._drain_s = min(self._drain_s, request.drain_s)
            self._end.set()
            await self._gone.wait()
            return DownReply()
        return StatusReply(self.report())

    def report(self) -> RunReport:
        """The state of the run now. Some ms: the kernel adds up every process's memory."""
        pools, requests = self._tables.pools_and_requests()
        zygote = self._starter.zygote_pid
        actors = [report_actor(actor, self._tables.actor(actor.name), self._meter) for actor in self.actors.values()]
        ready = all(actor.ready for actor in actors)
        state = "stopping" if self._end.is_set() else "ready" if ready else "degraded" if self._was_ready else "starting"
        return RunReport(
            ready=ready and not self._end.is_set(),
            state=state,
            path=str(self._run.path),
            run_id=self._run.run_id,
            endpoint=endpoint(self._info),
            model=str(self._info.get("model_path", "")),
            supervisor_pid=os.getpid(),
            overhead_bytes=(pss_bytes(os.getpid()) or 0) + (pss_bytes(zygote) or 0 if zygote else 0),
            uptime_s=time.monotonic() - self._began_s,
            actors=actors,
            pools=pools,
            requests=requests,
        )
