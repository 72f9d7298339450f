"""Links between the devices of a simulated run, and what is chosen for pages on their way (pure; KT1, KT2, KT3).

A device takes in one transfer at a time and gives out one at a time, in the order of ``Ports.send``. KV pages can be packed on their
way (KT2), and a decode's device can compute some of them itself instead of waiting (selective layers). The keys and values of a layer
need the hidden states of the layer below, so only the first layers can be computed anew, and for these the prompt's ids are enough.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from mmrt.models.architecture import TransferDType

from .events import NS, to_ns


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Between any two devices: bytes per second, and seconds before the first byte. ``packing``: of KV pages on their way, where that
    is faster. ``recomputes``: a decode's device computes the first layers of a prompt while the others come, where that is faster."""

    bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    packing: TransferDType = "auto"
    recomputes: bool = False


class Way(NamedTuple):
    """How a page travels: its bytes on the link, and the seconds to pack and to unpack it."""

    page_bytes: int
    packing_s: float = 0.0

    def page_s(self, bytes_per_s: float) -> float:
        """The time of a page."""
        return self.page_bytes / bytes_per_s + self.packing_s


def fastest_way(ways: Sequence[Way], bytes_per_s: float) -> Way:
    """Return the way in which a page takes least time, of equal ones the first."""
    return min(ways, key=lambda way: way.page_s(bytes_per_s))


def num_recomputed(num_layers: int, wait_s: float, copy_s: float, recompute_s: float) -> int:
    """Return how many of the first layers to compute anew, so that they and the rest, which comes meanwhile, are there soonest; of
    equal numbers the least. ``wait_s``: until the first byte. ``copy_s``, ``recompute_s``: of all layers."""
    if recompute_s <= 0.0:
        return 0 if wait_s + copy_s <= 0.0 else num_layers
    even = int(min(num_layers - 1, num_layers * (wait_s + copy_s) / (copy_s + recompute_s)))

    def seconds(count: int) -> float:
        copied_s = wait_s + copy_s * (num_layers - count) / num_layers if count < num_layers else 0.0
        return max(recompute_s * count / num_layers, copied_s)

    return min((0, even, min(num_layers, even + 1), num_layers), key=seconds)


class Ports:
    """The transfers of a run, by what each device takes in and gives out."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free_ns: defaultdict[tuple[str, str], int] = defaultdict(int)  # by direction and device

    def begin_ns(self, source: str, target: str, ready_ns: int) -> int:
        """Return when a transfer would begin that is ready at this time: once those before it are over, also where that is past."""
        return max(ready_ns, self._free_ns["out", source], self._free_ns["in", target])

    def send(self, source: str, target: str, num_bytes: int, ready_ns: int) -> int:
        """Add a transfer. Returns when all of it is there."""
        seconds = self._link.latency_s + num_bytes / self._link.bytes_per_s
        end_ns = self.begin_ns(source, target, ready_ns) + to_ns(seconds)
        self._free_ns["out", source] = self._free_ns["in", target] = end_ns
        return end_ns


def num_begun(num_pages: int, begin_ns: int, now_ns: int, page_s: float) -> int:
    """Return how many pages that are sent one after the other have begun by now."""
    if begin_ns >= now_ns:
        return 0
    return min(num_pages, int((now_ns - begin_ns) / NS / page_s) + 1) if page_s > 0 else num_pages
