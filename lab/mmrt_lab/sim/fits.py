"""From flight records of a run to a cost model: lines by least squares, and rates beside other stages (pure).

A plan's time alone follows from its line; what it really took, from its record; who else worked meanwhile, from theirs. The rates are
those with which the times alone are explained best.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .costs import Line
from .interference import stage_set

NUM_FACTORS = 100  # of a spread
LEAST_WORKS = 50  # of a stage within a set of stages, for a spread
LEAST_OVERLAP_S = 0.5  # of a set of stages, to count as measured
RATES = (0.05, 1.25)  # outside of it a fit is wrong
_PRIOR_S = 0.02  # of overlap, at the rate that is assumed without any

Floats = NDArray[np.float64]


Middle = Callable[[Sequence[float]], float]


class Sample(NamedTuple):
    """Work and how long it took."""

    units: float
    squares: float
    seconds: float


class Work(NamedTuple):
    """A plan or a step that was worked on: when, in ns, and how long it takes alone. ``is_first``: a step after a pause. It takes
    longer than others and tells nothing of them."""

    stage: str
    begin_ns: int
    end_ns: int
    alone_s: float
    is_first: bool = False


def fit_line(samples: Iterable[Sample], middle: Middle = statistics.median) -> Line:
    """The line through the middles of samples of equal work, in relative errors; no coefficient is negative. Raises: ValueError."""
    groups: dict[tuple[float, float], list[float]] = {}
    for sample in samples:
        groups.setdefault((sample.units, sample.squares), []).append(sample.seconds)
    if not groups:
        raise ValueError("there is nothing to fit a line to")
    middles = {work: middle(times) for work, times in groups.items()}
    coefficients = fit_not_negative([(1.0, *work) for work in middles], list(middles.values()))
    return Line(fixed_s=coefficients[0], per_unit_s=coefficients[1], per_square_s=coefficients[2])


def fit_not_negative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients of least relative squares, none below 0: the best of the fits over each set of columns. Where rows are all alike,
    the second column explains everything: a plan twice as large takes twice as long."""
    matrix, target = np.array(rows), np.array(seconds)
    scaled, ones = matrix / target[:, None], np.ones(len(target))
    best, least = [0.0] * matrix.shape[1], float("inf")
    for size in range(1, matrix.shape[1] + 1):
        for columns in combinations(sorted(range(matrix.shape[1]), key=lambda column: column != 1), size):
            found, *_ = np.linalg.lstsq(scaled[:, columns], ones)
            error = float(np.sum((scaled[:, columns] @ found - 1) ** 2))
            if (found >= 0).all() and error < least - 1e-12:
                best, least = [0.0] * matrix.shape[1], error
                for column, value in zip(columns, found, strict=True):
                    best[column] = float(value)
    return best


def fit_context(seconds: Mapping[tuple[int, float], float]) -> float:
    """The seconds per token in the KV cache, from those of steps over so many sequences and tokens, by relative errors. The rest of a
    step's time may depend on its number of sequences in any way. Never negative."""
    counts = sorted({count for count, _ in seconds})
    rows = [[*(float(count == one) for one in counts), context] for count, context in seconds]
    target = np.array([*seconds.values()])
    found, *_ = np.linalg.lstsq(np.array(rows) / target[:, None], np.ones(len(target)))
    return max(0.0, float(found[-1]))


def fit_interference(works: Sequence[Work], assume: Callable[[Mapping[str, int]], Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Rates of each stage within each set of stages that worked at once for long enough. See ``Costs.interference``. ``assume``: rates
    without any measurement, by the number of instances at work."""
    shared = _Timeline(works)
    interference: dict[str, dict[str, float]] = {}
    for stage in sorted({work.stage for work in works}):
        mine = [work for work in works if work.stage == stage and not work.is_first]
        sets = sorted(together for together in shared.sets_with(stage) if len(together) > 1)
        if not sets:
            continue
        overlap = np.array([[shared.seconds(work, together) for together in sets] for work in mine])
        beside = np.array([work.alone_s - shared.seconds(work, (stage,)) for work in mine])  # by itself its rate is 1
        assumed = np.array([assume(dict.fromkeys(together, 1))[stage] for together in sets])
        prior = np.eye(len(sets)) * np.sqrt(_PRIOR_S)
        weight = np.array([max(work.alone_s, 1e-6) ** -0.5 for work in mine])  # errors add up like those of many small works
        rates, *_ = np.linalg.lstsq(np.vstack((overlap * weight[:, None], prior)), np.concatenate((beside * weight, prior @ assumed)))
        for together, rate, total_s in zip(sets, rates, overlap.sum(axis=0), strict=True):
            if total_s >= LEAST_OVERLAP_S:
                interference.setdefault(stage_set(together), {})[stage] = float(np.clip(rate, *RATES))
    return dict(sorted(interference.items()))


def fit_spreads(works: Sequence[Work], rates: Callable[[Mapping[str, int]], Mapping[str, float]]) -> dict[str, dict[str, list[float]]]:
    """Factors between what works took and what they should have at these rates. See ``Costs.spreads``. A work belongs to the set of
    stages that was at work for most of its time."""
    shared = _Timeline(works)
    spreads: dict[str, dict[str, list[float]]] = {}
    for stage in sorted({work.stage for work in works}):
        mine = [w for w in works if w.stage == stage and not w.is_first and w.alone_s > 0 and w.end_ns > w.begin_ns]
        sets = sorted(shared.sets_with(stage))
        overlap = np.array([[shared.seconds(work, together) for together in sets] for work in mine])
        rate = np.array([rates(dict.fromkeys(together, 1))[stage] for together in sets])
        factors = overlap @ rate / np.array([work.alone_s for work in mine])
        most = overlap.argmax(axis=1)
        for number, together in enumerate(sets):
            found = factors[most == number]
            if len(found) >= LEAST_WORKS:
                spreads.setdefault(stage_set(together), {})[stage] = spread_of(found.tolist())
    return dict(sorted(spreads.items()))


def spread_of(values: Sequence[float]) -> list[float]:
    """The means of ``NUM_FACTORS`` equal parts of the sorted values, of fewer values themselves: so their mean is kept."""
    if not values:
        return []
    parts = np.array_split(np.sort(np.array(values)), min(NUM_FACTORS, len(values)))
    return [float(f"{part.mean():.4g}") for part in parts]


class _Timeline:
    """Which stages worked when."""

    def __init__(self, works: Sequence[Work]) -> None:
        edges = sorted({at_ns for work in works for at_ns in (work.begin_ns, work.end_ns)})
        self._edges = np.array(edges, np.int64)
        stages = sorted({work.stage for work in works})
        changes = np.zeros((len(stages), len(edges)), np.int64)
        for work in works:
            row = stages.index(work.stage)
            changes[row, self._at(work.begin_ns)] += 1
            changes[row, self._at(work.end_ns)] -= 1
        is_busy = np.cumsum(changes, axis=1)[:, :-1] > 0
        lengths_s = np.diff(self._edges) / 1e9
        self._before: dict[tuple[str, ...], Floats] = {}  # seconds of each set before each edge
        for column in np.unique(is_busy, axis=1).T:
            during = (is_busy == column[:, None]).all(axis=0)
            together = tuple(stage for stage, busy in zip(stages, column, strict=True) if busy)
            self._before[together] = np.concatenate(([0.0], np.cumsum(np.where(during, lengths_s, 0.0))))

    def _at(self, time_ns: int) -> int:
        return int(np.searchsorted(self._edges, time_ns))

    def sets_with(self, stage: str) -> list[tuple[str, ...]]:
        """Sets of stages that worked at once, this one among them."""
        return [together for together in self._before if stage in together]

    def seconds(self, work: Work, together: tuple[str, ...]) -> float:
        """How long this set worked, and no other stage, during this work."""
        before = self._before.get(together)
        if before is None:
            return 0.0
        return float(before[self._at(work.end_ns)] - before[self._at(work.begin_ns)])
