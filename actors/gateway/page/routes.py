"""The routes of the page: its files, the feed, traces of single requests, and the two commands.

The files hold no secrets and are served to everybody; ``guard`` decides about the rest. ``server.page = false`` turns all off.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from ....runtime.config.runtime_config import RuntimeConfig
from ....runtime.errors import RequestError, RunError
from ....runtime.observe.dumps import Recording
from ....runtime.observe.trace import make_trace
from ....runtime.process.page_token import page_token
from ....runtime.supervisor.ask_supervisor import ask
from ....runtime.supervisor.control import SOCKET_NAME, KillReply, KillRequest, RestartReply, RestartRequest
from ....schema.media import MediaKind
from ....shm.controller_stats import StatsSnapshot
from ....shm.run_directory import RunDirectory
from ....shm.status import ActorTable
from .feed import Feed
from .files import HEADERS, read_files
from .guard import Access, check_command, check_reader
from .peers import is_own

log = logging.getLogger(__name__)

ANSWER_FIRST_S = 0.2  # before the gateway asks for its own end
MARGIN_NS = 20_000_000  # shown before and after a request in its trace
_KEY = re.compile("[0-9a-f]{1,16}")
MAX_REVISION = 1 << 53  # whole numbers of JavaScript

_PRIVATE = {name: value for name, value in HEADERS.items() if name != "Content-Security-Policy"} | {"Cache-Control": "no-store"}


class Page:
    """The handlers. ``feed`` maps the run's tables read-only; the supervisor is asked for nothing but restarts and kills. ``own``: the
    name of this gateway, ``keeps_connections``: its own go on with the next one when it ends."""

    def __init__(
        self,
        run: RunDirectory,
        own: str,
        config: RuntimeConfig,
        actors: ActorTable,
        stats: Callable[[], StatsSnapshot],
        model: str,
        kinds: Sequence[MediaKind],
        keeps_connections: bool,
    ) -> None:
        self._run = run
        self._own = own
        self._config = config
        self._actors = actors
        self._model, self._kinds = model, kinds
        self._access = Access(config.server.needs_key, page_token(run.path), is_own)
        self._files = read_files()
        self._feed = Feed(run, actors, stats, (run.path / SOCKET_NAME).is_socket, keeps_connections)
        self._keeps_connections = keeps_connections
        self._tracing: asyncio.Task[bytes] | None = None
        self._orders: set[asyncio.Task[None]] = set()

    @property
    def open_routes(self) -> frozenset[str]:
        """The routes that need no key: those of the files."""
        return frozenset(self._files)

    def routes(self) -> Sequence[tuple[str, str, Handler]]:
        """Return method, path and handler of each route."""
        return (
            *(("GET", route, file.serve) for route, file in self._files.items()),
            ("GET", "/page/limits", self.limits),
            ("GET", "/page/state", self.state),
            ("GET", "/page/trace/{key}", self.trace),
            ("POST", "/page/restart/{actor}", self.restart),
            ("POST", "/page/kill/{actor}", self.kill),
        )

    def close(self) -> None:
        self._feed.close()

    async def limits(self, http: web.Request) -> web.Response:
        """Answer with what the server takes, so that the page can tell before it sends: ``max_body_bytes`` of a request, and
        ``kinds`` of media."""
        body = msgspec.json.encode({"max_body_bytes": self._config.server.max_body_mib << 20, "kinds": self._kinds})
        return web.Response(body=body, content_type="application/json", headers=_PRIVATE)

    async def state(self, http: web.Request) -> web.Response:
        """Answer with the state of the run; ``?after=N``: and with the requests that have changed since that revision."""
        check_reader(http, self._access)
        after = http.query.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) <= 16 and int(after) <= MAX_REVISION):
            raise RequestError(f"after is {after[:100]!r}, expected a whole number from 0 to {MAX_REVISION}", param="after")
        return web.Response(body=self._feed.reply(int(after)), content_type="application/json", headers=_PRIVATE)

    async def trace(self, http: web.Request) -> web.Response:
        """Answer with what all processes did while a request was served, as ``mmrt trace`` writes it. One at a time, in a thread."""
        check_reader(http, self._access)
        key = http.match_info["key"]
        window = self._feed.window_of(int(key, 16)) if _KEY.fullmatch(key) else None
        if window is None:
            raise RequestError(f"no request {key[:100]!r} is known (any more)", status=404, type="not_found_error")
        if self._tracing is not None and not self._tracing.done():
            raise RequestError("another trace is being made", status=503, type="overloaded_error")
        begin_ns, end_ns, name = window
        self._tracing = asyncio.create_task(asyncio.to_thread(self._make_trace, begin_ns, end_ns))
        body = await asyncio.shield(self._tracing)  # a thread goes on when its client has gone
        headers = {**_PRIVATE, "Content-Disposition": f'attachment; filename="mmrt-{name.replace(" ", "-")}.json"'}
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def restart(self, http: web.Request) -> web.Response:
        """Replace an actor's process by a new one; answer when that serves, or with 500 and its last lines."""
        actor = self._commanded(http)
        if self._is_own(actor):
            return self._later(RestartRequest(actor), f"{actor}: a new process is started; this connection {self._fate} when it serves")
        reply = await self._ask(RestartRequest(actor))
        assert isinstance(reply, RestartReply)
        if not reply.ok:
            raise RequestError("\n".join([reply.message, *reply.log[-5:]]), status=500, type="internal_error")
        return _told(reply.message)

    async def kill(self, http: web.Request) -> web.Response:
        """SIGKILL for an actor's process; the supervisor starts another one."""
        actor = self._commanded(http)
        if self._is_own(actor):
            return self._later(KillRequest(actor), f"{actor} is killed; this connection {self._fate}")
        reply = await self._ask(KillRequest(actor))
        assert isinstance(reply, KillReply)
        return _told(f"{actor}: pid {reply.pid} was killed")

    @property
    def _fate(self) -> str:
        """The verb for a connection of this gateway at its end."""
        return "goes on" if self._keeps_connections else "ends"

    def _commanded(self, http: web.Request) -> str:
        check_command(http, self._access)
        actor = http.match_info["actor"]
        if actor not in self._actors.present:
            names = ", ".join(self._actors.present)
            raise RequestError(f"no actor {actor[:100]!r}; there are {names}", status=404, type="not_found_error")
        return actor

    def _is_own(self, actor: str) -> bool:
        return actor == self._own

    def _later(self, request: RestartRequest | KillRequest, message: str) -> web.Response:
        """Ask for the end of this very process once the answer is out."""

        async def order() -> None:
            await asyncio.sleep(ANSWER_FIRST_S)
            try:
                await self._ask(request)
            except RequestError as error:
                log.warning("%s: %s", request.actor, error)

        task = asyncio.create_task(order())
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)
        return _told(message, status=202)

    async def _ask(self, request: RestartRequest | KillRequest) -> RestartReply | KillReply:
        try:
            reply = await ask(self._run.path, request)
        except RunError as error:
            message = str(error).replace(str(self._run.path), "the run's directory")
            raise RequestError(message, status=503, type="overloaded_error") from None
        assert isinstance(reply, RestartReply | KillReply)
        return reply

    def _make_trace(self, begin_ns: int, end_ns: int) -> bytes:
        """The names of run and files are none of a browser's business: segments are found by them."""
        recording = Recording.take(self._run).between(begin_ns - MARGIN_NS, (end_ns or time.monotonic_ns()) + MARGIN_NS)
        facts = msgspec.structs.replace(recording.facts, run_id="", model_path=self._model)
        return msgspec.json.encode(make_trace(Recording(facts, recording.recorders)))


def _told(message: str, status: int = 200) -> web.Response:
    body = msgspec.json.encode({"message": message})
    return web.Response(status=status, body=body, content_type="application/json", headers=_PRIVATE)
