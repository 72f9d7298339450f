"""The longest time a step may take before its watchdog calls it a hang, from the measured cost of such steps (pure).

A long step is no hang: the limit is many times the worst of recent steps of its size, never below ``floor_s`` (the patience with
silence, supervisor.watchdog_s), and ``ceiling_s`` while nothing is known. A step of more than ``ceiling_units`` has a ceiling that is
as many times higher: a page of print is one picture, and takes minutes of two cores. The worst is kept in the status words, so that
a new generation knows it too. One per actor process.
"""

import math

FACTOR = 20.0
FORGET = 0.99  # per step: a worst that does not come again counts less and less


class StepLimit:
    """``worst_s``: seconds per unit of work, 0 while unknown. Units are the caller's; a step costs about in proportion to them.

    Below ``least_units`` it does not: the cost of a small step is mostly not its work, and must not be multiplied by the size
    of a large one. Such a step counts as one of ``least_units``.
    """

    def __init__(
        self, floor_s: float, ceiling_s: float, worst_s: float = 0.0, least_units: float = 0.0, ceiling_units: float = math.inf
    ) -> None:
        self.floor_s = floor_s
        self.ceiling_s = ceiling_s
        self.worst_s = worst_s
        self.least_units = least_units
        self.ceiling_units = ceiling_units

    def limit_s(self, units: float) -> float:
        """The limit for a step of ``units`` > 0."""
        ceiling_s = self.ceiling_s * max(1.0, units / self.ceiling_units)
        if not self.worst_s:
            return max(self.floor_s, ceiling_s)
        return max(self.floor_s, min(ceiling_s, FACTOR * self.worst_s * max(units, self.least_units)))

    def took(self, units: float, seconds: float) -> None:
        """Record that a step of ``units`` > 0 is done."""
        self.worst_s = max(seconds / max(units, self.least_units), FORGET * self.worst_s)
