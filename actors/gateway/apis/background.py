"""Answers that go on though no client is connected: responses in the background. Runs in the gateway's event loop.

Each is kept from the beginning with all that another gateway needs to go on with it, and its text as it comes: a successor submits it
again by its key, drops what is kept, and goes on. Clients that stream it read what is kept, each for itself.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from ....runtime.errors import RequestError
from ..answers.answer_record import AnswerRecord
from ..answers.choices import Usage
from ..answers.client_request import ClientRequest, RequestStage
from ..answers.link import Keeping
from ..answers.requests import RequestRegistry
from ..at_work import Work, in_steps
from ..keeping.kept_answers import MAX_KEPT_BYTES, KeptAnswer, KeptAnswers
from ..keeping.patience import Patience
from ..keeping.state import Place
from ..keys.api_keys import ApiKeys, Client
from ..watching.metrics import Metrics
from .news import News
from .openai.background import (
    STARTED,
    End,
    Job,
    JobState,
    Played,
    Rendering,
    decode_job,
    decode_state,
    encode,
    encode_json,
    entry_of,
    failed,
    texts_of,
)
from .openai.responses_answer import ID_PREFIX
from .openai.stored import StoredResponse, StoredResponses
from .reading_along import LeftError, send_along
from .streams import name_as_asked

log = logging.getLogger(__name__)

MAX_UNFINISHED = 64  # of one tenant
TENANT_SHARE = 4  # of the bytes that are kept, one tenant's unfinished answers may take one in so many
MAX_STRIKES = 2  # crashes in the midst of its work, with which an answer is given up
ACCEPT_S = 1.0  # for the controller to refuse a request at once
CANCEL_S = 10.0
_NOT_SHOWN = 1 << 62


class BackgroundAnswer:
    """One under way. ``texts``: the entries of its log; ``end``: once it has ended. Whoever waits for more awaits ``more``."""

    def __init__(self, kept: KeptAnswer, job: Job, state: JobState, log_bytes: bytes, work: Work) -> None:
        self.kept = kept
        self.work = work
        self.job = job
        self.state = state
        self.texts = list(texts_of(log_bytes))
        self.log = bytearray(log_bytes)
        self.end: End | None = None
        self.is_cancelled = self.is_left = False
        self.client: Client | None = None
        self.rendering = Rendering(job.form, _NOT_SHOWN)
        self.rendering.begin()
        for text in self.texts:
            self.rendering.text(text)
        self._stirred = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._news = News()

    @property
    def has_started(self) -> bool:
        return bool(self.texts)

    @property
    def body(self) -> bytes:
        """Its JSON, as it stands."""
        if self.end is not None:
            return self.end.body
        return encode_json(self.job.form.response().object("in_progress" if self.has_started else "queued", []))

    def wake(self) -> None:
        """Tell that its request has changed."""
        self._stirred.set()

    async def stir(self) -> None:
        """Wait until its request has changed."""
        await self._stirred.wait()
        self._stirred.clear()
        self.news()

    def news(self) -> None:
        """Wake all who wait for more."""
        self._news.tell()

    async def more(self, timeout_s: float) -> bool:
        """Wait for more. Returns whether it has come in this time."""
        return await self._news.wait(timeout_s)


class BackgroundAnswers:
    """All of one gateway."""

    def __init__(
        self,
        kept: KeptAnswers,
        registry: RequestRegistry,
        metrics: Metrics,
        keys: ApiKeys,
        timeout_s: float,
        keep_alive_s: float,
    ) -> None:
        self.kept = kept
        self.stored = StoredResponses(kept)
        self._registry = registry
        self._metrics = metrics
        self._keys = keys
        self._timeout_s = timeout_s
        self._keep_alive_s = keep_alive_s
        self._running: dict[tuple[bytes, str], BackgroundAnswer] = {}

    def get(self, tenant: bytes, id: str) -> BackgroundAnswer | None:
        """Return one that is under way."""
        return self._running.get((tenant, id))

    def client(self, name: str) -> Client | None:
        """Return the owner of the API key of this name, None if there is none."""
        return next((one for one in self._keys.clients if one.key.name == name), None)

    def record(self, http: web.Request) -> AnswerRecord:
        return AnswerRecord(http, ID_PREFIX, self._timeout_s)

    # -------------------------------------------------------------------------------------------------------- to begin

    async def begin(
        self, tenant: bytes, record: AnswerRecord, client: Client | None, num_media_bytes: int, make: Callable[[], Job]
    ) -> StoredResponse | BackgroundAnswer:
        """Begin an answer and return it, or that which a gateway before has begun for the same request. ``make``: makes its job.
        Raises: RequestError, also where the controller refuses it at once."""
        record.open(1, self._registry.new_key)
        key, keeping = record.request(0)
        try:
            if (found := self.get(tenant, record.id)) is not None:
                return found
            if (stored := self.stored.get(tenant, record.id)) is not None:
                return stored
            expect_unseen(record)
            self.check(tenant, num_media_bytes)
            answer = self._open(tenant, make(), JobState(key))
        finally:
            if keeping is not None:
                keeping.on_known()
        answer.client = client
        self._start(answer, Keeping(lambda: None))
        request = self._request_of(answer)
        deadline_s = time.monotonic() + ACCEPT_S
        while request.stage is RequestStage.SUBMITTED and answer.end is None and (left_s := deadline_s - time.monotonic()) > 0:
            await answer.more(left_s)
        if answer.end is not None and answer.end.problem is not None and not answer.has_started:
            self.kept.remove(tenant, record.id)
            raise answer.end.problem.error()
        return answer

    def check(self, tenant: bytes, num_bytes: int) -> None:
        """Check an answer that would keep so many bytes against the limits of a tenant. Raises: RequestError."""
        others = self.kept.open_ones(tenant)
        if len(others) >= MAX_UNFINISHED:
            raise _refusal(f"{len(others)} answers in the background are under way", MAX_UNFINISHED)
        limit = self.kept.max_bytes // TENANT_SHARE
        if num_bytes > limit:  # whenever it is sent again
            message = f"an answer in the background would keep {num_bytes} bytes, media included, the limit is {limit}"
            raise RequestError(message, status=413)
        if (num_bytes := num_bytes + sum(one.num_bytes for one in others)) > limit:
            raise _refusal(f"answers in the background would keep {num_bytes} bytes, media included", limit)

    def _open(self, tenant: bytes, job: Job, state: JobState) -> BackgroundAnswer:
        """Keep what the answer needs. Raises: RequestError, where that breaks a limit."""
        data = encode(job)
        self.check(tenant, len(data))
        if (kept := self.kept.open(tenant, job.form.id, data, encode(state))) is None:
            raise refuse_for_memory()
        return BackgroundAnswer(kept, job, state, b"", Work(self.kept.marks(kept)))

    def _start(self, answer: BackgroundAnswer, keeping: Keeping) -> None:
        job, now_s = answer.job, time.monotonic()
        data = (medium.data for medium in job.conversation.media)
        media = [own if other is None else other for own, other in zip(data, job.media, strict=True)]
        self._running[answer.kept.tenant, answer.kept.id] = answer
        if answer.client is not None:
            answer.client.quota.begin(now_s, is_known=True)
        request = self._registry.submit(job.spec, media, answer.wake, now_s, answer.state.key, keeping)
        answer.task = asyncio.get_running_loop().create_task(in_steps(answer.work, self._run(answer, request)))

    def _request_of(self, answer: BackgroundAnswer) -> ClientRequest:
        request = self._registry.get(answer.state.key)
        assert request is not None
        return request

    # ---------------------------------------------------------------------------------------------------------- to run

    async def _run(self, answer: BackgroundAnswer, request: ClientRequest) -> None:
        error: RequestError | None = None
        try:
            await self._take(answer, request)
        except RequestError as found:
            error = found
        except Exception:  # a bug here must cost this answer only
            log.exception("%s failed", answer.kept.id)
            error = RequestError("internal error", status=500, type="internal_error")
        if error is not None:
            request.cancel(time.monotonic(), error)
        self._end(answer, request, error or request.error)

    async def _take(self, answer: BackgroundAnswer, request: ClientRequest) -> None:
        """Take its text as it comes, up to the end. What a gateway before has taken comes again, and is dropped."""
        known = Place(answer.state.num_text_bytes)
        while not request.has(known) and not request.is_over:
            await answer.stir()
        request.take(known.num_bytes)
        while request.error is None:
            if not answer.has_started and (request.has_started or request.has_text):
                self._note(answer, "", answer.state)
            if request.has_text:
                self._take_text(answer, request)
            elif request.is_over:
                return
            else:
                await answer.stir()

    def _take_text(self, answer: BackgroundAnswer, request: ClientRequest) -> None:
        if answer.state.num_text_bytes == 0:
            self._metrics.on_first_text(request)
        text, num_bytes = request.take(), request.taken.num_bytes
        answer.rendering.text(text)
        num_thought_tokens = request.num_tokens if answer.rendering.is_thinking else answer.state.num_thought_tokens
        self._note(answer, text, msgspec.structs.replace(answer.state, num_text_bytes=num_bytes, num_thought_tokens=num_thought_tokens))

    def _note(self, answer: BackgroundAnswer, text: str, state: JobState) -> None:
        """Keep an entry, then show it. Raises: RequestError if there is no room."""
        entry = entry_of(text) if text else STARTED
        if not text:
            answer.rendering.text("")
        if not self.kept.append(answer.kept, entry, encode(state)):
            raise refuse_for_memory()
        answer.log += entry
        answer.texts.append(text)
        answer.state = state
        answer.news()

    def _end(self, answer: BackgroundAnswer, request: ClientRequest, error: RequestError | None) -> None:
        """Keep the end, then let the controller forget the request."""
        now_s, job = time.monotonic(), answer.job
        usage = Usage(
            request.prompt_tokens(),
            request.num_tokens,
            max(0, request.num_cached_tokens),
            answer.state.num_thought_tokens,
            request.num_sound_frames,
            request.media_share,
        )
        conversation = job.conversation
        if error is None:
            assert request.finish is not None
            answer.rendering.flush(request.finish)
            ended = answer.rendering.ended
            body = job.form.response().finished(ended, usage)
            answer.end = End("incomplete" if request.finish == "length" else "completed", body, request.finish, None)
            conversation = conversation.with_answer(ended.message)
        else:
            name_as_asked(error, job.field_names)
            answer.end = failed(job.form, error, answer.is_cancelled)
        end = answer.end
        played = Played(job.form, bytes(answer.log), end.status, end.reason, end.problem)
        key = answer.kept.tenant, answer.kept.id
        answer.work.retire()  # its record goes
        if self.kept.has(answer.kept) and not self.stored.put_played(key[0], conversation, end.body, job.items, played):
            log.warning("%s is not kept: there is no room", answer.kept.id)
            self.kept.remove(*key)
        request.release(now_s)
        self._running.pop(key, None)
        self._metrics.on_over([request], usage.prompt_tokens, now_s)
        if answer.client is not None:
            answer.client.quota.end()
            if usage.completion_tokens or error is None:
                answer.client.quota.spend(usage.prompt_tokens, usage.completion_tokens, now_s)
        answer.news()

    async def cancel(self, answer: BackgroundAnswer) -> End | None:
        """End an answer, and wait for that."""
        answer.is_cancelled = answer.is_cancelled or not self._request_of(answer).is_over
        self._request_of(answer).cancel(time.monotonic())
        deadline_s = time.monotonic() + CANCEL_S
        while answer.end is None and time.monotonic() < deadline_s:
            await answer.more(deadline_s - time.monotonic())
        return answer.end

    # -------------------------------------------------------------------------------------------------------- to go on

    def resume(self, has_crashed: bool, on_resumed: Callable[[], None], patience: Patience) -> None:
        """Go on with the answers of a gateway before. If that ``has_crashed``, it may have died of those that it was at work on.
        ``on_resumed``: is called once the controller knows that of all, or ``patience`` is over."""
        left = set[str]()

        def known(id: str) -> None:
            left.discard(id)
            if not left:
                on_resumed()

        found = [kept for kept in self.kept.open_ones() if kept.id.startswith(ID_PREFIX)]
        answers = [answer for kept in found if (answer := self._restored(kept, has_crashed)) is not None]
        left.update(answer.kept.id for answer in answers)
        for answer in answers:
            answer.client = self.client(answer.job.client)
            place, id = Place(answer.state.num_text_bytes), answer.kept.id
            self._start(answer, Keeping(lambda id=id: known(id), place))  # type: ignore[misc]
        if not answers:
            on_resumed()
            return
        log.info("%d answers in the background go on", len(answers))
        patience.after(on_resumed)

    def _restored(self, kept: KeptAnswer, has_crashed: bool) -> BackgroundAnswer | None:
        data, log_bytes = self.kept.body(kept), self.kept.log(kept, 0, kept.num_log_bytes)
        assert data is not None and log_bytes is not None
        try:
            work, job = Work(self.kept.marks(kept)), decode_job(data)
            state = decode_state(kept.state)
            if work.take() and has_crashed:
                state = msgspec.structs.replace(state, strikes=state.strikes + 1)
                if state.strikes >= MAX_STRIKES:
                    self._give_up(kept, job, log_bytes, state.strikes)
                    return None
                if not self.kept.append(kept, b"", encode(state)):
                    raise ValueError("there is no room")
            return work.do(lambda: BackgroundAnswer(kept, job, state, log_bytes, work))
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("%s is dropped: %s", kept.id, error)
            self.kept.remove(kept.tenant, kept.id)
            return None

    def _give_up(self, kept: KeptAnswer, job: Job, log_bytes: bytes, num_deaths: int) -> None:
        """Let an answer fail that gateways may have died of."""
        log.error("%s has failed: %d gateways have died at work on it", kept.id, num_deaths)
        message = f"the server has died {num_deaths} times over this answer"
        end = failed(job.form, RequestError(message, status=500, type="internal_error"), is_cancelled=False)
        played = Played(job.form, log_bytes, end.status, end.reason, end.problem)
        if not self.stored.put_played(kept.tenant, job.conversation, end.body, job.items, played):
            self.kept.remove(kept.tenant, kept.id)

    def leave(self) -> None:
        """Leave all that is under way as it is, to a successor."""
        for answer in self._running.values():
            assert answer.task is not None
            answer.task.cancel()
            self._registry.forget(answer.state.key)
            answer.is_left = True
            answer.news()
        self._running.clear()

    # ---------------------------------------------------------------------------------------------------------- to show

    async def stream(
        self, http: web.Request, record: AnswerRecord, source: BackgroundAnswer | StoredResponse, first_shown: int
    ) -> web.StreamResponse:
        """Stream the events from a number on: of an answer under way up to its end, or of one that has ended."""
        first_shown = max(first_shown, record.num_events)
        events = _Events(source, first_shown) if isinstance(source, BackgroundAnswer) else _PlayedEvents(source, first_shown)
        return await send_along(http, record, events.form.id, events, self._keep_alive_s)


class _Events:
    """The events of an answer under way, for one client."""

    def __init__(self, answer: BackgroundAnswer, first_shown: int) -> None:
        self.form = answer.job.form
        self._answer = answer
        self._rendering = Rendering(self.form, first_shown)
        self._frames = [self._rendering.begin()]
        self._at = 0

    @property
    def position(self) -> int:
        return self._rendering.num_events

    def take(self) -> tuple[bytes, bool]:
        answer, frames = self._answer, self._frames
        if answer.is_left:
            raise LeftError
        frames += [self._rendering.text(text) for text in answer.texts[self._at :]]
        self._at, self._frames = len(answer.texts), []
        if answer.end is not None:
            frames.append(self._rendering.end(answer.end))
        return b"".join(frames), answer.end is not None

    async def more(self, timeout_s: float) -> bool:
        return await self._answer.more(timeout_s)


class _PlayedEvents:
    """Those of one that has ended."""

    def __init__(self, found: StoredResponse, first_shown: int) -> None:
        assert found.played is not None
        self.form = found.played.form
        self._found = found
        self._played = found.played
        self._rendering = Rendering(self.form, first_shown)

    @property
    def position(self) -> int:
        return self._rendering.num_events

    def take(self) -> tuple[bytes, bool]:
        texts = map(self._rendering.text, texts_of(self._played.log))
        return b"".join([self._rendering.begin(), *texts, self._rendering.end(self._played.end(self._found.body))]), True

    async def more(self, timeout_s: float) -> bool:
        raise AssertionError("all of it is there")


def expect_unseen(record: AnswerRecord) -> None:
    """Check that nobody has a part of an answer that is to begin. Raises: RequestError: then the answer is forgotten meanwhile."""
    if record.shown:
        raise RequestError("the answer that this streamed is forgotten", status=404, type="not_found_error")


def refuse_for_memory() -> RequestError:
    """Return the error of an answer that cannot be kept."""
    message = f"there is no memory to keep this answer: those under way have {MAX_KEPT_BYTES >> 20} MiB together"
    return RequestError(message, status=503, type="overloaded_error", retry_after_s=1)


def _refusal(what: str, limit: int) -> RequestError:
    message = f"{what}, the limit is {limit}"
    return RequestError(message, status=429, type="rate_limit_error", retry_after_s=1, code="rate_limit_exceeded")
