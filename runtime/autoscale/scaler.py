"""Choose the number of processes of each kind, from a run's work since the last look (pure; MS4).

Kinds are scaled apart, as ModServe's image and text instances are: each by the work that comes for it, by what waits for it, and by
how late decode's tokens are. Work that has come is work done and the growth of what waits, so a burst of pictures shows at once, and in
its own size: what has waited since its beginning is done in the share of the time that is not planned for.

More are wanted as soon as the last seconds need them; fewer when fewer would always have done for ``calm_s``.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..stage_table import STAGES, WORKERS, InstanceId, stage_of

WINDOW_S = 10.0  # that is looked at: single requests are large
_MOST_AT_ONCE = 1.5  # times as many, for what waits and for late tokens: neither says how many are needed


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A look at a run. ``busy_s`` and ``units`` count since the run or the observation began: seconds in which each worker
    computed, and patch rows and tokens of their plans; of video, plans. ``rows_left``, ``tokens_left`` and ``video_left`` (plans): of
    requests without a first token.
    ``tbt_p99_s``: of the last seconds, None without tokens. ``idle_cores``: of the machine, since the look before; None: not known."""

    at_s: float
    busy_s: dict[InstanceId, float]
    units: dict[InstanceId, int]
    rows_left: int = 0
    tokens_left: int = 0
    video_left: int = 0
    tbt_p99_s: float | None = None
    tbt_objective_s: float = 0.0
    idle_cores: float | None = None


class KindFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The ``num`` processes of one kind in the last ``passed_s``. ``come_s``: for which the work that has come keeps one of them busy,
    in the stage that has most. ``busy``: the share of the time in which they computed, of the busiest stage. ``backlog_s``: in which
    they would do what waits for them. ``lateness``: P99 of times between tokens over its objective, where they have decode."""

    num: int
    passed_s: float
    come_s: float = 0.0
    busy: float = 0.0
    backlog_s: float = 0.0
    lateness: float = 0.0


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The most of each figure, and the numbers of processes. ``busy``: the share of the time that the work which comes may take;
    ``backlog_s``: a share of the objective of TTFT."""

    busy: float = 0.9
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
        if sample.at_s <= before.at_s:
            raise ValueError(f"a sample at {sample.at_s} s after one at {before.at_s} s: it must be later")
        busy_s = {actor: _since(busy, before.busy_s.get(actor, 0.0)) for actor, busy in sample.busy_s.items()}
        done = {actor: _since(count, before.units.get(actor, 0)) for actor, count in sample.units.items()}
        for stage in WORKERS:
            units = sum(count for actor, count in done.items() if stage_of(actor) == stage)
            if units > 0:
                self._unit_s[stage] = sum(busy for actor, busy in busy_s.items() if stage_of(actor) == stage) / units
        numbers = Counter(stage_of(actor) for processes in kinds.values() for actors in processes for actor in actors)
        return {kind: self._figures(processes, busy_s, done, numbers, sample, before) for kind, processes in kinds.items()}

    def _figures(
        self,
        processes: Sequence[Sequence[InstanceId]],
        busy_s: Mapping[InstanceId, float],
        done: Mapping[InstanceId, float],
        numbers: Mapping[str, int],
        sample: Sample,
        before: Sample,
    ) -> KindFigures:
        """``numbers``: the actors of each stage, in processes of any kind. What waits for a stage is divided among them."""
        count, passed_s = len(processes), sample.at_s - before.at_s
        stages = {stage_of(actor) for actors in processes for actor in actors}
        computed = {stage: 0.0 for stage in stages}
        left = {
            "video": (before.video_left, sample.video_left),
            "encoder": (before.rows_left, sample.rows_left),
            "prefill": (before.tokens_left, sample.tokens_left),
        }
        wait_s = {}
        for stage in stages:
            unit_s = self._unit_s.get(stage, 0.0) * count / numbers[stage]
            wait_s[stage] = [unit_s * units for units in left.get(stage, (0, 0))]
        come_s = {stage: after_s - before_s for stage, (before_s, after_s) in wait_s.items()}
        for actors in processes:
            for actor in actors:
                computed[stage_of(actor)] += busy_s.get(actor, 0.0)
                come_s[stage_of(actor)] += self._unit_s.get(stage_of(actor), 0.0) * done.get(actor, 0)
        lateness = 0.0
        if "decode" in stages and sample.tbt_p99_s is not None and sample.tbt_objective_s > 0:
            lateness = sample.tbt_p99_s / sample.tbt_objective_s
        return KindFigures(
            num=count,
            passed_s=passed_s,
            come_s=max(come_s.values(), default=0.0),
            busy=min(1.0, max(computed.values(), default=0.0) / passed_s / count) if count else 0.0,
            backlog_s=sum(after_s for _, after_s in wait_s.values()) / max(1, count),
            lateness=lateness,
        )


def _since(now: float, before: float) -> float:
    """Return the growth of a count. That of a new process began at 0."""
    return now - before if now >= before else now


class Scaler:
    """Proposes numbers of processes. It only ever says; whoever asks it may act."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._looks: dict[str, deque[tuple[float, KindFigures]]] = {}  # by kind, of the last ``WINDOW_S``
        self._needs: dict[str, deque[tuple[float, int]]] = {}  # by kind, of the last ``calm_s``: (time, number that would have done)

    def propose(self, now_s: float, figures: Mapping[str, KindFigures]) -> list[Proposal]:
        """Return the changes to make now. Times must not run backwards."""
        found = (self._of_kind(now_s, kind, those) for kind, those in figures.items())
        return [proposal for proposal in found if proposal is not None]

    def _of_kind(self, now_s: float, kind: str, figures: KindFigures) -> Proposal | None:
        exact, why = self._needed(now_s, kind, figures)
        need = min(self._rules.most, max(self._rules.least, math.ceil(exact - 1e-9)))
        needs = self._needs.setdefault(kind, deque())
        needs.append((now_s, need))
        while len(needs) > 1 and needs[1][0] <= now_s - self._rules.calm_s:
            needs.popleft()
        if need > figures.num:
            return Proposal(kind, figures.num, need, why)
        calm_s, fewer = now_s - needs[0][0], max(need for _, need in needs)
        if fewer < figures.num and calm_s >= self._rules.calm_s:
            return Proposal(kind, figures.num, fewer, f"{fewer} would have done for {calm_s:.0f} s")
        return None

    def _needed(self, now_s: float, kind: str, figures: KindFigures) -> tuple[float, str]:
        """Return how many processes bring every figure down to its limit, and the figure that needs most."""
        nothing = KindFigures(num=figures.num, passed_s=0.0)  # before the first look
        looks = self._looks.setdefault(kind, deque([(now_s - figures.passed_s, nothing)]))
        looks.append((now_s, figures))
        while looks[0][0] <= now_s - WINDOW_S:
            looks.popleft()
        busy = sum(look.come_s for _, look in looks) / max(WINDOW_S, sum(look.passed_s for _, look in looks))
        backlog_s, lateness = min(look.backlog_s for _, look in looks), min(look.lateness for _, look in looks)
        loads = {
            f"work comes that keeps {busy:.2g} busy": busy / self._rules.busy,
            f"{backlog_s:.2g} s of work wait": figures.num * min(_MOST_AT_ONCE, backlog_s / self._rules.backlog_s),
            f"P99 of TBT at {lateness:.0%} of its objective": figures.num * min(_MOST_AT_ONCE, lateness / self._rules.lateness),
        }
        why = max(loads, key=loads.__getitem__)
        return loads[why], why


def letters_of(actors: Iterable[str]) -> str:
    """Return the letters of the stages of these actors that layouts name."""
    stages = (STAGES[stage_of(actor)] for actor in actors)
    return "".join(stage.letter for stage in stages if stage.can_scale)


def kinds_of(processes: Mapping[InstanceId, Sequence[InstanceId]]) -> dict[str, list[Sequence[InstanceId]]]:
    """Return the processes that layouts name, by the letters of their stages."""
    kinds: dict[str, list[Sequence[InstanceId]]] = {}
    for actors in processes.values():
        if letters := letters_of(actors):
            kinds.setdefault(letters, []).append(actors)
    return kinds
