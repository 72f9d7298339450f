"""Requests for work, ``POST /v1/chat/completions`` and others: body in, answer or stream of events out. Runs in the gateway's event
loop.

However a request ends (last text, error, disconnect, deadline, a client that does not read), the registry learns of it, and a
stream that has begun ends with a finish reason or an error event: never silently.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from ....models.text.thoughts import ThoughtReader
from ....models.text.tool_calls import CallReader
from ....runtime.bus.messages import Generation, RequestSpec
from ....runtime.config.sections import ServerSection
from ....runtime.errors import RequestError
from ....schema.media import AUTO_SHARE
from ....shm.spool import AnyBytes
from ..answers.answer_format import AnswerFormat, WrittenAnswer
from ..answers.answer_record import AnswerRecord, Keys, needs_media
from ..answers.choices import Choice, Usage, best_of, error_of, specs_of, usage_of
from ..answers.logprobs import ChatLogprobs, TextLogprobs, prompt_logprobs
from ..answers.requests import RequestRegistry
from ..at_work import in_thread
from ..fetch.client import FetchClient
from ..fetch.remote_media import RemoteMedia
from ..grammar.checks import GrammarChecks
from ..keeping.endings import reset
from ..keys.api_keys import salt_of, spend_tokens
from ..reading.bodies import BodyReader
from ..reading.forms import Form
from ..reading.json_body import Body
from ..reading.media import Medium, among_others, shared
from ..reading.prompt import Prompt, PromptBuilder
from ..reading.validation import TEXT_TOKENS, ChatRequest, Limits, TextRequest, read_chat, read_detokenize, read_text, read_tokenize
from ..watching.metrics import Metrics
from ..watching.request_log import PROBLEM, REQUEST_ID
from .openai.answers import CHAT, TEXT, json_response
from .prefills import Found, PrefillRequest, Prefills
from .streams import Stream, name_as_asked

if TYPE_CHECKING:
    from ..watching.tracing import Tracing

log = logging.getLogger(__name__)

DRAIN_RETRY_S = 5

_Asked = ChatRequest | TextRequest
_Body = TypeVar("_Body")
Read = Callable[[Body, Limits], _Asked]
ReadForm = Callable[[Form, Limits], _Asked]
Detach = Callable[[ChatRequest, Prompt], Awaitable[web.StreamResponse] | None]  # None: the answer belongs to its connection
ReadPrefill = Callable[[Body, Limits, PromptBuilder], PrefillRequest]


def shutting_down() -> RequestError:
    """The error that clients get when the server ends."""
    return RequestError("the server is shutting down", status=503, type="overloaded_error", retry_after_s=DRAIN_RETRY_S)


class Completions:
    """The handlers, and the state that all their requests share."""

    def __init__(
        self,
        *,
        limits: Limits,
        prompts: PromptBuilder,
        registry: RequestRegistry,
        metrics: Metrics,
        server: ServerSection,
        fingerprint: str,
        grammars: GrammarChecks,
        fetches: FetchClient,
        share_now: Callable[[], float],
        tracing: "Tracing | None" = None,
    ) -> None:
        self._limits = limits
        self._prompts = prompts
        self._registry = registry
        self._metrics = metrics
        self._server = server
        self._fingerprint = fingerprint
        self._grammars = grammars
        self._tracing = tracing
        self._share_now = share_now
        self.bodies = BodyReader(server.max_body_mib << 20, lambda: registry.num_media_bytes)
        self._remote = RemoteMedia(fetches, limits.media, self.bodies.hold, self.bodies.spool)
        self._prefills = Prefills(registry, metrics, server, tracing)
        self.threads_of_answers = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._streams: set[Stream] = set()
        self.num_open = 0
        self.is_draining = False
        self.is_closed = False  # running requests have been failed, and none begins

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """Answer a conversation.

        Raises:
            RequestError: as long as no headers are out.
        """
        return await self.answer(http, read_chat, CHAT)

    async def text(self, http: web.Request) -> web.StreamResponse:
        """Continue a text. Raises: as ``chat``."""
        return await self.answer(http, read_text, TEXT)

    async def tokenize(self, http: web.Request) -> web.Response:
        """Answer with the token ids of a prompt. A medium is one token, its placeholder. Raises: as ``chat``."""
        self._check_open()
        _, prompt = await self.bodies.read(http, partial(self._parse, read_tokenize))
        return json_response({"count": len(prompt.ids), "max_model_len": self._limits.max_context, "tokens": prompt.ids})

    async def detokenize(self, http: web.Request) -> web.Response:
        """Answer with the text of token ids, control tokens included. Raises: as ``chat``."""
        self._check_open()
        return json_response(
            {"prompt": await self.bodies.read(http, lambda body: self._prompts.text_of(read_detokenize(body, self._limits)))}
        )

    def _check_open(self) -> None:
        if self.is_draining:
            raise shutting_down()

    async def count(self, http: web.Request, read: Read) -> int:
        """Return the number of tokens of a prompt. Its media are analysed, which needs the run's stages; nothing else is computed.
        Raises: as ``chat``."""
        with self._counted():
            asked, prompt = await self.bodies.read(http, partial(self._parse, read))
            asked = await self._fetched(asked)
            return await self._count(http, asked, prompt) if _media_of(asked) else len(prompt.ids)

    async def answer(self, http: web.Request, read: Read, format: AnswerFormat, detach: Detach | None = None) -> web.StreamResponse:
        """Answer a request for work that ``read`` validates, in this format, or as ``detach`` does. Raises: as ``chat``."""
        return await self._receive(http, lambda: self.bodies.read(http, partial(self._parse, read)), format, detach)

    async def answer_form(self, http: web.Request, read: ReadForm, format: AnswerFormat) -> web.StreamResponse:
        """As ``answer``, for a request whose body is a form."""
        return await self._receive(http, lambda: self.bodies.read_form(http, partial(self._parse, read)), format)

    async def _receive(
        self,
        http: web.Request,
        receive: Callable[[], Awaitable[tuple[_Asked, Prompt]]],
        format: AnswerFormat,
        detach: Detach | None = None,
    ) -> web.StreamResponse:
        with self._counted():
            with self._refusals_counted():
                asked, prompt = await receive()
                if (form := asked.generation.grammar) is not None:
                    if form.part is not None:
                        await self._grammars.compile(form.part.source, form.part.field)
                    prompt = prompt.with_grammar(await self._grammars.compile(form.source, form.field))
                if needs_media(http):
                    asked = await self._fetched(asked)
                if self.is_closed:
                    raise shutting_down()
                answer = None if detach is None or not isinstance(asked, ChatRequest) else detach(asked, prompt)
                if answer is not None:
                    del asked  # whoever answers has its media, as long as they are needed
                    return await answer
            answer = self._answer(http, asked, prompt, format)
            del asked
            return await answer

    async def find(self, http: web.Request, id_prefix: str, read: ReadPrefill) -> tuple[list[Found], Usage]:
        """Find something out about prompts without answering them. ``id_prefix``: of the request's id. Raises: as ``chat``."""
        with self._counted():
            with self._refusals_counted():
                asked = await self.bodies.read(http, lambda body: read(body, self._limits, self._prompts), takes_long=True)
                asked = asked._replace(media=await self._fetched_media(asked.media))
            if self.is_closed:
                raise shutting_down()
            try:
                return await self._prefills.run(http, asked, f"{id_prefix}{secrets.token_hex(12)}")
            except RequestError as error:
                name_as_asked(error, asked.field_names)
                raise

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request for work while it is open."""
        self._check_open()
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            self._metrics.on_rejected(error)
            raise

    async def _fetched(self, asked: _Asked) -> _Asked:
        """Return the request with the media that are to be fetched. Raises: RequestError."""
        if not isinstance(asked, ChatRequest):
            return asked
        media = await self._fetched_media(asked.conversation.media)
        return msgspec.structs.replace(asked, conversation=asked.conversation._replace(media=media))

    async def _fetched_media(self, media: tuple[Medium, ...]) -> tuple[Medium, ...]:
        """Return the media with what is to be fetched, and with what depends on the load and on the other media."""
        began_s, filled = time.monotonic(), await self._remote.fill(media)
        if filled is not media:
            self._metrics.on_fetched(time.monotonic() - began_s)
        if (rules := self._limits.vision_rules) is not None and rules.cuts_alone:
            filled = among_others(filled)
        return shared(filled, self._share_now()) if any(medium.options.token_share == AUTO_SHARE for medium in filled) else filled

    def tick(self, now_s: float) -> None:
        """Every 0.1 s or so: wake streams that owe their client a sign of life, and drop clients that do not read."""
        for stream in list(self._streams):
            stream.tick(now_s)

    def abandon(self) -> None:
        """Drop the streams that are still open: their clients did not even read the error."""
        for stream in list(self._streams):
            reset(stream.transport)

    def _parse(self, read: Callable[[_Body, Limits], _Asked], body: _Body) -> tuple[_Asked, Prompt]:
        asked = read(body, self._limits)
        try:
            return asked, self._prompts.build(asked)
        except RequestError as error:
            name_as_asked(error, asked.field_names)
            raise

    # --------------------------------------------------------------------------------------------------------- answer

    async def _count(self, http: web.Request, asked: _Asked, prompt: Prompt) -> int:
        """Submit the request until its prompt is known with the tokens of its media."""
        if self.is_closed:
            raise shutting_down()
        now_s, event = time.monotonic(), asyncio.Event()
        http[REQUEST_ID] = f"count-{secrets.token_hex(12)}"
        spec = self.base_spec(http, asked, prompt, now_s + self._server.request_timeout_s)
        spec = msgspec.structs.replace(spec, max_new_tokens=1)
        request = self._registry.submit(spec, [medium.data for medium in _media_of(asked)], event.set, now_s)
        try:
            while request.num_prompt_tokens is None and not request.is_over:
                event.clear()
                await event.wait()
            if request.error is not None:
                name_as_asked(request.error, asked.field_names)
                raise request.error
            return request.prompt_tokens()
        finally:
            request.cancel(time.monotonic())

    def spec_of(self, http: web.Request, asked: ChatRequest, prompt: Prompt, deadline_s: float) -> RequestSpec:
        """Return what is submitted for an answer of one choice."""
        spec = self.base_spec(http, asked, prompt, deadline_s)
        spec = msgspec.structs.replace(spec, max_new_tokens=self._max_new_tokens(asked, spec))
        return specs_of(spec, asked.generation.output)[0]

    def base_spec(self, http: web.Request, asked: _Asked, prompt: Prompt, deadline_s: float) -> RequestSpec:
        """Return what the requests of all choices are made of."""
        generation = asked.generation
        return RequestSpec(
            generation=Generation(
                http[REQUEST_ID],
                prompt.sampling,
                deadline_s=deadline_s,
                stop=generation.stop,
                stop_token_ids=generation.stop_token_ids,
                include_stop=generation.include_stop,
                ignore_eos=generation.ignore_eos,
                return_token_ids=generation.return_token_ids,
            ),
            prompt_ids=prompt.ids,
            items=[medium.item for medium in _media_of(asked)],
            max_new_tokens=None,
            companion_ids=prompt.companion_ids,
            borders=prompt.borders,
            priority=generation.priority,
            clamp_max_new_tokens=generation.clamp_max_tokens,
            salt=salt_of(http, generation.cache_salt),
        )

    async def _answer(self, http: web.Request, asked: _Asked, prompt: Prompt, format: AnswerFormat) -> web.StreamResponse:
        if self.is_closed:
            raise shutting_down()
        event, record = asyncio.Event(), AnswerRecord(http, format.id_prefix, self._server.request_timeout_s)
        http[REQUEST_ID] = record.id
        if not record.needs_media:
            asked = _without_media(asked)
        spec = self.base_spec(http, asked, prompt, record.deadline_s)
        answer = format.begin(record.id, record.created, self._limits.model_name, self._fingerprint)
        self._metrics.on_media(spec.items)
        prompts, media = (prompt.ids, *prompt.more), [medium.data for medium in _media_of(asked)]
        record.open(len(prompts) * asked.generation.output.best_of, self._registry.new_key)
        choices = [
            choice
            for number, ids in enumerate(prompts)
            for choice in self.submit(asked, prompt, msgspec.structs.replace(spec, prompt_ids=ids), media, number, event, record)
        ]
        asked, media = _without_media(asked), []  # each request has its media until its text begins
        if self._tracing is not None:
            self._tracing.begin(choices[0].request.key, record.id, http.path, http.headers)
        try:
            if asked.generation.stream:
                return await self._stream(http, asked, choices, answer, event, record)
            return await self._whole(asked, choices, answer, event)
        except RequestError as error:
            name_as_asked(error, asked.field_names)
            raise
        finally:
            now_s = time.monotonic()
            for choice in choices:
                choice.request.cancel(now_s)
            record.release([choice.request for choice in choices])
            usage = usage_of(choices)
            self._metrics.on_over([choice.request for choice in choices], usage.prompt_tokens, now_s)
            if usage.completion_tokens or error_of(choices) is None:  # one that failed before its first token costs none
                spend_tokens(http, usage)

    def submit(
        self,
        asked: _Asked,
        prompt: Prompt,
        spec: RequestSpec,
        media: Sequence[AnyBytes],
        number: int,
        event: asyncio.Event,
        record: Keys,
    ) -> list[Choice]:
        """Submit the requests for the choices of one prompt, the ``number``th of the answer."""
        output = asked.generation.output
        spec = msgspec.structs.replace(spec, max_new_tokens=self._max_new_tokens(asked, spec))
        first_index = number * output.best_of
        specs = specs_of(spec, output, first_index)
        now_s = time.monotonic()
        requests = [
            self._registry.submit(one, media, event.set, now_s, *record.request(index)) for index, one in enumerate(specs, first_index)
        ]
        text_of = self._prompts.text_of if output.echo else None
        make = None if output.logprobs is None else ChatLogprobs if isinstance(asked, ChatRequest) else TextLogprobs
        tools = asked.tools if isinstance(asked, ChatRequest) else None
        choices = []
        for index, request in enumerate(requests, first_index):
            format, reader = make and make(self._prompts.tokenizer), tools and CallReader(tools.names)
            thoughts = None if prompt.is_thinking is None or output.thoughts == "inside" else ThoughtReader(prompt.is_thinking)
            choices.append(Choice(index, request, requests[0], output, text_of, format, reader=reader, thoughts=thoughts))
        return choices

    def _max_new_tokens(self, asked: _Asked, spec: RequestSpec) -> int | None:
        """The limit on new tokens; None for as many as fit."""
        wanted = asked.generation.max_new_tokens
        if wanted is not None or isinstance(asked, ChatRequest) or asked.generation.clamp_max_tokens:
            return wanted
        wanted = max(TEXT_TOKENS, asked.generation.sampling.min_tokens)
        return min(wanted, self._limits.max_context - max(len(spec.prompt_ids), len(spec.companion_ids or ())))

    async def _whole(self, asked: _Asked, choices: list[Choice], answer: WrittenAnswer, event: asyncio.Event) -> web.Response:
        while error_of(choices) is None and not all(choice.request.is_over for choice in choices):
            event.clear()
            await event.wait()
            for choice in choices:
                choice.follow()
        if (error := error_of(choices)) is not None:
            raise error
        for choice in choices:
            self._metrics.on_first_text(choice.request)
        encode = partial(self._encode_whole, asked, choices, answer)
        output = asked.generation.output
        is_large = output.logprobs is not None or output.prompt_logprobs is not None or output.echo
        body = await asyncio.get_running_loop().run_in_executor(self.threads_of_answers, in_thread(encode)) if is_large else encode()
        charset = "utf-8" if answer.content_type.startswith("text/") else None
        return web.Response(body=body, content_type=answer.content_type, charset=charset, headers={"X-Request-Id": answer.id})

    def _encode_whole(self, asked: _Asked, choices: list[Choice], answer: WrittenAnswer) -> bytes:
        """Return the body of an answer, in a thread where there may be much to encode."""
        output, is_text = asked.generation.output, isinstance(asked, TextRequest)
        news = [choice.take() for choice in choices]
        bodies, of_prompts = [], dict[int, dict[str, Any]]()
        for index, choice in enumerate(best_of(choices, output.n) if output.best_of > output.n else choices):
            piece = choice.piece(news[choice.index])
            if (key := choice.first.key) not in of_prompts:
                of_prompts[key] = self._of_prompt(choice, output.prompt_logprobs)
            ending = choice.ending
            assert ending is not None
            body = answer.choice(index, piece, ending, asked.generation.return_token_ids)
            bodies.append({**body, **of_prompts[key]} if is_text else body)
        return answer.whole(bodies, usage_of(choices), {} if is_text else of_prompts[choices[0].first.key])

    def _of_prompt(self, choice: Choice, num_alternatives: int | None) -> dict[str, Any]:
        """Return the field ``prompt_logprobs`` if it was asked for."""
        if num_alternatives is None or (prompt := choice.first.findings.prompt) is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(prompt.likeliest(num_alternatives), self._prompts.tokenizer)}

    async def _stream(
        self, http: web.Request, asked: _Asked, choices: list[Choice], answer: WrittenAnswer, event: asyncio.Event, record: AnswerRecord
    ) -> web.StreamResponse:
        """Stream the answer. Headers are sent once the request is known to fit, or after ``keep_alive_s`` of waiting."""
        chunks = answer.chunks(asked.generation)
        stream = Stream(
            http.transport, event, asked, choices, chunks, self._metrics, self._server.keep_alive_s, self.threads_of_answers, record
        )
        self._streams.add(stream)
        try:
            if not record.shown:
                await stream.until_started()
            headers = {"Content-Type": chunks.content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            response = web.StreamResponse(headers={**headers, "X-Request-Id": answer.id})
            await response.prepare(http)
            try:
                if record.shown:
                    http.writer.send_headers()
                    record.restored()
                    await stream.restore()
                await stream.write(response)
                if (error := error_of(choices)) is not None:
                    http[PROBLEM] = error.message
                await response.write_eof()
                await record.finish(response, stream.renew)
            except ConnectionResetError:
                http[PROBLEM] = "its client has gone"
            except Exception:  # a bug here must not look like an end, nor like a second response
                log.exception("%s: its stream failed", answer.id)
                reset(http.transport)
            return response
        finally:
            self._streams.discard(stream)


def _without_media(asked: _Asked) -> _Asked:
    if not isinstance(asked, ChatRequest):
        return asked
    return msgspec.structs.replace(asked, conversation=asked.conversation._replace(media=()))


def _media_of(asked: _Asked) -> Sequence[Medium]:
    return asked.conversation.media if isinstance(asked, ChatRequest) else ()
