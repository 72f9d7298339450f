"""Short prompts that are prefilled between the layers of a long one. The tokens are those of prompts that come one by one, whatever
dies."""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import pytest

from mmrt.runtime.bus.plans import Prefill, decode_plan
from mmrt.shm.plan_table import PlanTable
from mmrt.shm.run_directory import RunDirectory
from mmrt.shm.status import ActorTable
from mmrt.tests.end_to_end.conftest import Server, also_slow, copy_package
from mmrt.tests.end_to_end.test_devices import LETTERS, take_time
from mmrt.tests.end_to_end.test_media import image_part, picture, text
from mmrt.tests.end_to_end.test_outages import TIMEOUT_S, Asking
from mmrt.tests.end_to_end.test_restart import processes

SETTINGS = """[scheduling]
prefill_budget_tokens = 1024
[supervisor]
backoff_s = 0.05
restart_limit = 40
"""
LAYER_S = 0.2  # of prefill
BREAK_LINE = "            if after_layer is not None and after_layer() is True:\n"
LONG = [image_part(picture(1, 168, 168)), text(LETTERS)]
SHORT = [image_part(picture(2, 56, 56)), text("What is it?")]
LONG_TOKENS = 256  # that a plan with breaks has more than


@pytest.fixture(scope="module")
def slow(launch: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Five layers, three of which add parts of pictures to the stream. Each takes prefill its time."""
    source = copy_package(tmp_path_factory.mktemp("slow"))
    take_time(source / "models" / "lm" / "language_model.py", BREAK_LINE, f"{LAYER_S}")
    return launch("qwen3_vl", settings=SETTINGS, source=source)


def wait_for_step(server: Server, *, is_long: bool) -> None:
    """Until prefill is at a long plan, or at a short one while a long one is not done."""
    until_s = time.monotonic() + TIMEOUT_S
    with ExitStack() as stack:
        run = stack.enter_context(RunDirectory.attach(server.run_path))
        plans = stack.enter_context(closing(PlanTable.attach(run, writable=False)))
        actors = stack.enter_context(closing(ActorTable.attach(run)))
        while time.monotonic() < until_s:
            prefill, live = actors.read("prefill"), {record.plan_id: decode_plan(record.payload) for record in plans.live()}
            lengths = {plan_id: plan.units for plan_id, plan in live.items() if isinstance(plan, Prefill)}
            at = lengths.get(prefill.step_plan, 0) if prefill.step_deadline_ns else 0
            if at and is_long == (at > LONG_TOKENS) and any(length > LONG_TOKENS for length in lengths.values()):
                return
            time.sleep(0.001)
    raise AssertionError("no such plan was seen")


def test_a_short_prompt_is_answered_between_the_layers_of_a_long_one(slow: Server) -> None:
    long, short = (slow.chat(content, extra_body={"cache_salt": "alone"})[1] for content in (LONG, SHORT))
    asking = Asking(slow, LONG, extra_body={"cache_salt": "between"})
    wait_for_step(slow, is_long=True)
    assert slow.chat(SHORT, max_tokens=1, extra_body={"cache_salt": "between"})[1] == short[:1]
    assert not asking.began.is_set(), "the long one was waited for"
    asking.join(TIMEOUT_S)
    assert (asking.error, asking.ids) == (None, long)
    slow.wait_until_empty()


@pytest.mark.parametrize("victims", [("prefill",), *also_slow((("prefill", "controller"),), (("memory",),))], ids="+".join)
def test_a_kill_in_a_break_changes_nothing(slow: Server, victims: tuple[str, ...]) -> None:
    expected = [slow.chat(content, max_tokens=24, extra_body={"cache_salt": "alone"})[1] for content in (LONG, SHORT)]
    salt, before = {"cache_salt": "of a kill of " + "+".join(victims)}, processes(slow)
    asking = [Asking(slow, LONG, max_tokens=24, extra_body=salt)]
    wait_for_step(slow, is_long=True)
    asking.append(Asking(slow, SHORT, max_tokens=24, extra_body=salt))
    wait_for_step(slow, is_long=False)
    for victim in victims:
        slow.kill(victim)
    for one in asking:
        one.join(TIMEOUT_S)
    assert [(one.error, one.ids) for one in asking] == [(None, ids) for ids in expected]
    slow.wait(lambda status: bool(status["ready"]), "ready")
    assert all(processes(slow)[victim] != before[victim] for victim in victims)
    slow.wait_until_empty()
