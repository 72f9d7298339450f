"""A client's request in the gateway: commands to the controller, their repetition, and the answers.

Messages may be lost, repeated and reordered; each command is sent again until its answer arrives. Runs in the gateway's event loop;
knows neither HTTP nor sockets nor clocks: messages leave through ``Link.send``, time comes in as an argument (monotonic seconds).

    SUBMITTED --Queued--> QUEUED --Granted--> FILLING --bytes written--> WAITING --Prepared or text--> STREAMING
    any of them --last delta, Computed, Failed, cancel--> DELIVERED --Released or Unknown--> forgotten
"""

import enum
import logging
from collections.abc import Callable, Sequence

from ....runtime.bus.messages import (
    Cancel,
    Computed,
    Delivered,
    Delta,
    Failed,
    Filled,
    FinishReason,
    Granted,
    PageRun,
    Prepared,
    Query,
    Queued,
    Released,
    RequestSpec,
    Submit,
    ToController,
    Unknown,
)
from ....runtime.errors import RequestError
from ....shm.errors import StalePage, StaleRow
from ....shm.spool import AnyBytes, write_pages
from ..keeping.state import Place
from .findings import Findings
from .link import Keeping, Link

log = logging.getLogger(__name__)

RESEND_S = 0.2
MAX_RESEND_S = 2.0
QUERY_S = 1.0
STREAMING_QUERY_S = 5.0
GRACE_S = 0.05  # for the usage of a prompt to come behind its text, before it is asked for: it is on its way, or was lost
SENT_S = 0.5  # between notes of how much a client has been sent
SETTLE_S = 1.0  # how long an answer that has all its text waits for the numbers of its prompt tokens
MAX_PENDING_BYTES = 1 << 20
CLIENT_GONE = 499  # never sent: no client is left to read it

ControllerAnswer = Queued | Granted | Prepared | Computed | Failed | Released | Unknown


class RequestStage(enum.Enum):
    """The stage of a request, as far as the gateway knows."""

    SUBMITTED = enum.auto()
    QUEUED = enum.auto()
    FILLING = enum.auto()
    WAITING = enum.auto()
    STREAMING = enum.auto()
    DELIVERED = enum.auto()


class ClientRequest:
    """One request. The HTTP side reads it, takes its text, and may cancel it; ``wake`` wakes it."""

    def __init__(
        self,
        key: int,
        spec: RequestSpec,
        media: Sequence[AnyBytes],
        wake: Callable[[], None],
        link: Link,
        now_s: float,
        keeping: Keeping | None = None,
    ) -> None:
        self.key = key
        self.spec = spec
        self.stage = RequestStage.SUBMITTED
        self.num_prompt_tokens: int | None = None
        self.num_cached_tokens = -1  # of the prompt; -1: not known yet
        self.media_share = 1.0
        self.num_sound_frames = 0  # of the prompt's sounds
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self.error: RequestError | None = None
        self.is_too_slow = False  # the client did not read the text at hand
        self.submitted_s = now_s
        self.granted_s: float | None = None
        self.first_text_s: float | None = None
        self.finished_s: float | None = None
        self.stop = ""  # the stop string that ended the text
        self._wake = wake
        self._link = link
        self._media = list(media)
        self._filled: list[PageRun] | None = None
        self._received = 0
        self._pending = bytearray()
        self._ids: list[int] = []
        self._num_ids = 0
        self._keeping = keeping
        self._is_known = False
        self._end: ToController | None = None  # kept back until the answer is committed
        self.findings = Findings(spec, link.tokens)
        self._unanswered: ToController | None = None
        self._resend_s = RESEND_S
        self._resend_at_s = 0.0
        self._query_at_s = now_s + QUERY_S
        self._unsettled: FinishReason | None = None
        self._settle_at_s = 0.0
        self._sent_at_s = 0.0

    @property
    def is_over(self) -> bool:
        """Return whether nothing more will come: the finish reason or the error is known."""
        return self.finish is not None or self.error is not None

    @property
    def is_taken(self) -> bool:
        """Return whether the controller has answered its Submit, or its text shows that it has it."""
        return not isinstance(self._unanswered, Submit)

    @property
    def has_started(self) -> bool:
        """Return whether the controller has analysed it and it fits, or its answer has begun."""
        return self.num_prompt_tokens is not None or self.first_text_s is not None

    @property
    def num_media_bytes(self) -> int:
        """Bytes of media held because the controller may still ask for them."""
        return sum(map(len, self._media))

    def prompt_tokens(self) -> int:
        """Prompt tokens for the usage, media included once Prepared has come."""
        return len(self.spec.prompt_ids) if self.num_prompt_tokens is None else self.num_prompt_tokens

    @property
    def has_text(self) -> bool:
        """Return whether ``take`` gives any."""
        return bool(self._pending)

    @property
    def taken(self) -> Place:
        """Return the place up to which ``take`` has given it."""
        num_ids = self._num_ids - len(self._ids)
        return Place(self._received - len(self._pending), self.findings.num_taken, num_ids)

    def has(self, place: Place) -> bool:
        """Return whether it can be taken up to there."""
        has_all = self._received >= place.num_bytes and self._num_ids >= place.num_ids and self.findings.num_read >= place.num_tokens
        return has_all and (self.is_over or not place.has_ended)

    def take(self, most: int | None = None) -> str:
        """Take the text that has come since the last call, or the first bytes of it."""
        text = self._pending[:most].decode()
        del self._pending[:most]
        return text

    def take_ids(self, most: int | None = None) -> list[int]:
        """Take the token ids that have come since the last call, or the first of them; none unless they were asked for."""
        ids = self._ids[:most]
        del self._ids[:most]
        return ids

    def sent(self, num_tokens: int, now_s: float) -> None:
        """Note that the client has been sent the text of so many tokens."""
        if num_tokens and now_s >= self._sent_at_s:
            self._sent_at_s = now_s + SENT_S
            self._link.flight.sent(self.key, num_tokens)

    def submit(self, now_s: float) -> None:
        """Submit the request to the controller."""
        self._link.flight.received(self.key, self.spec)
        self._command(Submit(self._link.generation, self.key, self.spec), now_s)

    def cancel(self, now_s: float, error: RequestError | None = None) -> None:
        """Cancel: the client is gone, or must be told ``error``. Without effect on a finished request."""
        if self.is_over:
            return
        self.error = error or RequestError("the client is gone", status=CLIENT_GONE)
        self._close(Cancel(self._link.generation, self.key), now_s)

    def release(self, now_s: float) -> None:
        """Tell the controller of its end: no other gateway will need what it has of the request."""
        self._keeping = None
        if self._end is not None:
            command, self._end = self._end, None
            self._command(command, now_s)

    def tick(self, now_s: float) -> None:
        """Repeat unanswered commands, ask for the request's stage, and end it when its deadline has passed."""
        if self.spec.generation.deadline_s and now_s >= self.spec.generation.deadline_s and not self.is_over:
            self.cancel(now_s, self._timed_out(now_s))
        if self._unsettled is not None and now_s >= self._settle_at_s:
            self._settle(now_s)
        if self._unanswered is not None and now_s >= self._resend_at_s:
            self.resend(now_s)
        if now_s >= self._query_at_s and self.stage not in (RequestStage.SUBMITTED, RequestStage.DELIVERED):
            self._query(now_s)

    # ---------------------------------------------------------------------------------------- from the controller

    def on_message(self, message: ControllerAnswer, now_s: float) -> None:
        """Take an answer of the controller. Not for a request that has been delivered."""
        if isinstance(message, Unknown) and not self.is_taken:
            self.resend(now_s)
            return
        if not self.is_taken:
            self._unanswered = None
        self._note_known()
        match message:
            case Queued():
                self._on_queued()
            case Granted():
                self._on_granted(message.runs, now_s)
            case Prepared():
                self._on_prepared(message, now_s)
            case Computed():
                self._on_computed(message, now_s)
            case Failed():
                self._on_failed(message, now_s)
            case Unknown() | Released():
                self._on_lost(now_s)
        self._wake()

    def _on_queued(self) -> None:
        if self.stage is RequestStage.SUBMITTED:
            self.stage = RequestStage.QUEUED

    def _on_granted(self, runs: list[PageRun], now_s: float) -> None:
        """Write the media. The same grant again means that Filled was lost; another one means that a new controller placed it anew."""
        if self.first_text_s is not None:
            return
        if self._filled != runs:
            self.stage = RequestStage.FILLING
            if not self._fill(runs, now_s):
                return
            self._filled = runs
        if self.granted_s is None:
            self.granted_s = now_s
        if self.stage is not RequestStage.STREAMING:
            self.stage = RequestStage.WAITING
        self._command(Filled(self._link.generation, self.key), now_s)

    def _fill(self, runs: list[PageRun], now_s: float) -> bool:
        if runs and self._keeping is not None and not self._media:  # they came in time for the gateway before
            message = "the media of this request are gone: send it again"
            self.cancel(now_s, RequestError(message, status=503, type="overloaded_error", retry_after_s=1))
            return False
        if len(runs) != len(self._media):
            self._fail_internally(f"{len(runs)} page runs were granted for {len(self._media)} media", now_s)
            return False
        began_ns = self._link.flight.now_ns()
        try:
            for run, data in zip(runs, self._media, strict=True):
                self._link.pool.check(run.pages, run.generations)
                write_pages(self._link.pool, run.pages, data)
            if runs:
                self._link.flight.written(self.key, began_ns, sum(map(len, self._media)))
        except StalePage as error:
            log.warning("%s: an outdated grant is ignored: %s", self.spec.generation.request_id, error)
            self._unanswered = None
            self._query_at_s = now_s + RESEND_S
            return False
        except ValueError as error:
            self._fail_internally(f"the granted pages do not fit: {error}", now_s)
            return False
        return True

    def _on_prepared(self, prepared: Prepared, now_s: float) -> None:
        self.num_prompt_tokens, self.media_share = prepared.num_prompt_tokens, prepared.media_share
        self.num_sound_frames = prepared.num_sound_frames
        self.num_cached_tokens = max(self.num_cached_tokens, prepared.num_cached_tokens)  # an older one may come later
        if self.granted_s is None:  # without media there is nothing to fill
            self.granted_s = now_s
        self.stage = RequestStage.STREAMING
        self._unanswered = None
        if self._keeping is not None and self.spec.items:
            self._keeping.on_prepared()
        if not self._is_counted:
            return
        if self._unsettled is not None:
            self._settle(now_s)
        elif self.first_text_s is not None:
            self._query_at_s = now_s + STREAMING_QUERY_S

    def _on_computed(self, computed: Computed, now_s: float) -> None:
        """Finish a request without an answer."""
        try:
            self.findings.read_computed(computed)
        except StaleRow as error:
            log.warning("%s: an outdated result is ignored: %s", self.spec.generation.request_id, error)
            return
        except (OSError, ValueError) as error:
            self._fail_internally(f"what its prefill has found out cannot be read: {error}", now_s)
            return
        self.num_prompt_tokens, self.num_cached_tokens = computed.num_prompt_tokens, computed.num_cached_tokens
        self.media_share = computed.media_share
        if self.granted_s is None:
            self.granted_s = now_s
        self.finish, self.finished_s = "stop", now_s
        self._deliver(now_s)

    def _on_failed(self, failed: Failed, now_s: float) -> None:
        self.error = RequestError(
            failed.message,
            status=failed.status,
            type=failed.error_type,
            param=failed.param,
            retry_after_s=failed.retry_after_s,
            code=failed.code,
        )
        if failed.status == 504:  # the controller does not know since when
            self.error = self._timed_out(now_s)
        self._deliver(now_s)

    def _on_lost(self, now_s: float) -> None:
        if self._unsettled is not None:
            self._settle(now_s)
            return
        log.error("%s: the controller does not know it any more (stage %s)", self.spec.generation.request_id, self.stage.name)
        self.error = RequestError("the server has lost this request", status=500, type="internal_error", retry_after_s=1)
        self._deliver(now_s)

    def _fail_internally(self, problem: str, now_s: float) -> None:
        log.error("%s: %s", self.spec.generation.request_id, problem)
        self.cancel(now_s, RequestError("internal error", status=500, type="internal_error"))

    # --------------------------------------------------------------------------------------- from the detokenizer

    def on_delta(self, delta: Delta, now_s: float) -> None:
        """Take a piece of text; drop by its byte offset what was received already."""
        if self.is_over or self._unsettled is not None:
            return
        known = self._received - delta.byte_offset
        if known < 0 and not self._received:
            return  # it is on its way from the beginning, for this gateway
        if known < 0:
            log.warning("%s: a gap of %d bytes in its text; all of it will come again", self.spec.generation.request_id, -known)
            return
        try:
            self.findings.read(delta)
        except StaleRow as error:
            log.warning("%s: text of a row that it has lost: %s", self.spec.generation.request_id, error)
            return
        except (OSError, ValueError) as error:
            self._fail_internally(f"its log-probabilities cannot be read: {error}", now_s)
            return
        is_first = self.first_text_s is None
        if is_first:
            self._begin_text(now_s)
        data = delta.data[known:]
        self._pending += data
        self._received += len(data)
        self.num_tokens = max(self.num_tokens, delta.token_index)
        if delta.ids:
            self._ids += delta.ids[self._num_ids - (delta.token_index - len(delta.ids)) :]
            self._num_ids = max(self._num_ids, delta.token_index)
        if delta.finish in ("abort", "error"):
            self.error = RequestError("the model failed on this request", status=500, type="internal_error")
        if delta.finish == "grammar":
            self.error = RequestError("the answer cannot follow its grammar any further: it leads nowhere, or takes too much time")
        if delta.finish is not None:
            self._unsettled, self.stop, self.finished_s = delta.finish, delta.stop, now_s
            self._settle_at_s = now_s + SETTLE_S
            if self._is_counted or self.error is not None:
                self._settle(now_s)
        elif len(self._pending) > MAX_PENDING_BYTES + (self._keeping.place.num_bytes if self._keeping is not None else 0):
            self.is_too_slow = True
            self.cancel(now_s)
        if (is_first or self._unsettled is not None) and not self._is_counted and not self.is_over:
            self._query_at_s = now_s + GRACE_S
        self._wake()

    def _begin_text(self, now_s: float) -> None:
        self.first_text_s = now_s
        self._link.flight.first_text(self.key)
        self.stage = RequestStage.STREAMING
        if self.is_taken or self._keeping is None:  # else the text may be of a row that the controller has for a gateway before
            self._unanswered = None
        self._media.clear()
        self._query_at_s = now_s + STREAMING_QUERY_S

    @property
    def _is_counted(self) -> bool:
        """Return whether the usage of the prompt is known."""
        return self.num_prompt_tokens is not None and self.num_cached_tokens >= 0

    def _settle(self, now_s: float) -> None:
        """Finish: the last text is there, and the usage too, or the wait for it is over."""
        self.finish, self._unsettled = self._unsettled, None
        self._deliver(now_s)

    # ------------------------------------------------------------------------------------------------- to the controller

    def _deliver(self, now_s: float) -> None:
        """Note that the client has its end: the controller may forget the request."""
        self._close(Delivered(self._link.generation, self.key), now_s)

    def _close(self, command: ToController, now_s: float) -> None:
        self.stage = RequestStage.DELIVERED
        self._unsettled = None
        self._link.flight.over(self.key, self.num_tokens, self.error.status if self.error is not None else 0)
        self._media.clear()
        self._note_known()
        if self._keeping is None:
            self._command(command, now_s)
        else:
            self._end, self._unanswered = command, None
        self._wake()

    def _note_known(self) -> None:
        if self._keeping is not None and not self._is_known:
            self._is_known = True
            self._keeping.on_known()

    def _command(self, command: ToController, now_s: float) -> None:
        """Send a command, and repeat it after ``RESEND_S`` and then at growing intervals."""
        self._unanswered = command
        self._resend_s = RESEND_S
        self._resend_at_s = now_s + RESEND_S
        self._link.send(command)

    def resend(self, now_s: float) -> None:
        """Send the unanswered command again."""
        assert self._unanswered is not None
        if self._link.send(self._unanswered):
            self._resend_s = min(2 * self._resend_s, MAX_RESEND_S)
        self._resend_at_s = now_s + self._resend_s

    def _query(self, now_s: float) -> None:
        is_running = self.first_text_s is not None and self.num_prompt_tokens is not None
        interval_s = STREAMING_QUERY_S if is_running else QUERY_S
        self._query_at_s = now_s + (interval_s if self._unsettled is None else RESEND_S)
        self._link.send(Query(self._link.generation, self.key))

    def _timed_out(self, now_s: float) -> RequestError:
        waited_s = now_s - self.submitted_s
        message = f"the request was not finished after {waited_s:.0f} s (server.request_timeout_s)"
        return RequestError(message, status=504, type="timeout_error")
