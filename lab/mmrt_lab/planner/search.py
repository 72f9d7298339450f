"""The search over all layouts: coarse for each, then as fine as ranks need it, with several simulations at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from mmrt.bench.output import Tell

from .grid import Bracket, Grid, undecided
from .measure import Outcome

Measure = Callable[[str, float], "Future[Outcome]"]
"""Simulates a layout at a rate, sooner or later."""


class Search:
    """Goodputs of layouts. ``outcomes``: all loads that were simulated, by layout and grid step."""

    def __init__(self, grid: Grid, starts: dict[str, float], chosen_from: Sequence[str], target: float) -> None:
        """``starts``: where to begin, in requests per second. ``chosen_from``: layouts whose ranks are wanted."""
        self.brackets = {layout: Bracket(grid, grid.step(rate)) for layout, rate in starts.items()}
        self.outcomes: dict[str, dict[int, Outcome]] = {layout: {} for layout in starts}
        self._grid, self._chosen_from, self._target = grid, chosen_from, target
        self._order = sorted(starts, key=starts.__getitem__, reverse=True)  # long simulations first

    def run(self, measure: Measure, num_at_once: int, tell: Tell) -> None:
        """Simulate until ranks are known. Raises: as ``measure``."""
        running: dict[Future[Outcome], tuple[str, int]] = {}
        while True:
            busy = {layout for layout, _ in running.values()}
            for layout, step in self._wanted(busy):
                if len(running) >= num_at_once:
                    break
                tell(f"{layout}: {self._grid.rate(step):.3g} requests/s; {self._num_decided} of {len(self.brackets)} layouts are known")
                running[measure(layout, self._grid.rate(step))] = layout, step
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                layout, step = running.pop(future)
                self.note(layout, step, future.result())

    def note(self, layout: str, step: int, outcome: Outcome) -> None:
        """Take note of a load."""
        self.outcomes[layout][step] = outcome
        self.brackets[layout].note(step, outcome.attainment >= self._target)

    def _wanted(self, busy: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Loads to simulate next: first until every goodput is known coarsely, then where a rank is open."""
        coarse = [layout for layout in self._order if self.brackets[layout].next(self._grid.stride) is not None]
        width, layouts = (self._grid.stride, coarse) if coarse else (1, undecided(self.brackets, self._chosen_from))
        for layout in layouts:
            step = None if layout in busy else self.brackets[layout].next(width)
            if step is not None:
                yield layout, step

    @property
    def _num_decided(self) -> int:
        return sum(bracket.next(self._grid.stride) is None for bracket in self.brackets.values())
