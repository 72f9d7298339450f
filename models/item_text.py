"""Ids of the text that stands around the tokens of media in a prompt. Pure."""

from collections.abc import Iterator
from itertools import chain

import msgspec


class TimeTokens(msgspec.Struct, frozen=True):
    """Ids of the pieces that the text of a time in seconds is made of, as ``<12.3 seconds>``."""

    opening: tuple[int, ...]
    digits: tuple[tuple[int, ...], ...]  # of 0 to 9
    point: tuple[int, ...]
    closing: tuple[int, ...]

    @property
    def ids(self) -> Iterator[int]:
        return chain(self.opening, *self.digits, self.point, self.closing)


class TileTokens(msgspec.Struct, frozen=True):
    """Ids of the text around the tiles of a picture."""

    opening: tuple[int, ...]  # of each tile; it also ends the picture
    whole: tuple[int, ...]  # in place of a tag
    places: tuple[tuple[tuple[int, ...], ...], ...]  # the tag of a row and a column
    row_end: tuple[int, ...]
    last_row_end: tuple[int, ...]

    @property
    def ids(self) -> Iterator[int]:
        return chain(self.opening, self.whole, *(tag for row in self.places for tag in row), self.row_end, self.last_row_end)
