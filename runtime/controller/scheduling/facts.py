"""Facts for policies: what a request is, what the run promises, what plans cost, how late decode's steps are (pure values)."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from ....schema.media import MediaKind
from ...stage_table import InstanceId

RequestKind = Literal["text", "audio", "image", "video"]
KINDS: tuple[RequestKind, ...] = ("text", "audio", "image", "video")  # the least demanding first, as CW1 weighs media


def kind_of(media: Iterable[MediaKind]) -> RequestKind:
    """Return the kind of a request with these media: the most demanding one."""
    return max(media, key=KINDS.index, default="text")


class Objective(NamedTuple):
    """What a request of some kind is promised, in seconds. ``tbt_s`` 0: as ``Facts.tbt_s``."""

    ttft_s: float = 4.0
    tbt_s: float = 0.0


NO_OBJECTIVES: Mapping[RequestKind, Objective] = dict.fromkeys(KINDS, Objective())


class Cost(NamedTuple):
    """A plan of n units takes ``base_s`` + ``unit_s`` n seconds: patch rows of encoder and video, tokens of prefill. All 0 before the
    first measurement. ``largest``: units of the largest plan that was measured; beyond it the line is a guess."""

    base_s: float = 0.0
    unit_s: float = 0.0
    largest: int = 0

    def seconds(self, units: int) -> float:
        """Return the predicted seconds of a plan; 0 for one of no units."""
        return self.base_s + self.unit_s * units if units else 0.0

    def units(self, seconds: float, low: int, high: int) -> int:
        """Return the most units in [low, high] that take at most ``seconds`` (TI3), ``low`` if there are none; at most twice the units
        of the largest plan that was measured."""
        high = max(low, min(high, 2 * self.largest))
        left_s = seconds - self.base_s
        if low * self.unit_s >= left_s:
            return low
        return high if high * self.unit_s <= left_s else int(left_s / self.unit_s)


UNKNOWN = Cost()


class Facts(msgspec.Struct, frozen=True):
    """What is the same for all requests at one moment. ``costs``: of each actor that has done plans; ``encode`` and ``prefill``: of
    their stages; ``video``: of the decoding of segments of videos. ``step_s``: the time between tokens while nothing else ran, once
    measured. ``tbt_s``: its objective, the tightest of the rows that decode. Of the times between tokens of the last ``tbt_window_s``
    the ``late_share`` was longer than that, and 99 % were at most ``tbt_p99_s``; None if there were none."""

    now: float = 0.0
    encode: Cost = UNKNOWN
    prefill: Cost = UNKNOWN
    costs: Mapping[InstanceId, Cost] = msgspec.field(default_factory=dict)
    tbt_s: float = 0.05
    late_share: float | None = None
    tbt_p99_s: float | None = None
    tbt_window_s: float = 0.0
    step_s: float | None = None
    video: Cost = UNKNOWN
