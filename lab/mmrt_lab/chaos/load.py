"""The load of a storm: openai clients that send requests, read byte by byte, sometimes disconnect, and record the answers.

Runs in the storm's event loop. The openai client sends; the events are parsed here, since that client takes a
cut stream for a complete one.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import openai

from mmrt.bench.serve.client import EventParser

from .requests import ChaosRequest
from .verdict import End, Outcome, Reference

_RETRY_S = 0.05
_CACHED_SHARE = 0.3  # of requests, which may find what others of them have left in the caches; the rest computes everything
# The client does not wrap the transport's errors in mid-stream, and its transport depends on its version.
_TransportError: type[Exception] = next(
    vars(sys.modules[base.__module__])["HTTPError"] for base in openai.DefaultAsyncHttpxClient.__mro__ if base.__name__ == "AsyncClient"
)


class Load:
    """``concurrency`` clients in a closed loop; ``pause`` lets running requests end and holds the next ones back."""

    def __init__(
        self,
        catalogue: Sequence[ChaosRequest],
        seed: int,
        concurrency: int,
        cancel_share: float,
        request_timeout_s: float,
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        self._catalogue = catalogue
        self._random = random.Random(f"{seed}:load")
        self._concurrency = concurrency
        self._cancel_share = cancel_share
        self._timeout_s = request_timeout_s
        self._on_outcome = on_outcome
        self._gate = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._order: list[ChaosRequest] = []
        self._client: openai.AsyncOpenAI | None = None
        self._model = ""

    def connect(self, url: str, model: str) -> None:
        """Set the server for all further requests."""
        self._model = model
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=self._timeout_s)

    async def disconnect(self) -> None:
        """Close every connection."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._work()) for _ in range(self._concurrency)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.disconnect()

    def resume(self) -> None:
        """Send again. Raises any exception that ended a client: a bug of the storm itself."""
        for task in self._tasks:
            if task.done():
                task.result()
        self._gate.set()

    def hold(self) -> None:
        """Send nothing new."""
        self._gate.clear()

    async def pause(self) -> None:
        """Send nothing new and wait for every running request to end: each has a time limit."""
        self.hold()
        await self._idle.wait()

    async def references(self) -> dict[str, Reference]:
        """The right answers, asked for one at a time. Raises: ValueError when one fails."""
        found = {}
        for request in self._catalogue:
            outcome = await self._ask(request, None)
            if outcome.end != "complete":
                raise ValueError(f"the undisturbed request {request.name!r} ended {outcome.end}: {outcome.detail}")
            found[request.name] = Reference(outcome.text, outcome.ids, outcome.finish)
        return found

    async def _work(self) -> None:
        while True:
            while not self._gate.is_set():  # it may be closed again before this task runs
                await self._gate.wait()
            if not self._order:
                self._order = list(self._catalogue)
                self._random.shuffle(self._order)
            request = self._order.pop()
            leave_after = self._random.randrange(0, 12) if self._random.random() < self._cancel_share else None
            self._running += 1
            self._idle.clear()
            try:
                outcome = await self._ask(request, leave_after)
            finally:
                self._running -= 1
                if not self._running:
                    self._idle.set()
            self._on_outcome(outcome)
            if outcome.end in ("refused", "broken"):
                await asyncio.sleep(_RETRY_S)

    async def _ask(self, request: ChaosRequest, leave_after: int | None) -> Outcome:
        """Send one request. ``leave_after``: disconnect after this many events; 0 is before the answer has begun."""
        answer = _Answer(request.name)
        try:
            async with asyncio.timeout(self._timeout_s):
                if leave_after == 0:
                    await self._leave_early(request, answer)
                else:
                    await self._exchange(request, answer, leave_after)
        except TimeoutError:
            answer.end = "overdue"
        except openai.APIStatusError as error:
            answer.end, answer.status, answer.detail = "refused", error.status_code, str(error)
        except openai.APIConnectionError as error:
            answer.end, answer.detail = "broken", repr(error.__cause__ or error)
        except (ValueError, KeyError, TypeError) as error:  # no JSON, or not what was to be in it
            answer.end, answer.detail = "garbled", repr(error)
        except _TransportError as error:
            answer.end, answer.detail = "broken", repr(error)
        return answer.outcome()

    async def _leave_early(self, request: ChaosRequest, answer: "_Answer") -> None:
        task = asyncio.create_task(self._exchange(request, answer, None))
        await asyncio.wait({task}, timeout=self._random.uniform(0, 0.3))
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            answer.end = "cancelled"
            return
        task.result()

    async def _exchange(self, request: ChaosRequest, answer: "_Answer", leave_after: int | None) -> None:
        assert self._client is not None
        salt = "storm" if self._random.random() < _CACHED_SHARE else f"{self._random.getrandbits(64):x}"
        body = {"model": self._model, "cache_salt": salt, **request.body}
        if not request.is_whole:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        known = {key: body.pop(key) for key in ("model", "messages", "stream", "stream_options") if key in body}
        create: Any = self._client.chat.completions.with_streaming_response.create
        async with create(**known, extra_body=body) as response:
            if request.is_whole:
                answer.take_whole(await response.read())
                return
            parser = EventParser()
            num_events = 0
            async for data in response.iter_bytes():
                for event in parser.feed(data):
                    answer.take_event(event)
                    num_events += 1
                    if num_events == leave_after and answer.is_open:
                        answer.end = "cancelled"
                        return


class _Answer:
    """The part of an answer received so far."""

    def __init__(self, name: str) -> None:
        self.end: End = "silent"
        self.status = 0
        self.detail = ""
        self._name = name
        self._began_s = time.monotonic()
        self._texts: dict[int, str] = {}  # by choice
        self._ids: dict[int, list[int]] = {}
        self._finish: dict[int, str] = {}
        self._usage: int | None = None
        self._id = ""
        self._failed = False

    @property
    def is_open(self) -> bool:
        """True while more may come: neither an error nor the end has."""
        return self.end == "silent" and not self._failed

    def take_event(self, data: bytes) -> None:
        """Take the data of one event. Raises: ValueError for an invalid event."""
        if self.end != "silent":
            raise ValueError(f"something came after [DONE]: {data[:100]!r}")
        if data == b"[DONE]":
            if not self._finish and not self._failed:
                raise ValueError("[DONE] without a finish reason or an error")
            self.end = "error" if self._failed else "complete"
            return
        event = json.loads(data)
        if "error" in event:
            code = event["error"]["code"]  # the status, unless OpenAI has a word for it
            self._failed, self.status, self.detail = True, code if type(code) is int else 400, str(event["error"]["message"])
            return
        if self._failed:
            raise ValueError("text after an error")
        self._take(event, "delta")

    def take_whole(self, data: bytes) -> None:
        """Take an answer that was not streamed. Raises: ValueError."""
        self._take(json.loads(data), "message")
        self.end = "complete"

    def _take(self, found: Mapping[str, Any], part: str) -> None:
        self._id = str(found.get("id", ""))
        if usage := found.get("usage"):
            self._usage = int(usage["completion_tokens"])
        for choice in found["choices"]:
            content = choice[part].get("content") or ""
            ids = choice.get("token_ids") or []
            index = choice["index"]
            if index in self._finish and (content or ids):
                raise ValueError(f"more came after the finish reason: {content!r} {ids}")
            self._texts[index] = self._texts.get(index, "") + content
            self._ids[index] = [*self._ids.get(index, []), *ids]
            if choice["finish_reason"]:
                self._finish[index] = choice["finish_reason"]

    def outcome(self) -> Outcome:
        """Return what came: of several choices all if they are whole, one after the other, else the first."""
        shown = sorted(self._texts) if self.end == "complete" else [0]
        return Outcome(
            request=self._name,
            end=self.end,
            began_s=self._began_s,
            ended_s=time.monotonic(),
            text="".join(self._texts.get(index, "") for index in shown),
            ids=[one for index in shown for one in self._ids.get(index, [])],
            finish=" ".join(dict.fromkeys(self._finish.get(index, "none") for index in shown)) if self._finish else "",
            status=self.status,
            usage_tokens=self._usage,
            detail=self.detail,
            id=self._id,
        )
