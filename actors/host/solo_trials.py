"""After a crash in a step over many members, try each alone until the cause is known (decode: rows; detokenizer: texts).

A trial is one step whose name identifies its row; between trials work goes on as usual with the others. A row whose trial succeeds
joins them again. If the process crashes in a trial, the next generation reads the name and gives that row up: such a row costs two
crashes, and the others lose the time of their trials. A kill from outside a trial ends the trials: the next crash begins them again.
A row that crashes the process only together with others is never found: such crashes are counted as unexplained, see ``crash_cause``.
Plans of workers are handled in ``runtime/controller/rows/poison.py``, since the controller knows their contents.
"""

from collections.abc import Iterable

from ...runtime.process.crash_cause import Death

Place = tuple[int, int]  # (row, row generation)

_SOLO = 1 << 62  # in the name of a step: it is for one row


def solo_step(place: Place) -> int:
    """The name of a step for this row alone; rows and their generations are below 2**30 and 2**32."""
    row, generation = place
    return _SOLO | row << 32 | generation & 0xFFFF_FFFF


def solo_place(step: int) -> Place | None:
    """The row of a solo step; None for a step over many."""
    return ((step & ~_SOLO) >> 32, step & 0xFFFF_FFFF) if step & _SOLO else None


class SoloTrials:
    """``suspects`` are yet to be tried, in turn; ``guilty`` is the row to give up, if any; ``crashes`` are unexplained ones."""

    def __init__(self, death: Death | None, places: Iterable[Place]) -> None:
        """``death`` is the previous process's, ``places`` are all rows that it can have been working on."""
        self.guilty: Place | None = None
        self.suspects: list[Place] = []
        self.crashes = death.crashes if death is not None else 0
        tried = solo_place(death.step) if death is not None else None
        if death is not None and death.crashed and tried is not None:
            self.guilty = tried
            self.crashes = max(0, death.crashes - 2)  # this one, and the one that made it a suspect
        if death is not None and (death.crashed or tried is not None):  # killed from outside in a trial: the trials begin again
            self.suspects = [place for place in places if place != self.guilty]

    def passed(self, place: Place) -> None:
        """Note that a suspect's step succeeded."""
        self.suspects.remove(place)

    @property
    def held(self) -> set[int]:
        """Rows that must not be worked on together with others."""
        return {row for row, _ in self.suspects}
