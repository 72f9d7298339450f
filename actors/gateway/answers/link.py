"""The records that a client's request gets from the gateway: its way out, and what another gateway would go on with."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ....runtime.bus.messages import ToController
from ....shm.spool import Pages
from ..keeping.state import Place
from .findings import TokenReader
from .flight import GatewayFlight


class MediaPool(Pages, Protocol):
    """The part of a page pool that requests need."""

    def check(self, pages: Sequence[int], generations: Sequence[int]) -> None: ...


class Link(NamedTuple):
    """Shared by the requests of one gateway generation: the way to the controller, media pages, flight recorder, the table's tokens."""

    generation: int
    send: Callable[[ToController], bool]
    pool: MediaPool
    flight: GatewayFlight
    tokens: TokenReader


class Keeping(NamedTuple):
    """Of a request that another gateway could go on with: the controller is told of its end only by ``release``. ``on_known``: is
    called once the controller has answered, or the request is over. ``place``: how far a gateway before has shown it. ``on_prepared``:
    is called when the controller needs nothing more of its media."""

    on_known: Callable[[], None]
    place: Place = Place()
    on_prepared: Callable[[], None] = lambda: None
