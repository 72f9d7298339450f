"""What a load is judged by: an objective for all requests, or another time to the first token for those without media (pure; MS3)."""

import math
from collections.abc import Sequence

import msgspec

from mmrt.bench.serve.record import Record
from mmrt.bench.serve.slo import Slo, is_met
from mmrt.bench.serve.stall import STREAM_GROUP
from mmrt.bench.serve.workload import MODALITIES

DEFAULT_SLO = Slo(4.0, 0.1)  # the TTFT of [slo] for pictures and sounds; ten tokens per second are faster than people read


class Objective(msgspec.Struct, frozen=True):
    """``text_ttft_s``: of requests without media; None: as of all."""

    slo: Slo
    text_ttft_s: float | None = None

    def of(self, kind: str) -> Slo:
        """The objective of a kind of request."""
        is_text = kind in ("text", STREAM_GROUP)
        return Slo(self.text_ttft_s, self.slo.tbt_s) if is_text and self.text_ttft_s is not None else self.slo

    def times(self, scale: float) -> "Objective":
        """All times of it times ``scale`` (US16)."""
        text = None if self.text_ttft_s is None else self.text_ttft_s * scale
        return Objective(Slo(self.slo.ttft_s * scale, self.slo.tbt_s * scale), text)

    def verdicts(self, records: Sequence[Record]) -> list[bool]:
        """Return whether each request meets it. Those that the bench cut are left out."""
        return [is_met(record, self.of(record.group)) for record in records if not record.cut]

    def attainment(self, records: Sequence[Record]) -> float:
        """The share of the ``verdicts`` that are good; 0 without any."""
        met = self.verdicts(records)
        return sum(met) / len(met) if met else 0.0

    @property
    def sections(self) -> dict[str, dict[str, float]]:
        """The same as ``[slo]`` of a configuration."""
        slos = {kind: self.of(kind) for kind in MODALITIES}
        return {
            kind: {"ttft_ms": slo.ttft_s * 1000, "tbt_ms": slo.tbt_s * 1000 if math.isfinite(slo.tbt_s) else 0.0}
            for kind, slo in slos.items()
        }

    def __str__(self) -> str:
        text = "" if self.text_ttft_s is None else f" (text {self.text_ttft_s:g} s)"
        tbt = f" and 90 % of TBTs < {self.slo.tbt_s:g} s" if math.isfinite(self.slo.tbt_s) else ""
        return f"TTFT < {self.slo.ttft_s:g} s{text}{tbt}"
