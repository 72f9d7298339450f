"""The judge's loads, simulated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mmrt.bench.serve.options import Options

from ..sim.command import run_load
from ..sim.loads import Stall
from ..sim.options import load_policy
from ..sim.report import Steps, stall_run
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
        simulation, done = run_load(load, system.config, costs, policy, keeps_works=True, link=link)
        steps, works = Steps(simulation, costs), simulation.works or {}
        records = simulation.gateway.records
        for record in records:
            steps.cut_short(record)
        good = [record for record in records if record.is_success]
        stall = stall_run(done, records, steps) if isinstance(done, Stall) else None
        return Measured([steps.record(r) for r in records], [steps.breakdown(r, works.get(r.key, ())) for r in good], stall)

    yield measure
