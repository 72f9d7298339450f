"""One layout at one rate, simulated. Runs in processes of its own (``search``)."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from mmrt.bench.serve.planned import plan_requests
from mmrt.bench.serve.report import distribution
from mmrt.bench.serve.slo import Slo

from ..sim.command import run_load
from ..sim.devices import num_kv_devices
from ..sim.endpoint import gateways_busy
from ..sim.events import NS, to_ns
from ..sim.gateway import SimRecord
from ..sim.options import load_policy
from ..sim.report import Steps, judge, time_between_tokens
from ..sim.simulation import Simulation
from .options import PlanOptions

_LOOK_S = 0.5  # of the simulation, between looks for requests that have missed their objective
_NEWS_S = 0.3  # after which the controller knows of a first token


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one layout. ``is_cut``: it was ended early, since too many requests had missed their objective of TTFT; then
    ``attainment`` is the most that was possible, and times are unknown. ``missed``: the objective that more requests missed.
    ``gateways_busy``: gateways whose whole time the load takes."""

    rate: float
    num_requests: int
    attainment: float
    is_cut: bool = False
    missed: Literal["", "TTFT", "TBT"] = ""
    ttft_mean_s: float | None = None
    ttft_p90_s: float | None = None
    tbt_mean_s: float | None = None
    tbt_p99_s: float | None = None
    moved_bytes: int = 0
    gateways_busy: float | None = None


class Hopeless(Exception):
    """So many requests have missed their objective that the load fails, whatever comes of the others. ``attainment``: the most that
    is still possible."""

    def __init__(self, attainment: float) -> None:
        super().__init__(attainment)
        self.attainment = attainment


def measure(options: PlanOptions, layout: str, rate: float, *, to_the_end: bool = False) -> Outcome:
    """Simulate the load at this rate on a layout whose processes have a device each. ``to_the_end``: also once it must fail.

    Raises: as ``sim.command.run_load``.
    """
    load, config, slo = options.load_at(rate), options.config(layout), options.objective.slo
    plans = plan_requests(load)
    num_requests = len(plans)
    least = 0.0 if to_the_end else options.target
    try:
        simulation, _ = run_load(
            load,
            config,
            options.costs,
            load_policy(config.scheduling.policy),
            link=options.link,
            num_devices=num_kv_devices(layout),
            plans=plans,
            watch=lambda simulation: Watch(simulation, slo, num_requests, least),
        )
    except Hopeless as hopeless:
        return Outcome(rate=rate, num_requests=num_requests, attainment=hopeless.attainment, is_cut=True, missed="TTFT")
    return outcome_of(options, rate, simulation)


def outcome_of(options: PlanOptions, rate: float, simulation: Simulation) -> Outcome:
    """The figures of a simulation that is over."""
    records, steps = simulation.gateway.records, Steps(simulation, options.costs)
    verdicts = judge(records, steps, options.objective.slo)
    late, uneven = (sum(not verdict[part] for verdict in verdicts) for part in (0, 1))
    good = [record for record in records if record.is_success]
    ttft = distribution(ttft_s for record in good if (ttft_s := steps.ttft_s(record)) is not None)
    tbt = time_between_tokens(good, steps)
    return Outcome(
        rate=rate,
        num_requests=len(records),
        attainment=sum(map(all, verdicts)) / len(verdicts),
        missed="" if not late + uneven else "TTFT" if late >= uneven else "TBT",
        ttft_mean_s=None if ttft is None else ttft.mean,
        ttft_p90_s=None if ttft is None else ttft.p90,
        tbt_mean_s=None if tbt is None else tbt.mean,
        tbt_p99_s=None if tbt is None else tbt.p99,
        moved_bytes=simulation.devices.num_bytes,
        gateways_busy=gateways_busy(len(records), sum(record.num_tokens for record in records), _seconds(records)),
    )


def _seconds(records: Sequence[SimRecord]) -> float:
    """From the first request to the last end."""
    return (max(record.end_ns for record in records) - min(record.sent_ns for record in records)) / NS


class Watch:
    """Looks now and then for requests that are past their objective of TTFT without a token. Raises: Hopeless."""

    def __init__(self, simulation: Simulation, slo: Slo, num_requests: int, target: float) -> None:
        self._simulation, self._num_requests, self._target = simulation, num_requests, target
        self._past_ns = to_ns(slo.ttft_s + _NEWS_S)
        self._missed: set[int] = set()
        self._look()

    def _look(self) -> None:
        queue, requests = self._simulation.queue, self._simulation.controller.state.requests
        for client in self._simulation.gateway.sent_before(queue.now_ns - self._past_ns):
            request = requests.get(client.key)
            if not client.record.stretches and (request is None or not request.answer.committed):
                self._missed.add(client.key)
        attainment = (self._num_requests - len(self._missed)) / self._num_requests
        if attainment < self._target:
            raise Hopeless(attainment)
        queue.after(to_ns(_LOOK_S), self._look)
