"""Looks into the flight recorders, in a thread, for the stages of the gateway's requests: for the metrics, and for traces if they
are on.

Nothing of it runs in the event loop but a timer.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from ....runtime.observe.request_follower import FollowedRequest, RequestFollower
from ....runtime.observe.request_stages import stages_to_first_text
from ....shm.run_directory import RunDirectory
from .metrics import Metrics

if TYPE_CHECKING:
    from .tracing import Tracing

log = logging.getLogger(__name__)

LOOK_S = 0.25
PAUSE_S = 0.0005  # between pieces of a look, for the event loop: a thread that computes keeps it waiting again and again


class StageWatch:
    """Belongs to the running event loop."""

    def __init__(
        self,
        run: RunDirectory,
        actors: Callable[[], Sequence[str]],
        gateway: tuple[str, int],
        metrics: Metrics,
        tracing: "Tracing | None",
    ) -> None:
        """``actors``: of the run, at the call. ``gateway``: name and generation of it. ``tracing``: None where it is off."""
        self._tracing = tracing
        self._metrics = metrics
        self._actors = actors
        self._follower = RequestFollower(run, actors(), gateway, self._on_first_text, self._on_over)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stages")
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Look for the last time, and end."""
        self._task.cancel()
        for _ in range(2):  # a look says what the one before it has found
            await asyncio.wrap_future(self._thread.submit(self._look))
        if self._tracing is not None:
            await asyncio.wrap_future(self._thread.submit(self._tracing.close))
        self._thread.shutdown()
        self._follower.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.shield(asyncio.wrap_future(self._thread.submit(self._look)))

    def _look(self) -> None:
        try:
            self._follower.follow(self._actors())
            self._follower.look(partial(time.sleep, PAUSE_S))
        except Exception:  # figures must not cost answers
            log.exception("the stages of some requests are lost")

    def _on_first_text(self, request: FollowedRequest) -> None:
        assert request.first is not None
        self._metrics.on_stages(stages_to_first_text(request.span, request.plans.values(), request.first))

    def _on_over(self, request: FollowedRequest, end_ns: int) -> None:
        if self._tracing is not None:
            self._tracing.over(request, end_ns)
