"""Log-probabilities of tokens, for requests that ask for them: a ``RowFile``.

decode writes the record of an id of an answer before the count that commits the id; prefill writes those of a prompt before its plan
is done; the gateway reads both. A record belongs to the generation that its row has; who reads checks that after reading.
"""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .row_file import RowFile, whole_pages
from .run_directory import RunDirectory

MAX_ALTERNATIVES = 20
PROMPT, ANSWER = 0, 1  # parts of a row

_NAME = "logprobs"
_NUM_PARTS = 2
_WORD_BYTES = 4


class Logprobs(NamedTuple):
    """Of N tokens: their own log-probability, float32 [N], and its rank among all, int32 [N], 1 being the likeliest; and the K
    likeliest ids, int32 [N, K], with their log-probabilities, float32 [N, K], in falling order."""

    own: NDArray[np.float32]
    rank: NDArray[np.int32]
    ids: NDArray[np.int32]
    values: NDArray[np.float32]

    @staticmethod
    def record_bytes(num_alternatives: int) -> int:
        return _WORD_BYTES * (2 + 2 * num_alternatives)

    def part(self, first: int, last: int, num_alternatives: int) -> "Logprobs":
        """Return those of tokens [first, last), with at most so many alternatives."""
        alternatives = np.s_[first:last, :num_alternatives]
        return Logprobs(self.own[first:last], self.rank[first:last], self.ids[alternatives], self.values[alternatives])

    def pack(self) -> bytes:
        """Return the records, one behind another."""
        columns = (self.own.view(np.int32)[:, None], self.rank[:, None], self.ids, self.values.view(np.int32))
        return np.concatenate(columns, axis=1, dtype=np.int32).tobytes()

    @classmethod
    def unpack(cls, data: bytes, num_alternatives: int) -> Self:
        words = np.frombuffer(data, np.int32).reshape(-1, 2 + 2 * num_alternatives)
        ids, values = words[:, 2 : 2 + num_alternatives], words[:, 2 + num_alternatives :]
        return cls(words[:, 0].view(np.float32), words[:, 1], ids, np.ascontiguousarray(values).view(np.float32))


class LogprobFile(RowFile):
    """Records of one request have the same number of alternatives, K."""

    def __init__(self, run: RunDirectory, max_context: int, *, writable: bool) -> None:
        self._part_bytes = whole_pages(max_context * Logprobs.record_bytes(MAX_ALTERNATIVES))
        super().__init__(run, _NAME, _NUM_PARTS * self._part_bytes, writable=writable)

    def write(self, row: int, part: int, first: int, logprobs: Logprobs) -> None:
        """Write the records of tokens [first, first + N) of a row's prompt or answer. Raises: OSError, ENOSPC."""
        data = logprobs.pack()
        num_bytes = len(data) // max(1, len(logprobs.own))
        self.write_at(row, part * self._part_bytes + first * num_bytes, data)

    def read(self, row: int, part: int, first: int, last: int, num_alternatives: int) -> Logprobs:
        """Read the records of tokens [first, last). Raises: ValueError where they have not been written."""
        num_bytes = Logprobs.record_bytes(num_alternatives)
        wanted = (last - first) * num_bytes
        data = self.read_at(row, part * self._part_bytes + first * num_bytes, wanted)
        if len(data) < wanted:
            raise ValueError(f"row {row} has no records of tokens {first} to {last}")
        return Logprobs.unpack(data, num_alternatives)
