"""A policy is a seam: another order changes who is served, and a policy that fails costs time and nothing else."""

import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from mmrt.examples.shortest_first import ShortestFirst
from mmrt.runtime.bus import messages as m
from mmrt.runtime.bus import plans as p
from mmrt.runtime.config.sections import POLICY_NAMES
from mmrt.runtime.controller.plans.policy_calls import FAILURES_S, MAX_FAILURES, STARVED_S, swap
from mmrt.runtime.controller.scheduling.facts import Facts
from mmrt.runtime.controller.scheduling.legality import check
from mmrt.runtime.controller.scheduling.policy import POLICIES, UNIFIED
from mmrt.runtime.controller.scheduling.types import (
    Candidate,
    ChunkChoice,
    ItemChoice,
    MemberView,
    RequestView,
    SegmentChoice,
    SegmentStage,
    SegmentView,
    StepLimits,
    StepPlan,
    VideoRoom,
    View,
)
from mmrt.runtime.stage_table import InstanceId
from mmrt.tests.runtime.controller.recovery_world import World, make_request
from mmrt.tests.runtime.controller.test_machine import KEY, Driver, bring_to, image, sent, text
from mmrt.tests.settings import examples

LIMITS = StepLimits(16, 16, 16, 16)


class LastComeFirstServed:
    """As ``unified``, the other way round."""

    name = "toy"
    ages = False

    def rank(self, request: Candidate, facts: Facts) -> tuple[float, ...]:
        return (-request.arrival,)

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        return UNIFIED.plan(view, limits, memory)


class ByTurns(LastComeFirstServed):
    """Its ranks change with time, though not so soon that no row gets through in a crowd, and it counts its rounds."""

    ages = True

    def rank(self, request: Candidate, facts: Facts) -> tuple[float, ...]:
        return (request.arrival * (-1) ** int(facts.now / 4),)

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        return UNIFIED.plan(view, limits, None)[0], (memory or 0) + 1


class Raises(LastComeFirstServed):
    """Always where it is to plan, now and then where it is to rank."""

    ages = True

    def rank(self, request: Candidate, facts: Facts) -> tuple[float, ...]:
        if int(10 * facts.now) % 3 == 0:
            raise ValueError("no rank")
        return super().rank(request, facts)

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        raise ZeroDivisionError("no plan")


class PlansNothing(LastComeFirstServed):
    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        return StepPlan(), memory


class PausesAtTimes(LastComeFirstServed):
    """For two seconds in four."""

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        return (StepPlan(), memory) if view.now % 4 < 2 else UNIFIED.plan(view, limits, memory)


class PlansAnything(LastComeFirstServed):
    """Choices that are malformed, impossible, or right, in any order."""

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        rng = memory or random.Random(3)
        keys = [request.key for request in view.requests] + [12345]

        def number() -> int:
            return rng.randint(-1, 4)

        segments = [SegmentChoice(rng.choice(keys), number(), number()) for _ in range(rng.randint(0, 5))]
        segments += [SegmentChoice(r.key, s.item, s.segment) for r in view.requests for s in r.segments]
        rng.shuffle(segments)
        chunks = [ChunkChoice(rng.choice(keys), number(), 4 * number(), 4 * number()) for _ in range(rng.randint(0, 5))]
        chunks += [ChunkChoice(r.key, n, s.next, rng.randint(s.next, s.target)) for r in view.requests for n, s in enumerate(r.members)]
        items = [ItemChoice(rng.choice(keys), number()) for _ in range(4)] + [
            ItemChoice(r.key, i) for r in view.requests for i in r.unanalysed
        ]
        plan = StepPlan(tuple(items), tuple(segments), tuple(reversed(segments)), tuple(chunks))
        return (plan if rng.random() < 0.9 else "nonsense"), rng  # type: ignore[return-value]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.setitem(POLICIES, "toy", request.param())
    return "toy"


def test_the_configuration_names_the_policies_that_there_are() -> None:
    assert set(POLICY_NAMES) == set(POLICIES)
    assert all(policy.name == name for name, policy in POLICIES.items())


@pytest.mark.parametrize("number", [np.int64(0), True, 0.0, "0"])
def test_a_plan_holds_what_a_message_can_carry(number: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{number!r} in a plan is no int")):
        check(View(()), LIMITS, StepPlan(analyse=(ItemChoice(1, number),)))


# order


@pytest.mark.parametrize("toy", [LastComeFirstServed], indirect=True)
@pytest.mark.parametrize("is_toy", [False, True])
def test_the_order_of_grants_and_of_the_queue(toy: str, is_toy: bool) -> None:
    driver = Driver(num_rows=1, policy=toy if is_toy else "unified")
    driver.submit(text(), 1)
    for key in (2, 3, 4):
        driver.receive("gateway", m.Submit(1, key, text()))
    queued = {message.key: message.position for message in sent(driver.tick(), m.Queued) if isinstance(message, m.Queued)}
    assert sorted(queued, key=queued.__getitem__) == ([4, 3, 2] if is_toy else [2, 3, 4])
    driver.receive("gateway", m.Cancel(1, 1))
    driver.done("prefill")
    driver.tick()
    (request,) = driver.state.live()
    assert request.key == (4 if is_toy else 2)


@pytest.mark.parametrize("toy", [LastComeFirstServed], indirect=True)
@pytest.mark.parametrize("is_toy", [False, True])
def test_the_order_of_plans(toy: str, is_toy: bool) -> None:
    driver = Driver(num_rows=4, prefill_budget=5, policy=toy if is_toy else "unified")
    for actor in (1, 2, 3):
        driver.receive("gateway", m.Submit(1, actor, text()))
    driver.tick()
    _, plan = driver.plan("prefill")
    assert isinstance(plan, p.Prefill)
    first = driver.state.rows[plan.chunks[0].row]
    assert first is not None and first.key == (3 if is_toy else 1)


@pytest.mark.parametrize("toy", [LastComeFirstServed], indirect=True)
@pytest.mark.parametrize("is_toy", [False, True])
def test_the_order_of_victims(toy: str, is_toy: bool) -> None:
    driver = Driver(num_kv_pages=8, ahead_pages=0, ahead_s=0.0, policy=toy if is_toy else "unified")
    for key in (1, 2):
        driver.submit(text(8, 20), key=key)
    while driver.state.num_decoding < 2:
        driver.done("prefill")
    for count in range(1, 13):
        driver.counts[0] = driver.counts[1] = (count, 0)
        driver.tick(0.01)
        if victims := [request.key for request in driver.state.live() if request.record.evicting]:
            break
    assert victims == ([1] if is_toy else [2])


@pytest.mark.parametrize("toy", [ByTurns], indirect=True)
def test_ranks_that_age_and_memory(toy: str) -> None:
    driver = Driver(num_rows=1, policy=toy)
    for key in (1, 2, 3):
        driver.receive("gateway", m.Submit(1, key, text()))
    driver.tick()
    ranks = [[request.rank for request in driver.state.requests.values()]]
    rounds = driver.state.policy_memory
    driver.tick(4.0)
    ranks.append([request.rank for request in driver.state.requests.values()])
    assert sorted(ranks[0]) != ranks[0] or sorted(ranks[1]) != ranks[1]
    assert ranks[0] != ranks[1] and driver.state.policy_memory > rounds >= 1


# failure


@pytest.mark.parametrize("toy", [PlansNothing], indirect=True)
def test_one_that_plans_nothing_is_overruled_after_a_second(toy: str) -> None:
    driver = Driver(policy=toy)
    driver.submit(text())
    driver.tick(STARVED_S - 0.01)
    assert not driver.state.plans and driver.state.totals.overruled == 0
    driver.tick(0.02)
    assert len(driver.state.plans) == 1 and driver.state.totals.overruled == 1
    assert driver.state.overruled_because.startswith("nothing was planned for 1.0 s")
    driver.tick(STARVED_S + 1)
    assert driver.state.totals.overruled == 1, "somebody works"


@pytest.mark.parametrize("toy", [PlansNothing], indirect=True)
def test_one_that_has_nothing_to_plan_is_not_overruled(toy: str) -> None:
    driver = Driver(policy=toy)
    driver.submit(image())  # waits for its media
    for _ in range(4):
        driver.tick(1.0)
    assert driver.state.totals.overruled == 0


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.ages])
def test_one_that_ages_is_not_asked_to_rank_nothing(policy: str) -> None:
    driver = Driver(policy=policy)
    driver.receive("gateway", m.Submit(1, KEY, text()))
    driver.receive("gateway", m.Cancel(1, KEY))
    driver.tick()
    assert driver.state.totals.overruled == 0 and driver.state.ranking is POLICIES[policy]


@pytest.mark.parametrize("toy", [PlansNothing], indirect=True)
def test_the_second_does_not_go_on_from_a_request_that_has_left(toy: str) -> None:
    driver = Driver(policy=toy)
    driver.submit(text())
    driver.tick(STARVED_S - 0.1)
    driver.receive("gateway", m.Cancel(1, KEY))
    driver.tick(0.05)
    assert not driver.state.requests
    driver.tick(1.0)
    driver.submit(text(), key=2)
    driver.tick(STARVED_S - 0.1)
    assert driver.state.totals.overruled == 0
    driver.tick(0.2)
    assert driver.state.totals.overruled == 1


@pytest.mark.parametrize("toy", [Raises], indirect=True)
def test_one_that_raises_is_overruled_at_once(toy: str) -> None:
    driver = Driver(policy=toy)
    bring_to(driver, "decode")
    assert driver.state.totals.overruled >= 1 and "no plan" in driver.state.overruled_because
    while int(10 * driver.now) % 3:
        driver.tick(0.05)
    driver.tick()
    driver.submit(text(), 99)
    ranks = [request.rank[1] for request in driver.state.requests.values()]
    assert ranks == [0, 1], "by arrival, once it could not rank"


def place(key: int, item: int, segment: int) -> SegmentChoice:
    return SegmentChoice(key, item, segment)


def test_illegal_choices_are_dropped() -> None:
    pending = tuple(SegmentView(0, n, SegmentStage.PENDING, 10, 2, 1) for n in range(3))
    ready = tuple(SegmentView(0, n, SegmentStage.PREPROCESSED, 8, 1, 2) for n in range(3))
    members = (MemberView(4, 9, 12),)
    view = View(
        (
            RequestView(1, 1, has_kv=True, members=members, segments=pending),
            RequestView(2, 2, has_kv=True, members=members, segments=ready),
            RequestView(3, 3, has_kv=True, members=members, segments=ready, alone=True),
            RequestView(4, 4, unanalysed=(0, 2)),
            RequestView(5, 5, has_kv=False, members=members),
        ),
        video_credit=3,
        encoder_credit=1,
        prefill_credit=1,
        num_patch_pages=8,
        num_free_patch_pages=8,
        num_embedding_pages=8,
        num_free_embedding_pages=8,
    )

    def legal(**choices: Any) -> StepPlan:
        return check(view, LIMITS, StepPlan(**choices))[0]

    items = (ItemChoice(4, 0), ItemChoice(4, 0), ItemChoice(4, 1), ItemChoice(9, 0), ItemChoice(4, 2))
    assert legal(analyse=items).analyse == (ItemChoice(4, 0), ItemChoice(4, 2)), "twice, analysed, unknown"
    segments = (place(1, 0, 0), place(1, 0, 0), place(1, 0, 1), place(1, 0, 2), place(2, 0, 0))
    assert legal(preprocess=segments).preprocess == (place(1, 0, 0), place(1, 0, 1)), "twice, more than half of the pool, preprocessed"
    assert not legal(preprocess=segments[:0:-1][1:2]).preprocess, "there would be no pages for the ones before it"
    assert legal(encode=(place(2, 0, 1), place(2, 0, 0), place(2, 0, 1), place(2, 0, 2))).encode == (place(2, 0, 0), place(2, 0, 1))
    assert legal(encode=(place(3, 0, 0), place(3, 0, 1), place(2, 0, 0))).encode == (place(3, 0, 0),), "a suspect goes by itself"
    assert legal(encode=(place(2, 0, 0), place(3, 0, 0))).encode == (place(2, 0, 0),)
    chunks = (
        ChunkChoice(1, 0, 4, 9),
        ChunkChoice(1, 0, 4, 9),
        ChunkChoice(2, 0, 4, 10),
        ChunkChoice(2, 0, 3, 5),
        ChunkChoice(5, 0, 4, 5),
    )
    assert legal(prefill=chunks).prefill == chunks[:1], "twice, beyond what is ready, out of order, without KV pages"
    assert legal(prefill=(ChunkChoice(2, 0, 4, 4), ChunkChoice(2, 1, 0, 4), ChunkChoice(2, 0, 4, 5))).prefill == (
        ChunkChoice(2, 0, 4, 5),
    )
    assert legal(prefill=(chunks[0], ChunkChoice(3, 0, 4, 5))).prefill == chunks[:1], "nobody shares a plan with a suspect"
    assert check(view, StepLimits(4, 4, 4, 4), StepPlan(prefill=chunks[:1])) == (StepPlan(), 1)
    none = replace(view, video_credit=0, encoder_credit=0, prefill_credit=0)
    assert check(none, LIMITS, StepPlan(items, segments, (place(2, 0, 0),), chunks)) == (StepPlan(), 16)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mmrt-test-") as name:
        yield Path(name)


@pytest.mark.parametrize("toy", [LastComeFirstServed, ByTurns, Raises, PausesAtTimes, PlansAnything, ShortestFirst], indirect=True)
def test_nothing_is_lost_by_any_policy(toy: str, directory: Path) -> None:
    """The recovery world, with all that dies in it, under each."""
    overruled = illegal = finished = 0
    for seed in range(num_seeds := examples(12)):
        world = World(random.Random(seed), directory, crowded=seed % 3 == 0, policy=toy)
        try:
            for key in range(1, 7):
                world.submit(make_request(world.random, key, world.now, world.crowded))
                world.turn()
            end_s = world.now + 6.0
            while world.now < end_s and not world.is_idle():
                world.turn()
            world.calm_down()
            overruled += world.controller.state.totals.overruled
            illegal += world.controller.state.totals.illegal
            finished += sum(outcome == "finished" for outcome in world.outcomes.values())
        finally:
            world.close()
    policy = type(POLICIES[toy])
    assert finished > num_seeds
    assert (illegal > 0) == (policy is PlansAnything)
    assert (overruled > 0) == (policy in (Raises, PausesAtTimes, PlansAnything))


class InPieces(LastComeFirstServed):
    """Plans with halves of tokens, which no plan record can hold."""

    def plan(self, view: View, limits: StepLimits, memory: Any) -> tuple[StepPlan, Any]:
        plan, _ = UNIFIED.plan(view, limits, None)
        return replace(plan, prefill=tuple(chunk._replace(end=chunk.end - 0.5) for chunk in plan.prefill)), None  # type: ignore[arg-type]


class NoNumber(LastComeFirstServed):
    def rank(self, request: Candidate, facts: Facts) -> tuple[float, ...]:
        return (float("nan"),)


@pytest.mark.parametrize("toy", [InPieces, NoNumber], indirect=True)
def test_numbers_that_are_none_are_overruled(toy: str) -> None:
    driver = Driver(policy=toy)
    driver.submit(text())
    _, plan = driver.plan("prefill")
    assert isinstance(plan, p.Prefill) and isinstance(plan.chunks[0].end, int)
    assert driver.state.totals.overruled >= 1


@pytest.mark.parametrize("toy", [PlansNothing], indirect=True)
def test_the_second_begins_anew_with_the_next_request(toy: str) -> None:
    driver = Driver(policy=toy)
    driver.submit(text(), key=1)
    driver.receive("gateway", m.Cancel(1, 1))
    driver.tick(0.1)
    driver.tick(5 * STARVED_S)
    driver.submit(text(), key=2)
    assert driver.state.totals.overruled == 0


def test_a_refused_segment_takes_nothing_from_those_behind_it() -> None:
    segments = tuple(SegmentView(0, number, SegmentStage.PENDING, 4, 3, 1) for number in range(2))
    view = View((RequestView(1, 0, has_kv=True, segments=segments),), video_credit=2, num_patch_pages=8, num_free_patch_pages=4)
    plan, num_illegal = check(view, LIMITS, StepPlan(preprocess=(SegmentChoice(1, 0, 1), SegmentChoice(1, 0, 0))))
    assert plan.preprocess == (SegmentChoice(1, 0, 0),) and num_illegal == 1


def test_no_video_gets_more_than_it_has_room_for() -> None:
    """A request's media stay with the process that has them; those of others may go to any with room."""
    first, second = InstanceId("video"), InstanceId("video.1")
    requests = [RequestView(key, key, unanalysed=(0, 1), video=video) for key, video in ((1, first), (2, second), (3, ""))]
    view = View(tuple(requests), video_credit=3, videos=(VideoRoom(first, 1), VideoRoom(second, 2)))
    wanted = StepPlan(analyse=(ItemChoice(1, 0), ItemChoice(1, 1), ItemChoice(3, 0)))
    assert check(view, LIMITS, wanted) == (StepPlan(analyse=(ItemChoice(1, 0), ItemChoice(3, 0))), 1)


def test_a_suspect_that_does_not_fit_closes_no_batch() -> None:
    suspect, other = (SegmentView(0, 0, SegmentStage.PREPROCESSED, 4, 1, need) for need in (9, 1))
    requests = RequestView(1, 0, has_kv=True, segments=(suspect,), alone=True), RequestView(2, 1, has_kv=True, segments=(other,))
    view = View(requests, encoder_credit=1, num_embedding_pages=8, num_free_embedding_pages=8)
    plan, _ = check(view, LIMITS, StepPlan(encode=(SegmentChoice(1, 0, 0), SegmentChoice(2, 0, 0))))
    assert plan.encode == (SegmentChoice(2, 0, 0),)


# replacement


def test_a_swap_ranks_all_requests_anew_and_begins_without_memory() -> None:
    driver = Driver(num_rows=1)
    for key in (1, 2, 3):
        driver.receive("gateway", m.Submit(1, key, text()))
    driver.tick()
    assert [request.rank for request in driver.state.requests.values()] == [(0, 0, 0), (0, 1, 1), (0, 2, 2)]
    swap(driver.state, ByTurns())
    driver.tick()
    assert driver.state.policy_memory and driver.state.policy_record.plans <= driver.state.policy_memory
    swap(driver.state, LastComeFirstServed())
    assert driver.state.policy_memory is None
    driver.receive("gateway", m.Submit(1, 4, text()))
    driver.tick()
    assert [request.rank for request in driver.state.requests.values()] == [(0, 0, 0), (0, -1, 1), (0, -2, 2), (0, -3, 3)]


class RanksOfAnyLength(LastComeFirstServed):
    def rank(self, request: Candidate, facts: Facts) -> tuple[float, ...]:
        return (0.0,) * (request.arrival + 1)


class NoRank(LastComeFirstServed):
    def rank(self, request: Candidate, facts: Facts) -> tuple[float, ...]:
        return ()


class LongRank(LastComeFirstServed):
    def rank(self, request: Candidate, facts: Facts) -> tuple[float, ...]:
        return (0.0,) * 1000


class Incomparable(LastComeFirstServed):
    def rank(self, request: Candidate, facts: Facts) -> tuple[float, ...]:
        return ("first",)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (RanksOfAnyLength(), "a rank has 2 numbers, others have 1"),
        (NoRank(), "a rank has 0 numbers, it must have 1 to 16"),
        (LongRank(), "a rank has 1000 numbers, it must have 1 to 16"),
        (Incomparable(), "could not convert string to float: 'first'"),
    ],
)
def test_ranks_that_cannot_be_compared_are_replaced_by_order_of_arrival(policy: Any, why: str) -> None:
    driver = Driver()
    swap(driver.state, policy)
    for key in (1, 2):
        driver.submit(text(), key)
    assert why in driver.state.overruled_because
    driver.submit(text(), 3)
    assert [request.rank for request in driver.state.requests.values()] == [(0, 0, 0), (0, 1, 1), (0, 2, 2)]
    assert driver.state.totals.overruled == 1 and driver.state.policy is policy, "it still plans"


def test_one_that_fails_again_and_again_is_set_aside() -> None:
    driver = Driver()
    swap(driver.state, Raises())
    driver.submit(text())
    for _ in range(3 * MAX_FAILURES):
        driver.tick(0.2)
        driver.submit(text(), key=100 + driver.state.next_arrival)
    record = driver.state.policy_record
    assert driver.state.policy is UNIFIED and driver.state.totals.overruled == MAX_FAILURES
    assert record.set_aside.startswith(f"overruled {MAX_FAILURES} times within {FAILURES_S:g} s") and "no plan" in record.set_aside
    swap(driver.state, LastComeFirstServed())
    assert not driver.state.policy_record.set_aside and not driver.state.policy_record.overruled


def test_failures_far_apart_set_nobody_aside() -> None:
    driver = Driver()
    policy = Raises()
    swap(driver.state, policy)
    for key in range(4 * MAX_FAILURES):
        driver.submit(text(), key=key + 1)
        driver.receive("gateway", m.Cancel(1, key + 1))
        driver.done("prefill")
        driver.tick(FAILURES_S / 2)
    assert driver.state.totals.overruled > MAX_FAILURES and driver.state.policy is policy


class Lookalike:
    """It has a plan's fields, and is none."""

    analyse = preprocess = encode = prefill = ()


class Changing(ChunkChoice):
    """A choice whose numbers are others at the second look."""

    reads = 0

    def __iter__(self) -> Iterator[int]:
        self.reads += 1
        return iter(tuple(self[:]) if self.reads == 1 else (-1, -1, -1, -1))


@pytest.mark.parametrize("plan", [Lookalike(), None, "nonsense", (), StepPlan(analyse=((1,),)), StepPlan(prefill=(7,))])  # type: ignore[arg-type]
def test_a_plan_of_another_type_is_refused(plan: Any) -> None:
    with pytest.raises(TypeError):
        check(View(()), LIMITS, plan)


def test_a_checked_plan_has_no_objects_of_the_policy() -> None:
    view = View((RequestView(1, 0, has_kv=True, members=(MemberView(0, 8, 8),)),), prefill_credit=1)
    legal, num_illegal = check(view, LIMITS, StepPlan(prefill=[Changing(1, 0, 0, 8)]))  # type: ignore[arg-type]
    assert legal == StepPlan(prefill=(ChunkChoice(1, 0, 0, 8),)) and not num_illegal
    assert type(legal.prefill[0]) is ChunkChoice


@pytest.mark.parametrize("toy", [ByTurns], indirect=True)
def test_nothing_is_lost_by_swaps_at_random(toy: str, directory: Path) -> None:
    """The recovery world, whose policy is replaced at any moment: by another of mmrt's, or by one that fails."""
    finished = num_swaps = 0
    for seed in range(num_seeds := examples(8)):
        world = World(random.Random(seed), directory, crowded=seed % 3 == 0, policy=toy)
        policies: list[Any] = [*POLICIES.values(), ByTurns(), Raises(), PlansAnything(), ShortestFirst()]
        try:
            for key in range(1, 7):
                world.submit(make_request(world.random, key, world.now, world.crowded))
                world.turn()
            end_s = world.now + 6.0
            while world.now < end_s and not world.is_idle():
                if world.random.random() < 0.1:
                    swap(world.controller.state, world.random.choice(policies))
                    num_swaps += 1
                world.turn()
            swap(world.controller.state, UNIFIED)
            world.calm_down()
            finished += sum(outcome == "finished" for outcome in world.outcomes.values())
        finally:
            world.close()
    assert finished > num_seeds and num_swaps > 2 * num_seeds
