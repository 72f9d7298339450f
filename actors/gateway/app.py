"""The HTTP application: routes, authentication, errors in OpenAI's shape, and the small endpoints beside chat."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ... import __version__
from ...runtime.config.sections import ServerSection
from ...runtime.controller.rows.outages import MEDIA_STAGES
from ...runtime.errors import RequestError
from ...runtime.stage_table import stage_of
from . import guide
from .answers.client_request import CLIENT_GONE
from .apis import routes as apis
from .apis.anthropic import answers as anthropic_answer
from .apis.completions import Completions
from .apis.openai.answers import json_response
from .apis.openai.models import model_entry
from .connections import SERVER_NAME, Connections
from .keys.api_keys import CLIENT, ApiKeys
from .keys.authentication import authenticate, check_host, limit, mark_limits
from .keys.cross_origin import AllowedOrigins
from .keys.host_names import HostNames
from .openapi.document import Description
from .page.routes import Page
from .reading.ignored import HEADER, Ignored, collecting
from .reading.validation import Limits
from .watching.metrics import CONTENT_TYPE, Metrics
from .watching.request_log import PROBLEM, REQUEST_ID, log_answer, one_line

log = logging.getLogger(__name__)

PROBES = frozenset({"/health", "/ready"})
OPEN_ROUTES = frozenset(path for route in (*PROBES, "/v1") for path in (route, f"{route}/"))
DEFAULT_RETRY_S = 1
IGNORED = web.RequestKey("ignored", Ignored)


def build_app(
    endpoints: "Endpoints", server: ServerSection, connections: Connections, is_ending: Callable[[], bool], page: Page | None = None
) -> web.Application:
    """Build the application with all routes, those of ``page`` included.

    While ``is_ending``, and on extra ``connections``, each answer says that its connection closes, and closes it.
    """
    names = HostNames((server.host, *server.allowed_hosts))
    origins = AllowedOrigins(server.allow_origins)
    open_routes = OPEN_ROUTES if page is None else OPEN_ROUTES | page.open_routes
    opened = authenticate(endpoints.keys, names, origins, lambda request: request.path in open_routes)
    description = Description(endpoints.limits, endpoints.keys.is_needed)
    app = web.Application(
        middlewares=[
            _measure(endpoints.counts),
            _collect(server.strict_fields),
            _shape_errors,
            connections.refuse(_is_probe),
            check_host(endpoints.keys, names),
            origins.preflight,
            opened,
            limit,
        ],
        client_max_size=server.max_body_mib << 20,
    )
    for add, path, handler in (
        (app.router.add_post, "/v1/chat/completions", endpoints.completions.chat),
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
            (_adder(app, method), path, handler)
            for method, path, handler in apis.routes(endpoints.completions, endpoints.limits, endpoints.created_s)
        ),
    ):
        add(path, handler)
        add(f"{path}/", handler)
    for method, path, serve in () if page is None else page.routes():
        _adder(app, method)(path, serve)

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = SERVER_NAME
        origins.mark(request, response)
        apis.mark(request, response)
        mark_limits(request, response)
        _mark_ignored(request, response)
        if is_ending() or connections.is_extra(request):
            response.headers["Connection"] = "close"
            response.force_close()

    app.on_response_prepare.append(on_prepare)
    return app


def _adder(app: web.Application, method: str) -> Callable[[str, Handler], object]:
    return {"GET": app.router.add_get, "POST": app.router.add_post, "DELETE": app.router.add_delete}[method]


@dataclass(frozen=True)
class Endpoints:
    """The handlers of the routes. ``keys`` open them. ``readiness``: of each actor of the run, whether it serves. ``broken``: actors
    that the run does without for now, and why."""

    completions: Completions
    limits: Limits
    counts: Metrics
    keys: ApiKeys
    readiness: Callable[[], Mapping[str, bool]]
    broken: Callable[[], Mapping[str, str]]
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
        return web.Response(body=self.counts.render(), headers={"Content-Type": CONTENT_TYPE})


def _not_ready(message: str) -> RequestError:
    return RequestError(message, status=503, type="overloaded_error")


def _error_response(request: web.Request, error: RequestError) -> web.Response:
    body = apis.error_body_for(request)(error)
    response = web.Response(status=error.status, body=body, content_type="application/json")
    if error.status in (429, 503) or error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s or DEFAULT_RETRY_S)
    elif error.status == 408 or error.status >= 500:
        response.headers["X-Should-Retry"] = "false"  # what OpenAI's clients ask for: it would fail, or take as long, again
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _measure(metrics: Metrics) -> Middleware:
    @web.middleware
    async def measure(request: web.Request, handler: Handler) -> web.StreamResponse:
        began_s = time.monotonic()
        try:
            response = await handler(request)
        except asyncio.CancelledError:
            request[PROBLEM] = "its client has gone"
            log_answer(request, CLIENT_GONE, time.monotonic() - began_s)
            raise
        resource = request.match_info.route.resource
        metrics.on_http(resource.canonical.rstrip("/") if resource is not None else "none", request.method, response.status)
        if CLIENT in request:
            request[CLIENT].quota.answers[response.status // 100] += 1
        if request.method == "POST" or response.status >= 400:
            level = logging.DEBUG if _is_probe(request) and response.status == 503 else logging.INFO  # waiting clients ask often
            if not response.prepared:
                response.headers["X-Request-Id"] = request.setdefault(REQUEST_ID, f"req-{secrets.token_hex(12)}")
            log_answer(request, response.status, time.monotonic() - began_s, level)
        return response

    return measure


def _collect(is_strict: bool) -> Middleware:
    @web.middleware
    async def collect(request: web.Request, handler: Handler) -> web.StreamResponse:
        with collecting(is_strict) as request[IGNORED]:
            return await handler(request)

    return collect


def _mark_ignored(request: web.Request, response: web.StreamResponse) -> None:
    if IGNORED in request and (names := request[IGNORED].header):
        response.headers[HEADER] = names


@web.middleware
async def _shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn any failure before headers are out into an error in the shape of its API, with its status."""
    try:
        return await handler(request)
    except RequestError as error:
        request[PROBLEM] = error.message
        return _error_response(request, error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        kind = "not_found_error" if error.status == 404 else "invalid_request_error"
        message = f"{request.method} {request.path[:100]}: {error.reason}"
        if error.status == 404:
            message += f"; {guide.hint(request.path[:100], _routes(request.app))}"
        response = _error_response(request, RequestError(message, status=error.status, type=kind))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except Exception:  # the outermost loop of a request: a bug here must cost this request only
        log.exception("%s %s failed", request.method, one_line(request.path))
        return _error_response(request, RequestError("internal error", status=500, type="internal_error"))


def _routes(app: web.Application) -> list[tuple[str, str]]:
    """Method and path of each route."""
    routes = [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None]
    return [(method, path) for method, path in routes if method != "HEAD" and not path.endswith("/")]


def _is_probe(request: web.Request) -> bool:
    """Return whether the route is for probes, which ask often."""
    return request.path.removesuffix("/") in PROBES
