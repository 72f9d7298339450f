"""Workloads and objectives by name: the sizes that the texts state, from a seed."""

from collections import Counter
from pathlib import Path

import pytest

import mmrt
from mmrt.bench.serve.load_options import settings_of
from mmrt.bench.serve.planned import plan_requests
from mmrt.bench.serve.presets import OBJECTIVES, WORKLOADS, plan_workload
from mmrt.bench.serve.slo import Slo
from mmrt.models.config import load_model_config
from mmrt_lab.sim.costs import load_costs
from mmrt_lab.sim.options import parse_sim
from mmrt_lab.sim.requests import make_sample


@pytest.mark.parametrize("name", [name for name, workload in WORKLOADS.items() if workload.parts[-1].kind == "image"])
def test_pictures_have_the_tokens_that_the_text_states(name: str) -> None:
    workload = WORKLOADS[name]
    _, shape = make_sample(load_costs("qwen2.5-vl-7b-h200").model, "image", workload.shapes)
    tokens = shape.num_tokens
    plans = plan_workload(workload, 200, 0)
    lengths = [plan.num_input_tokens + tokens * len(plan.media) for plan in plans]
    if name in ("textcaps", "pope", "mme", "textvqa", "vizwiz"):
        assert tokens == 576 and all(plan.media == ("image",) for plan in plans)  # TI14
    elif name == "mmmu-1k":  # RS8
        assert tokens == 1024 and 7900 <= min(lengths) and max(lengths) <= 9100 and tokens * len(plans[0].media) > 5000
        assert sum(lengths) / 200 == pytest.approx(8500, rel=0.01)
    elif name == "mmmu-32":  # RS11
        assert tokens == 32 and tokens * len(plans[0].media) == 5120
    elif name == "mmmu-2k":
        assert 10900 <= min(lengths) and max(lengths) <= 13100 and tokens * len(plans[0].media) == pytest.approx(9000, rel=0.03)
    elif name == "modserve":  # MS4
        counts = Counter(len(plan.media) for plan in plans)
        assert set(counts) == {0, 1, 4, 9, 16, 25} and counts[0] == pytest.approx(100, abs=20) and counts[1] > counts[9] > counts[16]


def test_a_share_of_the_tokens_is_simulated() -> None:
    model = load_costs("qwen2.5-vl-7b-h200").model
    for name, kind, whole in (("textcaps", "image", 576), ("egoschema", "video", 180 * 64)):
        counts = []
        for share in ("1", "0.5"):
            shapes = parse_sim(["--workload", name, "--token-share", share])[0].shapes
            counts.append(make_sample(model, kind, shapes)[1].num_tokens)  # type: ignore[arg-type]
        assert counts[0] >= whole and 0.4 < counts[1] / counts[0] <= 0.5


def test_videos_have_the_lengths_that_the_text_states() -> None:
    assert 480 <= WORKLOADS["mlvu"].shapes.video_s <= 600 and WORKLOADS["egoschema"].shapes.video_s == 180
    assert all(WORKLOADS[name].shapes.video_size == (224, 224) for name in ("mlvu", "egoschema"))


def test_objectives_are_those_of_the_texts() -> None:
    assert OBJECTIVES["internvl3-38b/egoschema"] == Slo(100.0, 0.7)
    assert OBJECTIVES["llava-next-7b/pope"] == Slo(8.0, 0.30) and OBJECTIVES["llava-next-7b/mme"] == Slo(8.0, 0.60)
    assert OBJECTIVES["qwen2-vl-7b/textcaps"] == Slo(8.0, 0.10) and OBJECTIVES["llava-1.5-7b/vizwiz"] == Slo(4.0, 0.08)
    assert OBJECTIVES["qwen2.5-vl-72b/mmmu-1k"].ttft_s == 10.0
    assert {name.split("/")[1] for name in OBJECTIVES} == set(WORKLOADS) - {"modserve", "mmmu-32"}


def test_a_seed_gives_the_same_workload() -> None:
    first, again, other = (plan_workload(WORKLOADS["modserve"], 30, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({plan.seed for plan in first}) == 30


def test_a_workload_takes_arrivals_of_rates_and_traces_and_keeps_its_lengths(tmp_path: Path) -> None:
    options = parse_sim(["--workload", "textcaps", "--rate", "4", "--num-requests", "20", "--objective", "qwen2-vl-7b/textcaps"])[0]
    plans = plan_requests(options)
    assert len(plans) == 20 and plans[-1].arrival_s > 0 and {plan.max_tokens for plan in plans} == {64}
    assert options.slo == Slo(8.0, 0.1) and settings_of(options)["workload"] == "textcaps" and "modalities" not in settings_of(options)
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join(f'{{"timestamp": {at * 1000}, "input_length": 9000, "output_length": 3}}' for at in range(4)))
    plans = plan_requests(parse_sim(["--workload", "textcaps", "--trace", str(trace)])[0])
    assert [plan.arrival_s for plan in plans] == [0, 1, 2, 3] and {plan.max_tokens for plan in plans} == {64}
    assert all(plan.num_input_tokens < 50 and plan.media == ("image",) for plan in plans)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "textcaps", "--image-size", "99x99"], "--image-size (99, 99): --workload textcaps has requests of its own"),
        (["--workload", "mme", "--scenario", "mixed"], "--scenario mixed: --workload mme has requests of its own"),
        (["--workload", "laion"], "argument --workload: invalid choice: 'laion'"),
        (["--objective", "gpt/mme"], "argument --objective: invalid choice: 'gpt/mme'"),
        (["--objective", "llava-1.5-7b/mme", "--slo-tbt", "1"], "--slo-tbt 1.0: --objective llava-1.5-7b/mme says TTFT and TBT"),
    ],
)
def test_what_contradicts_a_preset_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_sim(arguments)
    assert exit_.value.code == 2 and message in " ".join(capsys.readouterr().err.split())


def test_the_demo_model_takes_the_small_workloads() -> None:
    model = load_model_config(Path(mmrt.__path__[0]) / "models" / "demo")
    for name in ("visionarena", "textcaps", "modserve"):
        _, shape = make_sample(model, "image", WORKLOADS[name].shapes)
        assert shape.num_tokens * WORKLOADS[name].most_media + 1200 < model.max_context
