"""The shell of an HTTP application: who may ask, errors in the shape of their API, what is counted and logged of each answer. Its
routes are its owner's: the gateway's, or those of the front of several models."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ...runtime.config.sections import ServerSection
from ...runtime.errors import RequestError
from . import guide
from .answers.client_request import CLIENT_GONE
from .apis import routes as apis
from .connections import SERVER_NAME, Connections
from .keys.api_keys import CLIENT, ApiKeys
from .keys.authentication import authenticate, check_host, limit, mark_limits
from .keys.cross_origin import AllowedOrigins
from .keys.host_names import HostNames
from .reading.ignored import HEADER, Ignored, collecting
from .watching.request_log import PROBLEM, REQUEST_ID, log_answer, one_line

log = logging.getLogger(__name__)

PROBES = frozenset({"/health", "/ready"})
OPEN_ROUTES = frozenset(path for route in (*PROBES, "/v1") for path in (route, f"{route}/"))
DEFAULT_RETRY_S = 1
IGNORED = web.RequestKey("ignored", Ignored)


def make_shell(
    keys: ApiKeys,
    server: ServerSection,
    connections: Connections,
    is_ending: Callable[[], bool],
    on_http: Callable[[str, str, int], None],
    open_routes: frozenset[str] = frozenset(),
) -> web.Application:
    """Build an application without routes. ``on_http``: is told route, method and status of each answer. ``open_routes``: that need
    no key, besides those of probes.

    While ``is_ending``, and on extra ``connections``, each answer says that its connection closes, and closes it.
    """
    names = HostNames((server.host, *server.allowed_hosts))
    origins = AllowedOrigins(server.allow_origins)
    all_open = OPEN_ROUTES | open_routes
    app = web.Application(
        middlewares=[
            _measure(on_http),
            _collect(server.strict_fields),
            _shape_errors,
            connections.refuse(_is_probe),
            check_host(keys, names),
            origins.preflight,
            authenticate(keys, names, origins, lambda request: request.path in all_open),
            limit,
        ],
        client_max_size=server.max_body_mib << 20,
    )

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


def adder(app: web.Application, method: str) -> Callable[[str, Handler], object]:
    """Return what adds a route of this method."""
    return {"GET": app.router.add_get, "POST": app.router.add_post, "DELETE": app.router.add_delete}[method]


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


def _measure(on_http: Callable[[str, str, int], None]) -> Middleware:
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
        on_http(resource.canonical.rstrip("/") if resource is not None else "none", request.method, response.status)
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
        response = _error_response(request, error)
        _forget_frames(error)
        return response
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


def _forget_frames(error: BaseException | None) -> None:
    """Let go of all that was in work where the error was raised: a request keeps its error, and would keep its media with it until the
    next collection."""
    while error is not None:
        error.__traceback__, error = None, error.__context__


def _routes(app: web.Application) -> list[tuple[str, str]]:
    """Method and path of each route."""
    routes = [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None]
    return [(method, path) for method, path in routes if method != "HEAD" and not path.endswith("/")]


def _is_probe(request: web.Request) -> bool:
    """Return whether the route is for probes, which ask often."""
    return request.path.removesuffix("/") in PROBES
