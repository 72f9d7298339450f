"""Who of many killed the process? They are tried one by one (decode: rows of a batch; detokenizer: texts).

The generation before died in a step over many, and not by anybody's hand. Each of them is then tried in a step of its own whose name
says whose it is; with the others work goes on as usual in between. Who gets through is one of them again; whom the process dies of
a second time is known by name to the next generation, and is given up. So a guilty one costs two deaths, and the innocent no more
than the time of these steps. Should there be more deaths all the same, trials take more and more steps: what kills in company only,
or now and then, is kept alone until it is found or done. Plans of workers have their own way (runtime/controller/poison.py), for the
controller knows what is in them.
"""

from collections.abc import Iterable

from ...runtime.process.crash_cause import Death

Place = tuple[int, int]  # (row, row generation)

LONGER = 8  # times as many steps per trial after each further crash
MAX_TRIAL_STEPS = 4096

_SOLO = 1 << 62  # in the name of a step: it is one row's


def solo_step(place: Place) -> int:
    """The name of a step for this row alone; rows and their generations are below 2**30 and 2**32."""
    row, generation = place
    return _SOLO | row << 32 | generation & 0xFFFF_FFFF


def solo_place(step: int) -> Place | None:
    """Whose step it is; None for a step over many."""
    return ((step & ~_SOLO) >> 32, step & 0xFFFF_FFFF) if step & _SOLO else None


class SoloTrials:
    """``suspects`` are yet to be tried, in turn; ``guilty`` is to be given up, if somebody is."""

    def __init__(self, death: Death | None, places: Iterable[Place]) -> None:
        """``death`` is the predecessor's, ``places`` are all that it can have been working on."""
        self.guilty: Place | None = None
        self.suspects: list[Place] = []
        self.crashes = 0  # of which the reason is not known
        self._steps = 1
        self._done: dict[Place, int] = {}
        if death is None:
            return
        self.crashes = death.crashes
        tried = solo_place(death.step)
        if death.crashed and tried is not None:
            self.guilty = tried
            self.crashes = max(0, death.crashes - 2)
        if self.crashes > 1:
            self._steps = min(MAX_TRIAL_STEPS, LONGER ** min(16, self.crashes - 1))
        if death.crashed or tried is not None:  # killed from outside in the middle of a trial: it begins again
            self.suspects = [place for place in places if place != self.guilty]

    def passed(self, place: Place) -> None:
        """A suspect's step went well: it is none any more, or others take their turn before its next one."""
        self.suspects.remove(place)
        self._done[place] = self._done.get(place, 0) + 1
        if self._done[place] < self._steps:
            self.suspects.append(place)

    @property
    def held(self) -> set[int]:
        """Rows that are not to be worked on together with others."""
        return {row for row, _ in self.suspects}
