"""The choice of a place for work (pure): of an actor for a plan, of a decode and a pool for a row, of a node for a request (MS2, TI7).
Called by ``plan_dispatch``, ``ownership``, ``placement`` and by ``mmrt.cluster``."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Routing = Literal["least_load", "round_robin", "random"]
Place = TypeVar("Place", bound=str)


def choose(pending: Mapping[Place, tuple[float, ...]], known: Mapping[Place, float] | None = None, slack: float = 0.0) -> Place:
    """Return the place for new work.

    ``pending``: what each place has to do, in the units of the work that is placed; further numbers decide between equal ones.
    ``known``: units of the new work that a place need not do, because its caches have them. The place that knows most gets the work
    unless it has more than ``slack`` more to do than the least busy one; of equal ones the least busy, then the first by name.
    Raises: ValueError without places.
    """
    least = min(units[0] for units in pending.values())
    near = [place for place, units in pending.items() if units[0] <= least + slack]
    return min(near, key=lambda place: (-known.get(place, 0.0) if known else 0.0, pending[place], place))


@dataclass(slots=True)
class Routes:
    """The choices of a controller generation by ``scheduling.routing`` (TI7). ``latest``: of each place the number of the last choice
    that fell on it."""

    way: Routing
    latest: dict[str, int] = field(default_factory=dict)
    num_choices: int = 0

    def choose(self, pending: Mapping[Place, tuple[float, ...]]) -> Place:
        """Return the place for new work. ``pending`` as of the function ``choose``, which ``least_load`` calls. ``round_robin``: the
        place that got none for longest. ``random``: any, by a hash of the choice's number, so that equal runs choose alike.
        Raises: ValueError without places."""
        if self.way == "least_load":
            return choose(pending)
        self.num_choices += 1
        places = sorted(pending)
        if self.way == "round_robin":
            place = min(places, key=lambda one: self.latest.get(one, 0))
        else:
            digest = hashlib.blake2b(self.num_choices.to_bytes(8, "little"), digest_size=8).digest()
            place = places[int.from_bytes(digest, "little") % len(places)]
        self.latest[place] = self.num_choices
        return place
