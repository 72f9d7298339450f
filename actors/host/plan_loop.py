"""The main loop of the actors that work on plans (video, encoder, prefill): receive, do one plan, commit, answer.

A plan lies in the plan table; a message only names it. A plan that is done is answered with the stored result, so that a repeated
command is harmless; a plan whose slot holds something else is obsolete and is dropped; one that raises is answered with an error;
one that the generation before died in, but for a debugger's, is answered with Died and not begun: the controller decides what to do.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from types import MappingProxyType

from ...runtime.bus.messages import Died, ItemError, Plan, PlanDone, Result, Run, Skipped, decode_plan
from ...runtime.observe.replay_capture import DevicePages, PlanCapture
from ...shm.plan_table import PlanTable
from ...shm.sequence_table import SequenceTable
from ...shm.status import ActorStatus
from .actor import Actor
from .device import raise_if_fatal
from .plan_checks import cost_units, still_wanted
from .recording import PlanFlight
from .step_limit import StepLimit

log = logging.getLogger(__name__)

KEPT_RESULTS = 256
NO_PAGES: DevicePages = MappingProxyType({})
IDLE_S = 0.5
LEAST_UNITS = 256  # tokens or patch rows: a forward over fewer costs about as much


def serve_plans(actor: Actor, execute: Callable[[Plan], Result], rows: SequenceTable, device_pages: DevicePages = NO_PAGES) -> None:
    """Become active and do plans one at a time until told to end. ``rows`` tells which are still wanted; ``device_pages`` are those
    that only this process can capture."""
    table = PlanTable.attach(actor.run)
    results: OrderedDict[int, PlanDone] = OrderedDict()
    queue: deque[Run] = deque()
    status = actor.become_active()
    status.set_crashes(0)  # the controller knows what they died of
    worst_s = status.step_cost_ns / 1e9
    limit = StepLimit(actor.config.supervisor.watchdog_s, actor.config.step_limit_s(actor.name), worst_s, LEAST_UNITS)
    flight = PlanFlight(actor.flight)
    capture = PlanCapture(actor.run, actor.name, actor.config.memory.kv_page_tokens, device_pages)
    actor.serving()
    while not actor.ending:
        _take(actor, queue, results, flight)
        if not queue:
            actor.wait(IDLE_S)
            continue
        command = queue.popleft()
        payload = table.read(command.slot, command.plan_id)
        if payload is None or command.plan_id in results:
            flight.skipped(command.plan_id)
            continue
        plan = decode_plan(payload)
        started_s, started_ns = time.monotonic(), time.monotonic_ns()
        wanted = None if 0 < command.deadline_s <= started_s else still_wanted(plan, rows)
        captured = capture.before(command.plan_id, wanted) if wanted is not None else None
        result = Skipped() if wanted is None else _do(execute, wanted, command.plan_id, status, limit, actor.name)
        done = PlanDone(actor.name, actor.generation, command.plan_id, time.monotonic() - started_s, result)
        results[command.plan_id] = done
        if len(results) > KEPT_RESULTS:
            results.popitem(last=False)
        flight.done(command.plan_id, plan, started_ns, result, len(queue))
        capture.after(captured, result)
        actor.send(done)


def _do(execute: Callable[[Plan], Result], plan: Plan, plan_id: int, status: ActorStatus, limit: StepLimit, actor: str) -> Result:
    """One step, with a deadline that follows from what such steps have taken so far."""
    units = cost_units(plan)
    began_s = time.monotonic()
    with status.step(plan_id, limit.ceiling_s if units is None else limit.limit_s(units)):
        result = _attempt(execute, plan, f"plan {plan_id:x} of {actor}")
    if units is not None:
        limit.took(units, time.monotonic() - began_s)
        status.set_step_cost(int(1e9 * limit.worst_s) or 1)
    return result


def _attempt(execute: Callable[[Plan], Result], plan: Plan, name: str) -> Result:
    """A plan that cannot be done fails its request, not this process: that would meet it again after every restart.

    The client is told the plan's name, by which the log has the traceback.

    Where memory runs out or the device is lost this process ends all the same.
    """
    try:
        return execute(plan)
    except MemoryError:
        raise
    except Exception as error:
        raise_if_fatal(error)
        log.exception("%s failed (%s)", name, type(plan).__name__)
        return ItemError(500, f"the request could not be processed: {name} failed, and the log says why")


def _take(actor: Actor, queue: deque[Run], results: OrderedDict[int, PlanDone], flight: PlanFlight) -> None:
    for message in actor.receive():
        if not isinstance(message, Run):
            log.warning("unexpected %s", type(message).__name__)
        elif done := results.get(message.plan_id):
            actor.send(done)
        elif actor.death is not None and message.plan_id == actor.death.step and not actor.death.excused:
            log.error("plan %x is not begun: the generation before %s in it", message.plan_id, actor.death.reason)
            results[message.plan_id] = PlanDone(actor.name, actor.generation, message.plan_id, 0.0, Died(actor.death.crashed))
            actor.send(results[message.plan_id])
        elif all(waiting.plan_id != message.plan_id for waiting in queue):
            queue.append(message)
            flight.arrived(message.plan_id)
