"""Restarts of actors while the exam asks: the answers are to be those of a run that is left alone."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mmrt.bench.own_run import OwnRun, OwnRunError
from mmrt.runtime.stage_table import actors_of, stage_of

_PAUSE_S = 0.2


def restartable(layout: str) -> tuple[str, ...]:
    """The actors of a run that the exam can restart: with the gateway the exam's connections would end."""
    return tuple(name for name in actors_of(layout) if stage_of(name) != "gateway")


@contextmanager
def restarting(run: OwnRun, actors: Sequence[str]) -> Iterator[list[str]]:
    """Restart one of the actors after another until the block ends; the names of those that were, as it goes on.

    Raises: OwnRunError at the end, if a restart failed.
    """
    done: list[str] = []
    failed: list[OwnRunError] = []
    stop = threading.Event()

    def work() -> None:
        for name in itertools.cycle(actors):  # none: nothing to do
            try:
                run.command("restart", name)
            except OwnRunError as error:
                failed.append(error)
                return
            done.append(name)
            if stop.wait(_PAUSE_S):
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]
