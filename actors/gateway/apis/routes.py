"""Routes of the APIs beside OpenAI's, and the shape of their errors. Runs in the gateway's event loop; ``app`` adds them."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler

from .... import __version__
from ....runtime.errors import RequestError
from ..answers.choices import Usage
from ..reading.validation import Limits
from ..watching.request_log import REQUEST_ID
from . import decisions
from .anthropic import answers as anthropic_answer
from .anthropic import messages as anthropic
from .background import BackgroundAnswers
from .completions import Completions, Read
from .decisions import Decision
from .ollama import answers as ollama_answer
from .ollama import embeddings as ollama_embeddings
from .ollama import requests as ollama
from .openai import embeddings
from .openai.answers import error_body, json_response
from .openai.embeddings import Embedding
from .openai.transcriptions import Transcription
from .response_routes import response_routes

_MESSAGES = "/v1/messages"
_OLLAMA = "/api/"
OLLAMA_VERSION = "0.14.0"  # for clients that demand one: since it Ollama speaks Responses and Messages too
_VERSION, _REQUEST_ID = "Anthropic-Version", "X-Request-Id"


Route = tuple[str, str, Handler]


def routes(completions: Completions, limits: Limits, created: int, background: BackgroundAnswers) -> list[Route]:
    """Return method, path and handler of each. ``created``: Unix time in seconds since which the model is served."""
    return [
        *response_routes(completions, limits, background),
        *_of_prefill(completions, limits),
        *_of_transcriptions(completions),
        *_of_messages(completions),
        *_of_ollama(completions, limits, created),
    ]


def _of_prefill(completions: Completions, limits: Limits) -> list[Route]:
    async def decide(http: web.Request) -> web.Response:
        decision = Decision()
        found, usage = await completions.find(http, decisions.ID_PREFIX, decision.read)
        return json_response(decision.answer(http[REQUEST_ID], int(time.time()), limits.model_name, found, usage))

    async def embed(http: web.Request) -> web.Response:
        embedding = Embedding()
        found, usage = await completions.find(http, embeddings.ID_PREFIX, embedding.read)
        body = await asyncio.to_thread(embedding.answer, limits.model_name, found, usage)
        return web.Response(body=body, content_type="application/json")

    return [("POST", "/v1/embeddings", embed), ("POST", "/v1/decisions", decide)]


def _of_transcriptions(completions: Completions) -> list[Route]:
    def answer_as(task: str) -> Handler:
        async def answer(http: web.Request) -> web.StreamResponse:
            transcription = Transcription(task)
            return await completions.answer_form(http, transcription.read, transcription)

        return answer

    return [("POST", "/v1/audio/transcriptions", answer_as("transcribe")), ("POST", "/v1/audio/translations", answer_as("translate"))]


def _of_messages(completions: Completions) -> list[Route]:
    async def count(http: web.Request) -> web.Response:
        return json_response({"input_tokens": await completions.count(http, anthropic.read_count)})

    create = partial(completions.answer, read=anthropic.read_message, format=anthropic_answer.MessageFormat())
    return [("POST", _MESSAGES, create), ("POST", f"{_MESSAGES}/count_tokens", count)]


def _of_ollama(completions: Completions, limits: Limits, created: int) -> list[Route]:
    def answer_by(read: Read, format: ollama_answer.LineFormat) -> Handler:
        async def answer(http: web.Request) -> web.StreamResponse:
            try:
                return await completions.answer(http, read, format)
            except ollama.NothingAsked:
                return web.Response(body=format.loaded(int(time.time()), limits.model_name), content_type="application/json")

        return answer

    def vectors_by(is_single: bool) -> Handler:
        async def embed(http: web.Request) -> web.Response:
            vectors = ollama_embeddings.Vectors(is_single)
            try:
                found, usage = await completions.find(http, ollama_embeddings.ID_PREFIX, vectors.read)
            except ollama.NothingAsked:
                found, usage = [], Usage(0, 0, 0)
            body = await asyncio.to_thread(vectors.answer, limits.model_name, found, usage)
            return web.Response(body=body, content_type="application/json")

        return embed

    async def tags(_: web.Request) -> web.Response:
        return json_response({"models": [ollama_answer.model_entry(limits, created)]})

    async def ps(_: web.Request) -> web.Response:
        return json_response({"models": [ollama_answer.running_model(limits, created)]})

    async def show(http: web.Request) -> web.Response:
        await completions.bodies.read(http, lambda body: ollama.read_show(body, limits))
        return json_response(ollama_answer.model_details(limits, created))

    async def version(_: web.Request) -> web.Response:
        return json_response({"version": OLLAMA_VERSION, "mmrt": __version__})

    return [
        ("POST", "/api/chat", answer_by(ollama.read_chat, ollama_answer.CHAT)),
        ("POST", "/api/generate", answer_by(ollama.read_generate, ollama_answer.GENERATE)),
        ("POST", "/api/embed", vectors_by(is_single=False)),
        ("POST", "/api/embeddings", vectors_by(is_single=True)),
        ("GET", "/api/tags", tags),
        ("GET", "/api/ps", ps),
        ("POST", "/api/show", show),
        ("GET", "/api/version", version),
    ]


def is_anthropics(http: web.Request) -> bool:
    """Return whether Anthropic's client asks: some of its routes are OpenAI's as well."""
    return _VERSION in http.headers


def mark(http: web.Request, response: web.StreamResponse) -> None:
    """Give the request's id by the name that Anthropic's client looks for."""
    if is_anthropics(http) and _REQUEST_ID in response.headers:
        response.headers[_REQUEST_ID.removeprefix("X-")] = response.headers[_REQUEST_ID]


def error_body_for(http: web.Request) -> Callable[[RequestError], bytes]:
    """Return the function that shapes an error of a request as its client reads it, on routes that are not there as well."""
    return anthropic_answer.error_body if is_anthropics(http) else error_body_of(http.path)


def error_body_of(path: str) -> Callable[[RequestError], bytes]:
    """Return the function that shapes an error of this path as its API does."""
    if path == _MESSAGES or path.startswith(f"{_MESSAGES}/"):
        return anthropic_answer.error_body
    if path.startswith(_OLLAMA):
        return ollama_answer.error_body
    return error_body
