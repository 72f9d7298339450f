"""Keep a warm process behind an actor, so that its death costs milliseconds instead of a start (``supervisor.gateway_standby``).

Run by the supervisor, beside the actor's own task, which promotes the standby when the process before it has ended.
"""

import asyncio

from ..errors import RunError
from .handover import drop_standby
from .managed_actor import Instance, SupervisedActor, first

LOOK_S = 0.2
RETRY_S = 5.0


async def keep_standby(actor: SupervisedActor) -> None:
    """Keep one until the actor is told to stop. A restart and a debugger go first."""
    while not actor.stopping.is_set():
        current = actor.current
        if not _needs_one(actor, current):
            await first(LOOK_S, actor.stopping)
            continue
        assert current is not None
        try:
            standby = await actor.start()
        except (RunError, OSError):
            await first(RETRY_S, actor.stopping)
            continue
        standby.is_standby = True
        if not _needs_one(actor, current):
            standby.kill("it is not needed any more")
            await standby.ended()
            continue
        actor.candidate = standby
        await _either_ends(standby, current)
        if actor.candidate is standby and not standby.process.alive:
            actor.candidate = None
            actor.say(f"its standby ended with {standby.describe_exit()}")
            await first(RETRY_S, actor.stopping)
    drop_standby(actor)


def _needs_one(actor: SupervisedActor, current: Instance | None) -> bool:
    if current is None or current is not actor.current or current.killed_because:
        return False
    serves = current.process.alive and current.active.is_set()
    return serves and actor.candidate is None and actor.debugger is None and not actor.is_being_restarted


async def _either_ends(*instances: Instance) -> None:
    ends = [asyncio.create_task(instance.process.wait()) for instance in instances]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
