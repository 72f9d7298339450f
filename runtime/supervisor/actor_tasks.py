"""The tasks of a run's actors, in the supervisor's event loop: one for each, from its first start to its last end."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from .managed_actor import SupervisedActor


class ActorTasks:
    """The tasks by actor. An exception in one is a bug in mmrt: it must end the run, not hang it."""

    def __init__(self, end: Callable[[], None]) -> None:
        """``end`` ends the run."""
        self._end = end
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, actor: SupervisedActor) -> None:
        """Keep an actor running from now on."""
        self._tasks[actor.name] = task = asyncio.create_task(actor.run(), name=actor.name)
        self.watch(task)

    def watch(self, task: asyncio.Task[Any]) -> None:
        """End the run if the task raises."""
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._end()

    def raise_bugs(self, others: Iterable[asyncio.Task[Any]]) -> None:
        """Raise what a task has raised, of actors or others."""
        for task in (*others, *self._tasks.values()):
            if task.done():
                task.result()

    async def ended(self, name: str) -> None:
        """Wait for the end of an actor that was told to stop, and forget it."""
        await self._tasks[name]
        del self._tasks[name]

    async def all_ended(self) -> None:
        """Wait for the ends of all actors."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
