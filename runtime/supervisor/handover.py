"""Hand an actor's role from one live process to another: a new generation (``mmrt restart``) or a debugger (``mmrt debug``).

Called by ``commands`` and ``reload`` in the supervisor, on a ``SupervisedActor``, whose own task promotes the candidate when the
process before it has ended. The newcomer is warm before the old process is told to end, and the role lock lets it write only then.
"""

import asyncio

from ..errors import RunError
from .control import RestartReply
from .managed_actor import Instance, SupervisedActor, first
from .processes import now_s


def expect_free(actor: SupervisedActor) -> None:
    """Check that the role is free. Raises: RunError if it is being handed over, a debugger has it, or the actor is ending."""
    if actor.stopping.is_set():
        raise RunError(f"{actor.name} is {actor.state}")
    if actor.debugger is not None:
        raise RunError(f"{actor.name} is being debugged by pid {actor.debugger.process.pid}")
    if (actor.candidate is not None and not actor.candidate.is_standby) or actor.is_being_restarted:
        raise RunError(f"{actor.name} is being restarted already")


async def restart(actor: SupervisedActor) -> RestartReply:
    """Replace the running generation by a new one that is warm before the old one ends.

    If the new one does not come up, the old one goes on unchanged.

    Raises: RunError, see ``expect_free``; OSError if no process can be started, and then nothing has changed.
    """
    expect_free(actor)
    drop_standby(actor)
    actor.is_being_restarted = True
    try:
        return await _replace(actor)
    finally:
        actor.is_being_restarted = False


async def _replace(actor: SupervisedActor) -> RestartReply:
    began_s = now_s()
    if actor.current is None:
        candidate = await _hurry(actor)
    else:
        actor.set_state("restarting")
        try:
            candidate = actor.candidate = await actor.start()
        except OSError:
            if actor.current is not None:
                actor.follow(actor.current)
            raise
    if candidate is None:
        raise RunError(f"{actor.name} is {actor.state}")
    timeout_s = actor.spec.ready_timeout_s
    if not await _reaches(candidate, candidate.ready, "ready", timeout_s):
        return _rejected(actor, candidate)
    await _end_predecessor(actor, candidate)
    if not await _reaches(candidate, candidate.active, "active", timeout_s):
        return RestartReply(
            ok=False,
            message=f"{actor.name}: the new process was ready, but ended with {candidate.describe_exit()} when it took over",
            log=candidate.tail,
        )
    seconds = now_s() - began_s
    return RestartReply(
        ok=True,
        message=f"{actor.name}: generation {candidate.generation} serves after {seconds:.2f} s",
        generation=candidate.generation,
        seconds=seconds,
    )


def admit_debugger(actor: SupervisedActor, debugger: Instance) -> None:
    """Make ``debugger`` one of the actor's processes, which end with it. ``actor`` must be free (``expect_free``)."""
    drop_standby(actor)
    actor.candidate = debugger


async def hand_over_to_debugger(actor: SupervisedActor, debugger: Instance) -> None:
    """Give the role to the admitted ``debugger`` once it is ready, and keep a warm process that takes over when it ends for any reason.

    Ends with the debugger.
    """
    pid = debugger.process.pid
    if not await _reaches(debugger, debugger.ready):
        _dismiss(actor, debugger)
        actor.say(f"debugger (pid {pid}) exited before taking over")
        return
    await _end_predecessor(actor, debugger)
    if await _reaches(debugger, debugger.active):
        actor.say(f"is debugged by pid {pid}")
        await _keep_standby(actor, debugger)
    await debugger.ended()
    _dismiss(actor, debugger)
    actor.say(f"is not debugged any more: pid {pid} has gone")


def _dismiss(actor: SupervisedActor, debugger: Instance) -> None:
    """Forget a debugger that has ended. If it had mended the actor without being its current process, the next one need not wait."""
    if actor.candidate is debugger:
        actor.candidate = None
    if actor.current is None and actor.outage is None:
        actor.retry_now.set()


async def _keep_standby(actor: SupervisedActor, debugger: Instance) -> None:
    try:
        standby = await actor.start()
    except (RunError, OSError):
        return  # its task will see the same when the debugger has ended, and say so
    if actor.current is debugger and debugger.process.alive:
        actor.candidate = standby
    else:
        standby.kill("the debugger has gone already")
        await standby.ended()


def drop_standby(actor: SupervisedActor) -> None:
    """Drop the warm process behind the one that serves, or behind a debugger: its code may be outdated. A fresh one will start."""
    standby = actor.candidate
    if standby is not None and not standby.is_debugger:
        actor.candidate = None
        standby.kill("its code is outdated")


async def _hurry(actor: SupervisedActor) -> Instance | None:
    """Cut short the wait before the next start. Returns the new process, None if the actor ends instead."""
    actor.retry_now.set()
    actor.came.clear()
    await first(actor.spec.ready_timeout_s, actor.came, actor.stopping)
    return actor.current


async def _end_predecessor(actor: SupervisedActor, successor: Instance) -> None:
    """Tell the process that has the role to end at its next step boundary, and wait for that."""
    old = actor.current or await _hurry(actor)
    if old is not None and old is not successor:
        old.is_relieved = True
        await old.process.stop(actor.spec.handover_grace_s, first=actor.spec.handover_signal)


async def _reaches(instance: Instance, event: asyncio.Event, what: str = "", timeout_s: float | None = None) -> bool:
    """Wait until the process has said so; False if it ended first. After ``timeout_s`` it is killed for not being ``what``."""
    waiting = asyncio.create_task(event.wait())
    ended = asyncio.create_task(instance.ended())
    try:
        await asyncio.wait({waiting, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        ended.cancel()
    if not event.is_set():
        instance.kill(f"not {what} within {timeout_s:g} s" if timeout_s is not None else "")
        await instance.ended()
        return False
    return instance.process.alive


def _rejected(actor: SupervisedActor, candidate: Instance) -> RestartReply:
    if actor.candidate is candidate:
        actor.candidate = None
    serving = actor.current is not None and actor.current is not candidate and actor.current.process.alive
    if serving and actor.current is not None:
        actor.follow(actor.current)
    after = "the old one keeps serving" if serving else "there is no old one"
    return RestartReply(
        ok=False,
        message=f"{actor.name}: the new process ended with {candidate.describe_exit()} before it was ready; {after}",
        log=candidate.tail,
    )
