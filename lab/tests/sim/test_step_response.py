"""The response of ``auto`` to a load that comes and goes at once: the figure of lab/docs/experiments.md, in numbers."""

from collections import defaultdict
from pathlib import Path

import mmrt
from mmrt_lab.sim.command import main, run_load
from mmrt_lab.sim.options import parse_sim
from mmrt_lab.sim.report import Steps

STEP = Path(mmrt.__path__[0]) / "lab" / "step"
OBJECTIVE_S, COMES_S = 0.1, 15
LOAD = ["--config", str(STEP / "run.toml"), "--trace", str(STEP / "load.jsonl"), "--costs", "qwen2.5-vl-32b-h200"]


def worst(*more: str) -> dict[int, float]:
    """The longest time between tokens of each second of the load."""
    options, config, costs, policy, _ = parse_sim([*LOAD, *more])
    simulation, _ = run_load(options, config, costs, policy)
    steps, found = Steps(simulation, costs), defaultdict(float)
    records = [steps.record(record) for record in simulation.gateway.records]
    begin_s = min(record.scheduled_s for record in records)
    for record in records:
        for time_s, tbt_s in record.timed_tbts():
            found[int(time_s - begin_s)] = max(found[int(time_s - begin_s)], tbt_s)
    return found


def test_auto_holds_p99_through_a_step_in_load() -> None:
    """Eight streams; from 15 to 75 s also five prompts of 4,000 tokens in two seconds."""
    seconds = worst()
    assert max(seconds.values()) <= 1.25 * OBJECTIVE_S
    busy = [seconds[at_s] for at_s in range(COMES_S + 3, 75)]
    assert max(busy) <= OBJECTIVE_S, "within the bound after 3 s"
    assert max(busy) < 1.05 * min(busy), "no oscillation"
    assert max(seconds[at_s] for at_s in range(78, 88)) < 0.02, "and back"
    assert worst("--policy", "unified", "--num-requests", "20")[COMES_S + 3] > 2 * OBJECTIVE_S, "the load needs it"


def test_the_picture_of_a_load(tmp_path: Path) -> None:
    path = tmp_path / "step.png"
    assert main([*LOAD, "--num-requests", "2", "--max-tokens", "8", "--slo-ttft", "4", "--slo-tbt", "0.1", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main([*LOAD, "--num-requests", "2", "--max-tokens", "8", "--plot", str(tmp_path / "step.nothing")]) == 1
