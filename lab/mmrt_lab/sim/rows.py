"""The words of the sequence table that the modelled actors read and write, and the rows that decodes have in their running sets."""

from collections.abc import Sequence
from dataclasses import dataclass

from mmrt.runtime.controller.machine import Controller
from mmrt.runtime.controller.rows.progress import Progress
from mmrt.runtime.controller.state.request import Request

from .step_log import StepLog


@dataclass(slots=True, eq=False)
class Member:
    """A row of a decode's running set. While it is ``active``, its count is ``count`` and the steps since ``since`` (a number of a step
    of ``log``)."""

    request: Request
    row: int
    generation: int
    log: StepLog
    end: int  # count at which it ends
    room: int = 0  # count at which it has no pages for the next token
    count: int = 0
    since: int = 0
    lag: int = 0  # ``since`` less ``count``
    active: bool = False

    @property
    def due(self) -> int:
        """The step before which it has to be looked at."""
        return self.lag + min(self.end, self.room)


class Rows:
    """decode's words for each row; the controller's are in its requests. ``members``: of running sets, by row."""

    def __init__(self, controller: Controller) -> None:
        self._state = controller.state
        num_rows = controller.state.limits.num_rows
        self.page_tokens = controller.state.limits.kv_page_tokens
        self.committed = [0] * num_rows
        self.end_codes = [0] * num_rows
        self.members: list[Member | None] = [None] * num_rows

    def begin(self, row: int) -> None:
        """A new request has the row."""
        self.committed[row] = self.end_codes[row] = 0

    def request(self, row: int, generation: int) -> Request | None:
        """The request in this generation of a row; None once it is leaving it."""
        request = self._state.rows[row]
        return request if request is not None and request.row_generation == generation and not request.ending else None

    def is_alive(self, row: int, generation: int) -> bool:
        """Return whether this generation of a row has a request that keeps it."""
        return self.request(row, generation) is not None

    def progress(self, watched: Sequence[tuple[int, int]]) -> list[Progress]:
        """The words of these rows, once every decode has committed the steps that are over."""
        members, committed, end_codes = self.members, self.committed, self.end_codes
        return [
            (
                row,
                generation,
                member.log.num_steps - member.lag if (member := members[row]) is not None and member.active else committed[row],
                end_codes[row],
            )
            for row, generation in watched
        ]
