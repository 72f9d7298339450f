"""All requests of one gateway generation, by their keys on the bus.

Runs in the gateway's event loop. A message about a forgotten request is answered so that the controller forgets it too.
"""

import logging
from collections.abc import Callable, Sequence

from ....runtime.bus.messages import Cancel, Delivered, Delta, Failed, Released, RequestSpec, ToActor, Unknown
from ....runtime.bus.request_keys import random_key
from ....runtime.errors import RequestError
from ....shm.spool import AnyBytes
from .client_request import ClientRequest, ControllerAnswer, RequestStage
from .link import Keeping, Link

log = logging.getLogger(__name__)

MAX_EARLY_BYTES = 64 << 20


class RequestRegistry:
    """Finds the request that a message or a delta is about, and drives all of them."""

    _link: Link

    def __init__(self, link: Link | None = None, gateway: str = "gateway") -> None:
        """Without a ``link`` it is to be opened. ``gateway``: its name."""
        self._gateway = gateway
        self._requests: dict[int, ClientRequest] = {}
        self._early: dict[int, list[Delta]] | None = None  # of requests that are not submitted again yet
        self._num_early_bytes = 0
        self._left = set[int]()  # keys of requests that are another gateway's from now on
        self._with_media: dict[int, ClientRequest] = {}  # a few more than have any
        if link is not None:
            self.open(link)

    def open(self, link: Link, *, adopts: bool = False) -> None:
        """Take requests from now on. ``adopts``: those of a gateway before will be submitted again, until ``adopted``."""
        self._link = link
        self._early = {} if adopts else None

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_media_bytes(self) -> int:
        """Bytes of media held because the controller may still ask for them."""
        held = {key: num_bytes for key, request in self._with_media.items() if (num_bytes := request.num_media_bytes)}
        self._with_media = {key: self._with_media[key] for key in held}
        return sum(held.values())

    def new_key(self) -> int:
        """Return a key that no request has."""
        key = random_key(self._gateway)
        while key in self._requests:
            key = random_key(self._gateway)
        return key

    def submit(
        self,
        spec: RequestSpec,
        media: Sequence[AnyBytes],
        wake: Callable[[], None],
        now_s: float,
        key: int | None = None,
        keeping: Keeping | None = None,
    ) -> ClientRequest:
        """Submit a request: a new one, or again that of a gateway before, by its ``key``. ``media`` are the bytes of ``spec.items``;
        ``wake`` is called when there is news for the client."""
        key = self.new_key() if key is None else key
        request = self._requests[key] = ClientRequest(key, spec, media, wake, self._link, now_s, keeping)
        if media:
            self._with_media[key] = request
        request.submit(now_s)
        for delta in self._take_early(key):
            request.on_delta(delta, now_s)
        return request

    @property
    def is_full(self) -> bool:
        """Return whether so much text has come early that more has to wait."""
        return self._num_early_bytes > MAX_EARLY_BYTES

    def adopted(self) -> None:
        """No request of a gateway before will be submitted again any more."""
        self._early, self._num_early_bytes = None, 0

    def _take_early(self, key: int) -> list[Delta]:
        early = self._early.pop(key, []) if self._early is not None else []
        self._num_early_bytes -= sum([len(delta.data) for delta in early])
        return early

    def on_welcome(self, now_s: float) -> None:
        """Submit again what the controller may not have taken: it had not heard of this gateway."""
        for request in self._requests.values():
            if not request.is_taken:
                request.resend(now_s)

    def get(self, key: int) -> ClientRequest | None:
        """Return the request of a key, None if there is none."""
        return self._requests.get(key)

    def forget(self, key: int) -> None:
        """Leave a request as it is, to another gateway."""
        self._requests.pop(key, None)
        self._left.add(key)

    def fail_all(self, error: RequestError, now_s: float) -> None:
        """End every request that is not over with this error: the gateway itself ends."""
        for request in list(self._requests.values()):
            if not request.is_over:
                log.warning("%s is cut off", request.spec.generation.request_id)
            request.cancel(now_s, error)

    def tick(self, now_s: float) -> None:
        """Let every request do its due work."""
        for request in list(self._requests.values()):
            request.tick(now_s)

    def on_message(self, message: ToActor, now_s: float) -> None:
        """Take an answer of the controller; reply to one about a forgotten request so that it forgets the request too."""
        if not isinstance(message, ControllerAnswer) or message.key in self._left:
            return
        request = self._requests.get(message.key)
        if request is None:
            if isinstance(message, Failed):
                self._link.send(Delivered(self._link.generation, message.key))
            elif not isinstance(message, Released | Unknown):
                self._link.send(Cancel(self._link.generation, message.key))
        elif request.stage is not RequestStage.DELIVERED:
            request.on_message(message, now_s)
        elif isinstance(message, Released | Unknown):
            del self._requests[message.key]

    def on_delta(self, delta: Delta, now_s: float) -> None:
        """Take a piece of text. Of a request that is not submitted again yet it waits."""
        if (request := self._requests.get(delta.key)) is not None:
            request.on_delta(delta, now_s)
        elif self._early is not None:
            self._early.setdefault(delta.key, []).append(delta)
            self._num_early_bytes += len(delta.data)
