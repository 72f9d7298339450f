"""The facts that policies get: of requests, also after a crash of the controller and from older journals, and of costs."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.runtime.bus import messages as m
from mmrt.runtime.controller.plans.planner import make_view
from mmrt.runtime.controller.plans.policy_calls import AGED_S, RANK_S
from mmrt.runtime.controller.recovery import recover
from mmrt.runtime.controller.rows.lifecycle import preempt
from mmrt.runtime.controller.scheduling.costs import CostModel, Costs
from mmrt.runtime.controller.scheduling.facts import Cost, Facts, Objective, kind_of
from mmrt.runtime.controller.scheduling.policy import POLICIES, UNIFIED
from mmrt.runtime.controller.scheduling.slack import OVERDUE, Slack
from mmrt.runtime.controller.scheduling.types import Candidate, StepLimits, StepPlan, View
from mmrt.runtime.controller.state.effects import WriteJournal
from mmrt.runtime.controller.state.records import JournalRecord, JournalState, Submitted
from mmrt.runtime.stage_table import InstanceId
from mmrt.schema.media import ItemShape, MediaKind, SegmentShape
from mmrt.schema.rows import Phase
from mmrt.tests.runtime.controller.test_machine import IMAGE, KEY, SHAPE, Driver, image, sent, text
from mmrt.tests.runtime.controller.test_recovery import remains

# of requests


@pytest.mark.parametrize(
    ("media", "kind"),
    [([], "text"), (["image"], "image"), (["audio", "image"], "image"), (["image", "video", "audio"], "video"), (["audio"], "audio")],
)
def test_a_request_is_of_the_kind_of_its_most_demanding_medium(media: list[MediaKind], kind: str) -> None:
    assert kind_of(media) == kind


def test_a_policy_knows_when_a_request_came_and_what_it_is_promised() -> None:
    objectives = {"text": Objective(1.0, 0.1), "image": Objective(2.0, 0.2)}
    driver = Driver(objectives=objectives)
    driver.now = 150.0
    driver.submit(image(priority=-2))
    driver.now = 153.0
    driver.receive("gateway", m.Filled(1, KEY))
    driver.tick()
    (seen,) = make_view(driver.state).requests
    assert (seen.arrived_s, seen.kind, seen.objective, seen.priority) == (150.0, "image", Objective(2.0, 0.2), -2)


def test_what_is_left_of_a_request() -> None:
    driver = Driver(prefill_budget=2)
    driver.submit(image())
    (request,) = driver.state.live()
    assert (request.tokens_left, request.rows_left, request.is_partial) == (5, 0, False), "not analysed: the picture is one token"
    driver.receive("gateway", m.Filled(1, KEY))
    driver.tick()
    driver.done("video", m.Analysed(SHAPE))
    assert (request.tokens_left, request.rows_left) == (9, 16), "all of 10 but the last"
    driver.done("video")
    driver.done("encoder")
    driver.done("prefill")
    assert (request.rows_left, request.is_partial) == (0, True) and request.tokens_left < 9
    assert request.tokens_left == make_view(driver.state).requests[0].tokens_left
    while driver.state.plans:
        driver.done("prefill")
    assert driver.state.num_decoding == 1 and (request.tokens_left, request.rows_left) == (0, 0)


def test_videos_have_rows_to_be_decoded_and_that_has_a_cost() -> None:
    """Not so pictures: the plan that fills their patch pages does what their analysis left."""
    driver = Driver(placeholder_ids={"image": IMAGE, "video": IMAGE + 1})
    segments = [SegmentShape("video", (1, 4, 4), 16, 4, 4)] * 2
    driver.submit(m.RequestSpec(m.Generation("r"), [1, IMAGE + 1, 3], [m.MediaItem("video", 10)], 4))
    driver.receive("gateway", m.Filled(1, KEY)).tick()
    driver.done("video", m.Analysed(ItemShape("video", (2, 4, 4), 8, segments)))
    (request,) = driver.state.live()
    assert (request.rows_left, request.video_rows_left) == (32, 32)
    plan_id, _ = driver.plan("video")
    driver.receive("video", m.PlanDone("video", 1, plan_id, 0.5, m.Done())).tick()
    assert (request.rows_left, request.video_rows_left) == (32, 16)
    assert driver.state.facts.video == Cost(0.0, 0.5 / 16, 16)
    driver = Driver()
    driver.submit(image())
    driver.receive("gateway", m.Filled(1, KEY)).tick()
    driver.done("video", m.Analysed(SHAPE))
    (request,) = driver.state.live()
    assert (request.rows_left, request.video_rows_left) == (16, 0)
    driver.done("video")
    assert driver.state.facts.video == Cost()


def test_nothing_is_left_of_a_request_with_a_token_that_is_prefilled_again() -> None:
    """By its objective for the first token it would be late: ``slack`` would let it go on last."""
    driver = Driver(objectives={"text": Objective(1.0)})
    driver.submit(text(8, 20))
    driver.done("prefill")
    driver.counts[0] = (3, 0)
    driver.tick(1.5)
    request = driver.state.requests[KEY]
    preempt(driver.state, request)
    (drop,) = sent(driver.tick(), m.Drop)
    assert isinstance(drop, m.Drop)
    driver.receive("decode", m.Dropped(1, 0, 1, drop.ticket)).tick()
    assert request.phase == Phase.PREPARE and not request.is_prefilled
    assert (request.tokens_left, request.rows_left, request.video_rows_left) == (0, 0, 0)
    assert Slack().rank(request, driver.state.facts) == (OVERDUE, request.arrived_s)


def test_both_members_of_a_pair_count() -> None:
    driver = Driver()
    driver.receive("gateway", m.Submit(1, KEY, text(6, companion_ids=[1, 2, 3])))
    assert driver.state.requests[KEY].tokens_left == 9
    driver.tick()
    assert driver.state.requests[KEY].tokens_left == 7, "all but the last of each"


def test_the_time_of_arrival_outlives_the_controller() -> None:
    driver = Driver()
    driver.now = 150.0
    journal = JournalState()
    for effect in driver.submit(text()):
        if isinstance(effect, WriteJournal):
            journal.apply(effect.record)
    machine = recover(driver.state.limits, 4, remains(driver)._replace(journal=journal))
    machine.tick(170.0)
    assert machine.state.requests[KEY].arrived_s == 150.0


@pytest.mark.parametrize("arrived_s", [0.0, 150.0])
def test_an_unknown_time_of_arrival_is_that_of_the_first_look(arrived_s: float) -> None:
    """A journal of an older version has none; a machine that was started since has a clock that began again."""
    snapshot = remains(Driver())
    snapshot.journal.apply(Submitted(KEY, 1, 0, text(), arrived_s))
    machine = recover(Driver().state.limits, 4, snapshot)
    machine.tick(30.0)
    machine.tick(40.0)
    assert machine.state.requests[KEY].arrived_s == 30.0


def test_a_journal_without_times_of_arrival_is_read() -> None:
    new = Submitted(KEY, 1, 3, text(), 150.0)
    fields: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(new))
    assert fields[-1] == 150.0
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(fields[:-1]), type=JournalRecord)
    assert old == Submitted(KEY, 1, 3, text())


def test_a_lower_priority_goes_first_whatever_the_policy_ranks() -> None:
    driver = Driver(num_rows=1)
    driver.submit(text(), 1)
    for key, priority in ((2, 5), (3, 0), (4, -5), (5, -5)):
        driver.receive("gateway", m.Submit(1, key, text(priority=priority)))
    driver.tick()
    requests = sorted(driver.state.waiting.values(), key=lambda request: request.rank)
    assert [request.key for request in requests] == [4, 5, 3, 2]


@pytest.mark.parametrize("policy", ["unified", "toy"])
def test_who_waits_for_a_minute_goes_before_a_flood_of_higher_priority(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "toy", Ages())
    driver = Driver(num_rows=1, max_waiting=1000, policy=policy)
    driver.submit(text(), 1)
    driver.receive("gateway", m.Submit(1, 2, text(priority=9)))
    for key in range(3, 3 + int(AGED_S)):
        assert min(driver.state.waiting.values(), key=lambda request: request.rank).key != 2 or key == 3
        driver.receive("gateway", m.Submit(1, key, text(priority=-9)))
        driver.tick(1.0)
    driver.tick(1.0)
    assert min(driver.state.waiting.values(), key=lambda request: request.rank).key == 2


class Ages:
    name, ages = "toy", True

    def __init__(self) -> None:
        self.num_ranked = 0

    def rank(self, request: Candidate, facts: Facts) -> tuple[float, ...]:
        self.num_ranked += 1
        return (facts.now - request.arrived_s,)

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        return UNIFIED.plan(view, limits, memory)


def test_ranks_that_change_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Ages()
    monkeypatch.setitem(POLICIES, "toy", policy)
    driver = Driver(policy="toy")
    driver.submit(text(), 1)
    driver.tick(RANK_S / 4)
    driver.submit(text(), 2)
    assert policy.num_ranked == 2, "a new one at once, and it alone"
    driver.tick(RANK_S)
    assert policy.num_ranked == 4


# of costs


PREFILL, SECOND = InstanceId("prefill"), InstanceId("prefill.1")
lines = st.builds(Cost, st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.integers(16, 4096))


@given(lines, st.lists(st.integers(1, 4000), min_size=8, max_size=40, unique=True))
def test_a_line_is_what_its_plans_took(line: Cost, sizes: list[int]) -> None:
    costs = Costs({})
    for number, units in enumerate(sizes):
        costs.observe((PREFILL, SECOND)[number % 2], units, line.seconds(units))
    cost = costs.of("prefill")
    assert cost.largest == max(sizes) == max(costs.by_actor[PREFILL].largest, costs.by_actor[SECOND].largest)
    for units in sizes:
        assert cost.seconds(units) == pytest.approx(line.seconds(units), rel=0.05, abs=1e-4)
    assert cost.seconds(0) == 0 and costs.of("encoder") == Cost()


def test_actors_of_one_stage_have_lines_of_their_own() -> None:
    costs = Costs({})
    for _ in range(20):
        for units in (10, 100):
            costs.observe(PREFILL, units, 0.001 * units)
            costs.observe(SECOND, units, 0.003 * units)
    assert costs.by_actor[PREFILL].unit_s == pytest.approx(0.001) and costs.by_actor[SECOND].unit_s == pytest.approx(0.003)
    assert costs.of("prefill").unit_s == pytest.approx(0.002)


def test_plans_without_work_teach_nothing() -> None:
    costs = Costs({})
    costs.observe(PREFILL, 0, 0.1)
    costs.observe(PREFILL, 5, -0.1)
    assert costs.by_actor == costs.by_stage == {}


@given(lines)
def test_what_is_known_counts_until_it_is_learned_anew(line: Cost) -> None:
    costs = Costs({"prefill": line})
    assert costs.of("prefill") == line
    model = CostModel.of(line)
    for units in (1, line.largest // 2, line.largest):
        assert model.predict(units) == pytest.approx(line.seconds(units), abs=1e-6)
    for _ in range(200):
        for units in (100, 1000):
            costs.observe(PREFILL, units, 0.5 + 0.002 * units)
    assert costs.of("prefill").seconds(500) == pytest.approx(1.5, rel=0.05)
    assert costs.of("prefill").largest == max(1000, line.largest)


def test_a_run_begins_with_budgets_for_the_costs_that_are_known() -> None:
    limits = Driver(prefill_budget=0, encode_budget=0).state.limits
    known = {"prefill": Cost(0.01, 0.0001, 1500), "encoder": Cost(0.01, 0.00001, 4000)}
    state = recover(limits, 4, remains(Driver())._replace(known_costs=known)).state
    assert state.steering.allowance_s == pytest.approx(0.2)
    assert state.steering.prefill.units == pytest.approx(1900, abs=5) and state.steering.encode.units == 8000, "twice the largest"
    fresh = recover(limits, 4, remains(Driver())).state.steering
    assert (fresh.prefill.units, fresh.encode.units) == (256, 1024)


def test_a_line_before_the_first_plan_and_after_plans_of_one_size() -> None:
    assert CostModel().line == (0.0, 0.0) and Cost().units(1.0, 3, 100) == 3
    assert CostModel().observe(10, 0.5).line == (0.0, 0.05)


@given(st.floats(0, 0.1), st.floats(0, 1e-3), st.integers(0, 5000), st.floats(0, 2), st.integers(1, 300), st.integers(300, 4096))
def test_the_units_that_a_time_allows(base_s: float, unit_s: float, largest: int, seconds: float, low: int, high: int) -> None:
    cost = Cost(base_s, unit_s, largest)
    units = cost.units(seconds, low, high)
    assert low <= units <= max(low, min(high, 2 * largest)), "far beyond what was measured the line is a guess"
    if units > low:
        assert cost.seconds(units) <= seconds + 1e-9
    if low < units < min(high, 2 * largest):
        assert cost.seconds(units + 1) > seconds - 1e-9


def test_a_policy_has_what_its_stages_cost() -> None:
    driver = Driver(prefill_budget=0)
    driver.submit(text())
    plan_id, plan = driver.plan("prefill")
    driver.receive("prefill", m.PlanDone("prefill", 1, plan_id, 0.25, m.Done()))
    driver.tick()
    assert driver.state.facts.prefill.seconds(5) == pytest.approx(0.25) and driver.state.facts.prefill.largest == 5
    assert driver.state.facts.encode == Cost() and driver.state.facts.now == driver.now
