"""The gateways as a stage: what a load asks of them, and what reports say of it."""

import io

import pytest
from rich.console import Console

from mmrt.actors.gateway.watching.own_load import FULL
from mmrt.bench.render import show_report
from mmrt.bench.serve.report import Report
from mmrt_lab.planner.measure import Outcome
from mmrt_lab.planner.report import LayoutReport, _endpoint, _rate_row
from mmrt_lab.sim.command import run_load
from mmrt_lab.sim.costs import Overheads
from mmrt_lab.sim.delays import DrawnDelays
from mmrt_lab.sim.endpoint import REQUEST_S, TOKEN_S, gateways_busy, gateways_needed, in_words
from mmrt_lab.sim.events import EventQueue
from mmrt_lab.sim.options import parse_sim
from mmrt_lab.sim.report import make_report

from .made_costs import make_costs

ANSWERED = {"demo-cpu": 191, "small-cpu": 16}  # requests a second, of 64 tokens, that 16 cores answer (measurements.md)


@pytest.mark.parametrize(
    ("costs", "num_cores", "num_gateways"),
    [("demo-cpu", 16, 2), ("demo-cpu", 32, 3), ("demo-cpu", 64, 6), ("small-cpu", 16, 1), ("small-cpu", 32, 1), ("small-cpu", 64, 1)],
)
def test_gateways_for_what_a_machine_answers(costs: str, num_cores: int, num_gateways: int) -> None:
    rate = ANSWERED[costs] * num_cores // 16
    busy = gateways_busy(rate, 64 * rate, 1.0)
    assert busy == pytest.approx(rate * (REQUEST_S + 63 * TOKEN_S)) and gateways_needed(busy) == num_gateways
    assert busy <= FULL * num_gateways and (num_gateways == 1 or busy > FULL * (num_gateways - 1))


def test_what_is_said_of_it() -> None:
    assert in_words(0.1, 1) == "endpoint: 10% of the time of the gateway"
    assert in_words(1.2, 2) == "endpoint: 60% of the time of each of 2 gateways"
    assert in_words(1.0, 1) == 'endpoint: 100% of the time of the gateway: it is the limit, actors.layout = "2G+…" has more gateways'
    assert in_words(9.0, 8) == "endpoint: 112% of the time of each of 8 gateways: it is the limit, and a run has no more gateways"
    assert gateways_busy(0, 0, 0.0) == 0.0 and gateways_needed(0.0) == 1


def simulated(layout: str) -> Report:
    load = "--scenario steady --rate 1000 --num-requests 200 --link 10 --costs demo-cpu".split()
    options, config, costs, policy, _ = parse_sim([*load, "--layout", layout])
    simulation, load_ = run_load(options, config, costs, policy, link=options.link, num_devices=8)
    return make_report(options, config, costs, simulation, load_)


def test_sixteen_cores_need_two_gateways_for_the_demo_model() -> None:
    """On eight devices of the two cores that the costs were measured on. With one, requests wait for their way in as well."""
    one, two = simulated("8EPD"), simulated("2G+8EPD")
    assert one.simulated is not None and "it is the limit" in one.simulated.endpoint
    assert two.simulated is not None and two.simulated.endpoint.endswith("of each of 2 gateways")
    assert two.groups[0].requests_per_s > 1.1 * one.groups[0].requests_per_s
    show_report(Console(file=(shown := io.StringIO()), width=200), one)
    assert one.simulated.endpoint in shown.getvalue()


def test_two_gateways_take_requests_side_by_side() -> None:
    queue, costs = EventQueue(), make_costs(overheads=Overheads(ingress_s=0.003))
    delays = DrawnDelays(costs, queue, lambda: False, seed=0, num_gateways=2)
    assert [delays.in_ns(0, 0) - queue.now_ns for _ in range(4)] == [3_000_000, 3_000_000, 6_000_000, 6_000_000]


def test_a_plan_says_from_which_rate_on_one_gateway_is_the_limit() -> None:
    def planned(busy: float | None) -> LayoutReport:
        outcome = Outcome(rate=100.0, num_requests=10, attainment=1.0, gateways_busy=busy)
        exact = {"fails": None, "is_exact": True, "rank": 1, "capacity": 1.0}
        return LayoutReport(layout="8EPD", is_candidate=True, goodput=100.0, outcomes=[outcome], **exact)  # type: ignore[arg-type]

    assert _rate_row(planned(1.4))[-1] == "2" and _rate_row(planned(None))[-1] == ""
    assert _endpoint(planned(0.7)) == _endpoint(planned(None)) == ""
    assert _endpoint(planned(1.4)) == (
        '\nthe endpoint is the limit of 8EPD with one gateway, from 50 requests/s on: actors.layout = "2G+…"'
    )
