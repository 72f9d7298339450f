"""The words of the sequence table that the modelled actors read and write."""

from ...runtime.controller.machine import Controller
from ...runtime.controller.request import Request


class Rows:
    """decode's words for each row; the controller's are in its requests."""

    def __init__(self, controller: Controller) -> None:
        self._state = controller.state
        self.page_tokens = controller.state.limits.kv_page_tokens
        self.committed = [0] * controller.state.limits.num_rows
        self.end_codes = [0] * controller.state.limits.num_rows

    def begin(self, row: int) -> None:
        """A new request has the row."""
        self.committed[row] = self.end_codes[row] = 0

    def request(self, row: int, generation: int) -> Request | None:
        """The request in this generation of a row; None once it is leaving it."""
        request = self._state.rows[row]
        return request if request is not None and request.row_generation == generation and not request.ending else None
