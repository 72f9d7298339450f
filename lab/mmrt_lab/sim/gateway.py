"""The clients and the gateway, simulated: a request's way to the controller, its media, its tokens' way back, its end."""

from collections.abc import Callable, Iterator
from itertools import takewhile

import msgspec

from mmrt.bench.serve.workload import RequestPlan
from mmrt.runtime.bus.messages import Cancel, Delivered, Failed, Filled, Granted, Prepared, Submit, ToActor, ToController

from .costs import Overheads
from .delays import DrawnDelays
from .events import NS, EventQueue, to_ns
from .requests import Asked

DRAWN = -1  # in place of a decode's number: of tokens that prefill draws


class SimRecord(msgspec.Struct, kw_only=True):
    """One request. Times are ns of the simulation. ``stretches``: the steps that committed its tokens (``step_log``), each with the
    number of the decode before them, or ``DRAWN``."""

    key: int
    index: int
    group: str
    scheduled_ns: int
    sent_ns: int
    end_ns: int = 0
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    stretches: list[tuple[int, int, int]] = []
    num_tokens: int = 0
    error: str | None = None
    cut: bool = False

    @property
    def is_success(self) -> bool:
        return self.error is None and not self.cut


class Client(msgspec.Struct, kw_only=True):
    """A request under way."""

    key: int
    plan: RequestPlan
    asked: Asked
    record: SimRecord
    on_end: Callable[["Client"], None]
    is_filled: bool = False
    is_over: bool = False


class Gateway:
    """``post``: sends to the controller. ``timeout_s``: of a request (``server.request_timeout_s``)."""

    def __init__(
        self, overheads: Overheads, delays: DrawnDelays, queue: EventQueue, post: Callable[[str, ToController], None], timeout_s: float
    ) -> None:
        self.records: list[SimRecord] = []
        self.num_open = 0
        self.changed_ns = queue.now_ns  # when a request was last sent or ended
        self._overheads, self._delays, self._queue, self._post, self._timeout_s = overheads, delays, queue, post, timeout_s
        self._clients: dict[int, Client] = {}
        self._cut: dict[int, SimRecord] = {}  # whose tokens decode has yet to report; those after the cut are left out by ``report``
        self._num_requests = 0

    def send(self, plan: RequestPlan, asked: Asked, on_end: Callable[[Client], None]) -> Client:
        """A client sends a request now. ``on_end``: called when it is over for the client."""
        now_ns = self._queue.now_ns
        self._num_requests += 1
        record = SimRecord(key=self._num_requests, index=plan.index, group=plan.group, scheduled_ns=now_ns, sent_ns=now_ns)
        client = Client(key=record.key, plan=plan, asked=asked, record=record, on_end=on_end)
        self.records.append(record)
        self._clients[client.key] = client
        self.num_open += 1
        self.changed_ns = now_ns
        self._queue.at(self._delays.in_ns(len(asked.spec.prompt_ids), asked.num_bytes), self._submit, client)
        return client

    def client(self, key: int) -> Client | None:
        """A request under way."""
        return self._clients.get(key)

    def sent_before(self, time_ns: int) -> Iterator[Client]:
        """Requests under way that were sent before this time."""
        return takewhile(lambda client: client.record.sent_ns < time_ns, self._clients.values())

    def cancel(self, client: Client) -> None:
        """The client goes away."""
        if not client.is_over:
            client.record.cut = True
            self._cut[client.key] = client.record
            self._post("gateway", Cancel(1, client.key))
            self._finish(client)

    def take(self, message: ToActor) -> None:
        """Take a message of the controller's."""
        client = self._clients.get(getattr(message, "key", 0))
        if client is None:
            return
        if isinstance(message, Granted):
            if not client.is_filled:
                client.is_filled = True
                fill_ns = to_ns(self._overheads.fill_byte_s * client.asked.num_bytes)
                self._queue.after(fill_ns, self._post, "gateway", Filled(1, client.key))
        elif isinstance(message, Prepared):
            client.record.num_prompt_tokens = message.num_prompt_tokens
            client.record.num_cached_tokens = message.num_cached_tokens if message.num_cached_tokens >= 0 else None
        elif isinstance(message, Failed) and not client.is_over:
            client.record.error = f"HTTP {message.status}: {message.message}"
            self._post("gateway", Delivered(1, client.key))
            self._finish(client)

    def take_stretch(self, decode: int, key: int, first: int, last: int) -> None:
        """A decode has committed consecutive tokens of a request."""
        client = self._clients.get(key)
        record = client.record if client is not None else self._cut.pop(key, None)
        if record is not None:
            record.stretches = [*record.stretches, (decode, first, last)]
            record.num_tokens += last + 1 - first

    def take_end(self, key: int) -> None:
        """decode has committed the last token of a request."""
        if (client := self._clients.get(key)) is not None:
            self._queue.after(to_ns(self._overheads.egress_s), self._delivered, client)

    def _submit(self, client: Client) -> None:
        deadline_s = self._queue.now_ns / NS + self._timeout_s
        self._post("gateway", Submit(1, client.key, client.asked.spec.asking(deadline_s=deadline_s)))

    def _delivered(self, client: Client) -> None:
        if not client.is_over:
            self._post("gateway", Delivered(1, client.key))
            self._finish(client)

    def _finish(self, client: Client) -> None:
        client.is_over = True
        client.record.end_ns = self.changed_ns = self._queue.now_ns
        del self._clients[client.key]
        self.num_open -= 1
        client.on_end(client)
