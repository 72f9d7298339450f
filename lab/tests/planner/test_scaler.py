"""The scaler: what it proposes, when, and that it does not swing; the drift detector; the layouts that they advise."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.runtime.autoscale.advice import scaled
from mmrt.runtime.autoscale.demand import Demand
from mmrt.runtime.autoscale.scaler import WINDOW_S, KindFigures, Meter, Proposal, Rules, Sample, Scaler, kinds_of
from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.errors import UserError
from mmrt.runtime.stage_table import InstanceId, check_layout, processes_of
from mmrt_lab.planner.advice import Adviser, load_plan
from mmrt_lab.planner.drift import LOOKS, DriftDetector
from mmrt_lab.planner.heuristic import Division

RULES = Rules(busy=0.7, backlog_s=1.0, lateness=0.9, calm_s=60.0, most=8)
LOOK_S = 5.0


def figures(num: int, come: float = 1.0, backlog_s: float = 0.0, lateness: float = 0.0) -> dict[str, KindFigures]:
    """``come``: processes that the work which comes keeps busy."""
    return {"PD": KindFigures(num=num, passed_s=LOOK_S, come_s=come * LOOK_S, backlog_s=backlog_s, lateness=lateness)}


def at_rest(num: int, made: dict[str, float]) -> list[Proposal]:
    """The proposal after these figures have filled the window."""
    scaler = Scaler(RULES)
    return [scaler.propose(at_s, figures(num, **made)) for at_s in (5.0, 10.0)][-1]


@pytest.mark.parametrize(
    ("num", "made", "wanted", "why"),
    [
        (2, {"come": 1.8}, 3, "work comes that keeps 1.8 busy"),
        (2, {"come": 4.0}, 6, "work comes that keeps 4 busy"),
        (2, {"backlog_s": 1.4}, 3, "1.4 s of work wait"),
        (4, {"backlog_s": 30.0}, 6, "30 s of work wait"),  # at most half as many again
        (2, {"lateness": 1.2}, 3, "P99 of TBT at 120% of its objective"),
        (6, {"come": 9.0}, 8, "work comes that keeps 9 busy"),  # at most 8
    ],
)
def test_as_many_more_are_wanted_as_the_figures_need(num: int, made: dict[str, float], wanted: int, why: str) -> None:
    assert at_rest(num, made) == [Proposal("PD", num, wanted, why)]


@pytest.mark.parametrize("made", [{"come": 1.8}, {"backlog_s": 9.0}, {"lateness": 9.0}])
def test_a_look_alone_says_nothing(made: dict[str, float]) -> None:
    scaler = Scaler(RULES)  # its window has two looks
    found = [scaler.propose(at_s, figures(2, **(made if at_s % 15 == 0 else {"come": 0.9}))) for at_s in range(0, 100, 5)]
    assert found == [[]] * 20


def test_a_burst_shows_in_its_first_seconds() -> None:
    scaler = Scaler(RULES)
    assert not any(scaler.propose(at_s, figures(2, come=1.0)) for at_s in (5.0, 10.0, 15.0))
    assert scaler.propose(20.0, figures(2, come=4.0)) == [Proposal("PD", 2, 4, "work comes that keeps 2.5 busy")]
    assert scaler.propose(25.0, figures(4, come=4.0)) == [Proposal("PD", 4, 6, "work comes that keeps 4 busy")]


@pytest.mark.parametrize("made", [{"come": 2.09}, {"backlog_s": 0.99}, {"lateness": 0.89}, {"come": 9.0, "num": 8}])
def test_what_is_within_its_limits_stays(made: dict[str, Any]) -> None:
    assert at_rest(made.pop("num", 3), made) == []


def test_fewer_are_wanted_only_after_a_calm_time() -> None:
    scaler = Scaler(RULES)
    proposed = {at_s: scaler.propose(at_s, figures(4, come=1.0)) for at_s in range(0, 80, 5)}
    first = min(at_s for at_s, proposals in proposed.items() if proposals)
    assert first == 60 and proposed[first] == [Proposal("PD", 4, 2, "2 would have done for 60 s")]


def test_one_busy_look_begins_the_calm_time_anew() -> None:
    scaler = Scaler(RULES)
    for at_s in range(0, 55, 5):
        assert not scaler.propose(at_s, figures(4, come=1.0))
    assert not scaler.propose(55, figures(4, come=4.2))  # with the look before: too much for three
    proposed = [at_s for at_s in range(60, 130, 5) if scaler.propose(at_s, figures(4, come=1.0))]
    assert proposed[0] == 125, "it counts until it leaves the window"


def test_what_has_waited_for_long_is_not_forgotten() -> None:
    """Of a flood that came before the window: while it waits, none is given up."""
    scaler = Scaler(RULES)
    assert not any(scaler.propose(at_s, figures(4, come=0.0, backlog_s=0.9)) for at_s in range(0, 200, 5))


@given(st.floats(0.05, 5.0), st.integers(1, 8))
def test_a_steady_load_comes_to_rest(load: float, num: int) -> None:
    """Followed at once, with so many processes' worth of work that never changes: no proposal is taken back."""
    scaler, seen = Scaler(RULES), [num]
    for at_s in range(0, 3600, 10):
        made = {"PD": KindFigures(num=seen[-1], passed_s=10.0, come_s=10 * load)}
        seen += [proposal.wanted for proposal in scaler.propose(at_s, made)]
    ups = [after > before for before, after in zip(seen, seen[1:], strict=False)]
    assert ups in ([], [True], [False]) and load / seen[-1] <= 0.9


def sample(at_s: float, busy: Sequence[float], units: Sequence[int], **more: Any) -> Sample:
    names = [InstanceId(name) for name in ("encoder", "prefill", "prefill.1")]
    return Sample(at_s=at_s, busy_s=dict(zip(names, busy, strict=True)), units=dict(zip(names, units, strict=True)), **more)


def test_figures_of_the_time_since_the_last_look() -> None:
    kinds = kinds_of(processes_of("E+2PD"))
    assert {kind: len(those) for kind, those in kinds.items()} == {"V": 1, "E": 1, "PD": 2}
    meter = Meter(sample(100.0, (50.0, 10.0, 10.0), (1000, 100, 100)))
    found = meter.look(
        sample(110.0, (55.0, 18.0, 12.0), (2000, 300, 300), rows_left=400, tokens_left=100, tbt_p99_s=0.09, tbt_objective_s=0.1), kinds
    )
    assert found["E"] == KindFigures(num=1, passed_s=10, come_s=7.0, busy=0.5, backlog_s=2.0)
    assert found["PD"] == KindFigures(
        num=2,
        passed_s=10,
        come_s=pytest.approx(10 + 100 * 0.025),  # 400 tokens done in 10 s, and 100 that wait
        busy=0.5,
        backlog_s=pytest.approx(100 * 0.025 / 2),
        lateness=pytest.approx(0.9),
    )
    idle = meter.look(sample(120.0, (55.0, 18.0, 12.0), (2000, 300, 300), rows_left=400), kinds)
    assert idle["E"] == KindFigures(num=1, passed_s=10, busy=0.0, backlog_s=2.0)  # as a row cost before
    again = meter.look(sample(130.0, (4.0, 18.0, 12.0), (80, 300, 300)), kinds)
    assert again["E"].busy == pytest.approx(0.4)  # a new process of that name counts from 0
    with pytest.raises(ValueError, match="must be later"):
        meter.look(sample(130.0, (4.0, 18.0, 12.0), (80, 300, 300)), kinds)


def test_video_is_scaled_by_its_plans() -> None:
    kinds, video = kinds_of(processes_of("E+P+D")), InstanceId("video")
    meter = Meter(Sample(at_s=100.0, busy_s={video: 1.0}, units={video: 10}))
    found = meter.look(Sample(at_s=110.0, busy_s={video: 9.0}, units={video: 30}, video_left=40), kinds)
    assert found["V"] == KindFigures(num=1, passed_s=10, come_s=pytest.approx(24.0), busy=0.8, backlog_s=pytest.approx(16.0))
    assert Scaler(RULES).propose(110.0, found)[0][:3] == ("V", 1, 4)
    assert scaled("E+P+D", [Proposal("V", 1, 3, "")]) == "E+P+D+3V" and scaled("E+P+D+3V", [Proposal("V", 3, 1, "")]) == "E+P+D"


def test_kinds_that_share_a_stage_divide_what_waits_for_it() -> None:
    """All of a flood for each kind would ask for it twice."""
    names = [InstanceId(name) for name in ("encoder", "prefill", "prefill.1", "prefill.2")]

    def look(at_s: float, units: int, tokens_left: int) -> Sample:
        busy = {name: units / 100 for name in names}
        return Sample(at_s=at_s, busy_s=busy, units=dict.fromkeys(names, units), tokens_left=tokens_left)

    kinds = {"P": [[names[1]]], "EP": [[names[0], names[2]]], "PD": [[names[3], InstanceId("decode")]]}
    found = Meter(look(0.0, 0, 300)).look(look(10.0, 100, 900), kinds)
    for kind in kinds:
        assert found[kind].come_s == pytest.approx((100 + 200) / 100), "100 tokens done, and a third of 600 more that wait"
        assert found[kind].backlog_s == pytest.approx(900 / 3 / 100)
    (alone,) = Meter(look(0.0, 0, 300)).look(look(10.0, 100, 900), {"P": [[names[1]], [names[2]], [names[3]]]}).values()
    assert alone.come_s == pytest.approx((300 + 600) / 100) and alone.backlog_s == pytest.approx(900 / 3 / 100)


def test_a_number_that_just_does_is_not_rounded_up() -> None:
    rules = Rules(busy=0.7)
    come_s = 2.1 * WINDOW_S
    assert come_s / WINDOW_S / rules.busy > 3, "by the last bit"
    scaler = Scaler(rules)
    for at_s in (10.0, 20.0):
        assert scaler.propose(at_s, {"PD": KindFigures(num=3, passed_s=WINDOW_S, come_s=come_s)}) == []


PLANNED = Demand(num_requests=100, encode_rows=40000, prompt_tokens=30000, decode_tokens=5000)
DIVISION = Division(
    budgets={"E": 1, "P": 1, "D": 1}, seconds={"E": 10.0, "P": 30.0, "D": 40.0}, shares={"E": 1, "P": 3, "D": 4}, layouts=["E+3P+4D"]
)


def now(num: int = 100, rows: int = 400, tokens: int = 300, generated: int = 50) -> Demand:
    return Demand(num_requests=num, encode_rows=num * rows, prompt_tokens=num * tokens, decode_tokens=num * generated)


def test_a_plan_is_out_of_date_when_the_division_would_be_another() -> None:
    detector = DriftDetector(PLANNED, DIVISION)
    assert [detector.look(now(num=500)) for _ in range(9)] == [None] * 9  # more of the same
    found = [detector.look(now(rows=1600)) for _ in range(LOOKS)]
    assert found[:-1] == [None] * (LOOKS - 1) and found[-1] is not None
    assert found[-1].factors == {"E": 4.0, "P": 1.0, "D": 1.0} and found[-1].shares == {"E": 3, "P": 2, "D": 3}
    assert "encode 4, prefill 1, decode 1 times as much" in str(found[-1]) and "divided 3E 2P 3D now" in str(found[-1])
    assert detector.look(now(num=3, rows=1)) is None and detector.look(now(rows=1600)) is not None  # few requests say nothing
    assert detector.look(now()) is None and detector.look(now(rows=1600)) is None  # it has to last again


def test_media_where_a_plan_had_none_are_a_drift() -> None:
    texts = msgspec.structs.replace(PLANNED, encode_rows=0)
    detector = DriftDetector(texts, msgspec.structs.replace(DIVISION, seconds={"E": 0.0, "P": 30.0, "D": 40.0}))
    found = [detector.look(now()) for _ in range(LOOKS)][-1]
    assert found is not None and found.shares == {} and "bring media" in str(found)


@pytest.mark.parametrize(
    ("layout", "proposals", "expected"),
    [
        ("E+P+D", [("E", 1, 2)], "E+P+D+E"),
        ("E+2PD", [("E", 1, 2), ("PD", 2, 1)], "E+PD+E"),
        ("2E+3PD", [("PD", 3, 4)], "2E+4PD"),
        ("3E+P+D", [("E", 3, 1)], "E+P+D"),
    ],
)
def test_the_layout_to_set(layout: str, proposals: list[tuple[str, int, int]], expected: str) -> None:
    found = scaled(layout, [Proposal(*proposal, "") for proposal in proposals])
    assert found == expected
    check_layout(found)


def test_a_plan_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with pytest.raises(UserError, match=f"cannot read the plan {file}: No such file"):
        load_plan(file)
    file.write_text("{}")
    with pytest.raises(UserError, match="is no plan of mmrt plan --json"):
        load_plan(file)


def test_recorded_looks_at_a_live_run_give_known_advice() -> None:
    """Looks at a run of the demo model, one process of each kind, while the load rose and fell again."""
    lines = (Path(__file__).parent / "recorded_looks.jsonl").read_text().splitlines()
    looks = [(msgspec.convert(line["sample"], Sample), msgspec.convert(line["demand"], Demand)) for line in map(json.loads, lines)]
    adviser = Adviser(RuntimeConfig(), calm_s=20.0, planned=None)
    advices = [adviser.look(*look, RuntimeConfig()) for look in looks]
    layouts = [advice.layout for advice in advices]
    assert layouts[:15] == [None] * 15 and layouts[38:] == [None] * 15  # before the load has lasted, and after it
    assert layouts[15:19] == ["E+P+D+P"] * 4 and layouts[19:36] == ["E+P+D+P+D"] * 17 and layouts[36:38] == ["E+P+2D"] * 2
    assert advices[18].why == ["P: 1 → 2, 3.6 s of work wait"]


def test_the_stages_of_a_pipeline_are_not_to_be_more() -> None:
    """Such a layout would be refused; decodes can follow the load."""
    lines = (Path(__file__).parent / "recorded_looks.jsonl").read_text().splitlines()
    config = parse_config('[actors]\nlayout = "E+2P+D"\n[scheduling]\nprefill_pipeline = true')
    adviser = Adviser(config, calm_s=20.0, planned=None)
    looks = [(msgspec.convert(line["sample"], Sample), msgspec.convert(line["demand"], Demand)) for line in map(json.loads, lines)]
    assert {adviser.look(*look, config).layout for look in looks} == {None, "E+2P+2D"}
