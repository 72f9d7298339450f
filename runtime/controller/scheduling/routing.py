"""The choice of a place for work (pure): of an actor for a plan, of a node for a request (MS2, TI7). Called by ``plan_dispatch`` and by
``mmrt.cluster``."""

from collections.abc import Mapping
from typing import TypeVar

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
