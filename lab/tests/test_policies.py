"""The policies in files that the experiments compare: each loads, plans, and does what its name says."""

from pathlib import Path

import pytest

import mmrt_lab
from mmrt.actors.controller.policy_file import PolicyFile
from mmrt.runtime.controller.scheduling.overlap import Overlap
from mmrt.runtime.controller.scheduling.types import StepLimits
from mmrt.tests.runtime.controller.test_policy_texts import chunks, keys, plan, request

POLICIES = sorted((Path(mmrt_lab.__file__).parents[1] / "policies").glob("*.py"))
LIMITS = StepLimits(512, 2048)


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_each_plans_what_is_ready(path: Path) -> None:
    policy = PolicyFile.read(path).load()
    step = plan(policy, request(1, 300), request(2, kind="image", rows=(64,)), limits=LIMITS)
    assert chunks(step) == [(1, 0, 300)] and keys(step) == [2]


def test_one_request_fills_a_prefill_plan_from_one_request() -> None:
    """RS6, RS7: ``overlap`` fills the plan from both. The other media of the request are encoded beside it all the same."""
    [path] = [path for path in POLICIES if path.stem == "one_request"]
    both = request(1, 300, target=800, kind="image", rows=(1024,)), request(2, 200)
    assert chunks(plan(Overlap(), *both, limits=LIMITS)) == [(1, 0, 300), (2, 0, 200)]
    step = plan(PolicyFile.read(path).load(), *both, limits=LIMITS)
    assert chunks(step) == [(1, 0, 300)] and keys(step) == [1]


def test_intra_keeps_a_pipeline_for_one_request() -> None:
    [path] = [path for path in POLICIES if path.stem == "intra"]
    policy = PolicyFile.read(path).load()
    begun, other = request(1, 600, next=300), request(2, 200)
    assert chunks(plan(policy, other, begun, limits=LIMITS, prefill_in_flight=1)) == [(1, 300, 600)]
    done = request(1, 600, next=600)
    assert not chunks(plan(policy, done, other, limits=LIMITS, prefill_in_flight=1)), "its last chunk is in the pipeline"
    assert chunks(plan(policy, done, other, limits=LIMITS)) == [(2, 0, 200)]
    assert chunks(plan(Overlap(), done, other, limits=LIMITS, prefill_in_flight=1)) == [(2, 0, 200)]
