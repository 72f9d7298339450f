"""The current findings of a storm: active faults, broken promises, and outcomes of requests.

``storm`` owns them; the load and the polls of /health and /ready report their outcomes here.
"""

import math
import time
from collections.abc import Callable, Sequence

import msgspec

from mmrt.bench.processes import SUPERVISOR
from mmrt.runtime.stage_table import stage_of

from .faults import Fault
from .report import Hit, Problem, StormReport
from .truth import GatewayMood
from .verdict import Outcome, Trouble, judge

_GRACE_S = 2.0  # after a recovery its fault may still be felt
_DISTURBING = frozenset({"kill", "stop", "pause", "term", "exit", "oom", "line"})
_RECENT = 5


class Findings:
    """Fills ``report``. ``say`` prints a line of progress; ``is_exact``: a text that differs from the undisturbed one is a problem."""

    def __init__(self, report: StormReport, say: Callable[[str], None], is_exact: bool = True) -> None:
        self.report = report
        self.is_draining = False
        self._say = say
        self._is_exact = is_exact
        self._began_s = time.monotonic()
        self._troubles: list[Trouble] = []

    @property
    def seconds(self) -> float:
        """Since the storm began."""
        return time.monotonic() - self._began_s

    def begin(self, fault: Fault) -> None:
        """Begin the time in which the fault may have effects."""
        self._troubles.append(Trouble(fault, time.monotonic(), math.inf))

    def end(self, seen: str, gap_s: float = 0.0, lines: Sequence[str] = ()) -> None:
        """End the last fault, which has hit the phase ``seen``. ``gap_s``: the longest time between tokens of other decodes; ``lines``:
        those that processes have died at."""
        now_s = time.monotonic()
        trouble = self._troubles[-1]
        self._troubles[-1] = msgspec.structs.replace(trouble, ended_s=now_s + _GRACE_S)
        fault, cell, report = trouble.fault, trouble.fault.cell, self.report
        recovery_s = now_s - trouble.began_s
        report.hits.append(Hit(fault.name, cell, seen, recovery_s, gap_s, list(lines)))
        target = f"{cell.target}+{fault.second}" if fault.second else cell.target
        self._say(
            f"{len(report.hits):4}  {fault.name:<8} {cell.kind:<7} {target:<12} {seen:<10} {recovery_s:5.1f} s"
            f"  {report.num_requests} requests, {len(report.problems)} broken{''.join(f'  {line}' for line in lines)}"
        )

    def note(self, problem: str) -> None:
        """Record a broken promise; "" is none."""
        if not problem:
            return
        last = self._troubles[-1].fault.describe() if self._troubles else ""
        self.report.problems.append(Problem(last, self.seconds, problem))
        self._say(f"      BROKEN: {problem}")

    def on_outcome(self, outcome: Outcome) -> None:
        """Record the end of a request."""
        report = self.report
        report.num_requests += 1
        report.ends[outcome.end] = report.ends.get(outcome.end, 0) + 1
        reference = report.references[outcome.request]
        if not self._is_exact and outcome.end == "complete":
            report.num_changed = (report.num_changed or 0) + (outcome.ids != reference.ids)
        if problem := judge(outcome, reference, self._troubles, self._is_exact):
            self.note(f"request {outcome.request!r} {outcome.id}: {problem}")
        else:
            report.num_excused += outcome.end in ("error", "refused", "broken")

    def mood(self, began_s: float, ended_s: float) -> GatewayMood:
        """The expected behaviour of the gateway in this time."""
        if self.is_draining:
            return "draining"
        for trouble in self._troubles[-_RECENT:]:
            cell = trouble.fault.cell
            is_disturbed = stage_of(cell.target) in ("gateway", SUPERVISOR) and cell.kind in _DISTURBING
            is_hit = is_disturbed or stage_of(trouble.fault.second) == "gateway"
            if is_hit and trouble.began_s <= ended_s and trouble.ended_s >= began_s:
                return "disturbed"
        return "up"
