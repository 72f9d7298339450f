"""The record of one sent request, with the time of each token. Written by ``client``, read by ``report`` and ``slo``.

Times are seconds of CLOCK_MONOTONIC. Several tokens that arrive in one chunk have the same time.
"""

from collections.abc import Iterator

import msgspec


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """``num_tokens`` tokens that arrived at ``time_s``."""

    time_s: float
    num_tokens: int


class Record(msgspec.Struct, kw_only=True):
    """One request. ``error`` is None when it went well; ``cut`` when the bench itself ended it, which is no failure."""

    index: int
    group: str
    request_id: str = ""  # as the server says
    scheduled_s: float  # when the workload wanted it sent
    sent_s: float = 0.0
    chunks: list[Chunk] = []
    end_s: float = 0.0
    num_prompt_tokens: int | None = None  # as the server says
    num_completion_tokens: int | None = None  # as the server says
    num_cached_tokens: int | None = None  # of the prompt, as the server says; None where it says nothing
    finish_reason: str | None = None
    error: str | None = None
    cut: bool = False

    @property
    def is_success(self) -> bool:
        return self.error is None and not self.cut

    @property
    def lag_s(self) -> float:
        """Seconds by which the client itself sent it late."""
        return self.sent_s - self.scheduled_s

    @property
    def num_tokens(self) -> int:
        """Completion tokens: what the server says where it does, else what was counted in the stream."""
        counted = sum(chunk.num_tokens for chunk in self.chunks)
        return counted if self.num_completion_tokens is None else self.num_completion_tokens

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token; None without one."""
        return self.chunks[0].time_s - self.sent_s if self.chunks else None

    @property
    def e2e_s(self) -> float:
        """From sending to the end of the stream."""
        return self.end_s - self.sent_s

    def timed_tbts(self) -> Iterator[tuple[float, float]]:
        """(time of the token, seconds since the one before it) of every token after the first; within a chunk the time is 0."""
        previous_s: float | None = None
        for chunk in self.chunks:
            if previous_s is not None:
                yield chunk.time_s, chunk.time_s - previous_s
            for _ in range(chunk.num_tokens - 1):
                yield chunk.time_s, 0.0
            previous_s = chunk.time_s

    @property
    def tbts_s(self) -> list[float]:
        """Times between tokens."""
        return [tbt_s for _, tbt_s in self.timed_tbts()]

    def timed_gaps(self) -> Iterator[tuple[float, float]]:
        """(time of the chunk, seconds since the one before it): what a reader sees, which bunching tokens cannot flatter."""
        for before, after in zip(self.chunks, self.chunks[1:], strict=False):
            yield after.time_s, after.time_s - before.time_s
