"""Simulated pipelines of prefill (RS1, RS6): the chunks of a prompt take as long as the slowest way through the stages says."""

import msgspec
import pytest

from mmrt.bench.serve.planned import plan_requests
from mmrt.lab.tests.sim.made_costs import FREE, make_costs, options_of
from mmrt_lab.sim.command import make_load, run
from mmrt_lab.sim.costs import Line
from mmrt_lab.sim.links import Link
from mmrt_lab.sim.report import Steps
from mmrt_lab.sim.requests import Requests
from mmrt_lab.sim.simulation import Simulation, simulated_limits

CHUNK, NUM_CHUNKS, TOKEN_S = 64, 8, 0.001


LINK = Link()


def ttfts_of(num_requests: int, num_ranks: int, link: Link | None = LINK) -> list[float]:
    """The TTFT of prompts of eight chunks and a token that come at once, sorted: ``num_ranks`` stages, each with a device of its own;
    without a link on one CPU, where prefill draws first tokens."""
    costs = make_costs(**(FREE | dict(prefill=Line(per_unit_s=TOKEN_S))))
    load = ("--num-requests", f"{num_requests}", "--concurrency", f"{num_requests}", "--max-tokens", "2", "--no-caches")
    options, config = options_of(*load, "--layout", f"E+{num_ranks}P+D", f"--input-tokens={CHUNK * NUM_CHUNKS + 1}")
    scheduling = msgspec.structs.replace(config.scheduling, prefill_pipeline=num_ranks > 1, prefill_budget_tokens=CHUNK)
    config = msgspec.structs.replace(config, scheduling=scheduling)
    simulation = Simulation(config, costs, simulated_limits(config, costs), link=link)
    run(simulation, make_load(options, plan_requests(options)), Requests(costs, options.shapes, config.media))
    steps = Steps(simulation, costs)
    return sorted(steps.ttft_s(record) or 0.0 for record in simulation.gateway.records)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_prompt_takes_a_chunk_at_each_stage_and_the_others_behind_it(num_ranks: int) -> None:
    chunk_s = CHUNK * TOKEN_S
    assert ttfts_of(1, 1) == pytest.approx([NUM_CHUNKS * chunk_s], abs=1e-6)
    assert ttfts_of(1, num_ranks) == pytest.approx([(NUM_CHUNKS + num_ranks - 1) * chunk_s / num_ranks], abs=1e-6)


def test_the_last_stage_draws_the_first_token_on_a_cpu() -> None:
    """With a chunk of the prompt's last token, behind the eighth."""
    assert ttfts_of(1, 2, link=None) == pytest.approx([((NUM_CHUNKS + 1) * CHUNK + 1) * TOKEN_S / 2], abs=1e-6)


def test_several_prompts_keep_all_stages_busy() -> None:
    """The last of three ends when all of their chunks have passed the first stage, and one the second."""
    assert ttfts_of(3, 2)[-1] == pytest.approx((3 * NUM_CHUNKS + 1) * CHUNK * TOKEN_S / 2, rel=0.02)
