"""A quantum: how many layers of a plan are computed before one looks whether decode waits (pure).

Layers cannot be interrupted, and on a GPU their time is known only after waiting for them. So the layers until the next look are
counted ahead, by the longest layer of the plan so far; the first one is looked at alone.
"""

SHARE = 0.8  # of the time that the TBT objective leaves beside a step: the rest is for jitter


def quantum_s(objective_s: float, step_s: float) -> float:
    """Return the length of a quantum where tokens are to come every ``objective_s`` and a step takes ``step_s``."""
    return SHARE * max(0.0, objective_s - step_s)


class Quantum:
    """One after the other, of one plan. Times are in seconds, from any origin."""

    def __init__(self, now_s: float, length_s: float) -> None:
        """A plan begins, and with it its first quantum."""
        self._layer_s = 0.0
        self.begin(now_s, length_s)

    def begin(self, now_s: float, length_s: float) -> None:
        """Begin the next one."""
        self._until_s = now_s + length_s
        self._count(now_s)

    def has_layers(self) -> bool:
        """Note that a layer has been launched. False if it is the last one before the next look."""
        self._num_launched += 1
        return self._num_launched < self._num_layers

    def is_over(self, now_s: float) -> bool:
        """Look, once all launched layers are computed. False if another one fits into the quantum."""
        self._layer_s = max(self._layer_s, (now_s - self._looked_s) / self._num_launched)
        self._count(now_s)
        return self._until_s - now_s < self._layer_s

    def _count(self, now_s: float) -> None:
        """Decide on the layers until the next look."""
        self._looked_s, self._num_launched = now_s, 0
        self._num_layers = max(1, int((self._until_s - now_s) / self._layer_s)) if self._layer_s else 1
