"""The residual streams between two stages of prefill's pipeline: a ``RowFile`` with a place for each plan in flight.

A stage writes the stream behind its last layer before its plan is done; the next stage reads it. What is written twice has the same
bits. A place keeps its bytes until another plan takes it, so a stage that was killed finds them again.
"""

from .row_file import RowFile, whole_pages
from .run_directory import RunDirectory

_NAME = "streams"


class StreamFile(RowFile):
    """A place has up to ``max_tokens`` tokens, of ``token_bytes`` each."""

    def __init__(self, run: RunDirectory, max_tokens: int, token_bytes: int, *, writable: bool) -> None:
        super().__init__(run, _NAME, whole_pages(max_tokens * token_bytes), writable=writable)
        self._token_bytes = token_bytes

    def write(self, relay: int, first: int, data: bytes) -> None:
        """Write tokens from ``first`` on. Raises: OSError, ENOSPC."""
        self.write_at(relay, first * self._token_bytes, data)

    def read(self, relay: int, first: int, num_tokens: int) -> bytes:
        """Read tokens [first, first + num_tokens). Raises: ValueError where the file ends before them."""
        wanted = num_tokens * self._token_bytes
        data = self.read_at(relay, first * self._token_bytes, wanted)
        if len(data) < wanted:
            raise ValueError(f"place {relay} has no stream of {num_tokens} tokens from {first} on")
        return data
