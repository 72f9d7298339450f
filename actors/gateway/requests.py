"""The gateway's side of the life of a request: what to tell the controller, when to tell it again, and what came back.

Messages may be lost, repeated and reordered; each command is sent again until its answer arrives. Runs in the gateway's event loop;
knows neither HTTP nor sockets nor clocks: messages leave through ``send``, time comes in as an argument (monotonic seconds).

    SUBMITTED --Queued--> QUEUED --Granted--> FILLING --bytes written--> WAITING --Prepared or text--> STREAMING
    any of them --last delta, Failed, cancel--> DELIVERED --Released or Unknown--> forgotten
"""

import enum
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

from ...runtime.bus.messages import (
    Cancel,
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
    ToActor,
    ToController,
    Unknown,
)
from ...runtime.errors import RequestError
from ...shm.errors import StalePage
from .flight import GatewayFlight

log = logging.getLogger(__name__)

RESEND_S = 0.2
MAX_RESEND_S = 2.0
QUERY_S = 1.0
STREAMING_QUERY_S = 5.0
SENT_S = 0.5  # between notes of how much a client has been sent
SETTLE_S = 1.0  # how long an answer waits for the exact number of its prompt tokens
MAX_PENDING_BYTES = 1 << 20
CLIENT_GONE = 499  # never sent: there is nobody to read it


class MediaPool(Protocol):
    """What of a page pool is needed here."""

    def check(self, pages: Sequence[int], generations: Sequence[int]) -> None: ...
    def write_bytes(self, pages: Sequence[int], data: bytes) -> None: ...


class Stage(enum.Enum):
    """Where a request is, as far as the gateway knows."""

    SUBMITTED = enum.auto()
    QUEUED = enum.auto()
    FILLING = enum.auto()
    WAITING = enum.auto()
    STREAMING = enum.auto()
    DELIVERED = enum.auto()


class Request:
    """One request. The HTTP side reads it and is woken by ``wake``; only the registry changes it, but for ``take``."""

    def __init__(self, key: int, spec: RequestSpec, media: Sequence[bytes], wake: Callable[[], None], now_s: float) -> None:
        self.key = key
        self.spec = spec
        self.stage = Stage.SUBMITTED
        self.wake = wake
        self.position: int | None = None  # in the queue
        self.num_prompt_tokens: int | None = None
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self.error: RequestError | None = None
        self.is_too_slow = False  # the client did not read what there was
        self.submitted_s = now_s
        self.granted_s: float | None = None
        self.first_text_s: float | None = None
        self._media = list(media)
        self._filled: list[PageRun] | None = None
        self._received = 0
        self._pending = bytearray()
        self._ids: list[int] = []
        self._num_ids = 0
        self._command: ToController | None = None
        self._resend_s = RESEND_S
        self._resend_at_s = 0.0
        self._query_at_s = now_s + QUERY_S
        self._unsettled: FinishReason | None = None
        self._settle_at_s = 0.0
        self._sent_at_s = 0.0

    @property
    def is_over(self) -> bool:
        """Nothing more will come: the finish reason or the error is known."""
        return self.finish is not None or self.error is not None

    @property
    def has_started(self) -> bool:
        """The controller has analysed it and it fits, or it has even begun to answer."""
        return self.num_prompt_tokens is not None or self.first_text_s is not None

    def prompt_tokens(self) -> int:
        """Prompt tokens for the usage, media included; before Prepared has come, without."""
        return len(self.spec.prompt_ids) if self.num_prompt_tokens is None else self.num_prompt_tokens

    def take(self) -> str:
        """The text that has come since the last call."""
        text = self._pending.decode()
        self._pending.clear()
        return text

    def take_ids(self) -> list[int]:
        """The token ids that have come since the last call; always empty unless they were asked for."""
        ids, self._ids = self._ids, []
        return ids


class RequestRegistry:
    """All requests of this gateway generation."""

    def __init__(
        self, generation: int, send: Callable[[ToController], bool], pool: MediaPool, flight: GatewayFlight | None = None
    ) -> None:
        self._flight = flight or GatewayFlight(None)
        self._generation = generation
        self._send = send
        self._pool = pool
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_media_bytes(self) -> int:
        """Bytes of media held here, because the controller may still ask for them."""
        return sum(len(data) for request in self._requests.values() for data in request._media)

    def fail_all(self, error: RequestError, now_s: float) -> None:
        """End every request that is not over with this error: the gateway itself ends."""
        for request in list(self._requests.values()):
            if not request.is_over:
                log.warning("%s is cut off", request.spec.request_id)
            self.cancel(request, now_s, error)

    def submit(self, spec: RequestSpec, media: Sequence[bytes], wake: Callable[[], None], now_s: float) -> Request:
        """A new request. ``media`` are the bytes of ``spec.items``; ``wake`` is called when there is news for the client."""
        key = 0
        while key == 0 or key in self._requests:
            key = secrets.randbits(63)
        request = self._requests[key] = Request(key, spec, media, wake, now_s)
        self._flight.received(key, spec)
        self._command(request, Submit(self._generation, key, spec), now_s)
        return request

    def sent(self, request: Request, num_tokens: int, now_s: float) -> None:
        """The client has been sent the text of so many tokens."""
        if num_tokens and now_s >= request._sent_at_s:
            request._sent_at_s = now_s + SENT_S
            self._flight.sent(request.key, num_tokens)

    def cancel(self, request: Request, now_s: float, error: RequestError | None = None) -> None:
        """The client is gone, or must be told ``error``. Without effect on a request that is over."""
        if request.is_over:
            return
        request.error = error or RequestError("the client is gone", status=CLIENT_GONE)
        self._close(request, Cancel(self._generation, request.key), now_s)

    def tick(self, now_s: float) -> None:
        """Send again what was not answered, ask where requests are, and end those whose deadline has passed."""
        for request in list(self._requests.values()):
            deadline_s = request.spec.deadline_s
            if deadline_s and now_s >= deadline_s and not request.is_over:
                self.cancel(request, now_s, _timed_out(request, now_s))
            if request._unsettled is not None and now_s >= request._settle_at_s:
                self._settle(request, now_s)
            if request._command is not None and now_s >= request._resend_at_s:
                self._resend(request, now_s)
            if now_s >= request._query_at_s and request.stage not in (Stage.SUBMITTED, Stage.DELIVERED):
                self._query(request, now_s)

    # ---------------------------------------------------------------------------------------- from the controller

    def on_message(self, message: ToActor, now_s: float) -> None:
        """Take an answer of the controller. Answers about requests that are forgotten are answered so that it forgets them too."""
        if not isinstance(message, Queued | Granted | Prepared | Failed | Released | Unknown):
            return
        request = self._requests.get(message.key)
        if request is None:
            if isinstance(message, Failed):
                self._send(Delivered(self._generation, message.key))
            elif not isinstance(message, Released | Unknown):
                self._send(Cancel(self._generation, message.key))
            return
        if request.stage is Stage.DELIVERED:
            if isinstance(message, Released | Unknown):
                del self._requests[message.key]
            return
        match message:
            case Queued():
                self._on_queued(request, message.position)
            case Granted():
                self._on_granted(request, message.runs, now_s)
            case Prepared():
                self._on_prepared(request, message.num_prompt_tokens, now_s)
            case Failed():
                self._on_failed(request, message, now_s)
            case Unknown() if request.stage is Stage.SUBMITTED:
                self._resend(request, now_s)
            case Unknown() | Released():
                self._on_lost(request, now_s)
        request.wake()

    def _on_queued(self, request: Request, position: int) -> None:
        request.position = position
        if request.stage is Stage.SUBMITTED:
            request.stage = Stage.QUEUED
            request._command = None

    def _on_granted(self, request: Request, runs: list[PageRun], now_s: float) -> None:
        """Write the media. The same grant again means that Filled was lost; another one, that a new controller placed it anew."""
        if request.first_text_s is not None:
            return
        if request._filled != runs:
            request.stage = Stage.FILLING
            if not self._fill(request, runs, now_s):
                return
            request._filled = runs
        if request.granted_s is None:
            request.granted_s = now_s
        if request.stage is not Stage.STREAMING:
            request.stage = Stage.WAITING
        self._command(request, Filled(self._generation, request.key), now_s)

    def _fill(self, request: Request, runs: list[PageRun], now_s: float) -> bool:
        if len(runs) != len(request._media):
            self._fail_internally(request, f"{len(runs)} page runs were granted for {len(request._media)} media", now_s)
            return False
        began_ns = self._flight.now_ns()
        try:
            for run, data in zip(runs, request._media, strict=True):
                self._pool.check(run.pages, run.generations)
                self._pool.write_bytes(run.pages, data)
            if runs:
                self._flight.written(request.key, began_ns, sum(map(len, request._media)))
        except StalePage as error:
            log.warning("%s: an outdated grant is ignored: %s", request.spec.request_id, error)
            request._command = None
            request._query_at_s = now_s + RESEND_S
            return False
        except ValueError as error:
            self._fail_internally(request, f"the granted pages do not fit: {error}", now_s)
            return False
        return True

    def _on_prepared(self, request: Request, num_prompt_tokens: int, now_s: float) -> None:
        request.num_prompt_tokens = num_prompt_tokens
        if request.granted_s is None:  # without media there is nothing to fill
            request.granted_s = now_s
        request.stage = Stage.STREAMING
        request._command = None
        if request._unsettled is not None:
            self._settle(request, now_s)

    def _on_failed(self, request: Request, failed: Failed, now_s: float) -> None:
        request.error = RequestError(
            failed.message,
            status=failed.status,
            type=failed.error_type,
            param=failed.param,
            retry_after_s=failed.retry_after_s,
        )
        if failed.status == 504:  # the controller does not know since when
            request.error = _timed_out(request, now_s)
        self._close(request, Delivered(self._generation, request.key), now_s)

    def _on_lost(self, request: Request, now_s: float) -> None:
        if request._unsettled is not None:
            self._settle(request, now_s)
            return
        log.error("%s: the controller does not know it any more (stage %s)", request.spec.request_id, request.stage.name)
        request.error = RequestError("the server has lost this request", status=500, type="internal_error", retry_after_s=1)
        self._close(request, Delivered(self._generation, request.key), now_s)

    def _fail_internally(self, request: Request, problem: str, now_s: float) -> None:
        log.error("%s: %s", request.spec.request_id, problem)
        self.cancel(request, now_s, RequestError("internal error", status=500, type="internal_error"))

    # --------------------------------------------------------------------------------------- from the detokenizer

    def on_delta(self, delta: Delta, now_s: float) -> None:
        """Take a piece of text; what was received already is dropped by its byte offset."""
        request = self._requests.get(delta.key)
        if request is None or request.is_over or request._unsettled is not None:
            return
        known = request._received - delta.byte_offset
        if known < 0:
            log.warning("%s: a gap of %d bytes in its text; all of it will come again", request.spec.request_id, -known)
            return
        if request.first_text_s is None:
            request.first_text_s = now_s
            self._flight.first_text(request.key)
            request.stage = Stage.STREAMING
            request._command = None
            request._media.clear()
            request._query_at_s = now_s + STREAMING_QUERY_S
            if request.num_prompt_tokens is None:
                self._query(request, now_s)
        data = delta.data[known:]
        request._pending += data
        request._received += len(data)
        request.num_tokens = max(request.num_tokens, delta.token_index)
        if delta.ids:
            request._ids += delta.ids[request._num_ids - (delta.token_index - len(delta.ids)) :]
            request._num_ids = max(request._num_ids, delta.token_index)
        if delta.finish in ("abort", "error"):
            request.error = RequestError("the model failed on this request", status=500, type="internal_error")
        if delta.finish is not None:
            request._unsettled = delta.finish
            request._settle_at_s = now_s + SETTLE_S
            if request.num_prompt_tokens is not None or not request.spec.items or request.error is not None:
                self._settle(request, now_s)
        elif len(request._pending) > MAX_PENDING_BYTES:
            request.is_too_slow = True
            self.cancel(request, now_s)
        request.wake()

    def _settle(self, request: Request, now_s: float) -> None:
        """The last text is there, and Prepared too, or it is not worth more waiting."""
        request.finish, request._unsettled = request._unsettled, None
        self._close(request, Delivered(self._generation, request.key), now_s)

    # ------------------------------------------------------------------------------------------------- to the controller

    def _close(self, request: Request, command: ToController, now_s: float) -> None:
        request.stage = Stage.DELIVERED
        request._unsettled = None
        self._flight.over(request.key, request.num_tokens, request.error.status if request.error is not None else 0)
        request._media.clear()
        self._command(request, command, now_s)
        request.wake()

    def _command(self, request: Request, command: ToController, now_s: float) -> None:
        """Send a command, and again from ``RESEND_S`` on at growing intervals."""
        request._command = command
        request._resend_s = RESEND_S
        request._resend_at_s = now_s + RESEND_S
        self._send(command)

    def _resend(self, request: Request, now_s: float) -> None:
        assert request._command is not None
        if self._send(request._command):
            request._resend_s = min(2 * request._resend_s, MAX_RESEND_S)
        request._resend_at_s = now_s + request._resend_s

    def _query(self, request: Request, now_s: float) -> None:
        is_running = request.first_text_s is not None and request.num_prompt_tokens is not None
        request._query_at_s = now_s + (STREAMING_QUERY_S if is_running else QUERY_S)
        self._send(Query(self._generation, request.key))


def _timed_out(request: Request, now_s: float) -> RequestError:
    waited_s = now_s - request.submitted_s
    return RequestError(
        f"the request was not finished after {waited_s:.0f} s (server.request_timeout_s)", status=504, type="timeout_error"
    )
