"""The pages of recurrent states that a member of a row has in one pool (pure)."""

from typing import NamedTuple

from ....schema.rows import SNAPSHOT_SLOT


class StatePages(NamedTuple):
    """A member's pages of recurrent states, and of their log; and the page of the cache that it begins from. -1: none. A row without an
    answer has no log."""

    bases: tuple[int, int] = (-1, -1)
    log: int = -1
    snapshot: int = -1

    @property
    def is_whole(self) -> bool:
        """False also where the words of a grant were not all written: those of the bases are the last."""
        return -1 not in self.bases

    def at(self, slot: int) -> int:
        """Return the page of a slot."""
        return self.snapshot if slot == SNAPSHOT_SLOT else self.bases[slot]


NO_STATES = StatePages(), StatePages()
