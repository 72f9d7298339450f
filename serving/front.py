"""The front's HTTP application: each request for work goes to the run of its model, which is loaded first if need be.

Lists of models, health and metrics are answered here; they neither load a model nor count as its use. Requests and answers are not
changed: the run checks them, its answer is streamed through byte for byte, and a client that goes ends its request there.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from .. import __version__
from ..actors.gateway import guide
from ..actors.gateway.apis.ollama.answers import CHAT, GENERATE
from ..actors.gateway.apis.ollama.requests import read_show
from ..actors.gateway.apis.openai.answers import json_response
from ..actors.gateway.apis.routes import OLLAMA_VERSION, is_anthropics
from ..actors.gateway.connections import Connections
from ..actors.gateway.keys.api_keys import ApiKeys
from ..actors.gateway.openapi.document import Description
from ..actors.gateway.page.guard import PROXIED, TOKEN_HEADER
from ..actors.gateway.reading.forms import FORM, read_form
from ..actors.gateway.shell import adder, make_shell
from ..actors.gateway.watching.metrics import CONTENT_TYPE
from ..runtime.errors import RequestError
from . import lists
from .asgi import serve_asgi
from .asked import Asked, read_asked
from .fleet import Fleet, Member
from .metrics import FrontMetrics, merge
from .models_file import ModelsFile
from .page import FrontPage
from .relay import SMALL_BYTES, Relay, Request, RunLost, Send, no_room, reply, stream
from .residency import State
from .waiting import Waiting

RELAYED = (
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/responses"), ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/embeddings"), ("POST", "/v1/decisions"), ("POST", "/v1/audio/transcriptions"), ("POST", "/v1/audio/translations"),
    ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("POST", "/api/chat"), ("POST", "/api/generate"), ("POST", "/api/embed"), ("POST", "/api/embeddings"),
)  # fmt: skip
"""Routes of a run that name the model in their body."""

TRIES = 3  # of a request whose run is lost before it has answered
PAUSE_S = 0.2  # between them
METRICS_S = 2.0  # that runs have to tell their metrics
_OF_BROWSERS = ("origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")  # the front has judged them

log = logging.getLogger(__name__)


class Front:
    """The handlers of the routes."""

    def __init__(self, file: ModelsFile, fleet: Fleet) -> None:
        self._file = file
        self._fleet = fleet
        self._relay = Relay(file.server.max_body_mib << 20)
        self._created_s = int(time.time())
        self.metrics = FrontMetrics(fleet.members.values)

    async def close(self) -> None:
        await self._relay.close()

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each."""
        return [
            *((method, path, self.relay) for method, path in RELAYED),
            *((method, f"/v1/responses/{{id}}{more}", self.relay_response) for method, more in _OF_STORED),
            *((method, "/v1/stream/{id}", self.relay_response) for method in ("GET", "DELETE")),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:.+}", self.model),
            ("GET", "/api/tags", self.tags),
            ("GET", "/api/ps", self.ps),
            ("POST", "/api/show", self.show),
            ("GET", "/api/version", self.ollama_version),
            ("GET", "/health", self.health),
            ("GET", "/ready", self.ready),
            ("GET", "/version", self.version),
            ("GET", "/metrics", self.render_metrics),
            ("GET", "/openapi.json", self.describe),
            ("GET", "/v1", guide.serve),
        ]

    # ------------------------------------------------------------------------------------------------------- for work

    async def relay(self, http: web.Request) -> web.StreamResponse:
        """Send a request on to the model that its body names; without a name to the first."""

        async def answer(request: Request, send: Send) -> None:
            asked = await _asked_by(http, request)
            member = self._fleet.find(asked.model, is_ollamas=request.path.startswith("/api/"))
            if not self._is_unloading(member, asked):
                await self._answer(request, send, member, asked)
                return
            self._fleet.unload(member)
            format = CHAT if "chat" in request.path else GENERATE
            await reply(send, format.begin("", int(time.time()), member.name, "").line("", done=True, done_reason="unload"))

        return await self._serve(http, answer)

    def _is_unloading(self, member: Member, asked: Asked) -> bool:
        """Return whether Ollama's client asks for nothing but that the model be unloaded, which must not load it first."""
        is_heard = self._file.front.max_keep_alive_s > 0 or member.residence.state is State.ABSENT
        return asked.is_empty and asked.keep_s == 0 and is_heard

    async def relay_response(self, http: web.Request) -> web.StreamResponse:
        """Send a request about a stored response on to the model that has given it, if it is still loaded: responses end with a run."""

        async def answer(request: Request, send: Send) -> None:
            request.headers = [(name, value) for name, value in request.headers if name.lower() not in _OF_BROWSERS]
            for member in self._fleet.members.values():
                if member.residence.state is State.READY and await self._answer_if_found(request, send, member):
                    return
            message = f"response_id: no model that is loaded has a response {http.match_info['id'][:100]!r}"
            raise RequestError(message, status=404, type="not_found_error", param="response_id")

        return await self._serve(http, answer)

    async def _answer_if_found(self, request: Request, send: Send, member: Member) -> bool:
        """Answer from a model that is loaded, unless it answers that there is no such thing."""
        with contextlib.suppress(RunLost):
            async with self._relay.ask(request, member.run.url) as answer:
                if answer.response.status != 404:
                    await stream(answer, request.path, send)
                    return True
        return False

    async def _serve(self, http: web.Request, answer: Callable[..., object]) -> web.StreamResponse:
        return await serve_asgi(
            http,
            lambda scope, receive, send: self._relay.serve(scope, receive, send, partial(answer, send=send)),  # type: ignore[arg-type]
        )

    async def _answer(self, request: Request, send: Send, member: Member, asked: Asked) -> None:
        """Raises: RequestError if the model cannot be loaded, or its run is lost again and again."""
        keep_alive_s = self._file.server.keep_alive_s
        async with Waiting(send, request.path, member.name, keep_alive_s, asked.is_stream) as waiting:
            try:
                await self._answer_from_run(request, send, member, asked, waiting)
            except RequestError as error:
                await waiting.stop()
                if not waiting.has_begun:
                    raise
                await waiting.fail(error)

    async def _answer_from_run(self, request: Request, send: Send, member: Member, asked: Asked, waiting: Waiting) -> None:
        request.headers = [(name, value) for name, value in request.headers if name.lower() not in _OF_BROWSERS]
        most_s = self._file.front.max_keep_alive_s
        keep_s = None if asked.keep_s is None or not most_s else min(asked.keep_s, most_s)
        for attempt in range(TRIES):
            async with self._fleet.use(member, self._file.server.request_timeout_s, keep_s) as url:
                try:
                    async with self._relay.ask(request, url, lambda: member.run.has_ended) as answer:
                        await waiting.stop()
                        await stream(answer, request.path, send, has_begun=waiting.has_begun)
                    return
                except RunLost as error:
                    log.warning("the run of %s is lost before it has answered: %s", member.name, error)
            await asyncio.sleep(PAUSE_S * (attempt + 1))
        raise no_room(f"the run of model {member.name!r} was lost {TRIES} times before it had answered")

    # --------------------------------------------------------------------------------------------------------- lists

    async def models(self, http: web.Request) -> web.Response:
        members = self._fleet.members.values()
        if is_anthropics(http):
            return json_response(lists.anthropic_page(members, self._created_s))
        return json_response({"object": "list", "data": [lists.openai_entry(member, self._created_s) for member in members]})

    async def model(self, http: web.Request) -> web.Response:
        member = self._fleet.find(http.match_info["model"].rstrip("/"))
        entry = lists.anthropic_entry if is_anthropics(http) else lists.openai_entry
        return json_response(entry(member, self._created_s))

    async def tags(self, _: web.Request) -> web.Response:
        return json_response({"models": [lists.ollama_entry(member, self._created_s) for member in self._fleet.members.values()]})

    async def ps(self, _: web.Request) -> web.Response:
        loaded = [member for member in self._fleet.members.values() if member.residence.state is State.READY]
        idle_s, now_s = self._file.front.idle_s, time.monotonic()
        return json_response({"models": [lists.ollama_running(member, self._created_s, idle_s, now_s) for member in loaded]})

    async def show(self, http: web.Request) -> web.StreamResponse:
        async def answer(request: Request, send: Send) -> None:
            member = self._fleet.find((await _asked_by(http, request)).model, is_ollamas=True)
            if member.card is not None:
                read_show(request.body, member.card.limits(member.name))
            await reply(send, msgspec.json.encode(lists.ollama_details(member, self._created_s)))

        return await self._serve(http, answer)

    async def ollama_version(self, _: web.Request) -> web.Response:
        return json_response({"version": OLLAMA_VERSION, "mmrt": __version__})

    async def version(self, _: web.Request) -> web.Response:
        return json_response({"version": __version__})

    # ------------------------------------------------------------------------------------------------------ watching

    async def health(self, _: web.Request) -> web.Response:
        """Liveness: this process answers."""
        return json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """Readiness: the pinned models are loaded, and others will be when they are asked for."""
        members = self._fleet.members.values()
        missing = [member for member in members if member.model.pinned and member.residence.state is not State.READY]
        if self._fleet.is_closing or missing:
            why = "; ".join(f"{member.name}: {member.problem or self._fleet.describe(member)}" for member in missing)
            raise RequestError(f"not ready: {why or 'the server is shutting down'}", status=503, type="overloaded_error")
        return json_response({"status": "ready", "models": {member.name: member.residence.state for member in members}})

    async def render_metrics(self, http: web.Request) -> web.StreamResponse:
        """The front's own, and those of all runs; ``?model=NAME``: of the run of a model that is loaded, as it has them."""
        if (name := http.query.get("model")) is not None:
            return await self.pass_on(http, self._fleet.loaded(name))

        async def answer(request: Request, send: Send) -> None:
            loaded = [member for member in self._fleet.members.values() if member.residence.state is State.READY]
            texts = await asyncio.gather(*(self._metrics_of(request, member) for member in loaded))
            told = {member.name: text for member, text in zip(loaded, texts, strict=True) if text}
            body = self.metrics.render() + await asyncio.to_thread(merge, told)
            await reply(send, body, content_type=CONTENT_TYPE)

        return await self._serve(http, answer)

    async def _metrics_of(self, request: Request, member: Member) -> str:
        """Return what a run answers; "" if it does not."""
        with contextlib.suppress(RunLost, TimeoutError, aiohttp.ClientError, UnicodeDecodeError):
            async with asyncio.timeout(METRICS_S), self._relay.ask(request, member.run.url) as answer:
                body = answer.first + await answer.response.content.read()
                return body.decode() if answer.response.status == 200 else ""
        return ""

    async def describe(self, http: web.Request) -> web.Response:
        """The description of the first model whose checkpoint is known: the others have the same routes."""
        for member in self._fleet.members.values():
            if member.card is not None:
                needs_key = self._file.server.needs_key
                return await Description(member.card.limits(member.name), needs_key).serve(http)
        raise no_room("no checkpoint has been looked at yet")

    async def pass_on(self, http: web.Request, member: Member) -> web.StreamResponse:
        """Answer from the run of a model that is loaded, without counting it as use. The front has judged who asks."""

        async def answer(request: Request, send: Send) -> None:
            request.headers = [(name, value) for name, value in request.headers if not _is_judged(name.lower())]
            try:
                async with self._relay.ask(request, member.run.url) as found:
                    await stream(found, request.path, send)
            except RunLost as error:
                raise no_room(f"the run of model {member.name!r} is lost: {error}") from None

        return await self._serve(http, answer)


def _is_judged(header: str) -> bool:
    """Return whether a header says who asks, from where."""
    return header in (*_OF_BROWSERS, *PROXIED, TOKEN_HEADER.lower()) or header.startswith("x-forwarded-")


_OF_STORED = (("GET", ""), ("POST", "/cancel"), ("GET", "/input_items"), ("DELETE", ""))


async def _asked_by(http: web.Request, request: Request) -> Asked:
    """Read what a request asks for, in a thread where its body is long. Raises: RequestError."""
    if http.content_type == FORM:
        form = await read_form(http.headers, request.body)
        model = form.get("model")
        return Asked(model=model if isinstance(model, str) and model else None, is_stream=form.get("stream") == "true")
    read = partial(read_asked, request.path, request.body)
    return read() if len(request.body) <= SMALL_BYTES else await asyncio.to_thread(read)


def build_front_app(
    front: Front,
    file: ModelsFile,
    keys: ApiKeys,
    connections: Connections,
    is_ending: Callable[[], bool],
    page: FrontPage | None = None,
) -> web.Application:
    """Build the application with all routes, those of ``page`` included."""
    open_routes = frozenset[str]() if page is None else page.open_routes
    app = make_shell(keys, file.server, connections, is_ending, front.metrics.on_http, open_routes)
    for method, path, handler in () if page is None else page.routes():
        adder(app, method)(path, handler)
    for method, path, handler in front.routes():
        for one in (path, f"{path}/"):
            adder(app, method)(one, handler)
    return app
