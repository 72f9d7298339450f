"""The pages that the files of ``cache.dir`` have, as far as is known (pure; controller process).

The process looks into the files now and then and tells the controller. That is a hint: by now the file may have overwritten a page, and
it may be damaged. A page that could not be loaded is not asked for again until some row has made it anew, or the file has it no more.
"""

from collections.abc import Iterable, Mapping


class SavedIndex:
    """The pages of one pool's file. Its size is bounded by the file."""

    def __init__(self) -> None:
        self._slot_of: Mapping[bytes, int] = {}
        self._lacking: set[bytes] = set()

    @property
    def is_empty(self) -> bool:
        """True if the file has no pages, or there is none."""
        return not self._slot_of

    def learn(self, slot_of: Mapping[bytes, int]) -> None:
        """Take note of a look into the file: the slots of all its pages, by key."""
        self._slot_of = slot_of
        self._lacking = {key for key in self._lacking if key in slot_of}

    def note_lacking(self, key: bytes) -> None:
        """Take note of a page that could not be loaded."""
        self._lacking.add(key)

    def note_made(self, keys: Iterable[bytes]) -> bool:
        """Take note of pages that were filled, and will be saved. Returns whether one of them could not be loaded before."""
        if not self._lacking:
            return False
        made = self._lacking.intersection(keys)
        self._lacking -= made
        return bool(made)

    def find(self, key: bytes) -> int | None:
        """Return the slot of a page; None if the file lacks it."""
        return None if key in self._lacking else self._slot_of.get(key)

    def find_leading(self, keys: Iterable[bytes]) -> list[int]:
        """Return the slots of the leading pages, up to the first that the file lacks."""
        slots: list[int] = []
        for key in keys if self._slot_of else ():
            slot = self.find(key)
            if slot is None:
                break
            slots.append(slot)
        return slots
