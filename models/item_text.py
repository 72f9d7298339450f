"""Ids of the text that stands around the tokens of media in a prompt. Pure."""

from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

NUMBER = "\0"  # in ``ModelConfig.prompt_texts``: how many such pieces stand before it


class TimeTokens(msgspec.Struct, frozen=True):
    """Ids of the pieces that the text of a time in seconds is made of, as ``<12.3 seconds>``."""

    opening: tuple[int, ...]
    digits: tuple[tuple[tuple[int, ...], ...], ...]  # of 0 to 9, then of 00 to 99 and so on: as many digits as make one piece at most
    point: tuple[int, ...]
    closing: tuple[int, ...]

    @property
    def ids(self) -> Iterator[int]:
        return chain(self.opening, *(piece for of_length in self.digits for piece in of_length), self.point, self.closing)

    def text(self, number: str) -> Iterator[int]:
        """The ids of a number such as ``12.3``, and of what stands around it."""
        yield from self.opening
        for place, digits in enumerate(number.split(".")):
            yield from self.point if place else ()
            for at in range(0, len(digits), len(self.digits)):
                piece = digits[at : at + len(self.digits)]
                yield from self.digits[len(piece) - 1][int(piece)]
        yield from self.closing


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


def with_prompt_texts(rendered: str, texts: Sequence[tuple[str, str]]) -> str:
    """A rendered template as it becomes tokens. ``texts``: as in ``ModelConfig``."""
    for written, meant in texts:  # control tokens: what users write has none
        first, *others = rendered.split(written)
        rendered = first + "".join(meant.replace(NUMBER, str(number)) + other for number, other in enumerate(others))
    return rendered
