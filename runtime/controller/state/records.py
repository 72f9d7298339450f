"""The records of the controller's journal, and the state that they add up to (pure). ``journal`` keeps them in a file."""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from ...bus.messages import Failed, RequestSpec
from ...stage_table import InstanceId

KEPT_ENDS = 4096
_ERA_BYTES = 32
_MAX_CODES = 256


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request was accepted. ``arrival`` orders requests permanently. ``arrived_s``: when, by the clock of deadlines; 0: not known."""

    key: int
    gateway_generation: int
    arrival: int
    spec: RequestSpec
    arrived_s: float = 0.0


class Rehomed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Another gateway has taken the request over."""

    key: int
    gateway_generation: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An accepted request has failed; it ends when the gateway knows."""

    key: int
    failure: Failed


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The gateway is done with the request."""

    key: int


class CacheEra(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An era of the caches begins; older pages are outdated (``cache_eras``). ``codes``: of the actors that fill pages. ``kept``: the
    era that later runs begin in."""

    era: Annotated[bytes, Meta(max_length=_ERA_BYTES)]
    codes: Annotated[dict[InstanceId, int], Meta(max_length=_MAX_CODES)]
    kept: Annotated[bytes, Meta(max_length=_ERA_BYTES)] = b""


NO_ERA = CacheEra(b"", {})

JournalRecord = Submitted | Rehomed | Refused | Ended | CacheEra


@dataclass(slots=True)
class JournalState:
    """The state of the journal: live requests in order of arrival, their failures, recently ended keys, and the era of the caches."""

    live: dict[int, Submitted] = field(default_factory=dict)
    failures: dict[int, Failed] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    next_arrival: int = 0
    era: CacheEra = NO_ERA

    def apply(self, record: JournalRecord) -> None:
        if isinstance(record, Submitted):
            self.live[record.key] = record
            self.next_arrival = max(self.next_arrival, record.arrival + 1)
        elif isinstance(record, Rehomed):
            if (live := self.live.get(record.key)) is not None:
                self.live[record.key] = msgspec.structs.replace(live, gateway_generation=record.gateway_generation)
        elif isinstance(record, Refused):
            self.failures[record.key] = record.failure
        elif isinstance(record, CacheEra):
            self.era = record
        else:
            self.live.pop(record.key, None)
            self.failures.pop(record.key, None)
