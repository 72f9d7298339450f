"""One table of pages of the rows of ``sequence_table``: entries [R, M, max_pages] uint32 and how many of them are filled [R, M] uint64.

The controller writes it; entries come before their count.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .fence import fence
from .segment import Field, Segment


class PageTable:
    """A view of one table in a segment."""

    def __init__(self, segment: Segment, entries: Field, counts: Field) -> None:
        self._segment = segment
        self._entries: NDArray[np.uint32] = segment.field(entries)
        self._counts: NDArray[np.uint64] = segment.field(counts)
        self._first_word, self._num_members = counts.offset // 8, counts.shape[1]

    def append(self, row: int, member: int, pages: Sequence[int]) -> None:
        """Grow a member's table: entries first, then their count. Raises: ValueError above ``max_pages``."""
        word, max_pages = self._word(row, member), self._entries.shape[2]
        start = self._segment.words[word]
        end = start + len(pages)
        if end > max_pages:
            raise ValueError(f"{end} pages for row {row} exceed its block table of {max_pages}")
        self._entries[row, member, start:end] = pages
        fence()
        self._segment.words[word] = end

    def filled(self, row: int, member: int) -> NDArray[np.uint32]:
        """Return a member's entries as far as they are filled: a view."""
        count = self._segment.words[self._word(row, member)]
        fence()
        return self._entries[row, member, :count]

    def clear(self, row: int) -> None:
        """Empty the tables of all members."""
        self._counts[row] = 0

    def _word(self, row: int, member: int) -> int:
        return self._first_word + row * self._num_members + member
