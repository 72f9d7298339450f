"""The proposals of ``mmrt advise`` at each look at a run: layouts to set, and whether the plan is out of date.

Pure, but for reading the plan and for ``acted_on``."""

import datetime
import time
from pathlib import Path
from typing import TextIO

import msgspec

from mmrt.runtime.autoscale import advice
from mmrt.runtime.autoscale.demand import Demand
from mmrt.runtime.autoscale.scaler import KindFigures, Sample
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.errors import RunError, UserError
from mmrt.runtime.stage_table import MAX_INSTANCES
from mmrt.runtime.supervisor.control import LayoutRequest, call
from mmrt.shm.run_directory import RunDirectory

from .drift import Drift, DriftDetector
from .report import FORMAT_VERSION, PlanReport


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One look. ``layout``: to set, None if the present one is right; ``why``: of each kind that would change. ``set_in_s``: how long
    it took to set it; None: it was not set. ``refused``: why the run did not take it."""

    at: str
    figures: dict[str, KindFigures]
    layout: str | None
    why: list[str]
    drift: Drift | None
    set_in_s: float | None = None
    refused: str = ""


class Adviser:
    """Turns looks at a run into advice."""

    def __init__(self, config: RuntimeConfig, calm_s: float, planned: PlanReport | None, most: int = MAX_INSTANCES) -> None:
        """``most``: processes of each kind."""
        self._adviser = advice.Adviser(config, calm_s, most)
        self._detector = None if planned is None else DriftDetector(planned.demand, planned.division)

    def look(self, sample: Sample, demand: Demand, config: RuntimeConfig) -> Advice:
        """``config``: of the run now. The first look has no figures: they are of the time since the look before."""
        found = self._adviser.look(sample, config)
        drift = self._detector.look(demand) if self._detector is not None and found.figures else None
        return Advice(at=_now(), figures=found.figures, layout=found.layout, why=list(found.why), drift=drift)


def acted_on(found: Advice, run: Path) -> Advice:
    """Set the layout that is proposed, if one is, and return the found with what came of it. A refusal, as of processes that find
    no memory, changes nothing. Raises: RunError once the run is down."""
    if found.layout is None:
        return found
    began_s = time.monotonic()
    try:
        call(run, LayoutRequest(found.layout), timeout_s=None)
    except RunError as error:
        if not RunDirectory.is_alive(run):
            raise
        return msgspec.structs.replace(found, refused=str(error))
    return msgspec.structs.replace(found, set_in_s=round(time.monotonic() - began_s, 3))


def load_plan(path: Path) -> PlanReport:
    """Read a report of ``mmrt plan --json``. Raises: UserError."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=PlanReport)
    except OSError as error:
        raise UserError(f"cannot read the plan {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is no plan of mmrt plan --json: {error}") from None
    if report.format_version != FORMAT_VERSION:
        raise UserError(f"{path} has format {report.format_version}, this version reads {FORMAT_VERSION}: run mmrt plan again")
    return report


def show(found: Advice, out: TextIO, *, as_json: bool) -> None:
    """Print one look: a line of JSON, or what there is to say."""
    if as_json:
        print(msgspec.json.encode(found).decode(), file=out, flush=True)
        return
    kinds = "; ".join(f"{one.num} {kind}: {_words(one)}" for kind, one in found.figures.items())
    print(f"{found.at}  {kinds}", file=out, flush=True)
    if found.layout is not None:
        done = "would run" if found.set_in_s is None else f"ran in {found.set_in_s:.1f} s"
        done = f"refused ({found.refused})" if found.refused else done
        print(f"  {done}: mmrt layout set {found.layout}  ({'; '.join(found.why)})", file=out, flush=True)
    if found.drift is not None:
        print(f"  {found.drift}; would run: mmrt plan", file=out, flush=True)


def _words(figures: KindFigures) -> str:
    late = f", P99 of TBT at {figures.lateness:.0%} of its objective" if figures.lateness else ""
    return f"busy {figures.busy:.0%}, {figures.backlog_s:.2g} s wait{late}"


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
