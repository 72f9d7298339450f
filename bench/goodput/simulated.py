"""The judge's loads, simulated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from ...runtime.config import RuntimeConfig
from ..sim.command import run_load
from ..sim.costs import Costs, Line
from ..sim.interference import stage_set, stage_sets
from ..sim.options import load_policy
from ..sim.report import Steps
from .options import GoodputOptions
from .report import Measured
from .systems import System

Measure = Callable[[float], Measured]
"""Measures the load at this rate."""


@contextmanager
def simulated(options: GoodputOptions, system: System) -> Iterator[Measure]:
    """A system that is simulated anew for each rate. Raises, when it measures: as ``run_load``."""
    assert options.costs is not None
    costs = costs_of(system.config, options.costs, apart=options.apart)
    policy = load_policy(system.config.scheduling.policy)

    def measure(rate: float) -> Measured:
        simulation, _ = run_load(options.load_at(rate), system.config, costs, policy, keeps_works=True)
        steps, works = Steps(simulation, costs), simulation.works or {}
        records = simulation.gateway.records
        good = [record for record in records if record.is_success]
        return Measured([steps.record(r) for r in records], [steps.breakdown(r, works.get(r.key, ())) for r in good])

    yield measure


def costs_of(config: RuntimeConfig, costs: Costs, *, apart: bool = False) -> Costs:
    """The costs in a run of this configuration.

    With the preset ``split`` on a GPU, encode and prefill have one half of it and decode the other (US12): each takes twice as long,
    and neither slows the other. On a CPU the stages have as many cores as was measured. ``apart``: encoder, prefill and decode have a
    device each (RS1), but for presets.
    """
    if config.scheduling.preset == "split" and costs.device != "cpu":
        return msgspec.structs.replace(
            costs,
            note=f"{costs.note} Split: encode and prefill on one half of the device, decode on the other.",
            encode={kind: _twice(line) for kind, line in costs.encode.items()},
            prefill=_twice(costs.prefill),
            decode=_twice(costs.decode),
            decode_context_s=2 * costs.decode_context_s,
            interference=_interference({"encoder", "prefill"}),
        )
    if apart and not config.scheduling.preset:
        return msgspec.structs.replace(costs, interference=_interference(set()))
    return costs


def _interference(side: set[str]) -> dict[str, dict[str, float]]:
    """Two stages of this side share its time; the others have a device each."""
    rates = {}
    for together in stage_sets(("decode", "encoder", "prefill", "video")):
        is_shared = bool(side) and side <= set(together)
        rates[stage_set(together)] = {stage: 0.5 if is_shared and stage in side else 1.0 for stage in together}
    return rates


def _twice(line: Line) -> Line:
    return Line(**{field: 2 * value for field, value in msgspec.structs.asdict(line).items()})
