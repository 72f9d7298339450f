"""Set the layouts that the load asks for (``[autoscale]``; MS4).

Run by the supervisor, beside the actors. It looks at the run every few seconds and follows the advice: what is refused, as processes
that find no memory, changes nothing, and is said once. A failure of its own ends it, and not the run.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from ..autoscale.advice import Advice, Adviser
from ..autoscale.demand import Demand
from ..autoscale.scaler import Sample, kinds_of
from ..config.runtime_config import RuntimeConfig
from ..errors import RunError
from ..process.processors import read_processors
from ..stage_table import MAX_INSTANCES

log = logging.getLogger(__name__)


class AutoscaledRun(Protocol):
    """The interface of the run's actors (``crew``) for the autoscaler."""

    @property
    def config(self) -> RuntimeConfig: ...
    @property
    def can_scale(self) -> bool: ...
    def say(self, text: str) -> None: ...


class Looks(Protocol):
    """The part of an ``Observer`` that it needs. ``look`` raises RunError."""

    def look(self) -> tuple[Sample, Demand]: ...
    def close(self) -> None: ...


class Autoscaler:
    """Looks at the run while it serves, and sets its layout. ``observe`` begins to look at it; ``change`` sets a layout. Both raise
    RunError."""

    def __init__(self, run: AutoscaledRun, observe: Callable[[], Looks], change: Callable[[str], Awaitable[object]]) -> None:
        self._run = run
        self._observe = observe
        self._change = change
        self._section = run.config.autoscale
        self._observer: Looks | None = None
        self._said = ""

    async def scale(self) -> None:
        """Look and follow, until the task is cancelled."""
        try:
            await self._scale()
        except Exception:
            log.exception("the autoscaler")
            self._run.say("autoscale has failed and is off; the layout stays as it is (mmrt layout, mmrt scale)")
        finally:
            if self._observer is not None:
                self._observer.close()

    async def _scale(self) -> None:
        section, config = self._section, self._run.config
        adviser = Adviser(config, section.calm_s, section.most or most_of(config))
        while True:
            await asyncio.sleep(section.every_s)
            if not self._run.can_scale:
                continue
            try:
                self._observer = self._observer or self._observe()
                sample, _ = await asyncio.to_thread(self._observer.look)
                await self._follow(adviser.look(sample, self._run.config))
            except RunError as error:
                self._say_once(f"autoscale: {error}")

    async def _follow(self, advice: Advice) -> None:
        if advice.layout is None:
            if advice.why:
                self._say_once(f"autoscale keeps the layout ({'; '.join(advice.why)})", "kept")
            return
        what = f"layout {advice.layout} ({'; '.join(advice.why)})"
        if self._section.dry_run:
            self._say_once(f"autoscale would set {what}", advice.layout)
            return
        try:
            await self._change(advice.layout)
        except RunError as error:
            self._say_once(f"autoscale: {what} is refused: {error}", f"{advice.layout} {error}")
            return
        self._said = ""
        self._run.say(f"autoscale has set {what}")

    def _say_once(self, text: str, about: str = "") -> None:
        """Say a text, unless the last one was about the same; figures in it may differ."""
        if (about or text) != self._said:
            self._said = about or text
            self._run.say(text)


def most_of(config: RuntimeConfig) -> int:
    """Return how many processes of a kind there may be: as many as cores, and no fewer than the configured layout has."""
    configured = max(map(len, kinds_of(config.processes).values()))
    return min(MAX_INSTANCES, max(configured, read_processors().num_cores))
