"""The proposals of ``mmrt advise`` at each look at a run: layouts to set, and whether the plan is out of date.

Pure, but for reading the plan and for ``acted_on``."""

import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.errors import RunError, UserError
from mmrt.runtime.stage_table import MAX_INSTANCES, ProcessSpec, format_layout, parse_layout
from mmrt.runtime.supervisor.control import LayoutRequest, call
from mmrt.shm.run_directory import RunDirectory

from .demand import Demand
from .drift import Drift, DriftDetector
from .report import FORMAT_VERSION, PlanReport
from .scaler import KindFigures, Meter, Proposal, Rules, Sample, Scaler, kinds_of, letters_of

_BACKLOG_SHARE = 0.5  # of the tightest objective of TTFT


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
    """Turns samples of a run into advice."""

    def __init__(self, config: RuntimeConfig, calm_s: float, planned: PlanReport | None, most: int = MAX_INSTANCES) -> None:
        """``most``: processes of each kind."""
        slos = (config.slo.text, config.slo.image, config.slo.video, config.slo.audio)
        backlog_s = _BACKLOG_SHARE * min(slo.ttft_ms for slo in slos) / 1000
        self._scaler = Scaler(Rules(backlog_s=backlog_s, calm_s=calm_s, most=most))
        self._detector = None if planned is None else DriftDetector(planned.demand, planned.division)
        self._meter: Meter | None = None

    def look(self, sample: Sample, demand: Demand, config: RuntimeConfig) -> Advice:
        """``config``: of the run now. The first look has no figures: they are of the time since the look before."""
        kinds = kinds_of(config.processes)
        if self._meter is None:
            self._meter = Meter(sample)
            return Advice(at=_now(), figures={}, layout=None, why=[], drift=None)
        figures = self._meter.look(sample, kinds)
        proposals = self._scaler.propose(sample.at_s, figures)
        drift = self._detector.look(demand) if self._detector is not None else None
        layout = scaled(config.actors.layout, proposals) if proposals else None
        why = [f"{proposal.kind}: {proposal.num} → {proposal.wanted}, {proposal.why}" for proposal in proposals]
        return Advice(at=_now(), figures=figures, layout=layout, why=why, drift=drift)


def scaled(layout: str, proposals: Sequence[Proposal]) -> str:
    """Return the layout with these numbers of processes of each kind: the last ones of a kind go, new ones come behind all others, so
    that those keep their names."""
    found = [ProcessSpec(part.stages, 1, part.device) for part in parse_layout(layout) for _ in range(part.count)]
    for proposal in proposals:
        mine = [place for place, process in enumerate(found) if letters_of(process.stages) == proposal.kind]
        found += [found[mine[0]]] * (proposal.wanted - len(mine))
        for place in reversed(mine[proposal.wanted :]):
            del found[place]
    return format_layout(found)


def acted_on(advice: Advice, run: Path) -> Advice:
    """Set the layout that is proposed, if one is, and return the advice with what came of it. A refusal, as of processes that find
    no memory, changes nothing. Raises: RunError once the run is down."""
    if advice.layout is None:
        return advice
    began_s = time.monotonic()
    try:
        call(run, LayoutRequest(advice.layout), timeout_s=None)
    except RunError as error:
        if not RunDirectory.is_alive(run):
            raise
        return msgspec.structs.replace(advice, refused=str(error))
    return msgspec.structs.replace(advice, set_in_s=round(time.monotonic() - began_s, 3))


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


def show(advice: Advice, out: TextIO, *, as_json: bool) -> None:
    """Print one look: a line of JSON, or what there is to say."""
    if as_json:
        print(msgspec.json.encode(advice).decode(), file=out, flush=True)
        return
    kinds = "; ".join(f"{one.num} {kind}: {_words(one)}" for kind, one in advice.figures.items())
    print(f"{advice.at}  {kinds}", file=out, flush=True)
    if advice.layout is not None:
        done = "would run" if advice.set_in_s is None else f"ran in {advice.set_in_s:.1f} s"
        done = f"refused ({advice.refused})" if advice.refused else done
        print(f"  {done}: mmrt layout set {advice.layout}  ({'; '.join(advice.why)})", file=out, flush=True)
    if advice.drift is not None:
        print(f"  {advice.drift}; would run: mmrt plan", file=out, flush=True)


def _words(figures: KindFigures) -> str:
    late = f", P99 of TBT at {figures.lateness:.0%} of its objective" if figures.lateness else ""
    return f"busy {figures.busy:.0%}, {figures.backlog_s:.2g} s wait{late}"


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
