"""Generations of the actors from one fault to the next (pure): only those that a fault hits are replaced, and each once. A change of
the layout also replaces the actors that the other layout lacks.

Called by ``storm`` after each fault and at quiet points, so that a death between two faults counts as well.
"""

import math
from collections.abc import Callable, Mapping

from mmrt.runtime.stage_table import actors_of

from .faults import Fault

_SURVIVED = frozenset({"pause", "lost", "late", "scale", "layout"})  # kinds after which the target goes on


class Bystanders:
    """``together``: these actors and those that share processes with them. ``generations``: of the undisturbed run."""

    def __init__(self, together: Callable[[set[str]], set[str]], generations: Mapping[str, int]) -> None:
        self._together = together
        self._last = dict(generations)
        self._spare: dict[str, float] = {}  # replacements that the last fault has allowed and not had: a death may come late

    def check(self, generations: Mapping[str, int], fault: Fault | None = None) -> list[str]:
        """Return the actors that were replaced since the last check although nothing has hit them, or more often than hit.

        A full file system hits everybody. A second fault may hit a successor while it starts: there the number is open.
        """
        allowed = {} if fault is None else self._allowed(fault)
        problems, spare = [], {}
        for name, generation in generations.items():
            times, now, earlier = generation - self._last.get(name, generation), allowed.get(name, 0), self._spare.get(name, 0)
            most = now + earlier
            spare[name] = min(most if fault is None else now, max(0, most - times))
            if times > most:
                why = f"it was hit {_often(most)}" if most else "nothing has hit it"
                problems.append(f"{name} was replaced {_often(times)}, but {why}: its generation is {generation}")
        self._last, self._spare = dict(generations), spare
        return problems

    def _allowed(self, fault: Fault) -> dict[str, float]:
        """Return how often each may be replaced."""
        cell = fault.cell
        if cell.kind == "enospc":
            return dict.fromkeys(self._together({*self._last}), math.inf)
        hit = {fault.second} | ({cell.target} if cell.kind not in _SURVIVED else set())
        if fault.layout:
            hit |= {*self._last} - {*actors_of(fault.layout)}  # they leave, and come again
        return dict.fromkeys(self._together(hit), math.inf if fault.second else 1 + fault.is_at_start)


def _often(times: float) -> str:
    return "once" if times == 1 else f"{times:g} times"
