"""The gateway process: one event loop with HTTP on one side, the bus, media pages and the delta ring on the other.

``GatewayServer`` wires the parts together, keeps time for them, and ends in order. At the end of the run: refuse new requests, let
running ones finish for ``supervisor.drain_s``, then end the rest with an error. When a successor is ready (SIGUSR1): accept no
more connections, so that new ones wait for it in the listening socket's queue, and finish the accepted ones; where the supervisor
keeps the connections (``keeping``), leave all as it is to the successor.
"""

import asyncio
import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import uvloop
from aiohttp import web

from ... import __version__
from ...runtime.bus.messages import ToActor, ToController, Welcome, decode_delta
from ...runtime.bus.request_keys import deltas_of
from ...runtime.bus.transport import LoopReader, drain_in_loop
from ...runtime.config.runtime_config import RuntimeConfig
from ...runtime.errors import ConfigError
from ...runtime.process.listening import BACKLOG, inherited_listeners, open_listeners
from ...runtime.stage_table import number_of
from ...runtime.supervisor.connection_keeper import ConnectionKeeper
from ...shm.controller_stats import ControllerStats
from ...shm.doorbell import Listener, Ringer
from ...shm.pool import PagePool
from ...shm.ring import Ring
from ...shm.role_lock import RoleLock
from ...shm.sequence_table import SequenceTable
from ...shm.spool import give_back
from ...shm.status import ActorState, ActorTable
from ..host.actor import Actor
from ..host.garbage import Garbage, collect_when_quiet
from ..host.media_rules import share_under
from .answers.flight import GatewayFlight
from .answers.link import Link
from .answers.requests import RequestRegistry
from .answers.token_table import TokenTable
from .apis.background import BackgroundAnswers
from .apis.completions import Completions, shutting_down
from .apis.openai.answers import CHAT
from .apis.resumable import ResumableStreams
from .app import Endpoints, build_app
from .connections import Connections, Site, runner_of
from .fetch.client import FetchClient
from .grammar.checks import GrammarChecks
from .keeping.adoption import Adoption
from .keeping.first_gateway import leave_to_first
from .keeping.keepers import kept_records, most_connections, own_keeper
from .keeping.kept_answers import KeptAnswers
from .keeping.kept_bodies import KeptBodies
from .keeping.patience import Patience
from .keeping.turns import Turns
from .keys.api_keys import KeyMetrics
from .keys.shared_counts import SharedCounts
from .keys.tls import Certificate
from .page.routes import Page
from .text_stack import TextStack, load_text_stack
from .watching.actor_metrics import ActorMetrics
from .watching.metrics import Metrics
from .watching.own_load import OwnLoad, advice_for
from .watching.siblings import siblings_of
from .watching.stage_watch import StageWatch

if TYPE_CHECKING:
    from .watching.tracing import Tracing

log = logging.getLogger(__name__)

ENDPOINT_NAME = "endpoint"
FINGERPRINT = f"mmrt-{__version__}"
TICK_S = 0.1
GREETING_S = 0.002  # between attempts to tell the controller of this gateway
DRAIN_ERROR_S = 1.0  # for error events to reach their clients at the end
EXPIRE_S = 5.0  # between looks for answers that are kept no longer
LARGE_BLOCK_BYTES = 1 << 20
SWITCH_S = 0.0005  # how long a thread that reads a large body may keep the loop from running
LAST_REQUESTS_S = 0.1  # for requests on connections that were accepted just before a hand-over


def main(actor: Actor) -> None:
    """Entry of the gateway process."""
    text = load_text_stack(actor)
    _import_tracing(actor.config)
    sys.setswitchinterval(SWITCH_S)
    give_back(LARGE_BLOCK_BYTES)
    uvloop.run(serve(actor, text, _keep_what_is_there))


def _keep_what_is_there() -> None:
    """Leave out of every later collection what a standby has."""
    gc.collect()
    collect_when_quiet()


async def serve(actor: Actor, text: TextStack, on_warm: Callable[[], None] = lambda: None) -> None:
    """Make all that a standby may have, wait for the role, and serve until the actor is told to end. The loop stands still while it
    waits. ``on_warm``: is called before. Raises: as ``GatewayServer.run``."""
    server = GatewayServer(actor, text)
    await server.set_up()
    on_warm()
    actor.become_active()
    server.take_role()
    await server.run()


class GatewayServer:
    """The parts of the gateway, wired together in the event loop of its creation: first those that any process may have, then those
    that only the holder of the role may read and write."""

    _adoption: Adoption | None = None
    _keeper: ConnectionKeeper | None = None
    _adopts = False
    _stages: StageWatch
    _load: OwnLoad
    _deltas: Ring
    _bell: Listener
    _bus: LoopReader

    def __init__(self, actor: Actor, text: TextStack) -> None:
        self._actor = actor
        self._loop = asyncio.get_running_loop()
        self._actors = ActorTable.attach(actor.run, writable=False)
        self._media = PagePool.attach(actor.run, "media")
        self._tokens = TokenTable(SequenceTable.attach(actor.run, writable=False))
        self._kept = KeptAnswers()
        self._registry = RequestRegistry(gateway=actor.name)
        stats = ControllerStats.attach(actor.run)
        trace = _import_tracing(actor.config)
        tracing = self._tracing = None if trace is None else trace(actor.config.tracing, text.limits.model_name)
        metrics = self._metrics = Metrics(text.limits.model_name, stats.read, self._generations)
        self._shared = SharedCounts(actor)
        self._keys = self._shared.keys(self._report_faults)
        metrics.add(KeyMetrics(self._keys))
        metrics.add(ActorMetrics(self._actors), of_run=True)
        self._certificate = Certificate(actor.config.server, self._report_faults)
        self._grammars = GrammarChecks(actor.model_path, is_open=actor.config.structured_output.additional_properties)
        self._fetches = FetchClient(actor.config.media.fetch)
        self._completions = Completions(
            limits=text.limits,
            prompts=text.prompts,
            registry=self._registry,
            metrics=metrics,
            server=actor.config.server,
            grammars=self._grammars,
            fetches=self._fetches,
            share_now=lambda: share_under(stats.read().work_left_s, actor.config.slo.image.ttft_ms / 1000),
            fingerprint=FINGERPRINT,
            tracing=tracing,
        )
        self._page: Page | None = None
        if actor.config.server.page:
            limits = text.limits
            tables = self._actors, stats.read
            self._page = Page(actor.run, actor.name, actor.config, *tables, limits.model_name, limits.kinds, actor.keeps_connections)
        server = actor.config.server
        self._background = BackgroundAnswers(
            self._kept, self._registry, metrics, self._keys, server.request_timeout_s, server.keep_alive_s
        )
        begin = partial(CHAT.begin, model=text.limits.model_name, fingerprint=FINGERPRINT)
        self._resumable = ResumableStreams(self._completions, self._background, self._registry, metrics, server, begin)
        kept = self._background, self._resumable
        self._siblings = siblings_of(actor, self._actors.present, metrics)
        all_counts = None if self._siblings is None else self._siblings.read
        broken = lambda: stats.read().broken  # noqa: E731
        endpoints = Endpoints(self._completions, text.limits, metrics, self._keys, self._readiness, broken, *kept, all_counts)
        self._turns, self._patience, self._garbage = Turns(), Patience(), Garbage(time.monotonic())
        connections = Connections(most_connections(actor))
        metrics.add(connections)
        app = build_app(endpoints, actor.config.server, connections, lambda: actor.ending, self._page, self._turns)
        if number_of(actor.name):
            leave_to_first(app, broken)
        self._runner = runner_of(app, connections, DRAIN_ERROR_S)
        self._following: list[asyncio.Task[None]] = []  # files of the configuration
        self._num_orders = 0  # to end
        self._is_sending = self._is_handing_over = False
        self._expire_at_s = 0.0
        self._end_s = math.inf  # until when running requests may finish
        self._unadopted = set[str]()

    async def set_up(self) -> None:
        """Prepare the application to be served."""
        await self._runner.setup()

    def take_role(self) -> None:
        """Begin with what the process before has left, once this one has the role."""
        actor = self._actor
        bus = actor.bus  # it connects while the rest is made
        self._load = OwnLoad(time.monotonic(), time.thread_time(), advice_for(actor.config, has_supervisor=actor.store is None))
        self._shared.take()
        self._keys.look()
        self._kept.open_records(kept_records(actor))
        self._adopts = actor.keeps_connections or bool(self._kept.open_ones())
        link = Link(actor.generation, self._send, self._media, GatewayFlight(actor.flight), self._tokens)
        self._registry.open(link, adopts=self._adopts)
        self._deltas = Ring.attach(actor.run, deltas_of(actor.name))
        self._bell = Listener(actor.run, actor.name)
        gateway = actor.name, actor.generation
        self._stages = StageWatch(actor.run, lambda: self._actors.actors, gateway, self._metrics, self._tracing)
        self._bus = drain_in_loop(self._loop, bus, self._receive)

    async def run(self) -> None:
        """Serve until the actor is told to end.

        Raises:
            RunError: the port cannot be listened on.
        """
        self._actor.watch_ending(self._loop, self._on_ending)
        self._loop.add_signal_handler(signal.SIGUSR1, self._on_successor)
        self._loop.add_reader(self._bell.fd, self._on_bell)
        try:
            listeners = _listeners(self._actor)
            url = _url_of(self._actor, listeners)
            if (channel := self._channel(listeners)) is None:
                await _accept(self._runner, listeners, self._certificate.context)
            _publish_endpoint(self._actor, url)
            if self._siblings is not None:
                await self._siblings.answer()
            self._actor.serving(adopts=self._adopts)
            self._actor.heartbeat()
            if self._adopts:
                self._adopt(channel)
            log.info("listening on %s", url)
            self._report_faults()
            self._following = [self._loop.create_task(files.follow()) for files in (self._keys, self._certificate)]
            while not self._actor.ending:
                await self._tick(TICK_S)
            if self._is_handing_over and self._adoption is not None:
                self._leave()
            self._end_s = time.monotonic() + self._actor.config.supervisor.drain_s
            if self._is_handing_over:
                await self._stop_accepting()
                self._background.leave()
                self._resumable.leave()
            await self._drain()
        finally:
            for following in self._following:
                following.cancel()
            await self._runner.cleanup()
            await self._grammars.close()
            await self._fetches.close()
            await self._stages.close()
            if self._page is not None:
                self._page.close()
            if self._siblings is not None:
                self._siblings.close()
            self._loop.remove_reader(self._bell.fd)
            self._bell.close()
            self._actor.flush()
            self._bus.close()
            if self._adoption is not None:
                self._adoption.close()
            if self._keeper is not None:
                self._keeper.close()

    def _channel(self, listeners: Sequence[socket.socket]) -> socket.socket | None:
        """Return the channel to who keeps the connections: the supervisor, or a keeper here whose copies systemd has."""
        actor = self._actor
        if actor.store is not None:
            self._keeper = own_keeper(actor.store, listeners, actor.config.server)
            return None if self._keeper is None else self._keeper.channel()
        return None if actor.keeper_fd is None else socket.socket(fileno=actor.keeper_fd)

    def _adopt(self, channel: socket.socket | None) -> None:
        """Take over the connections, where they are kept, and the requests under way, on them and in the background; texts have to come
        again, from their beginnings."""
        has_crashed = self._actor.follows_a_crash
        self._unadopted = {"background", "streams", *(() if channel is None else ("connections",))}
        self._background.resume(has_crashed, partial(self._on_adopted, "background"), self._patience)
        self._resumable.resume(has_crashed, partial(self._on_adopted, "streams"), self._patience)
        if channel is not None:
            server = self._runner.server
            assert server is not None
            connections = partial(self._on_adopted, "connections")
            bodies = KeptBodies(self._actor.config.server.max_body_mib << 20)
            self._adoption = Adoption(channel, server, self._turns, connections, has_crashed, self._patience, bodies)
            self._adoption.begin()
        with Ringer(self._actor.run, "detokenizer") as bell:
            bell.ring()

    def _on_adopted(self, what: str) -> None:
        self._unadopted.discard(what)
        if self._unadopted or self._actor.has_adopted:
            return
        self._actor.adopted()
        self._actor.heartbeat()
        self._registry.adopted()
        self._take_deltas()

    def _leave(self) -> None:
        """End at once, with all as it is: an orderly end would close the connections, and cancel the requests."""
        log.info("handed over: %d requests", self._completions.num_open)
        self._actor.close()
        logging.shutdown()
        os._exit(0)

    async def _tick(self, pause_s: float) -> None:
        """Do the due work, then let others run for ``pause_s``."""
        now_s = time.monotonic()
        self._actor.heartbeat()
        self._flush()  # also what was delayed on purpose
        self._take_deltas()
        self._registry.tick(now_s)
        self._completions.tick(now_s)
        if now_s >= self._expire_at_s:
            self._expire_at_s = now_s + EXPIRE_S
            self._kept.expire()
        self._garbage.tick(now_s, self._completions.num_open)
        self._load.tick(now_s, time.thread_time())
        if self._actor.status is not None:
            self._actor.status.set_queue_depth(self._completions.num_open)
        await asyncio.sleep(pause_s if self._actor.has_greeted else GREETING_S)

    async def _stop_accepting(self) -> None:
        """Leave new connections to the successor, serve requests begun on accepted ones, and close idle ones."""
        for site in self._runner.sites:
            await site.stop()
        end_s = time.monotonic() + LAST_REQUESTS_S
        while time.monotonic() < end_s or (self._completions.bodies.num_reading and not self._is_late()):
            await self._tick(TICK_S / 10)
        assert self._runner.server is not None
        self._runner.server.pre_shutdown()

    async def _drain(self) -> None:
        """Refuse new requests and let running ones finish, then end the rest with an error that their clients see."""
        completions = self._completions
        completions.is_draining = True
        log.info("requests that are running: %d", completions.num_open)
        while completions.num_open and not self._is_late():
            await self._tick(TICK_S / 2)
        completions.is_closed = True
        self._registry.fail_all(shutting_down(), time.monotonic())
        end_s = time.monotonic() + DRAIN_ERROR_S
        while completions.num_open and time.monotonic() < end_s:
            await self._tick(TICK_S / 10)
        completions.abandon()

    def _is_late(self) -> bool:
        """Return whether the time to drain is over, the order came twice, or no request is left to drain."""
        return time.monotonic() > self._end_s or self._num_orders > 1 or self._actor.lifeline.is_gone()

    def _report_faults(self) -> None:
        """Say in ``mmrt status`` what is wrong with the files of the configuration."""
        self._actor.notifier.status("; ".join(filter(None, (self._keys.fault, self._certificate.fault))) or "active")

    def _on_ending(self) -> None:
        self._num_orders += 1

    def _on_successor(self) -> None:
        self._is_handing_over = not self._actor.ending
        self._actor.end()

    def _on_bell(self) -> None:
        self._bell.drain()
        self._take_deltas()

    def _take_deltas(self) -> None:
        """Apply the deltas that the detokenizer has pushed, then acknowledge them."""
        if self._registry.is_full:
            return
        now_s = time.monotonic()
        while records := self._deltas.pop_all():
            for record in records:
                self._registry.on_delta(decode_delta(record), now_s)
            self._deltas.ack()

    def _send(self, message: ToController) -> bool:
        """Send with all others of this turn of the loop. Returns whether those before have left."""
        if not self._is_sending:
            self._is_sending = True
            self._loop.call_soon(self._flush)
        return self._actor.hold(message)

    def _flush(self) -> None:
        self._is_sending = False
        self._actor.flush()
        self._bus.poke()

    def _receive(self, message: ToActor) -> None:
        if isinstance(message, Welcome):
            self._registry.on_welcome(time.monotonic())
            self._patience.heard()
        self._registry.on_message(message, time.monotonic())

    def _generations(self) -> dict[str, int]:
        return {name: self._actors.read(name).generation for name in self._actors.present}

    def _readiness(self) -> dict[str, bool]:
        return {name: _is_ready(self._actor, self._actors, name) for name in self._actors.present}


def _import_tracing(config: RuntimeConfig) -> "type[Tracing] | None":
    """Return the class of traces, None where they are off. Raises: ConfigError without the packages of the extra."""
    if not config.tracing.otlp_endpoint:
        return None
    try:
        from .watching.tracing import Tracing  # of the extra, and 0.4 s to import
    except ImportError as error:
        raise ConfigError(f"tracing.otlp_endpoint needs OpenTelemetry: pip install 'mmrt[otel]' ({error})") from None
    return Tracing


def _listeners(actor: Actor) -> list[socket.socket]:
    """Return the inherited sockets, else our own on the configured host alone."""
    server = actor.config.server
    return inherited_listeners(actor.listen_fds) or open_listeners(server.host, server.port)


def _url_of(actor: Actor, listeners: Sequence[socket.socket]) -> str:
    host, port = listeners[0].getsockname()[:2]
    return f"{actor.config.server.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


async def _accept(runner: web.AppRunner, listeners: Sequence[socket.socket], tls: ssl.SSLContext | None) -> None:
    for listener in listeners:
        await Site(runner, listener, backlog=BACKLOG, ssl_context=tls).start()


def _publish_endpoint(actor: Actor, url: str) -> None:
    """Leave the URL in the run directory: with port 0 no other process knows it. If the directory is full, serve all the same."""
    file, text = actor.run.path / ENDPOINT_NAME, url + "\n"
    if file.exists() and file.read_text() == text:
        return
    part = actor.run.path / f".{ENDPOINT_NAME}.{os.getpid()}"
    try:
        part.write_text(text)
        os.replace(part, file)
    except OSError as error:
        log.warning("%s is not written: %s", file, error)
        part.unlink(missing_ok=True)


def _is_ready(actor: Actor, actors: ActorTable, name: str) -> bool:
    """Return whether the actor serves: its words say so, and their writer lives and holds the role lock."""
    row = actors.read(name)
    return row.state is ActorState.ACTIVE and RoleLock.acts(actor.run, name, row.pid)
