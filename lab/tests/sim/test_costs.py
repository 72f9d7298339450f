"""Cost models: lines, rates of stages together, files and their refusal, rooflines, fits."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.bench.serve.report import distribution
from mmrt.lab.tests.sim.made_costs import make_costs
from mmrt.runtime.bus.messages import MediaItem, PageRun
from mmrt.runtime.bus.plans import Analyse, Encode, EncodePart, Prefill, PrefillChunk
from mmrt.schema.media import SegmentShape
from mmrt_lab.sim.answers import Answer, summarise
from mmrt_lab.sim.costs import (
    CONTEXT_QUANTUM,
    SHIPPED,
    Answers,
    CostsError,
    Line,
    load_costs,
    plan_seconds,
    shipped_costs,
    step_seconds,
)
from mmrt_lab.sim.fits import Sample, Work, fit_interference, fit_line, fit_spreads
from mmrt_lab.sim.interference import Interference
from mmrt_lab.sim.report import weighted_distribution
from mmrt_lab.sim.roofline import PEAKS, renew, roofline
from mmrt_lab.sim.step_log import StepLog, pauses, weights

RUN = PageRun([], [])


def part(kind: Any, num_rows: int) -> EncodePart:
    return EncodePart(0, 1, SegmentShape(kind, (1, 1, num_rows), num_rows, 4, num_rows // 4), RUN, RUN)


def test_a_stage_saturates_where_what_grows_takes_as_long_as_what_is_fixed() -> None:
    """TI14. A step of decode over 8 sequences takes half a second more than one over 4, so over 12 as long more as one over one."""
    line = Line(fixed_s=1.0, per_unit_s=0.1, least_s=2.0)
    assert line.saturation == pytest.approx(30)
    assert line.seconds(30) - line.fixed_s == pytest.approx(line.fixed_s + line.least_s)
    assert Line(points=((1, 1.5), (4, 1.6), (8, 2.1))).saturation == pytest.approx(12)
    assert Line(fixed_s=1.0).saturation is None and Line(points=((1, 1.0), (2, 0.9))).saturation is None


def test_the_time_of_a_plan() -> None:
    line = Line(fixed_s=1.0, per_unit_s=0.1, per_square_s=0.01, least_s=2.0)
    assert line.seconds(10) == 3.0 and line.seconds(50, 100) == 1.0 + 5.0 + 1.0
    costs = make_costs(prefill=line, encode={"image": line, "audio": Line(fixed_s=7.0)}, analyse={"image": Line(per_unit_s=2.0)})
    chunks = [PrefillChunk(0, 1, 0, 10, 40, []), PrefillChunk(1, 1, 0, 0, 20, [])]
    assert plan_seconds(costs, Prefill(chunks)) == pytest.approx(1 + 5 + 0.01 * ((1600 - 100) / 2 + 200))
    encode = Encode([part("image", 30), part("audio", 5), part("image", 20)])
    assert plan_seconds(costs, encode) == pytest.approx(1 + 5 + 0.01 * (900 + 400) + 7)
    media = MediaItem("image", 99, work=4)
    assert plan_seconds(costs, Analyse(0, 1, 0, media, RUN)) == 8.0
    with pytest.raises(CostsError, match="no line to analyse video; there are image"):
        plan_seconds(costs, Analyse(0, 1, 0, MediaItem("video", 99), RUN))
    steps = [step_seconds(costs, 3, context) for context in (0, CONTEXT_QUANTUM - 1, CONTEXT_QUANTUM)]
    assert steps[0] == steps[1] < steps[2]


def test_a_line_through_points() -> None:
    line = Line(fixed_s=9.0, per_square_s=0.5, points=((1, 2.0), (4, 2.0), (8, 6.0)))
    assert [line.seconds(units) for units in (1, 3, 4, 5, 8, 10)] == [2.0, 2.0, 2.0, 3.0, 6.0, 8.0]
    assert line.seconds(4, 2) == 3.0
    assert Line(points=((2, 3.0),)).seconds(5) == 3.0
    falling = Line(points=((1, 3.0), (2, 1.0)))
    assert falling.seconds(1.5) == 2.0 and falling.seconds(5) == 1.0


def test_rates_of_stages_together() -> None:
    interference = Interference(make_costs())
    assert interference.rates({"decode": 1}) == {"decode": 1.0}
    assert interference.rates({"decode": 1, "encoder": 1}) == {"decode": 0.6, "encoder": 0.7}
    assert interference.rates({"encoder": 1, "prefill": 1}) == {"encoder": 1.0, "prefill": 1.0}  # a core each
    three = interference.rates({"decode": 1, "encoder": 1, "video": 1})  # two cores for three threads, and what pairs differ from that
    assert three == pytest.approx({"decode": 2 / 3 * 0.6 * 0.9, "encoder": 2 / 3 * 0.7, "video": 2 / 3 * 0.5})
    two = interference.rates({"decode": 1, "encoder": 2})
    assert two == pytest.approx({"decode": 0.6 * 2 / 3, "encoder": 0.7 * 2 / 3})


def test_threads_share_cores_by_niceness() -> None:
    """Of Linux' weights: 1 for niceness 0, 1 / 1.25^10 = 0.107 for 10. On two cores the first gets one of its own."""
    costs = make_costs(interference={}, nice={"encoder": 10, "video": 10})
    rates = Interference(costs).rates
    assert rates({"decode": 1, "encoder": 1}) == {"decode": 1.0, "encoder": 1.0}
    assert rates({"decode": 1, "encoder": 1, "video": 1}) == pytest.approx({"decode": 1.0, "encoder": 0.5, "video": 0.5})
    one_core = Interference(make_costs(interference={}, nice={"encoder": 10}, num_cores=1)).rates
    assert one_core({"decode": 1, "encoder": 1}) == pytest.approx({"decode": 1 / 1.107374, "encoder": 0.107374 / 1.107374}, rel=1e-5)


def test_shipped_costs_load_and_rooflines_are_what_is_computed() -> None:
    names = shipped_costs()
    assert {"demo-cpu", "small-cpu", "qwen2.5-vl-3b-h200", "qwen2.5-vl-7b-h200", "qwen2.5-vl-32b-h200"} <= set(names)
    host = load_costs("demo-cpu")
    for name in names:
        costs = load_costs(name)
        assert costs.name == name
        if costs.origin == "roofline":
            assert costs == roofline(name, costs.model, PEAKS[costs.device], host)
            assert costs.environment is None and costs.title.endswith("(roofline, never measured)")
        else:
            assert costs.environment is not None and costs.title == name


def test_rooflines_are_written_again_as_they_are(tmp_path: Path) -> None:
    renew(tmp_path)
    written = {file.stem: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(written) == {name for name in shipped_costs() if load_costs(name).origin == "roofline"}
    assert all((SHIPPED / f"{name}.json").read_bytes() == data for name, data in written.items())


def test_a_roofline_by_hand() -> None:
    """Qwen2.5-VL-7B: 6.5e9 weights in its layers, 0.54e9 in its output; 28 layers of 2 x 4 x 128 values per cached token."""
    costs = load_costs("qwen2.5-vl-7b-h200")
    assert costs.prefill.per_unit_s == pytest.approx(2 * 6.525e9 / 989e12, rel=0.01)
    assert costs.decode.least_s == pytest.approx(2 * (6.525e9 + 0.545e9) / 4.8e12, rel=0.01)
    assert costs.decode_context_s == pytest.approx(28 * 2 * 4 * 128 * 2 / 4.8e12, rel=0.01)
    assert costs.prefill.per_square_s == pytest.approx(4 * 3584 * 28 / 989e12)
    assert costs.interference["decode+encoder+video"] == {"decode": 0.5, "encoder": 0.5, "video": 1.0}
    num_rows = 360 * (224 // 14) ** 2 // 2  # of 3 minutes at 2 frames/s
    assert costs.preprocess["video"].seconds(num_rows) == pytest.approx(360 * 224 * 224 * 7.2e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": Line(fixed_s=-0.5)}, "prefill.fixed_s is -0.5, it must be at least 0"),
        ({"encode": {"image": Line(per_unit_s=float("inf"))}}, "is no cost file|encode.image.per_unit_s is inf"),
        ({"decode": Line(points=((1, 0.1), (2, -0.5)))}, "decode.points 1 is -0.5, it must be at least 0"),
        (
            {"decode": Line(points=((4, 0.1), (2, 0.2)))},
            "the units of decode.points must be at least 0, and rise from each to the next",
        ),
        ({"decode": Line(points=((-2, 0.1),))}, "the units of decode.points must be at least 0"),
        ({"decode_context_s": -1.0}, "decode_context_s is -1.0, it must be at least 0"),
        ({"interference": {"decode+video": {"decode": 0.0}}}, "the rate of decode is 0.0, it must be above 0"),
        ({"spreads": {"decode": {"decode": [1.0, 0.0]}}}, "spreads of decode: the factors of decode must be above 0, and at least one"),
        ({"egress": [0.001, -1.0]}, "egress 1 is -1.0, it must be at least 0"),
        ({"interference": {"decode+video": {"prefill": 0.5}}}, "a rate of prefill, which is not one of them"),
        ({"answers": Answers(kept=[None, -1])}, "answers.kept 1 is -1, it must be at least 0"),
        ({"answers": Answers(growth=-0.5)}, "answers.growth is -0.5, it must be at least 0"),
        ({"num_cores": 0}, "num_cores is 0, it must be at least 1"),
        ({"format_version": 99}, "has format 99, this version reads 3"),
    ],
)
def test_bad_cost_files_are_refused_with_value_and_limit(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(msgspec.json.encode(make_costs(**change)))
    with pytest.raises(CostsError, match=message):
        load_costs(str(file))


def test_other_files_are_no_costs(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"name": 3}')
    with pytest.raises(CostsError, match="a.json is no cost file"):
        load_costs(str(tmp_path / "a.json"))
    for name in ("nothing", str(tmp_path / "absent.json")):
        with pytest.raises(CostsError, match="there are demo-cpu, "):
            load_costs(name)


def test_what_answers_have_in_common() -> None:
    """A change in the last tokens comes from the cut there, and is none of the answer's."""
    found = [Answer(96, 96, 0), Answer(96, 94, 5), Answer(96, 0, 144), Answer(96, 48, 48)]
    assert summarise(found) == Answers(kept=[None, None, 0, 48], growth=192 / 144)
    assert summarise(found[:2]) == Answers(kept=[None, None])


def test_a_line_is_found_again() -> None:
    line = Line(fixed_s=0.01, per_unit_s=2e-5, per_square_s=3e-9)
    sizes = [(16, 128.0), (256, 32768.0), (1024, 524288.0), (300, 90000.0)]
    rng = np.random.default_rng(3)
    noisy = [Sample(u, s, line.seconds(u, s) * (1 + rng.normal(0, 0.01))) for u, s in sizes for _ in range(30)]
    noisy += [Sample(16, 128.0, 5.0)] * 3  # a stray pause
    found = fit_line(noisy)
    assert [found.fixed_s, found.per_unit_s, found.per_square_s] == pytest.approx([0.01, 2e-5, 3e-9], rel=0.3)
    falling = fit_line([Sample(10, 0, 2.0), Sample(20, 0, 1.0)])
    assert falling.per_unit_s == 0 and 1 < falling.fixed_s < 2
    alike = fit_line([Sample(10, 0, 2.0)] * 3)
    assert (alike.fixed_s, alike.per_unit_s) == (0, pytest.approx(0.2))  # of a plan of twice the size twice the time
    with pytest.raises(ValueError, match="nothing to fit"):
        fit_line([])


def test_rates_are_found_again() -> None:
    """Works of two stages, some alone, some together at rates 0.5 and 0.8; an encoder that always stops halfway through a step."""
    works, at_ns = [], 0
    for _ in range(60):
        works.append(Work("decode", at_ns, at_ns + 100_000_000, 0.05 * 0.5 + 0.05))  # half of it beside the encoder
        works.append(Work("encoder", at_ns, at_ns + 50_000_000, 0.05 * 0.8))
        works.append(Work("encoder", at_ns + 200_000_000, at_ns + 260_000_000, 0.06))
        at_ns += 300_000_000
    found = fit_interference(works, Interference(make_costs(interference={})).rates)
    assert list(found) == ["decode+encoder"]
    assert found["decode+encoder"] == pytest.approx({"decode": 0.5, "encoder": 0.8}, abs=0.03)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), max_size=12))
def test_a_weighted_distribution_is_that_of_the_expanded_values(values: list[tuple[int, int]]) -> None:
    mine = weighted_distribution(np.array([1_000_000 * v for v, _ in values], np.int64), np.array([n for _, n in values], np.int64))
    theirs = distribution(v / 1000 for v, n in values for _ in range(n))
    assert (mine is None) == (theirs is None)
    if mine is not None and theirs is not None:
        for field in mine.__struct_fields__:
            assert getattr(mine, field) == pytest.approx(getattr(theirs, field))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8), st.data())
def test_a_step_log_is_its_commits(runs: list[tuple[int, int, int]], data: st.DataObject) -> None:
    log, commits = StepLog(100), [100]
    for wait, more, gap in runs:
        log.add(commits[-1] + wait, more, gap)
        commits += [commits[-1] + wait + number * gap for number in range(more + 1)]
    assert log.commits().tolist() == commits[1:] and log.num_steps == len(commits) - 1 and log.last_ns == commits[-1]
    first = data.draw(st.integers(0, log.num_steps - 1))
    stretches = [(first, data.draw(st.integers(first, log.num_steps - 1)))]
    if stretches[0][1] + 1 < log.num_steps:
        stretches.append((log.num_steps - 1, log.num_steps - 1))
    tokens = [commits[1 + step] for a, b in stretches for step in range(a, b + 1)]
    counted = np.repeat(log.gaps(), weights(log.num_steps, [stretches])).tolist() + pauses(log.commits(), stretches)
    assert sorted(counted) == sorted(b - a for a, b in pairwise(tokens))


def test_steps_after_a_pause_tell_nothing_of_others() -> None:
    works = [Work("decode", at * 10**7, at * 10**7 + 10**6 * (3 if at % 2 else 1), 0.001, is_first=at % 2 == 1) for at in range(400)]
    assert fit_spreads(works, lambda counts: dict.fromkeys(counts, 1.0)) == {"decode": {"decode": [1.0] * 100}}
