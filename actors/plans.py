"""The main loop of the actors that work on plans (video, encoder, prefill): receive, do one plan, commit, answer.

A plan lies in the plan table; a message only names it. A plan that is done is answered with the stored result, so that a repeated
command is harmless; a plan whose slot holds something else is obsolete and is dropped; one that raises is answered with an error.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from ..runtime.messages import ItemError, Plan, PlanDone, Result, Run, decode_plan
from ..shm.plan_table import PlanTable
from .base import Actor

log = logging.getLogger(__name__)

KEPT_RESULTS = 256
IDLE_S = 0.5


def serve_plans(actor: Actor, execute: Callable[[Plan], Result]) -> None:
    """Become active and do plans one at a time until told to end."""
    table = PlanTable.attach(actor.run)
    limit_s = actor.config.step_limit_s(actor.name)
    results: OrderedDict[int, PlanDone] = OrderedDict()
    queue: deque[Run] = deque()
    status = actor.become_active()
    actor.serving()
    while not actor.ending:
        _take(actor, queue, results)
        if not queue:
            actor.wait(IDLE_S)
            continue
        command = queue.popleft()
        payload = table.read(command.slot, command.plan_id)
        if payload is None or command.plan_id in results:
            continue
        plan = decode_plan(payload)
        started_s = time.monotonic()
        with status.step(command.plan_id, limit_s):
            result = _attempt(execute, plan)
        done = PlanDone(actor.name, actor.generation, command.plan_id, time.monotonic() - started_s, result)
        results[command.plan_id] = done
        if len(results) > KEPT_RESULTS:
            results.popitem(last=False)
        actor.send(done)


def _attempt(execute: Callable[[Plan], Result], plan: Plan) -> Result:
    """A plan that cannot be done fails its request, not this process: that would meet it again after every restart."""
    try:
        return execute(plan)
    except Exception:
        log.exception("%s failed", type(plan).__name__)
        return ItemError(500, "the request could not be processed")


def _take(actor: Actor, queue: deque[Run], results: OrderedDict[int, PlanDone]) -> None:
    for message in actor.receive():
        if not isinstance(message, Run):
            log.warning("unexpected %s", type(message).__name__)
        elif done := results.get(message.plan_id):
            actor.send(done)
        elif all(waiting.plan_id != message.plan_id for waiting in queue):
            queue.append(message)
