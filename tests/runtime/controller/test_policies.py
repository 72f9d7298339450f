"""Every registered policy: its plans are legal, keep to budgets and pairs, and go on while anything can; nothing is lost or starves."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from mmrt.runtime.controller.scheduling.facts import RequestKind
from mmrt.runtime.controller.scheduling.legality import check
from mmrt.runtime.controller.scheduling.policy import POLICIES, UNIFIED
from mmrt.runtime.controller.scheduling.types import MemberView, RequestView, StepLimits, StepPlan, View
from mmrt.tests.runtime.controller.random_views import views
from mmrt.tests.runtime.controller.recovery_world import World, make_request
from mmrt.tests.settings import examples

NAMES = tuple(POLICIES)
NUM_SEEDS = examples(9)
STAGES = ("encoder", "prefill", "decode")
each_policy = pytest.mark.parametrize("name", NAMES)

step_limits = st.builds(
    StepLimits,
    prefill_tokens=st.integers(1, 4) | st.integers(1, 60),
    encode_rows=st.integers(1, 60),
    max_prefill_tokens=st.integers(60, 90),
    max_encode_rows=st.integers(60, 90),
    with_decode=st.frozensets(st.sampled_from(STAGES)),
)


@each_policy
@settings(deadline=None, max_examples=examples(50))
@given(views(), step_limits)
def test_plans_are_legal_and_pure(name: str, view: View, limits: StepLimits) -> None:
    policy = POLICIES[name]
    plan, memory = policy.plan(view, limits, None)
    assert check(view, limits, plan) == (plan, 0)
    assert policy.plan(view, limits, None) == (plan, memory)
    again, _ = policy.plan(view, limits, memory)
    assert check(view, limits, again) == (again, 0)


@each_policy
@settings(deadline=None, max_examples=examples(50))
@given(views(), step_limits)
def test_no_half_pair(name: str, view: View, limits: StepLimits) -> None:
    """CF3: whoever is ready of a pair is in its plan, unless the plan has room for one token in all."""
    plan, _ = POLICIES[name].plan(view, limits, None)
    if limits.prefill_tokens < 2:
        return
    for request in view.requests:
        planned = {chunk.member for chunk in plan.prefill if chunk.key == request.key}
        ready = {number for number, member in enumerate(request.members) if member.ready > member.next}
        assert planned in (set(), ready)


@each_policy
@pytest.mark.parametrize("kind", ["text", "video"])
@pytest.mark.parametrize("budget", range(1, 6))
def test_pairs_are_prefilled_by_the_least_budgets(name: str, kind: RequestKind, budget: int) -> None:
    """A share of a small budget has room for one member, which is none."""
    pairs = [RequestView(key, key, has_kv=True, members=(MemberView(0, 9, 9),) * 2, kind=kind) for key in range(3)]
    plan, _ = POLICIES[name].plan(View(tuple(pairs), prefill_credit=1), StepLimits(budget, 1, budget, 1), None)
    assert {chunk.member for chunk in plan.prefill} == ({0} if budget == 1 else {0, 1})


@each_policy
@settings(deadline=None, max_examples=examples(50))
@given(views(), step_limits)
def test_something_is_planned_when_something_can_run_and_nothing_does(name: str, view: View, limits: StepLimits) -> None:
    idle = replace(
        view,
        requests=tuple(replace(request, video_in_flight=0) for request in view.requests),
        encode_in_flight=0,
        prefill_in_flight=0,
    )
    if UNIFIED.plan(idle, limits, None)[0]:
        assert POLICIES[name].plan(idle, limits, None)[0] != StepPlan()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mmrt-test-") as name:
        yield Path(name)


@each_policy
def test_everything_ends_under_each(name: str, directory: Path) -> None:
    """The recovery world, with all that dies in it: it asserts that nothing was overruled or illegal."""
    finished = 0
    for seed in range(NUM_SEEDS):
        world = World(random.Random(seed), directory, crowded=seed % 2 == 0, policy=name)
        try:
            for key in range(1, 9):
                world.submit(make_request(world.random, key, world.now, world.crowded))
                world.turn()
            end_s = world.now + 6.0
            while world.now < end_s and not world.is_idle():
                world.turn()
            world.calm_down()
            finished += sum(outcome == "finished" for outcome in world.outcomes.values())
        finally:
            world.close()
    assert finished >= 2 * NUM_SEEDS
