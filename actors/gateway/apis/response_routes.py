"""The routes of OpenAI's Responses API. Runs in the gateway's event loop; ``routes`` adds them."""

import asyncio
import secrets
import time
from collections.abc import Awaitable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from ....runtime.errors import RequestError
from ..keys.api_keys import CLIENT, salt_of
from ..keys.authentication import hand_on
from ..reading.fields import Fields, refuse, show
from ..reading.prompt import Prompt
from ..reading.validation import ChatRequest, Limits
from ..watching.request_log import PROBLEM, REQUEST_ID
from .background import BackgroundAnswer, BackgroundAnswers
from .completions import Completions
from .openai.answers import json_response
from .openai.input_items import read_page
from .openai.responses import Exchange
from .openai.stored import StoredResponse

_EVENTS = "text/event-stream"
_MAX_NUMBER_CHARS = 12


def response_routes(completions: Completions, limits: Limits, background: BackgroundAnswers) -> list[tuple[str, str, Handler]]:
    """Return method, path and handler of each."""
    handlers = _Responses(completions, limits, background)
    return [
        ("POST", "/v1/responses", handlers.create),
        ("POST", "/v1/responses/input_tokens", handlers.count),
        ("GET", "/v1/responses/{id}", handlers.retrieve),
        ("POST", "/v1/responses/{id}/cancel", handlers.cancel),
        ("GET", "/v1/responses/{id}/input_items", handlers.list_items),
        ("DELETE", "/v1/responses/{id}", handlers.delete),
    ]


class _Responses:
    """The handlers."""

    def __init__(self, completions: Completions, limits: Limits, background: BackgroundAnswers) -> None:
        self._completions = completions
        self._limits = limits
        self._background = background
        self._stored = background.stored

    async def create(self, http: web.Request) -> web.StreamResponse:
        one = self._exchange(http)

        def detach(asked: ChatRequest, prompt: Prompt) -> Awaitable[web.StreamResponse] | None:
            return self._create_in_background(http, one, asked, prompt) if one.is_background else None

        try:
            return await self._completions.answer(http, one.read, one, detach)
        except RequestError as error:
            if http.headers.get("Accept") != _EVENTS:  # others understand the status
                raise
            id = http.setdefault(REQUEST_ID, f"{one.id_prefix}{secrets.token_hex(12)}")
            if (body := one.failed(error, id, int(time.time()), self._limits.model_name)) is None:
                raise
            http[PROBLEM] = error.message
            return web.Response(body=body, content_type=_EVENTS, charset="utf-8", headers={"X-Request-Id": id})

    async def _create_in_background(self, http: web.Request, one: Exchange, asked: ChatRequest, prompt: Prompt) -> web.StreamResponse:
        record, client = self._background.record(http), http.get(CLIENT)
        http[REQUEST_ID] = record.id
        spec = self._completions.spec_of(http, asked, prompt, record.deadline_s)
        name = "" if client is None else client.key.name
        answer = await self._background.begin(
            salt_of(http, None),
            record,
            client,
            sum(len(medium.data) for medium in asked.conversation.media),
            lambda: one.job(record.id, record.created, self._limits.model_name, asked, spec, prompt.is_thinking, name),
        )
        hand_on(http)
        if asked.generation.stream:
            return await self._background.stream(http, record, answer, 0)
        return web.Response(body=answer.body, content_type="application/json", headers={"X-Request-Id": record.id})

    async def count(self, http: web.Request) -> web.Response:
        num_tokens = await self._completions.count(http, self._exchange(http).read)
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def retrieve(self, http: web.Request) -> web.StreamResponse:
        found = self._running(http) or self._kept(http)
        after = _starting_after(http)
        if not _wants_stream(http):
            return web.Response(body=found.body, content_type="application/json")
        if isinstance(found, StoredResponse) and found.played is None:
            raise refuse("stream", "is not supported: the response was not made with background")
        record = self._background.record(http)
        record.open(0, lambda: 0)
        return await self._background.stream(http, record, found, after + 1)

    async def cancel(self, http: web.Request) -> web.Response:
        if (answer := self._running(http)) is not None:
            await self._background.cancel(answer)
            return web.Response(body=answer.body, content_type="application/json")
        found = self._kept(http)
        if found.played is None:
            raise refuse("response_id", "cannot be cancelled: the response was not made with background")
        return web.Response(body=found.body, content_type="application/json")

    async def list_items(self, http: web.Request) -> web.Response:
        page, answer = read_page(_query_of(http)), self._running(http)
        if answer is not None:
            items, media = answer.job.items, answer.job.conversation.restored().media
        else:
            found = self._kept(http)
            items, media = found.items, found.conversation.media
        body = await asyncio.to_thread(page.of, items, media)
        return web.Response(body=body, content_type="application/json")

    async def delete(self, http: web.Request) -> web.Response:
        if (answer := self._running(http)) is not None:
            await self._background.cancel(answer)
        if not self._stored.remove(salt_of(http, None), id := http.match_info["id"]):
            raise self._unknown(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    def _exchange(self, http: web.Request) -> Exchange:
        return Exchange(self._stored, salt_of(http, None))

    def _running(self, http: web.Request) -> BackgroundAnswer | None:
        return self._background.get(salt_of(http, None), http.match_info["id"])

    def _kept(self, http: web.Request) -> StoredResponse:
        if (found := self._stored.get(salt_of(http, None), id := http.match_info["id"])) is None:
            raise self._unknown(id)
        return found

    def _unknown(self, id: str) -> RequestError:
        message = f"response_id: {self._stored.why_unknown(id)}"
        return RequestError(message, status=404, type="not_found_error", param="response_id")


def _starting_after(http: web.Request) -> int:
    """Return the number of the last event that the client has, -1 if it has none. Raises: RequestError."""
    if (given := http.query.get("starting_after")) is None:
        return -1
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_NUMBER_CHARS):
        raise refuse("starting_after", f"is {show(given)}, expected the sequence_number of an event, from 0 on")
    if not _wants_stream(http):
        raise refuse("starting_after", "needs stream=true")
    return int(given)


def _wants_stream(http: web.Request) -> bool:
    """Return whether the client asks for events. Raises: RequestError."""
    given = http.query.get("stream", "false")
    if given not in ("true", "false"):
        raise refuse("stream", f"is {show(given)}, expected true or false")
    return given == "true"


def _query_of(http: web.Request) -> Fields:
    """Return the parameters of a URL; one whose name ends in [] is a list's, without these signs. Raises: RequestError."""
    values: dict[str, Any] = {}
    for name in dict.fromkeys(http.query):
        given = http.query.getall(name)
        if not name.endswith("[]") and len(given) > 1:
            raise refuse(name[:60], f"is given {len(given)} times")
        values[name.removesuffix("[]")] = given if name.endswith("[]") else given[0]
    return Fields(values)
