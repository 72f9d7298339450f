"""The description of the endpoint in OpenAPI 3.1, for the served model and the run's limits, and its route."""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from .... import __version__
from ..apis.anthropic import answers as anthropic_answer
from ..apis.ollama import answers as ollama_answer
from ..apis.openai.answers import error_body
from ..apis.routes import error_body_of
from ..reading.fields import STRING, Schema
from ..reading.forms import FORM
from ..reading.validation import Limits
from . import answers
from .operations import OPERATIONS, FormBody, JsonBody, Operation
from .request_schema import schema_of

_JSON = "application/json"
_DESCRIPTION = (
    "The limits are those of the served model and of this server's configuration. A field that is not described has no effect, and is "
    "refused with server.strict_fields; null means the same as a missing field. Some fields depend on others, which the schemas do not "
    "say. docs/api.md of mmrt has the meaning of all fields."
)
_ALL = (400, 401, 403, 421, 503)  # statuses of the errors of every route
_ERRORS: Mapping[int, str] = {
    400: "A wrong field, value or JSON, or more than the context holds",
    401: "The API key is missing or wrong",
    403: "A web page of another origin, and no API key is set",
    404: "Another model",
    408: "The body did not arrive in time",
    413: "The body, a medium, or all media together are too large",
    415: "Another content type, or a compressed body",
    421: "Host is none of the server's names",
    422: "A medium is broken, empty or of another kind, or cannot be fetched",
    429: "A limit of the API key is exceeded",
    500: "A defect, or a stage could not process the request",
    503: "Too much waits, a stage is broken, or the server is ending",
    504: "The request took too long",
}
_WITH_RETRY = (429, 503)
_IN_PATH = re.compile(r"\{(\w+)\}")
_SHAPES: Mapping[Callable[..., bytes], tuple[str, Schema]] = {
    error_body: ("OpenAIError", answers.ERROR),
    anthropic_answer.error_body: ("AnthropicError", answers.ANTHROPIC_ERROR),
    ollama_answer.error_body: ("OllamaError", answers.OLLAMA_ERROR),
}


def make_document(limits: Limits, needs_key: bool) -> dict[str, Any]:
    """Return the description. ``needs_key``: routes that are not open demand an API key."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation, limits)
    keys: list[dict[str, list[str]]] = [{"bearer": []}, {"x_api_key": []}] if needs_key else []
    return {
        "openapi": "3.1.0",
        "info": {"title": "mmrt", "version": __version__, "description": _DESCRIPTION, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "security": keys,
        "tags": [{"name": name} for name in dict.fromkeys(operation.tag for operation in OPERATIONS)],
        "paths": paths,
        "components": {
            "schemas": dict(_SHAPES.values()),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _describe(operation: Operation, limits: Limits) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": _id_of(operation),
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {"200": _answer(operation), **_errors(operation)},
    }
    if operation.is_open:
        found["security"] = []
    shown = {"model": limits.model_name, "id": "resp_1"}
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": STRING, "example": shown[name]}
        for name in _IN_PATH.findall(operation.path)
    ]
    if parameters := [*in_path, *({"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items())]:
        found["parameters"] = parameters
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": _content(operation.body, limits)}
    return found


def _id_of(operation: Operation) -> str:
    parts = operation.path.strip("/").replace(".", "_").replace("{", "by_").replace("}", "").split("/")
    return "_".join([operation.method.lower(), *parts])


def _content(body: JsonBody | FormBody, limits: Limits) -> dict[str, Any]:
    bodies = body.examples(limits.kinds)
    if isinstance(body, JsonBody):
        return {_JSON: {"schema": schema_of(body.read, bodies, limits), "example": bodies[0]}}
    return {FORM: {"schema": schema_of(body.read, bodies, limits)} if bodies else {}}


def _answer(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": operation.answer}} if operation.answer is not None else {}
    if operation.text:
        content[operation.text] = {"schema": STRING}
    if operation.stream:
        content[operation.stream] = {}
    streams = "; a stream where `stream` is true" if operation.stream else ""
    of_made = [_id_of(one) for one in OPERATIONS if one.path.startswith(f"{operation.path}/{{id}}")]  # routes of what it makes
    links = {id: {"operationId": id, "parameters": {"id": "$response.body#/id"}} for id in of_made}
    return {"description": f"The answer{streams}", "content": content, **({"links": links} if links else {})}


def _errors(operation: Operation) -> dict[str, Any]:
    name, _ = _SHAPES[error_body_of(operation.path)]
    content = {_JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    retry = {"Retry-After": {"description": "Seconds", "schema": answers.COUNT}}
    return {
        str(status): {"description": _ERRORS[status], "content": content, **({"headers": retry} if status in _WITH_RETRY else {})}
        for status in sorted({*_ALL, *operation.statuses})
    }


class Description:
    """The route of the description, which a thread makes when it is first asked for: that takes as long as a decode step."""

    def __init__(self, limits: Limits, needs_key: bool) -> None:
        self._limits = limits
        self._needs_key = needs_key
        self._body: bytes | None = None

    async def serve(self, _: web.Request) -> web.Response:
        if self._body is None:
            self._body = await asyncio.to_thread(self._make)
        return web.Response(body=self._body, content_type=_JSON)

    def _make(self) -> bytes:
        return msgspec.json.encode(make_document(self._limits, self._needs_key))
