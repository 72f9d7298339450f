"""Findings of a storm, as figures and as tables: faults, outcomes of requests, broken promises and how to replay them.

Called by ``storm`` and ``command``.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import median

import msgspec
from rich.console import Console

from mmrt.bench.processes import SUPERVISOR, ZYGOTE
from mmrt.runtime.stage_table import ALL_ACTORS, stage_of

from .census import Count
from .faults import EVERYBODY, KINDS, LINE, PHASES, Cell
from .verdict import Reference

_SHOWN = 20  # problems in the summary; --json has all
_SHORT = {"hand-over": "handover", "mid-stream": "stream"}


class Problem(msgspec.Struct, frozen=True):
    """A broken promise. ``fault`` names the last fault before it, "" when there was none; ``time_s`` counts from the storm's start."""

    fault: str
    time_s: float
    what: str


class Hit(msgspec.Struct, frozen=True):
    """A fault that was done. ``seen`` is the phase that it hit, which is not always the one that was waited for."""

    name: str
    cell: Cell
    seen: str
    recovery_s: float
    gap_s: float = 0.0  # the longest time between tokens of a decode that was not hit; 0: there were none
    lines: list[str] = []  # that processes have died at


class StormReport(msgspec.Struct, kw_only=True):
    """Everything that ``--json`` writes."""

    seed: int
    filters: str = ""  # the options without which an index means another fault
    hits: list[Hit] = []
    ends: dict[str, int] = {}  # requests by how they ended
    num_excused: int = 0
    num_requests: int = 0
    num_changed: int | None = None  # complete ones with other ids than the undisturbed; None where that is a problem
    num_polls: int = 0
    num_unready: int = 0
    num_quiet_points: int = 0
    seconds: float = 0.0
    references: dict[str, Reference] = {}  # the right answers, by request
    counts: list[Count] = []  # of a soak, at its quiet points
    problems: list[Problem] = []
    notes: list[str] = []

    @property
    def is_clean(self) -> bool:
        return not self.problems


def coverage(hits: Iterable[Hit], rows: tuple[str, ...], of: str) -> list[str]:
    """Lines of a table: number of hits by kind or target and by the phase that was hit. It fits a terminal."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for hit in hits:
        counts[getattr(hit.cell, of)][hit.seen] += 1
    lines = [f"{of:<12}" + "".join(f"{_SHORT.get(phase, phase):>9}" for phase in PHASES) + "  all"]
    for name in rows:
        if total := counts[name].total():
            lines.append(f"{name:<12}" + "".join(f"{counts[name][phase] or '·':>9}" for phase in PHASES) + f"{total:5}")
    return lines


def show(console: Console, report: StormReport, num_cells: int) -> None:
    """The summary for people."""
    for line in summary(report, num_cells):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary(report: StormReport, num_cells: int) -> list[str]:
    """The summary as lines."""
    cells = {(hit.cell.kind, hit.cell.target, hit.seen) for hit in report.hits}
    ends = ", ".join(f"{number} {end}" for end, number in sorted(report.ends.items(), key=lambda item: -item[1]))
    slowest = max((hit.recovery_s for hit in report.hits), default=0.0)
    lines = [
        *coverage(report.hits, (*KINDS, LINE), "kind"),
        *coverage(report.hits, (*ALL_ACTORS, ZYGOTE, SUPERVISOR, EVERYBODY), "target"),
        f"seed {report.seed}: {len(report.hits)} faults in {report.seconds:.0f} s, {len(cells)} cells of {num_cells};"
        f" slowest recovery {slowest:.1f} s; {report.num_quiet_points} quiet points",
        f"{report.num_requests} requests: {ends or 'none'}; {report.num_excused} ends were excused by a fault",
        f"/health and /ready: asked {report.num_polls} times, /ready said no {report.num_unready} times",
        *_changed_lines(report),
        *_gap_lines(report.hits),
        *_source_lines(report.hits),
        *(f"note: {note}" for note in report.notes),
    ]
    for problem in report.problems[:_SHOWN]:
        lines.append(f"BROKEN  {problem.time_s:6.1f} s  after {problem.fault or 'no fault'}: {problem.what}")
    if len(report.problems) > _SHOWN:
        lines.append(f"… and {len(report.problems) - _SHOWN} more")
    if not report.problems:
        lines.append("every promise was kept")
    elif first := next((problem.fault for problem in report.problems if problem.fault), ""):
        lines.append(f"see the first again: mmrt chaos {report.filters}--replay {first.split(' ')[0]} --faults 10")
    return lines


def _changed_lines(report: StormReport) -> list[str]:
    """A line about the texts of formats in which a text may change."""
    if report.num_changed is None:
        return []
    whole = report.ends["complete"]
    share = f"{report.num_changed} of {whole} complete answers ({report.num_changed / whole:.0%})"
    return [f"{share} are not the undisturbed ones, as rounding in other batches allows: this storm does not check their contents"]


def _source_lines(hits: Iterable[Hit]) -> list[str]:
    """A line about the lines of the source at which processes have died."""
    kills = [hit for hit in hits if hit.cell.kind == LINE]
    lines = [line for hit in kills for line in hit.lines]
    files = {line.rpartition(":")[0] for line in lines}
    return [f"{len(kills)} faults: deaths at {len({*lines})} lines of {len(files)} files, the others outside of them"] if kills else []


def _gap_lines(hits: Iterable[Hit]) -> list[str]:
    """A line about the streams beside the faults, for faults on decodes and on others."""
    by_stage: dict[bool, list[float]] = defaultdict(list)
    for hit in hits:
        if hit.gap_s:
            by_stage[stage_of(hit.cell.target) == "decode"].append(1000 * hit.gap_s)
    return [
        f"longest time between tokens of other decodes, {'a' if on_decode else 'no'} decode being hit:"
        f" median {median(gaps_ms):.0f} ms, worst {max(gaps_ms):.0f} ms of {len(gaps_ms)} faults"
        for on_decode, gaps_ms in sorted(by_stage.items())
    ]
