"""A layout to set after each look at a run, with the reasons (pure; MS4). Called by the supervisor and by ``mmrt advise``."""

from collections.abc import Sequence
from typing import NamedTuple

from ..config.runtime_config import RuntimeConfig
from ..stage_table import MAX_INSTANCES, STAGES, expand_layout, format_layout
from .scaler import KindFigures, Meter, Proposal, Rules, Sample, Scaler, kinds_of, letters_of

_BACKLOG_SHARE = 0.5  # of the tightest objective of TTFT


class Advice(NamedTuple):
    """``figures``: of each kind of process since the look before. ``layout``: to set, None if the present one is right. ``why``: for
    each kind that would change; without a layout for each that would grow if cores were idle."""

    figures: dict[str, KindFigures]
    layout: str | None = None
    why: Sequence[str] = ()


class Adviser:
    """Turns samples of a run into advice."""

    def __init__(self, config: RuntimeConfig, calm_s: float, most: int = MAX_INSTANCES) -> None:
        """``calm_s``: for which fewer processes must have done before they are proposed. ``most``: processes of each kind."""
        slos = (config.slo.text, config.slo.image, config.slo.video, config.slo.audio)
        backlog_s = _BACKLOG_SHARE * min(slo.ttft_ms for slo in slos) / 1000
        self._scaler = Scaler(Rules(backlog_s=backlog_s, calm_s=calm_s, most=most))
        self._meter: Meter | None = None
        self._least_idle = config.autoscale.idle_cores

    def look(self, sample: Sample, config: RuntimeConfig) -> Advice:
        """``config``: of the run now. The first look has no figures: they are of the time since the look before."""
        if self._meter is None:
            self._meter = Meter(sample)
            return Advice({})
        figures = self._meter.look(sample, kinds_of(config.processes))
        proposals = [one for one in self._scaler.propose(sample.at_s, figures) if not _is_set(config, one.kind)]
        if sample.idle_cores is not None and sample.idle_cores < self._least_idle:
            kept = [one for one in proposals if one.wanted > one.num]
            proposals = [one for one in proposals if one.wanted < one.num]
            if not proposals:
                return Advice(figures, None, [f"{_words(one)}, but {sample.idle_cores:.2g} cores are idle" for one in kept])
        if not proposals:
            return Advice(figures)
        return Advice(figures, scaled(config.actors.layout, proposals), list(map(_words, proposals)))


def _is_set(config: RuntimeConfig, kind: str) -> bool:
    """Return whether a live run cannot change the number of such processes: the stages of a pipeline."""
    return config.scheduling.prefill_pipeline and STAGES["prefill"].letter in kind


def _words(proposal: Proposal) -> str:
    return f"{proposal.kind}: {proposal.num} → {proposal.wanted}, {proposal.why}"


def scaled(layout: str, proposals: Sequence[Proposal]) -> str:
    """Return the layout with these numbers of processes of each kind: the last ones of a kind go, new ones come behind all others, so
    that those keep their names."""
    found = expand_layout(layout)
    for proposal in proposals:
        mine = [place for place, process in enumerate(found) if letters_of(process.stages) == proposal.kind]
        found += [found[mine[0]]] * (proposal.wanted - len(mine))
        for place in reversed(mine[proposal.wanted :]):
            del found[place]
    return format_layout(found)
