"""Service level objectives: which requests met theirs, how much load still meets them. Pure (TI13, US16, RS9).

The objectives are fixed before the run; a failed request is a violation; nothing is smoothed.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from .record import Record

TBT_SHARE = 0.9  # of a request's times between tokens that must be under the objective


class Slo(msgspec.Struct, frozen=True):
    """Seconds to the first token, and between tokens."""

    ttft_s: float
    tbt_s: float = float("inf")

    def scaled(self, factor: float) -> "Slo":
        """The same, ``factor`` times as loose (US16: attainment against SLO scale)."""
        return Slo(self.ttft_s * factor, self.tbt_s * factor)


def is_met(record: Record, slo: Slo) -> bool:
    """TTFT is under its objective and so are at least 90 % of the TBTs (TI13). False for a request that failed or was cut."""
    ttft_s = record.ttft_s
    if not record.is_success or ttft_s is None or ttft_s >= slo.ttft_s:
        return False
    tbts_s = record.tbts_s
    return sum(tbt_s < slo.tbt_s for tbt_s in tbts_s) >= TBT_SHARE * len(tbts_s)


def attainment(records: Iterable[Record], slo: Slo) -> float:
    """Share of the requests that met the objective, in [0, 1]. Requests that the bench cut do not count; 0 without any."""
    judged = [is_met(record, slo) for record in records if not record.cut]
    return sum(judged) / len(judged) if judged else 0.0


def attainment_curve(records: Sequence[Record], slo: Slo, factors: Sequence[float]) -> list[tuple[float, float]]:
    """(factor, attainment at ``factor`` times the objective)."""
    return [(factor, attainment(records, slo.scaled(factor))) for factor in factors]


def goodput(attainment_at: Callable[[float], float], low: float, high: float, target: float = 0.9, tolerance: float = 0.05) -> float:
    """The highest rate with an attainment of at least ``target``, by bisection of [low, high] (TI13).

    ``attainment_at(rate)`` runs the workload at that rate. Ends when the interval is shorter than ``tolerance`` times its upper
    end; 0 if not even ``low`` reaches the target. Raises: ValueError unless 0 < low <= high and 0 < tolerance < 1.
    """
    if not 0 < low <= high < float("inf") or not 0 < tolerance < 1:
        raise ValueError(f"bisection of [{low}, {high}] to {tolerance}: need 0 < low <= high and a tolerance between 0 and 1")
    if attainment_at(low) < target:
        return 0.0
    if attainment_at(high) >= target:
        return high
    while high - low > tolerance * high:
        middle = (low + high) / 2
        if attainment_at(middle) >= target:
            low = middle
        else:
            high = middle
    return low


def area_under_curve(points: Sequence[tuple[float, float]]) -> float:
    """Trapezoidal area under (x, y) points sorted by x (RS9: attainment over rate)."""
    pairs = zip(points, points[1:], strict=False)
    return sum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairs)
