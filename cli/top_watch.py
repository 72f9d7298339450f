"""Look at a run again and again, for ``mmrt top``: its report, and what its flight recorders have got since the last look."""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ..runtime.errors import RunError
from ..runtime.observe.live import Event, LiveRequest, LiveRequests
from ..runtime.supervisor.run_report import RunReport
from ..shm.errors import MissingError
from ..shm.run_directory import RunDirectory
from ..shm.status import ActorTable
from .status import read_report

NUM_RATES = 60


class View(NamedTuple):
    """One look at a run. ``rates``: tokens per second, the latest last; ``steps``: of each actor, per second."""

    report: RunReport
    rates: Sequence[float]
    steps: dict[str, float]
    requests: Sequence[LiveRequest]  # the newest first
    events: Sequence[Event]  # the newest last
    now_ns: int


class Watch:
    """Looks at a run again and again. Raises RunError when it is not up, or no longer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._report = read_report(path)
        try:
            self._run = RunDirectory.attach(path, timeout_s=0.5)
            with closing(ActorTable.attach(self._run, writable=False)) as table:
                self._live = LiveRequests(self._run, table.actors)
        except MissingError:
            raise RunError(f"the run in {path} has only just begun: mmrt status shows its start") from None
        self._live.look()
        self._looked_s = time.monotonic()
        self._rates: list[float] = []

    def close(self) -> None:
        self._live.close()
        self._run.close()

    def look(self) -> View:
        """Return the state now, with rates since the last look."""
        before, tokens, looked_s = self._report, self._live.num_tokens, self._looked_s
        self._report = read_report(self._path)
        self._live.look()
        self._looked_s = time.monotonic()
        passed_s = max(1e-3, self._looked_s - looked_s)
        self._rates = [*self._rates, (self._live.num_tokens - tokens) / passed_s][-NUM_RATES:]
        return View(
            report=self._report,
            rates=self._rates,
            steps=_rates_of_steps(before, self._report, passed_s),
            requests=sorted(self._live.requests.values(), key=lambda request: -request.span.begin_ns),
            events=list(self._live.events),
            now_ns=time.monotonic_ns(),
        )


def _rates_of_steps(before: RunReport, after: RunReport, passed_s: float) -> dict[str, float]:
    """Return each actor's steps per second; 0 for one whose process is another."""
    earlier = {(actor.name, actor.pid): actor.steps for actor in before.actors}
    return {
        actor.name: max(0.0, (actor.steps - earlier.get((actor.name, actor.pid), actor.steps)) / passed_s) for actor in after.actors
    }
