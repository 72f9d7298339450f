"""The traffic that a run has had, as a trace: from its flight recorders, or from a file of ``mmrt record``. For ``hindsight``."""

import statistics
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from mmrt.models.config import load_model_config
from mmrt.runtime.errors import UserError
from mmrt.runtime.observe.dumps import Recording
from mmrt.runtime.observe.flight import complete_since_ns, merge
from mmrt.runtime.observe.traffic import WANTED, Traffic, TrafficRow
from mmrt.runtime.process.run import read_run_info
from mmrt.shm.run_directory import RunDirectory

HOUR_S = 3600.0
_WRITERS = ("gateway", "controller")
_decode = msgspec.json.Decoder(TrafficRow).decode


class Past(NamedTuple):
    """Requests in order of arrival, those that failed left out, over so many seconds."""

    rows: list[TrafficRow]
    seconds: float

    @property
    def ttfts_s(self) -> list[float]:
        """As their clients waited, of those that are known."""
        return [row.ttft_ms / 1000 for row in self.rows if row.ttft_ms > 0]

    def quantiles_s(self) -> tuple[float, float]:
        """P50 and P90 of ``ttfts_s``."""
        return quantiles(self.ttfts_s)

    def write(self, path: Path) -> None:
        """Write a trace. Raises: OSError."""
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in self.rows))


def quantiles(times_s: list[float]) -> tuple[float, float]:
    """P50 and P90; zeros for fewer than two."""
    deciles = statistics.quantiles(times_s, n=10, method="inclusive") if len(times_s) > 1 else [0.0] * 9
    return deciles[4], deciles[8]


def from_run(run: RunDirectory, seconds: float = HOUR_S) -> Past:
    """Return what a live run's recorders still have of the last ``seconds``."""
    info, now_ns = read_run_info(run), time.monotonic_ns()
    model = load_model_config(info.model_path)
    recorders = {name: records for name, records in Recording.take(run).recorders.items() if name in _WRITERS}
    since_ns = max(now_ns - round(seconds * 1e9), complete_since_ns(recorders))
    rate = model.audio_rules.sample_rate / model.audio_rules.hop if model.audio_rules else 0.0
    traffic = Traffic(since_ns, model.vision_rules.patch_size if model.vision_rules else 0, rate)
    for record in merge(recorders, since_ns):
        if record.kind in WANTED:
            traffic.add(record)
    return _past([*traffic.rows(time.monotonic_ns()), *traffic.rest()], seconds)


def from_file(path: Path, seconds: float = HOUR_S) -> Past:
    """Return the last ``seconds`` of a file of ``mmrt record``. Raises: UserError."""
    rows = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    rows.append(_decode(line))
                except msgspec.DecodeError as error:
                    raise UserError(f"{path}:{number} is no line of mmrt record: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return _past(rows, seconds)


def _past(rows: list[TrafficRow], seconds: float) -> Past:
    good = sorted((row for row in rows if row.output_length > 0 and not row.status), key=lambda row: row.timestamp)
    last_ms = good[-1].timestamp if good else 0.0
    good = [row for row in good if row.timestamp >= last_ms - 1000 * seconds]
    return Past(good, (last_ms - good[0].timestamp) / 1000 if good else 0.0)
