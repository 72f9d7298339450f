"""Cost models and configurations for tests: the demo model's shapes with made times."""

from functools import cache
from pathlib import Path
from typing import Any

import mmrt
from mmrt.bench.serve.load_options import LoadOptions
from mmrt.bench.serve.planned import plan_requests
from mmrt.models.architecture import ModelConfig
from mmrt.models.config import load_model_config
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt_lab.sim.command import make_load, run
from mmrt_lab.sim.costs import Costs, Delays, Line, Overheads
from mmrt_lab.sim.links import Link
from mmrt_lab.sim.loads import Load
from mmrt_lab.sim.options import parse_sim
from mmrt_lab.sim.requests import Requests
from mmrt_lab.sim.simulation import Simulation, simulated_limits

INTERFERENCE = {
    "decode+encoder": {"decode": 0.6, "encoder": 0.7},
    "decode+prefill": {"decode": 0.7, "prefill": 0.8},
    "decode+video": {"decode": 0.9, "video": 0.5},
}

VARIED: dict[str, Any] = dict(
    alone=Delays(ingress_s=[0.002, 0.004]),
    beside=Delays(ingress_s=[0.004, 0.005, 0.009], message_s=[0.0002, 0.0007], tick_s=[0.0005]),
    egress=[0.001, 0.002, 0.006] * 8 + [None],
    spreads={
        "decode": {"decode": [0.7, 0.9, 1.0, 1.4]},
        "decode+prefill": {"decode": [0.5, 1.5], "prefill": [0.8, 1.2]},
        "prefill": {"prefill": [0.9, 1.1]},
    },
)
"""Changes of ``make_costs``: of a machine whose times vary."""


@cache
def demo_model() -> ModelConfig:
    return load_model_config(Path(mmrt.__path__[0]) / "models" / "demo")


def make_costs(**changes: Any) -> Costs:
    values: dict[str, Any] = dict(
        name="made",
        origin="measured",
        model=demo_model(),
        device="cpu",
        num_cores=2,
        threads=dict.fromkeys(("video", "encoder", "prefill", "decode"), 1),
        environment=None,
        analyse=dict.fromkeys(("image", "video", "audio"), Line(fixed_s=0.002)),
        preprocess=dict.fromkeys(("image", "video", "audio"), Line(fixed_s=0.001, per_unit_s=1e-6)),
        encode=dict.fromkeys(("image", "video", "audio"), Line(fixed_s=0.004, per_unit_s=2e-5)),
        prefill=Line(fixed_s=0.004, per_unit_s=2e-5),
        decode=Line(fixed_s=0.004, per_unit_s=2e-4),
        decode_context_s=1e-6,
        overheads=Overheads(ingress_s=0.003, egress_s=0.001, message_s=0.0002, tick_s=0.0003),
        interference=INTERFERENCE,
    )
    return Costs(**(values | changes))


NOTHING = Line()
FREE: dict[str, Any] = dict(
    analyse={}, preprocess={}, encode={}, prefill=NOTHING, decode=NOTHING, decode_context_s=0.0, overheads=Overheads(), interference={}
)


def options_of(*arguments: str) -> tuple[LoadOptions, RuntimeConfig]:
    """The load and the configuration of a command line."""
    options, config, *_ = parse_sim([*arguments, "--costs", "demo-cpu"])
    return options, config


def simulate_costs(costs: Costs, *arguments: str, link: Link | None = None) -> tuple[Simulation, Load]:
    """A simulation with these costs, run to its end."""
    options, config = options_of(*arguments)
    requests, plans = Requests(costs, options.shapes, config.media), plan_requests(options)
    load = make_load(options, plans)
    simulation = Simulation(config, costs, simulated_limits(config, costs), keeps_works=True, link=link)
    run(simulation, load, requests)
    return simulation, load
