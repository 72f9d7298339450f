"""The HTTP application of the gateway: its routes, and the small endpoints beside chat. ``shell`` has the rest."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ... import __version__
from ...runtime.config.sections import ServerSection
from ...runtime.controller.rows.outages import MEDIA_STAGES
from ...runtime.errors import RequestError
from ...runtime.stage_table import stage_of
from . import guide
from .apis import routes as apis
from .apis.anthropic import answers as anthropic_answer
from .apis.background import BackgroundAnswers
from .apis.completions import Completions
from .apis.openai.answers import json_response
from .apis.openai.models import model_entry
from .apis.resumable import ResumableStreams
from .connections import Connections
from .keeping.connection import KeptConnection
from .keeping.turns import Turns
from .keys.api_keys import ApiKeys
from .openapi.document import Description
from .page.routes import Page
from .reading.validation import Limits
from .shell import adder, make_shell
from .watching.metrics import CONTENT_TYPE, Family, Metrics


def build_app(
    endpoints: "Endpoints",
    server: ServerSection,
    connections: Connections,
    is_ending: Callable[[], bool],
    page: Page | None = None,
    turns: Turns | None = None,
) -> web.Application:
    """Build the application with all routes, those of ``page`` included. ``turns``: of requests on connections that are not kept. The
    rest is of ``make_shell``."""
    open_routes = frozenset() if page is None else page.open_routes
    app = make_shell(endpoints.keys, server, connections, is_ending, endpoints.counts.on_http, open_routes)
    if turns is not None:
        app.middlewares.append(_in_turn(turns))
    description = Description(endpoints.limits, endpoints.keys.is_needed)
    for add, path, handler in (
        (app.router.add_post, "/v1/chat/completions", endpoints.resumable.chat),
        (app.router.add_get, "/v1/stream/{id}", endpoints.resumable.read),
        (app.router.add_delete, "/v1/stream/{id}", endpoints.resumable.delete),
        (app.router.add_post, "/v1/completions", endpoints.completions.text),
        (app.router.add_get, "/v1/models", endpoints.models),
        (app.router.add_get, "/v1/models/{model:.+}", endpoints.model),
        (app.router.add_post, "/tokenize", endpoints.completions.tokenize),
        (app.router.add_post, "/detokenize", endpoints.completions.detokenize),
        (app.router.add_get, "/health", endpoints.health),
        (app.router.add_get, "/ready", endpoints.ready),
        (app.router.add_get, "/version", endpoints.version),
        (app.router.add_get, "/metrics", endpoints.metrics),
        (app.router.add_get, "/openapi.json", description.serve),
        (app.router.add_get, "/v1", guide.serve),
        *(
            (adder(app, method), path, handler)
            for method, path, handler in apis.routes(endpoints.completions, endpoints.limits, endpoints.created_s, endpoints.background)
        ),
    ):
        add(path, handler)
        add(f"{path}/", handler)
    for method, path, serve in () if page is None else page.routes():
        adder(app, method)(path, serve)
    return app


def _in_turn(turns: Turns) -> Middleware:
    @web.middleware
    async def in_turn(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST" and not isinstance(request.transport, KeptConnection):
            await turns.wait()
        return await handler(request)

    return in_turn


@dataclass(frozen=True)
class Endpoints:
    """The handlers of the routes. ``keys`` open them. ``readiness``: of each actor of the run, whether it serves. ``broken``: actors
    that the run does without for now, and why. ``siblings``: returns the metrics of each gateway, where there are several."""

    completions: Completions
    limits: Limits
    counts: Metrics
    keys: ApiKeys
    readiness: Callable[[], Mapping[str, bool]]
    broken: Callable[[], Mapping[str, str]]
    background: BackgroundAnswers
    resumable: ResumableStreams
    siblings: Callable[[], Awaitable[Mapping[str, list[Family]]]] | None = None
    created_s: int = field(default_factory=lambda: int(time.time()))

    async def models(self, http: web.Request) -> web.Response:
        if apis.is_anthropics(http):
            return json_response(anthropic_answer.model_page(self.limits, self.created_s))
        return json_response({"object": "list", "data": [model_entry(self.limits, self.created_s)]})

    async def model(self, http: web.Request) -> web.Response:
        name = http.match_info["model"].rstrip("/")
        if name != self.limits.model_name:
            message = f"model {name[:100]!r} does not exist"
            raise RequestError(message, status=404, type="not_found_error", param="model", code="model_not_found")
        if apis.is_anthropics(http):
            return json_response(anthropic_answer.model_info(self.limits, self.created_s))
        return json_response(model_entry(self.limits, self.created_s))

    async def health(self, _: web.Request) -> web.Response:
        """Liveness: this process answers. A restart of it would not help while other actors are away."""
        return json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """Readiness: a request for text sent now would be served. The answer names actors that the run does without."""
        if self.completions.is_draining:
            raise _not_ready("the server is shutting down")
        ready = self.readiness()
        missing = [name for name, serves in ready.items() if not serves]
        if not missing:
            return json_response({"status": "ready"})
        broken = self.broken()
        serving = {stage_of(name) for name, serves in ready.items() if serves}
        if all(stage_of(name) in serving or stage_of(name) in MEDIA_STAGES and name in broken for name in missing):
            return json_response({"status": "ready", "degraded": missing})
        raise _not_ready("not ready: " + ", ".join(f"{name} (broken: {broken[name]})" if name in broken else name for name in missing))

    async def version(self, _: web.Request) -> web.Response:
        return json_response({"version": __version__})

    async def metrics(self, _: web.Request) -> web.Response:
        gateways = None if self.siblings is None else await self.siblings()
        return web.Response(body=self.counts.render(gateways), headers={"Content-Type": CONTENT_TYPE})


def _not_ready(message: str) -> RequestError:
    return RequestError(message, status=503, type="overloaded_error")
