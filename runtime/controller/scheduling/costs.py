"""What plans and steps of decode cost (pure). Lines are fitted to the plans of each actor that reports (units, elapsed), and to those
of its stage."""

from collections.abc import Callable, Mapping

import msgspec

from ...stage_table import InstanceId, stage_of
from .facts import UNKNOWN, Cost

_DECAY = 0.9
_LONG_DECAY = 0.98  # of the lines that policies see: some 50 plans


class CostModel(msgspec.Struct, frozen=True):
    """elapsed = base_s + per_unit_s * units, by least squares with exponential forgetting."""

    weight: float = 0.0
    sum_x: float = 0.0
    sum_y: float = 0.0
    sum_xx: float = 0.0
    sum_xy: float = 0.0

    @classmethod
    def of(cls, known: Cost) -> "CostModel":
        """Begin with a line that is known, at the weight of two plans on it."""
        if not known.largest:
            return cls()
        small = max(1, known.largest // 8)
        return cls().observe(small, known.seconds(small)).observe(known.largest, known.seconds(known.largest))

    def observe(self, units: int, elapsed_s: float, decay: float = _DECAY) -> "CostModel":
        """Update the model with a finished plan of ``units`` (tokens or rows)."""
        return CostModel(
            self.weight * decay + 1.0,
            self.sum_x * decay + units,
            self.sum_y * decay + elapsed_s,
            self.sum_xx * decay + units * units,
            self.sum_xy * decay + units * elapsed_s,
        )

    def __add__(self, other: "CostModel") -> "CostModel":
        """Return the model of both's plans."""
        return CostModel(
            self.weight + other.weight,
            self.sum_x + other.sum_x,
            self.sum_y + other.sum_y,
            self.sum_xx + other.sum_xx,
            self.sum_xy + other.sum_xy,
        )

    def predict(self, units: int) -> float:
        """Predict the seconds of a plan of ``units``; never negative. 0 before any measurement."""
        return self.predictor()(units)

    def predictor(self) -> Callable[[int], float]:
        """Return ``predict``, for many plans."""
        if not self.weight:
            return lambda units: 0.0
        mean_x, mean_y, slope = self._fit()
        return lambda units: mean_y + slope * (units - mean_x)

    @property
    def line(self) -> tuple[float, float]:
        """Return the seconds of a plan of no units, and per unit; neither is negative."""
        if not self.weight:
            return 0.0, 0.0
        mean_x, mean_y, slope = self._fit()
        return max(0.0, mean_y - slope * mean_x), slope

    def _fit(self) -> tuple[float, float, float]:
        """Return mean units, mean seconds, and seconds per unit: between 0 and what makes a plan of no units take no time."""
        mean_x, mean_y = self.sum_x / self.weight, self.sum_y / self.weight
        variance = self.sum_xx / self.weight - mean_x * mean_x
        if variance > 1e-6 * mean_x * mean_x:
            slope = (self.sum_xy / self.weight - mean_x * mean_y) / variance
            slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
        else:
            slope = mean_y / mean_x if mean_x else 0.0
        return mean_x, mean_y, slope


class Costs:
    """``by_actor`` and ``by_stage`` are replaced, never changed: ``Facts`` keep those of their moment."""

    def __init__(self, known: Mapping[str, Cost]) -> None:
        """``known``: of stages, from earlier runs of the same model on the same device."""
        self.by_actor: Mapping[InstanceId, Cost] = {}
        self.by_stage: Mapping[str, Cost] = dict(known)
        self._known = known
        self._models: dict[InstanceId, CostModel] = {}

    def observe(self, actor: InstanceId, units: int, elapsed_s: float) -> None:
        """Learn from a finished plan. One without work teaches nothing."""
        if units <= 0 or elapsed_s < 0:
            return
        stage, known = stage_of(actor), self.by_actor.get(actor, UNKNOWN)
        model = self._models.get(actor) or CostModel.of(self._known.get(stage, UNKNOWN))
        self._models[actor] = model = model.observe(units, elapsed_s, _LONG_DECAY)
        line = model.line
        self.by_actor = {**self.by_actor, actor: Cost(*line, max(known.largest, units))}
        models = [model for other, model in self._models.items() if stage_of(other) == stage]
        if len(models) > 1:
            line = sum(models, CostModel()).line
        self.by_stage = {**self.by_stage, stage: Cost(*line, max(self.of(stage).largest, units))}

    def note_step(self, seconds: float) -> None:
        """Learn decode's time between tokens while nothing disturbs it: a line of one token, however many rows a step has."""
        self.by_stage = {**self.by_stage, "decode": Cost(seconds, 0.0, 1)}

    def of(self, stage: str) -> Cost:
        """Return the line of a stage's plans, whichever actor does them."""
        return self.by_stage.get(stage, UNKNOWN)
