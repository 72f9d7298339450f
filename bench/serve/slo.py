"""Service level objectives, and the requests that met them. Pure (TI13, US16, RS9).

The objectives are fixed before the run; a failed request is a violation; nothing is smoothed.
"""

from collections.abc import Iterable

import msgspec

from .record import Record

TBT_SHARE = 0.9  # of a request's times between tokens that must be under the objective


class Slo(msgspec.Struct, frozen=True):
    """Seconds to the first token, and between tokens."""

    ttft_s: float
    tbt_s: float = float("inf")


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
