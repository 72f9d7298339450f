"""The supervisor: one run of all actors in one process group tree, from ``mmrt up`` to the last actor's end.

An asyncio program without torch. It owns the run directory, the notify and control sockets, the lifeline and the zygote; each actor
is a ``SupervisedActor`` of the ``Crew``, which decides; this module does what it asks for. Dependencies gate readiness, not spawning:
every actor is started at once and waits for what it needs.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ...schema.outage import Outage
from ...shm.confined import is_confined
from ...shm.errors import BusyError, ShmError
from ...shm.outages import OutageTable
from ...shm.run_directory import RunDirectory
from ..autoscale.observer import Observer
from ..bus.line_faults import die_at_lines
from ..config.runtime_config import RuntimeConfig
from ..environment import read_environment
from ..errors import ConfigError, RunError
from ..observe.dumps import BlackBox, salvage
from ..process.crash_cause import oom_kills
from ..process.kept_connections import record_sizes, why_unkept
from ..process.notify import Notification, Notifier, NotifyListener
from ..process.page_token import is_token_needed, page_token
from ..process.run import RunInfo, create_run, rewrite_run_info
from .autoscaler import Autoscaler
from .commands import Commands, Loan
from .connection_keeper import ConnectionKeeper
from .control import SOCKET_NAME
from .control_server import ControlServer
from .crew import Crew
from .device_keeper import DeviceKeeper
from .exit_cause import conclude
from .launcher import pipe_to_logs
from .logs import LogFiles, LogPump
from .managed_actor import ActorSpec, Instance, Step, SupervisedActor
from .processes import ForeignProcess, become_subreaper, descends_from_us, end_strangers, keep_descriptors, make_nicer
from .reload import Reloader
from .run_report import RunReport
from .scaling import Scaling
from .stand_in import StandIn
from .starter import NOTIFY_NAME, Starter
from .status_report import ActorWords, CpuMeter, RunFacts, StatusTables, report_run


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
        self._setup = setup
        self.crew = Crew(setup.specs, setup.info.config, self, can_be_edited=setup.watched_source is not None)
        self._reporter = reporter
        self._notifier = Notifier(setup.notify_socket, "supervisor")  # to the process that started the supervisor
        self._stand_in = StandIn(setup.listeners)
        self._connections: ConnectionKeeper | None = None
        self._began_s = time.monotonic()
        self._logs = LogFiles(setup.log_directory, reporter.message, is_json=setup.info.config.logging.is_json)
        self._meter = CpuMeter()

    # ------------------------------------------------------------------------------------------------------ the run

    async def serve(self) -> int:
        """Start everything, keep it running until it is told to end, and leave nothing behind.

        Returns the exit status: 0 ended on request, 1 an actor failed, 130 forced by a second Ctrl-C.
        Raises: RunError if a run is up already in this directory, or the directory cannot be used.
        """
        self._run = self._create_run()
        self._logs.begin(self.crew.config.actors.layout)
        self._tables = StatusTables(self._run)
        self._black_box = BlackBox(self._run, self._setup.log_directory, self._saved, self._not_saved)
        self._keeper = DeviceKeeper(self._run.path, self.say) if self.crew.config.model.on_cuda else None
        self._loop = asyncio.get_running_loop()
        become_subreaper()
        keep_descriptors()
        self._connections = self._keep_connections()
        setup = self._setup
        self._starter = Starter(
            self.crew.policy,
            self,
            self._run.path,
            setup.environment,
            setup.zygote_stages,
            setup.listeners,
            self._connections,
            setup.info.config.server.api_key,
        )
        self._notify = NotifyListener(self._run.path / NOTIFY_NAME)
        self.scaling = Scaling(self._run, self._tables, self.crew)
        commands = Commands(self.crew, self)
        control = ControlServer(self._run.path / SOCKET_NAME, commands.answer)
        try:
            await control.start()
            self._loop.add_reader(self._notify.fd, self.crew.hear)
            self._handle_signals()
            try:
                await self.crew.run(self._beside())
            finally:
                end_strangers()
        finally:
            self._loop.remove_reader(self._notify.fd)
            self._notify.close()
            if self._keeper is not None:
                await self._keeper.close()
            await self._black_box.close()
            self._tables.close()
            self._outages.close()
            try:
                self._run.destroy()
            except ShmError as error:
                self.say(f"the run directory stays: {error}")
            self.crew.gone()
            commands.close()
            self.say(": ".join(filter(None, ("forced to an end" if self.crew.is_forced else "the run is over", self.crew.failure))))
            await control.close()
            self._starter.close()
            self._notifier.close()
            self._logs.close()
        if self.crew.failure:
            return 1
        return 130 if self.crew.is_forced else 0

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
        server = self.crew.config.server
        if not self._setup.listeners or server.scheme == "https":
            return None
        try:
            sizes = record_sizes(server.max_connections, server.max_body_mib << 20, num_gateways=self.crew.config.num_gateways)
            if not (fault := why_unkept(sizes)):
                return ConnectionKeeper(self._setup.listeners, sizes)
        except (OSError, ConfigError) as error:
            fault = str(error)
        if self.crew.config.num_gateways > 1:
            raise RunError(f"connections cannot be kept for {self.crew.config.num_gateways} gateways: {fault}")
        self.say(f"connections end with their gateway: {fault}")
        return None

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        """Return what runs beside the actors."""
        beside: list[Coroutine[Any, Any, None]] = [self._starter.keep_zygote()] if self._setup.zygote_stages else []
        if self._setup.watched_source is not None:
            beside.append(Reloader(self._setup.watched_source, self.crew.actors, self.say).watch())
        if self.crew.config.autoscale.enabled:
            beside.append(Autoscaler(self.crew, partial(Observer, self._run.path), self.scaling.change).scale())
        return beside

    def _handle_signals(self) -> None:
        die_at_lines("supervisor", read_environment())
        self._loop.add_signal_handler(signal.SIGINT, self.crew.interrupt)
        self._loop.add_signal_handler(signal.SIGTERM, self.crew.interrupt)
        if self._setup.hang_up_ends and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            self._loop.add_signal_handler(signal.SIGHUP, self.crew.interrupt)
        else:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _words_of(self, actor: SupervisedActor, instance: Instance) -> dict[str, ActorWords]:
        """Return the status words of this process's actors, for rows that this process wrote."""
        words = {role: self._tables.actor(role) for role in actor.spec.roles}
        return {role: one for role, one in words.items() if one.pid == instance.process.pid}

    # ------------------------------------------------------------------------------------ what the crew asks for

    async def start_process(self, actor: SupervisedActor) -> Instance:
        """Outside: start the process of an actor."""
        read_end, write_end = pipe_to_logs()
        try:
            process = await self._starter.start(actor.spec, write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        output = LogPump(read_end, lambda lines: self.on_lines(actor.name, lines, process.pid))
        return Instance(process, output, oom_kills=oom_kills())

    def hear(self) -> Iterable[Notification]:
        """Outside: return what has come over the notify socket."""
        return self._notify.drain()

    def steps_of(self, actor: SupervisedActor, instance: Instance) -> dict[str, Step]:
        """Outside: return the steps that stand in status words."""
        words = self._words_of(actor, instance)
        return {role: Step(one.step_start_s, one.step_deadline_s) for role, one in words.items() if one.step_deadline_s}

    def started(self, instance: Instance, pids: Iterable[int]) -> None:
        """Outside: a process has started."""
        self._meter.watch(set(pids))

    def serves(self, actor: SupervisedActor, instance: Instance) -> None:
        """Outside: a process has its role."""
        if actor.spec.nice:
            make_nicer(instance.process.pid, actor.spec.nice)

    def ended(self, actor: SupervisedActor, instance: Instance, unexpected: bool) -> None:
        """Outside: a process of an actor is gone. If that was unexpected, all flight records are saved."""
        words = self._words_of(actor, instance)
        blamed = conclude(self._run.path, actor, instance, words)
        whose = f", in what {' and '.join(blamed)} did" if blamed and len(blamed) < len(actor.spec.roles) else ""
        reason = f"{actor.name} ended with {instance.describe_exit()}{whose}" if unexpected else ""
        if reason and whose:
            self.say(reason)
        generations = {actor.name: instance.generation} | {role: its.generation for role, its in words.items()}
        self._black_box.ended(actor.name, generations, instance.process.pid, instance.process.exit_status, reason)

    def _saved(self, path: Path) -> None:
        self._logs.write("supervisor", [f"flight recorders saved: {path}"], os.getpid())

    def _not_saved(self, error: OSError) -> None:
        self.say(f"cannot save the flight recorders in {self._setup.log_directory}: {error.strerror}")

    def tick(self) -> None:
        """Outside: report to the own watchdog, and look for orphans."""
        self._notifier.watchdog()
        self._starter.reap_strangers()

    def on_lines(self, actor: str, lines: Sequence[str], pid: int) -> None:
        """Starter: a process has printed lines."""
        self._reporter.lines(actor, self._logs.write(actor, lines, pid))

    def on_message(self, actor: str, text: str) -> None:
        """Starter: report a message about a process."""
        self.say(f"{actor} {text}")

    def progress(self, actor: SupervisedActor) -> None:
        """Outside: an actor's state or status line has changed."""
        self._reporter.progress(actor.name, actor.state, actor.status)
        if self._keeper is not None and actor.name == "memory" and actor.ready and actor.current is not None:
            self._keeper.follow(actor.current.process.pid)

    def run_ready(self) -> None:
        """Outside: all actors serve for the first time."""
        seconds = time.monotonic() - self._began_s
        endpoint, page = self._setup.info.endpoint, self._setup.info.page
        self._logs.write("supervisor", [f"ready after {seconds:.2f} s: {endpoint}"], os.getpid())
        if is_token_needed(self.crew.config.server) and (token := page_token(self._run.path)):
            page += f"#token={token}"
        self._reporter.ready(endpoint, page, seconds)
        self._notifier.active(f"serving at {endpoint}")

    def run_failed(self, failure: str, tail: Sequence[str]) -> None:
        """Outside: the run ends because of an actor."""
        self._logs.write("supervisor", [failure], os.getpid())
        self._reporter.failed(failure, tail)

    def run_stopping(self) -> None:
        """Outside: the actors are about to be told to end."""
        self._notifier.stopping()

    def publish(self, outages: tuple[Outage, ...]) -> None:
        """Outside: say in shared memory which actors are broken."""
        self._outages.publish(outages)

    def stand_in(self, next_probe_s: float | None) -> None:
        """Outside: answer clients in place of the gateway, or stop doing so."""
        if next_probe_s is not None:
            self._stand_in.open(next_probe_s)
        else:
            self._stand_in.close()

    def stop_listening(self) -> None:
        """Outside: close the listeners, which also refuses connections that wait for a gateway: none will come."""
        self._stand_in.close()
        if self._connections is not None:
            self._connections.close()
        for listener in self._setup.listeners:
            listener.close()

    def start_no_more(self) -> None:
        """Outside: the actors have been told to end."""
        self._starter.end()

    def write_config(self, config: RuntimeConfig) -> None:
        """Outside: let processes that start from now on have another configuration. Raises: OSError."""
        rewrite_run_info(self._run, msgspec.structs.replace(self._setup.info, config=config))
        self._logs.begin(config.actors.layout)

    def say(self, text: str) -> None:
        """Outside: report to users and write to the log."""
        self._logs.write("supervisor", text.splitlines(), os.getpid())
        self._reporter.message(text)

    # ------------------------------------------------------------------------------------------------------ control

    def lend(self, actor: SupervisedActor, pid: int) -> Loan:
        """Asked: give what process ``pid`` needs to be this actor. Raises: ProcessLookupError if it has gone; OSError."""
        debugger = Instance(ForeignProcess(pid), None, is_debugger=True)
        stack = contextlib.ExitStack()
        environment, fds = self._starter.inheritance(actor.spec, stack)
        return Loan(debugger, environment, fds, stack.close)

    def may_ask(self, pid: int) -> str:
        """Asked: return why this process may not command the run, "" if it may."""
        if is_confined(pid):
            return (
                f"process {pid} has more filters of system calls (seccomp) than the run, as the one that parses media: it may not "
                "command the run; use a terminal outside of its sandbox"
            )
        return ""

    def is_descendant(self, pid: int) -> bool:
        """Asked: return whether a process of the run has started this one."""
        return descends_from_us(pid)

    def report(self) -> RunReport:
        """Asked: return the state of the run now. Some ms: the kernel adds up every process's memory."""
        facts = RunFacts(self._run, self._began_s, self.crew.was_ready, self.crew.is_ending, self._starter.zygote_pids)
        return report_run(facts, self.crew.actors.values(), self._tables, self._meter)
