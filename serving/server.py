"""The process of ``mmrt serve``: the front's socket, run directory, control socket and logs around its models. One event loop."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ..actors.gateway.connections import Connections, Runner, Site
from ..actors.gateway.keys.api_keys import ApiKeys
from ..actors.gateway.keys.tls import Certificate
from ..runtime.config.runtime_config import RuntimeConfig
from ..runtime.errors import RunError
from ..runtime.process.listening import BACKLOG, connection_limit, open_listeners
from ..runtime.process.notify import Notifier
from ..runtime.process.page_token import is_token_needed, page_token
from ..runtime.process.run import RunInfo, create_run, is_of_several
from ..runtime.supervisor.control import (
    SOCKET_NAME,
    DownReply,
    DownRequest,
    FrontReply,
    KeyReply,
    KeyRequest,
    Reply,
    Request,
    StatusRequest,
)
from ..runtime.supervisor.control_server import ControlServer
from ..runtime.supervisor.logs import LogFiles
from ..runtime.supervisor.run_report import FrontReport, ModelReport
from ..runtime.supervisor.supervisor import Reporter
from ..shm.confined import is_confined
from ..shm.errors import BusyError, ShmError
from ..shm.run_directory import RunDirectory
from .fleet import Fleet, Member
from .front import Front, build_front_app
from .models_file import ModelsFile
from .page import FrontPage
from .residency import State

LOG_NAME = "front"
IDLE_CONNECTION_S = 75.0
LAST_ANSWERS_S = 1.0  # for ends of streams to reach their clients
FILES_EACH = 2  # open for a client: its connection, and that of its request to a run


class FrontSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a front is started with. ``path``: its run directory."""

    path: Path
    file: ModelsFile
    log_directory: Path
    notify_socket: str | None = None
    hang_up_ends: bool = True


class FrontServer:
    """One front, from its start to its end."""

    def __init__(self, setup: FrontSetup, reporter: Reporter) -> None:
        self._setup = setup
        self._reporter = reporter
        self._began_s = time.monotonic()
        self._logs = LogFiles(setup.log_directory, reporter.message, is_json=setup.file.logging.is_json)
        self._end = asyncio.Event()
        self._gone = asyncio.Event()
        self._drain_s: float | None = None
        self._endpoint = ""

    async def serve(self) -> int:
        """Serve until it is told to end, and end all runs then. Returns the exit status.

        Raises: RunError if the port is taken, or another run is up in the directory.
        """
        server = self._setup.file.server
        async with contextlib.AsyncExitStack() as ends:
            listeners = open_listeners(server.host, server.port)
            for listener in listeners:
                ends.callback(listener.close)
            run = self._create_run(int(listeners[0].getsockname()[1]))
            ends.callback(self._logs.close)
            control = ControlServer(run.path / SOCKET_NAME, self._answer)
            ends.push_async_callback(control.close)
            ends.callback(self._leave, run)
            logging.basicConfig(
                level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", handlers=[_ToLog(self._log)], force=True
            )
            await self._serve(run, control, listeners, ends)
        return 0

    async def _serve(
        self, run: RunDirectory, control: ControlServer, listeners: Sequence[socket.socket], ends: contextlib.AsyncExitStack
    ) -> None:
        """Serve until it is told to end, and end all runs then."""
        file = self._setup.file
        self._fleet = Fleet(file, run.path, self.say)
        front = Front(file, self._fleet)
        ends.push_async_callback(front.close)
        keys, certificate = ApiKeys(file.server, run.path, lambda: None, of_front=True), Certificate(file.server, lambda: None)
        connections = Connections(connection_limit(file.server.max_connections, FILES_EACH))
        page = FrontPage(self._fleet, file.server, run.path, front.pass_on) if file.server.page else None
        runner = Runner(
            build_front_app(front, file, keys, connections, self._end.is_set, page),
            connections,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=LAST_ANSWERS_S,
            keepalive_timeout=IDLE_CONNECTION_S,
            auto_decompress=False,
        )
        ends.push_async_callback(runner.cleanup)
        for one in (keys, certificate):
            ends.callback(asyncio.create_task(one.follow()).cancel)
        await control.start()
        self._handle_signals()
        await self._fleet.begin()
        await runner.setup()
        for listener in listeners:
            await Site(runner, listener, backlog=BACKLOG, ssl_context=certificate.context).start()
        self._tell_ready()
        await self._end.wait()
        self.say("stopping: the runs of all models end")
        await self._fleet.close(self._drain_s)

    def _leave(self, run: RunDirectory) -> None:
        """Nobody finds the front any more; the control socket tells so to whoever waits for it."""
        with contextlib.suppress(ShmError):
            run.destroy()
        self._gone.set()
        self.say("the front is down")

    def say(self, text: str) -> None:
        """Tell users, and the log."""
        self._log(text)
        self._reporter.message(text)

    def _log(self, text: str) -> None:
        self._logs.write(LOG_NAME, text.splitlines(), os.getpid())

    def _create_run(self, port: int) -> RunDirectory:
        file, path = self._setup.file, self._setup.path
        config = RuntimeConfig(server=msgspec.structs.replace(file.server, port=port), logging=file.logging)
        info = RunInfo(config=config, runs=tuple(f"{path.name}.{model.run_suffix}" for model in file.models))
        self._endpoint = info.endpoint
        self._page = info.page
        try:
            for model in file.models:
                RunDirectory.check_place(path.with_name(f"{path.name}.{model.run_suffix}"))
            return create_run(path, info)
        except BusyError as error:
            pids = ", ".join(map(str, error.pids)) or "unknown"
            raise RunError(f"a run is already up in {path} (pid {pids}): end it with mmrt down, or use --run NAME") from None
        except ShmError as error:
            raise RunError(str(error)) from None

    def _tell_ready(self) -> None:
        notifier = Notifier(self._setup.notify_socket, "front")
        notifier.active(f"serving at {self._endpoint}")
        notifier.close()
        self._log(f"serving at {self._endpoint}")
        page = self._page
        if is_token_needed(self._setup.file.server) and (token := page_token(self._setup.path)):
            page += f"#token={token}"
        self._reporter.ready(self._endpoint, page, time.monotonic() - self._began_s)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if self._setup.hang_up_ends else ())):
            loop.add_signal_handler(number, self._on_signal)
        if not self._setup.hang_up_ends:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_signal(self) -> None:
        """End; at the second signal without waiting for requests."""
        self._begin_end(0.0 if self._end.is_set() else None)

    def _begin_end(self, drain_s: float | None) -> None:
        """End; where that has begun, with less time for requests."""
        if self._end.is_set() and drain_s is not None:
            self._hurry = asyncio.create_task(self._fleet.close(drain_s))
        elif not self._end.is_set():
            self._drain_s = drain_s
            self._end.set()

    async def _answer(self, request: Request, pid: int) -> Reply:
        """Answer the command line. Raises: RunError for what only the run of one model can do."""
        if isinstance(request, StatusRequest):
            return FrontReply(self._report())
        if isinstance(request, DownRequest):
            self._begin_end(request.drain_s)
            await self._gone.wait()
            return DownReply()
        if isinstance(request, KeyRequest) and not is_confined(pid):
            return KeyReply(self._setup.file.server.api_key)
        raise is_of_several(self._setup.path, [member.run.path.name for member in self._fleet.members.values()])

    def _report(self) -> FrontReport:
        return FrontReport(
            path=str(self._setup.path),
            endpoint=self._endpoint,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._began_s,
            budget_bytes=self._fleet.budget_bytes,
            is_ending=self._end.is_set(),
            models=[_report_of(member) for member in self._fleet.members.values()],
        )


def _report_of(member: Member) -> ModelReport:
    residence, is_ready = member.residence, member.residence.state is State.READY
    return ModelReport(
        name=member.name,
        state=residence.state,
        run=member.run.path.name,
        run_path=str(member.run.path),
        model=member.model.config.model.path,
        pinned=member.model.pinned,
        pid=member.run.pid if residence.is_held and member.run.pid else None,
        running=residence.num_running,
        waiting=member.num_waiting,
        needs_bytes=residence.needs_bytes or 0,
        takes=[] if member.card is None else ["text", *member.card.kinds],
        idle_s=time.monotonic() - residence.last_used_s if is_ready and not residence.num_running else None,
        problem=member.problem,
    )


class _ToLog(logging.Handler):
    """Writes what the front's modules log into its log file."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))


async def serve_front(setup: FrontSetup, reporter: Reporter) -> int:
    """Be a front, to its end. Returns the exit status. Raises: RunError."""
    return await FrontServer(setup, reporter).serve()
