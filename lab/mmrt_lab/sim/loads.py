"""Load shapes of a simulation, as ``serve.drivers``, ``serve.chat`` and ``serve.stall`` make them: who sends what, and when."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from mmrt.bench.serve.stall import StallPlan
from mmrt.bench.serve.workload import RequestPlan

from .events import EventQueue, to_ns
from .gateway import Client, Gateway
from .requests import NOTHING_SAID, Requests, Turn

START_S = 0.05
_LOOK_S = 0.01  # stall: between looks for a stream's first token
_TAIL_S = 0.5


class Load(Protocol):
    """``begin`` adds the first events. It is over when it will send nothing more and its last request has ended."""

    @property
    def is_over(self) -> bool: ...

    def begin(self, senders: "Senders") -> None: ...


class Senders(msgspec.Struct, frozen=True):
    """What a load sends by."""

    queue: EventQueue
    gateway: Gateway
    requests: Requests
    has_token: Callable[[Client], bool]

    def send(self, plan: RequestPlan, on_end: Callable[[Client], None], before: Turn = NOTHING_SAID) -> Client:
        """A client sends this request now."""
        return self.gateway.send(plan, self.requests.ask(plan, plan.seed, before), on_end)


class OpenLoop:
    """Every request at its time of arrival, independent of the others."""

    def __init__(self, plans: Sequence[RequestPlan]) -> None:
        self._plans = sorted(plans, key=lambda plan: plan.arrival_s)
        self._num_sent = self._num_ended = 0

    @property
    def is_over(self) -> bool:
        return self._num_ended == len(self._plans)

    def begin(self, senders: Senders) -> None:
        self._senders, self._start_ns = senders, senders.queue.now_ns + to_ns(START_S)
        self._next()

    def _next(self) -> None:
        if self._num_sent < len(self._plans):
            self._senders.queue.at(self._start_ns + to_ns(self._plans[self._num_sent].arrival_s), self._send)

    def _send(self) -> None:
        plan = self._plans[self._num_sent]
        self._num_sent += 1
        self._senders.send(plan, self._ended)
        self._next()

    def _ended(self, client: Client) -> None:
        self._num_ended += 1


class ClosedLoop:
    """So many requests at a time until all have been sent; or so many conversations, each a list of turns, one after the other."""

    def __init__(self, conversations: Sequence[Sequence[RequestPlan]], concurrency: int) -> None:
        self._waiting: Iterator[Sequence[RequestPlan]] = iter(conversations)
        self._num_open = 0
        self._concurrency = concurrency

    @property
    def is_over(self) -> bool:
        return not self._num_open

    def begin(self, senders: Senders) -> None:
        self._senders = senders
        for _ in range(self._concurrency):
            self._converse()

    def _converse(self) -> None:
        """Begin the next conversation."""
        turns = next(self._waiting, None)
        if turns is not None:
            self._num_open += 1
            self._turn(turns, 0, NOTHING_SAID)

    def _turn(self, turns: Sequence[RequestPlan], number: int, before: Turn) -> None:
        def ended(client: Client) -> None:
            if number + 1 < len(turns) and client.record.is_success:
                said = self._senders.requests.after(client.plan, client.asked, client.key, client.record.num_tokens)
                self._turn(turns, number + 1, said)
                return
            self._num_open -= 1
            self._converse()

        self._senders.send(turns[number], ended, before)


class Stall:
    """Text streams alone, then with fresh media at every interval. Streams that end are started again; the last are cut."""

    def __init__(self, plan: StallPlan, texts: Sequence[RequestPlan]) -> None:
        self.is_over = False
        self.alone_ns = self.fresh_ns = self.end_ns = 0
        self._plan, self._texts = plan, texts
        self._streams: list[Client] = []  # a slot each
        self._flows = [False] * plan.num_streams  # slots that have had a token
        self._num_started = self._num_fresh_ended = 0

    def begin(self, senders: Senders) -> None:
        self._senders = senders
        for slot in range(self._plan.num_streams):
            self._streams.append(self._stream(slot))
        self._await_flow()

    def _stream(self, slot: int) -> Client:
        def ended(client: Client) -> None:
            self._flows[slot] = True
            if not self.is_over:
                self._streams[slot] = self._stream(slot)

        number, self._num_started = self._num_started, self._num_started + 1
        return self._senders.send(self._texts[number % len(self._texts)], ended)

    def _await_flow(self) -> None:
        """The first phase begins once every slot has had a token."""
        queue = self._senders.queue
        self._flows = [flows or self._senders.has_token(client) for flows, client in zip(self._flows, self._streams, strict=True)]
        if not all(self._flows):
            queue.after(to_ns(_LOOK_S), self._await_flow)
            return
        self.alone_ns = queue.now_ns
        self.fresh_ns = self.alone_ns + to_ns(self._plan.phase_s)
        for number, fresh in enumerate(self._plan.fresh):
            queue.at(self.fresh_ns + to_ns(number * self._plan.interval_s), self._senders.send, fresh, self._fresh_ended)

    def _fresh_ended(self, client: Client) -> None:
        self._num_fresh_ended += 1
        if self._num_fresh_ended == len(self._plan.fresh):
            self._senders.queue.after(to_ns(_TAIL_S), self._end)

    def _end(self) -> None:
        self.is_over, self.end_ns = True, self._senders.queue.now_ns
        for client in self._streams:
            self._senders.gateway.cancel(client)
