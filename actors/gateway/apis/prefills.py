"""Requests about prompts that are prefilled and not answered, for embeddings and decisions. Runs in the gateway's event loop.

Each prompt is a request of its own to the controller. Those with an equal beginning share its KV pages by the prefix cache.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from ....runtime.bus.messages import Generation, Pooling, RequestSpec
from ....runtime.bus.sampling import Sampling
from ....runtime.config.sections import ServerSection
from ..answers.choices import Usage
from ..answers.client_request import ClientRequest
from ..answers.logprobs import LEAST
from ..answers.requests import RequestRegistry
from ..keys.api_keys import salt_of, spend_tokens
from ..reading.fields import refuse
from ..reading.media import Medium
from ..watching.metrics import Metrics
from ..watching.request_log import REQUEST_ID

if TYPE_CHECKING:
    from ..watching.tracing import Tracing

AT_ONCE = 16  # prompts of a request that the controller has
WITH_MEDIA_AT_ONCE = 4  # each holds media pages of its own
MAX_PROMPT_TOKENS = 1 << 20  # of all prompts of a request, unless one that fills the context has more


class PromptRow(NamedTuple):
    """A prompt: ``ids`` with one placeholder per medium, and behind them ``scored``, whose log-probability is asked for, or ``pooling``
    of all. ``is_counted``: ``ids`` count in the usage; not where they are those of the row before."""

    ids: list[int]
    scored: Sequence[int] = ()
    pooling: Pooling | None = None
    is_counted: bool = True

    @property
    def sampling(self) -> Sampling:
        return Sampling(prompt_logprobs=0, prompt_logprobs_last=len(self.scored)) if self.scored else Sampling()


class PrefillRequest(NamedTuple):
    """A valid request. Its ``media`` belong to each of its rows. ``messages_field``: the name of the field that has the prompts."""

    rows: Sequence[PromptRow]
    media: tuple[Medium, ...] = ()
    priority: int = 0
    cache_salt: str | None = None
    messages_field: str = "messages"

    @property
    def field_names(self) -> dict[str, str]:
        """Fields whose names in the request differ from those in the controller's errors."""
        return {"messages": self.messages_field}


class Found(NamedTuple):
    """About one row. ``logprob``: the sum over its scored tokens."""

    logprob: float
    vector: NDArray[np.float64] | None
    num_prompt_tokens: int
    num_cached_tokens: int
    media_share: float


def check_num_tokens(num_tokens: int, max_context: int, field: str) -> None:
    """Check that the prompts of a request have no more tokens together than the gateway's memory is for. Raises: RequestError."""
    if num_tokens > (limit := max(MAX_PROMPT_TOKENS, max_context)):
        raise refuse(field, f"makes prompts of more than {limit} tokens together, which is the limit")


class Prefills:
    """Runs them, and counts them as other requests for work are."""

    def __init__(self, registry: RequestRegistry, metrics: Metrics, server: ServerSection, tracing: "Tracing | None") -> None:
        self._registry = registry
        self._metrics = metrics
        self._server = server
        self._tracing = tracing

    async def run(self, http: web.Request, asked: PrefillRequest, id: str) -> tuple[list[Found], Usage]:
        """Return what is found about each row, and the usage of all. Raises: RequestError, that of the first row that fails."""
        http[REQUEST_ID] = id
        began_s = time.monotonic()
        items = [medium.item for medium in asked.media]
        self._metrics.on_media(items)
        spec = RequestSpec(
            generation=Generation(id, deadline_s=began_s + self._server.request_timeout_s),
            prompt_ids=[],
            items=items,
            max_new_tokens=0,
            priority=asked.priority,
            salt=salt_of(http, asked.cache_salt),
        )
        event, data = asyncio.Event(), [medium.data for medium in asked.media]
        left, at_once = iter(enumerate(asked.rows)), WITH_MEDIA_AT_ONCE if asked.media else AT_ONCE
        first: ClientRequest | None = None
        running, found = dict[int, ClientRequest](), dict[int, Found]()
        try:
            while True:
                event.clear()
                for row, request in list(running.items()):
                    if request.error is not None:
                        raise request.error
                    if request.is_over:
                        found[row] = _found(request)
                        del running[row]
                for row, prompt in islice(left, at_once - len(running)):
                    request = running[row] = self._registry.submit(_spec_of(spec, row, prompt), data, event.set, time.monotonic())
                    if first is None:
                        first = request
                        self._trace(http, first)
                if not running:
                    return [found[row] for row in range(len(asked.rows))], _usage(asked.rows, found)
                await event.wait()
        finally:
            now_s, usage = time.monotonic(), _usage(asked.rows, found)
            for request in running.values():
                request.cancel(now_s)
            if first is not None:
                self._metrics.on_over(list(running.values()) or [first], usage.prompt_tokens, now_s)
            if found:
                spend_tokens(http, usage)

    def _trace(self, http: web.Request, first: ClientRequest) -> None:
        if self._tracing is not None:
            self._tracing.begin(first.key, http[REQUEST_ID], http.path, http.headers)


def _spec_of(spec: RequestSpec, row: int, prompt: PromptRow) -> RequestSpec:
    """Return the request to the controller for a row."""
    id = spec.generation.request_id
    spec = spec.asking(request_id=f"{id}.{row}" if row else id, sampling=prompt.sampling, pooling=prompt.pooling)
    return msgspec.structs.replace(spec, prompt_ids=[*prompt.ids, *prompt.scored], borders=(0, len(prompt.ids), 0))


def _found(request: ClientRequest) -> Found:
    prompt = request.findings.prompt
    logprob = 0.0 if prompt is None else float(prompt.logprobs.own.clip(LEAST).sum(dtype=np.float64))
    return Found(logprob, request.findings.vector, request.prompt_tokens(), max(0, request.num_cached_tokens), request.media_share)


def _usage(rows: Sequence[PromptRow], found: Mapping[int, Found]) -> Usage:
    counted = [at for at in found if rows[at].is_counted]
    num_scored = sum(len(rows[at].scored) for at in found if not rows[at].is_counted)
    num_prompt_tokens = num_scored + sum(found[at].num_prompt_tokens for at in counted)
    share = min([found[at].media_share for at in found], default=1.0)
    return Usage(num_prompt_tokens, 0, sum(found[at].num_cached_tokens for at in counted), media_share=share)
