"""The supervisor: one run of all actors in one process group tree, from ``mmrt up`` to the last actor's end.

An asyncio program without torch. It owns the run directory, the notify and control sockets, the lifeline and the zygote; each actor
is a ``SupervisedActor``. Dependencies gate readiness, not spawning: every actor is started at once and waits for what it needs.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ...schema.outage import Outage
from ...shm.errors import BusyError, ShmError
from ...shm.outages import OutageTable
from ...shm.run_directory import RunDirectory
from ...shm.tcp_count import why_inexact
from ..config.runtime_config import RuntimeConfig
from ..errors import ConfigError, RunError
from ..observe.dumps import BlackBox, salvage
from ..process.kept_connections import record_sizes
from ..process.notify import Notifier, NotifyListener
from ..process.page_token import is_token_needed, page_token
from ..process.run import RunInfo, create_run, rewrite_run_info
from .actor_tasks import ActorTasks
from .commands import Commands
from .connection_keeper import ConnectionKeeper
from .control import SOCKET_NAME
from .control_server import ControlServer
from .device_keeper import DeviceKeeper
from .exit_cause import conclude
from .logs import LogFiles
from .managed_actor import ActorSpec, Instance, Step, SupervisedActor
from .processes import Process, become_subreaper, end_strangers, keep_descriptors
from .reload import Reloader
from .restart_policy import RestartPolicy
from .roster import Roster
from .run_report import RunReport
from .scaling import Scaling
from .specs import HURRY_GRACE_S, stop_order
from .stand_in import StandIn
from .standby import keep_standby
from .starter import NOTIFY_NAME, Starter
from .status_report import ActorWords, CpuMeter, RunFacts, StatusTables, report_run

TICK_S = 0.5
LATE_S = 1.0  # a tick later than this means that this process was stopped or starved


class Reporter(Protocol):
    """A receiver of events: the terminal, or the process that waits for a detached run."""

    def lines(self, actor: str, lines: Sequence[str]) -> None: ...
    def progress(self, actor: str, state: str, status: str) -> None: ...
    def message(self, text: str) -> None: ...
    def ready(self, endpoint: str, page: str, seconds: float) -> None: ...
    def failed(self, reason: str, tail: Sequence[str]) -> None: ...


class RunSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The settings to start a run."""

    path: Path
    info: RunInfo
    specs: Sequence[ActorSpec]
    environment: Mapping[str, str]  # of every process
    log_directory: Path
    zygote_stages: Mapping[str, Sequence[str]] = {}  # without them every actor starts plainly
    notify_socket: str | None = None  # gets the readiness of the run itself (sd_notify)
    hang_up_ends: bool = True  # SIGHUP means SIGTERM, rather than nothing
    listeners: Sequence[socket.socket] = ()  # for clients; closed when the gateway has ended
    watched_source: Path | None = None  # the package's directory; changes restart the actors that import the changed modules


class Supervisor:
    """One run. ``serve`` spans its whole life; it must run in the main thread of a process that has no other children."""

    def __init__(self, setup: RunSetup, reporter: Reporter) -> None:
        settings = setup.info.config.supervisor
        self.policy = RestartPolicy(
            limit=settings.restart_limit,
            window_s=settings.restart_window_s,
            backoff_s=settings.backoff_s,
            backoff_max_s=settings.backoff_max_s,
        )
        self.actors = {spec.name: SupervisedActor(spec, self) for spec in setup.specs}
        self._setup = setup
        self._config = setup.info.config
        self._reporter = reporter
        self._notifier = Notifier(setup.notify_socket, "supervisor")  # to the process that started the supervisor
        self._stand_in = StandIn(setup.listeners)
        self._connections: ConnectionKeeper | None = None
        self._began_s = time.monotonic()
        self._was_ready = False
        self._failure = ""
        self._end = asyncio.Event()
        self._gone = asyncio.Event()
        self._drain_s = settings.drain_s
        self._forced = False
        self._logs = LogFiles(setup.log_directory, reporter.message, is_json=self._config.logging.is_json)
        self._meter = CpuMeter()
        self._roster = Roster()
        self.tasks = ActorTasks(self._end.set)

    # ------------------------------------------------------------------------------------------------------ the run

    async def serve(self) -> int:
        """Start everything, keep it running until it is told to end, and leave nothing behind.

        Returns the exit status: 0 ended on request, 1 an actor failed, 130 forced by a second Ctrl-C.
        Raises: RunError if a run is up already in this directory, or the directory cannot be used.
        """
        self._run = self._create_run()
        self._logs.begin(self._config.actors.layout)
        self._tables = StatusTables(self._run)
        self._black_box = BlackBox(self._run, self._setup.log_directory)
        self._keeper = DeviceKeeper(self._run.path, self.say) if self._config.model.on_cuda else None
        self._loop = asyncio.get_running_loop()
        become_subreaper()
        keep_descriptors()
        self._connections = self._keep_connections()
        setup = self._setup
        self._starter = Starter(self, self._run.path, setup.environment, setup.zygote_stages, setup.listeners, self._connections)
        self._notify = NotifyListener(self._run.path / NOTIFY_NAME)
        self.scaling = Scaling(self._run, self._tables, self)
        commands = Commands(self, self._starter, self._config.server.page)
        control = ControlServer(self._run.path / SOCKET_NAME, commands.answer)
        try:
            await control.start()
            self._loop.add_reader(self._notify.fd, self._on_notify)
            self._handle_signals()
            await self._run_actors()
        finally:
            self._loop.remove_reader(self._notify.fd)
            self._notify.close()
            if self._keeper is not None:
                await self._keeper.close()
            self._tables.close()
            self._outages.close()
            try:
                self._run.destroy()
            except ShmError as error:
                self.say(f"the run directory stays: {error}")
            self._gone.set()
            commands.close()
            self.say(": ".join(filter(None, ("forced to an end" if self._forced else "the run is over", self._failure))))
            await control.close()
            self._starter.close()
            self._notifier.close()
            self._logs.close()
        if self._failure:
            return 1
        return 130 if self._forced else 0

    def _create_run(self) -> RunDirectory:
        path = self._setup.path
        if saved := salvage(path, self._setup.log_directory):
            self.say(f"the last run here was killed; what it was doing: mmrt trace --crash {saved.stem}")
        try:
            run = create_run(path, self._setup.info)
            self._outages = OutageTable.create(run)
            return run
        except BusyError as error:
            pids = ", ".join(map(str, error.pids)) or "unknown"
            raise RunError(
                f"a run is already up in {path} (pid {pids}): see mmrt status, end it with mmrt down, or use --run NAME"
            ) from None
        except ShmError as error:
            raise RunError(str(error)) from None

    def _keep_connections(self) -> ConnectionKeeper | None:
        """Return what keeps clients' connections; None where that is impossible: they then end with their gateway."""
        server = self._config.server
        if not self._setup.listeners or server.scheme == "https":
            return None
        try:
            sizes = record_sizes(server.max_connections, server.max_body_mib << 20)
            if not (fault := why_inexact() or ("" if sizes.number else "few files may be open (ulimit -n)")):
                return ConnectionKeeper(self._setup.listeners, sizes)
        except (OSError, ConfigError) as error:
            fault = str(error)
        self.say(f"connections end with their gateway: {fault}")
        return None

    async def _run_actors(self) -> None:
        background: set[asyncio.Task[Any]] = set()
        ending = asyncio.create_task(self._end.wait())
        try:
            if self._setup.zygote_stages:
                background.add(asyncio.create_task(self._starter.keep_zygote()))
                await asyncio.sleep(0)  # it starts first: it takes longest to become ready
            background.add(asyncio.create_task(self._tick()))
            if self._setup.watched_source is not None:
                background.add(asyncio.create_task(Reloader(self._setup.watched_source, self.actors, self.say).watch()))
            for actor in self.actors.values():
                self.tasks.begin(actor)
                if actor.spec.listens and self._config.supervisor.gateway_standby:
                    background.add(asyncio.create_task(keep_standby(actor)))
            for task in background:
                self.tasks.watch(task)
            await ending
            self.tasks.raise_bugs(background)
        finally:
            ending.cancel()
            await self._stop_actors()
            self._starter.end()
            await self.tasks.all_ended()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            end_strangers()

    async def _stop_actors(self) -> None:
        self.say("stopping" if not self._failure else "stopping, since an actor failed")
        self._notifier.stopping()
        actors = dict(self.actors)  # one that leaves the run may be gone from it before its turn
        for specs in stop_order([actor.spec for actor in actors.values()]):
            members = [actors[spec.name] for spec in specs]
            await asyncio.gather(*(self._stop(actor) for actor in members))
            if any(actor.spec.listens for actor in members):
                self._stop_listening()

    def _stop_listening(self) -> None:
        """Close the listeners, which also refuses connections that wait for a gateway: none will come."""
        self._stand_in.close()
        if self._connections is not None:
            self._connections.close()
        for listener in self._setup.listeners:
            listener.close()

    async def _stop(self, actor: SupervisedActor) -> None:
        if self._forced:
            actor.kill()
        if actor.spec.listens:
            # The first SIGTERM lets it drain, the second ends its streams with an error frame.
            await actor.stop(HURRY_GRACE_S, hurry_after_s=max(0.1, self._drain_s))
        else:
            await actor.stop()

    def _handle_signals(self) -> None:
        self._loop.add_signal_handler(signal.SIGINT, self._on_signal)
        self._loop.add_signal_handler(signal.SIGTERM, self._on_signal)
        if self._setup.hang_up_ends and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            self._loop.add_signal_handler(signal.SIGHUP, self._on_signal)
        else:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_signal(self) -> None:
        if not self._end.is_set():
            self._end.set()
            return
        self._forced = True
        self.say("forced: killing every actor")
        for actor in self.actors.values():
            actor.kill()

    async def _tick(self) -> None:
        """Run the periodic checks: watchdog and orphans, for which there is no event."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            self._notifier.watchdog()
            now_s = time.monotonic()
            # Unread notifications do not count against an actor, nor does time in which the supervisor was stopped (Ctrl-Z).
            self._on_notify()
            late, last_s = now_s - last_s > TICK_S + LATE_S, now_s
            for actor in self.actors.values():
                if late:
                    actor.excuse(now_s)
                actor.check(now_s, {} if late else {one.process.pid: self._steps_of(actor, one) for one in actor.instances})
            self._starter.reap_strangers()

    def _words_of(self, actor: SupervisedActor, instance: Instance) -> dict[str, ActorWords]:
        """Return the status words of this process's actors, for rows that this process wrote."""
        words = {role: self._tables.actor(role) for role in actor.spec.roles}
        return {role: one for role, one in words.items() if one.pid == instance.process.pid}

    def _steps_of(self, actor: SupervisedActor, instance: Instance) -> dict[str, Step]:
        words = self._words_of(actor, instance)
        return {role: Step(one.step_start_s, one.step_deadline_s) for role, one in words.items() if one.step_deadline_s}

    async def start_process(self, spec: ActorSpec, output_fd: int) -> Process:
        """Host: start the process of an actor."""
        return await self._starter.start(spec, output_fd)

    # ------------------------------------------------------------------------------------------------- another layout

    @property
    def config(self) -> RuntimeConfig:
        """Scaled: the configuration, with the layout of now."""
        return self._config

    @property
    def can_scale(self) -> bool:
        """Scaled: return whether the run serves, and goes on."""
        return self._was_ready and not self._end.is_set()

    def set_config(self, config: RuntimeConfig) -> None:
        """Scaled: let processes that start from now on have another configuration. Raises: OSError, and it stays as it was."""
        rewrite_run_info(self._run, msgspec.structs.replace(self._setup.info, config=config))
        self._config = config
        self._logs.begin(config.actors.layout)

    # ------------------------------------------------------------------------------------------ what actors tell

    def _on_notify(self) -> None:
        self._roster.pass_on(self._notify.drain())

    def on_started(self, actor: SupervisedActor, instance: Instance) -> None:
        """Host: a process has started."""
        self._roster.add(actor, instance)
        self._meter.watch(set(self._roster.pids))

    def on_ended(self, actor: SupervisedActor, instance: Instance, unexpected: bool) -> None:
        """Host: a process of an actor is gone. If that was unexpected, all flight records are saved."""
        self._on_notify()  # its last words
        words = self._words_of(actor, instance)
        blamed = conclude(self._run.path, actor, instance, words)
        whose = f", in what {' and '.join(blamed)} did" if blamed and len(blamed) < len(actor.spec.roles) else ""
        reason = f"{actor.name} ended with {instance.describe_exit()}{whose}" if unexpected else ""
        if reason and whose:
            self.say(reason)
        generations = {actor.name: instance.generation} | {role: its.generation for role, its in words.items()}
        try:
            saved = self._black_box.ended(actor.name, generations, instance.process.pid, instance.process.exit_status, reason)
        except OSError as error:
            self.say(f"cannot save the flight recorders in {self._setup.log_directory}: {error.strerror}")
            return
        if saved is not None:
            self._logs.write("supervisor", [f"flight recorders saved: {saved}"], os.getpid())

    def is_ready(self, names: frozenset[str]) -> bool:
        """Host: return whether all of these actors serve."""
        return all(self.actors[name].ready for name in names if name in self.actors)

    def on_lines(self, actor: str, lines: Sequence[str], pid: int) -> None:
        """Host: a process of an actor has printed lines."""
        self._reporter.lines(actor, self._logs.write(actor, lines, pid))

    def on_message(self, actor: str, text: str) -> None:
        """Host: report a message of the supervisor itself about an actor."""
        self.say(f"{actor} {text}")

    def on_state(self, actor: SupervisedActor) -> None:
        """Host: an actor's state or status line has changed."""
        self._reporter.progress(actor.name, actor.state, actor.status)
        if self._keeper is not None and actor.name == "memory" and actor.ready and actor.current is not None:
            self._keeper.follow(actor.current.process.pid)
        if not self._was_ready and not self._end.is_set() and self.is_ready(frozenset(self.actors)):
            self._was_ready = True
            seconds = time.monotonic() - self._began_s
            endpoint, page = self._setup.info.endpoint, self._setup.info.page
            self._logs.write("supervisor", [f"ready after {seconds:.2f} s: {endpoint}"], os.getpid())
            if is_token_needed(self._config.server) and (token := page_token(self._run.path)):
                page += f"#token={token}"
            self._reporter.ready(endpoint, page, seconds)
            self._notifier.active(f"serving at {endpoint}")

    def can_do_without(self, actor: SupervisedActor, is_misconfigured: bool) -> bool:
        """Host: return whether the run goes on while this actor is broken. Not during the start: no client is served yet, and a caller
        waits for the outcome. With reloading it does, since the next edit may fix anything except the configuration."""
        if self._setup.watched_source is not None and not is_misconfigured:
            return True
        return self._was_ready and not actor.spec.is_essential

    def on_outage(self, actor: SupervisedActor) -> None:
        """Host: an actor is broken, or serves again."""
        if actor.spec.listens and actor.outage is not None:
            self._stand_in.open(actor.outage.next_probe_s)  # answers clients in place of the gateway
        elif actor.spec.listens:
            self._stand_in.close()
        self._outages.publish(
            tuple(
                Outage(role, broken.outage.reason, broken.outage.next_probe_s)
                for broken in self.actors.values()
                if broken.outage is not None
                for role in broken.spec.roles
            )
        )

    def on_failed(self, actor: SupervisedActor, reason: str) -> None:
        """Host: an actor cannot be kept running: the run ends."""
        if self._failure:
            return
        self._failure = f"{actor.name} failed: {reason}"
        self._drain_s = 0.0
        self._logs.write("supervisor", [self._failure], os.getpid())
        self._reporter.failed(self._failure, actor.last_tail)
        self._end.set()

    def say(self, text: str) -> None:
        """Report to users and write to the log."""
        self._logs.write("supervisor", text.splitlines(), os.getpid())
        self._reporter.message(text)

    # ------------------------------------------------------------------------------------------------------ control

    async def end(self, drain_s: float | None) -> None:
        """Commanded: end the run, with at most ``drain_s`` for running requests, and return when nothing is left."""
        if drain_s is not None and drain_s < self._drain_s:
            self._drain_s = drain_s
            if self._end.is_set():  # the actors have been given a longer one
                for actor in self.actors.values():
                    self._loop.call_later(drain_s, actor.hurried.set)
        self._end.set()
        await self._gone.wait()

    def report(self) -> RunReport:
        """Commanded: return the state of the run now. Some ms: the kernel adds up every process's memory."""
        facts = RunFacts(self._run, self._began_s, self._was_ready, self._end.is_set(), self._starter.zygote_pids)
        return report_run(facts, self.actors.values(), self._tables, self._meter)
