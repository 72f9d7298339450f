"""Choose the number of processes of each kind, from a run's work since the last look (pure; MS4).

Kinds are scaled apart, as ModServe's image and text instances are: each by the stage of it that is busiest, by the work that waits for
it, and by how late decode's tokens are. Work that waits counts first: a burst of pictures shows there before anything is late.

More are wanted when a look and the one before it say so. Fewer are wanted only after ``calm_s`` in which fewer would always have done,
with room to spare; and a change begins that time anew, so that the number does not swing.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ...runtime.stage_table import STAGES, InstanceId, stage_of

_SPARE = 0.85  # of each limit may be used with fewer processes
_MOST_AT_ONCE = 1.5  # times as many


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A look at a run. ``busy_s`` and ``units`` count since the run or the observation began: seconds in which each encoder and prefill
    computed, and patch rows and tokens of their plans. ``rows_left`` and ``tokens_left``: of requests without a first token.
    ``tbt_p99_s``: of the last seconds, None without tokens."""

    at_s: float
    busy_s: dict[InstanceId, float]
    units: dict[InstanceId, int]
    rows_left: int = 0
    tokens_left: int = 0
    tbt_p99_s: float | None = None
    tbt_objective_s: float = 0.0


class KindFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The ``num`` processes of one kind. ``busy``: the share of the time in which they computed, of the busiest stage. ``backlog_s``:
    in which they would do what waits for them. ``lateness``: P99 of times between tokens over its objective, where they have decode."""

    num: int
    busy: float = 0.0
    backlog_s: float = 0.0
    lateness: float = 0.0


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The most of each figure, and the numbers of processes. ``backlog_s``: a share of the objective of TTFT."""

    busy: float = 0.95
    backlog_s: float = 1.0
    lateness: float = 0.9
    calm_s: float = 120.0
    least: int = 1
    most: int = 8


class Proposal(NamedTuple):
    """Have ``wanted`` processes of a kind in place of ``num``."""

    kind: str
    num: int
    wanted: int
    why: str


Kinds = Mapping[str, Sequence[Sequence[InstanceId]]]
"""The processes of each kind, by its letters: the actors of each."""


class Meter:
    """Figures from samples. Remembers what a unit of each stage costs, for looks in which none was done."""

    def __init__(self, first: Sample) -> None:
        self._before = first
        self._unit_s: dict[str, float] = {}

    def look(self, sample: Sample, kinds: Kinds) -> dict[str, KindFigures]:
        """Figures of the time since the sample before. Raises: ValueError for a sample that is not later."""
        before, self._before = self._before, sample
        passed_s = sample.at_s - before.at_s
        if passed_s <= 0:
            raise ValueError(f"a sample at {sample.at_s} s after one at {before.at_s} s: it must be later")
        busy_s = {actor: _since(busy, before.busy_s.get(actor, 0.0)) for actor, busy in sample.busy_s.items()}
        done = {actor: _since(count, before.units.get(actor, 0)) for actor, count in sample.units.items()}
        for stage in ("encoder", "prefill"):
            units = sum(count for actor, count in done.items() if stage_of(actor) == stage)
            if units > 0:
                self._unit_s[stage] = sum(busy for actor, busy in busy_s.items() if stage_of(actor) == stage) / units
        left = {"encoder": sample.rows_left, "prefill": sample.tokens_left}
        return {kind: self._figures(processes, busy_s, passed_s, left, sample) for kind, processes in kinds.items()}

    def _figures(
        self,
        processes: Sequence[Sequence[InstanceId]],
        busy_s: Mapping[InstanceId, float],
        passed_s: float,
        left: Mapping[str, int],
        sample: Sample,
    ) -> KindFigures:
        count = len(processes)
        stages = {stage_of(actor) for actors in processes for actor in actors}
        computed = {stage: 0.0 for stage in stages}
        for actors in processes:
            for actor in actors:
                computed[stage_of(actor)] += busy_s.get(actor, 0.0)
        lateness = 0.0
        if "decode" in stages and sample.tbt_p99_s is not None and sample.tbt_objective_s > 0:
            lateness = sample.tbt_p99_s / sample.tbt_objective_s
        return KindFigures(
            num=count,
            busy=min(1.0, max(computed.values(), default=0.0) / passed_s / count) if count else 0.0,
            backlog_s=sum(self._unit_s.get(stage, 0.0) * left.get(stage, 0) for stage in stages) / max(1, count),
            lateness=lateness,
        )


def _since(now: float, before: float) -> float:
    """Return the growth of a count. That of a new process began at 0."""
    return now - before if now >= before else now


def needed(figures: KindFigures, rules: Rules, spare: float = 1.0) -> tuple[float, str]:
    """Return how many processes bring every figure down to its limit times ``spare``, and the figure that needs most."""
    loads = {
        f"busy for {figures.busy:.0%} of the time": figures.busy / rules.busy,
        f"{figures.backlog_s:.2g} s of work wait": figures.backlog_s / rules.backlog_s if figures.backlog_s > rules.backlog_s else 0.0,
        f"P99 of TBT at {figures.lateness:.0%} of its objective": figures.lateness / rules.lateness,
    }
    why = max(loads, key=loads.__getitem__)
    return figures.num * loads[why] / spare, why


class Scaler:
    """Proposes numbers of processes. It only ever says; whoever asks it may act."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._needs: dict[str, deque[tuple[float, int]]] = {}  # what would have done, by kind: (time, number)
        self._nums: dict[str, int] = {}
        self._over: dict[str, bool] = {}  # the look before wanted more

    def propose(self, now_s: float, figures: Mapping[str, KindFigures]) -> list[Proposal]:
        """Return the changes to make now. Times must not run backwards."""
        found = (self._of_kind(now_s, kind, those) for kind, those in figures.items())
        return [proposal for proposal in found if proposal is not None]

    def _of_kind(self, now_s: float, kind: str, figures: KindFigures) -> Proposal | None:
        rules, num = self._rules, figures.num
        needs = self._needs.setdefault(kind, deque())
        if self._nums.get(kind) != num:
            self._nums[kind] = num
            self._over[kind] = False
            needs.clear()
        exact, why = needed(figures, rules)
        wanted = self._clamp(min(exact, _MOST_AT_ONCE * num))
        was_over, self._over[kind] = self._over[kind], wanted > num
        if wanted > num:
            needs.clear()
            return Proposal(kind, num, wanted, why) if was_over else None
        spare, _ = needed(figures, rules, _SPARE)
        needs.append((now_s, self._clamp(spare)))
        while needs and needs[0][0] < now_s - rules.calm_s:
            calm_since_s = needs.popleft()[0]
            fewer = max([need for _, need in needs])
            if fewer < num:
                needs.clear()
                return Proposal(kind, num, fewer, f"{fewer} would have done since {now_s - calm_since_s:.0f} s")
        return None

    def _clamp(self, need: float) -> int:
        return min(self._rules.most, max(self._rules.least, math.ceil(need - 1e-9)))


def letters_of(actors: Iterable[str]) -> str:
    """Return the letters of the stages of these actors that compute the model."""
    return "".join(STAGES[stage_of(actor)].letter for actor in actors)


def kinds_of(processes: Mapping[InstanceId, Sequence[InstanceId]]) -> dict[str, list[Sequence[InstanceId]]]:
    """Return the processes that compute the model, by the letters of their stages."""
    kinds: dict[str, list[Sequence[InstanceId]]] = {}
    for actors in processes.values():
        if letters := letters_of(actors):
            kinds.setdefault(letters, []).append(actors)
    return kinds
