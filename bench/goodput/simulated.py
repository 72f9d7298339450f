"""The judge's loads, simulated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..serve.options import Options
from ..sim.command import run_load
from ..sim.options import load_policy
from ..sim.report import Steps
from .devices import costs_of, link_of
from .options import GoodputOptions
from .report import Measured
from .systems import System

Measure = Callable[[Options], Measured]
"""Measures this load."""


@contextmanager
def simulated(options: GoodputOptions, system: System) -> Iterator[Measure]:
    """A system that is simulated anew for each load. Raises, when it measures: as ``run_load``."""
    assert options.costs is not None
    costs, link = costs_of(system.config, options.costs), link_of(system.config, apart=options.apart)
    policy = load_policy(system.config.scheduling.policy)

    def measure(load: Options) -> Measured:
        simulation, _ = run_load(load, system.config, costs, policy, keeps_works=True, link=link)
        steps, works = Steps(simulation, costs), simulation.works or {}
        records = simulation.gateway.records
        good = [record for record in records if record.is_success]
        return Measured([steps.record(r) for r in records], [steps.breakdown(r, works.get(r.key, ())) for r in good])

    yield measure
