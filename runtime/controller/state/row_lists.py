"""The requests in rows by phase (pure). A list is made when somebody asks for it after it has changed."""

from collections.abc import Sequence

from ....schema.rows import Phase
from .request import Request


class RowLists:
    """Lists in row order; do not change them. Call ``note_phase``, ``note_end`` or ``note_counts`` after such a change of a request."""

    def __init__(self, rows: Sequence[Request | None]) -> None:
        self._rows = rows
        self._live: list[Request] | None = None
        self._preparing: list[Request] | None = None
        self._decoding: list[Request] | None = None
        self._watched: list[tuple[int, int]] | None = None
        self._num_decode_tokens = 0
        self._tbt_s: set[float] = set()

    def note_phase(self, request: Request, before: Phase) -> None:
        """The request has another phase than ``before``."""
        phase = request.phase
        if before == Phase.FREE or phase == Phase.ENDING:
            self._live = None
        if Phase.PREPARE in (before, phase):
            self._preparing = None
        if Phase.DECODE in (before, phase):
            self._decoding = self._watched = None
        elif not request.answer.counts_known:
            self._watched = None

    def note_end(self) -> None:
        """It is known of a request that decode appends no further ids."""
        self._decoding = None

    def note_counts(self) -> None:
        """The count of a request is known, or no longer."""
        self._watched = None

    def live(self) -> list[Request]:
        """Return requests that have a row and keep it."""
        if self._live is None:
            self._live = [request for request in self._rows if request is not None and not request.ending]
        return self._live

    def preparing(self) -> list[Request]:
        """Return requests whose media or prompts are being processed."""
        if self._preparing is None:
            prepare = Phase.PREPARE
            self._preparing = [request for request in self.live() if request.phase == prepare]
        return self._preparing

    def decoding(self) -> list[Request]:
        """Return requests that decode is generating tokens for."""
        if self._decoding is None:
            decode = Phase.DECODE
            self._decoding = found = [request for request in self.live() if request.phase == decode and not request.answer.end_code]
            self._num_decode_tokens = sum([len(request.kv.lengths) for request in found])
            self._tbt_s = {request.objective.tbt_s for request in found}
        return self._decoding

    def watched(self) -> list[tuple[int, int]]:
        """Return (row, generation) of the rows whose words matter now."""
        if self._watched is None:
            decode = Phase.DECODE
            self._watched = [(r.row, r.row_generation) for r in self.live() if r.phase == decode or not r.answer.counts_known]
        return self._watched

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of a step of decode: two for a guidance pair."""
        self.decoding()
        return self._num_decode_tokens

    @property
    def tbt_s(self) -> set[float]:
        """Objectives of those that decode; 0: none of its own."""
        self.decoding()
        return self._tbt_s
