"""Views of a picture: a part of it resized, then cut. For the video actor; families say which (``schema.media.View``)."""

from collections.abc import Iterable

import numpy as np

from ..schema.media import Part, View
from .preprocess import Pixels, resize
from .rules import Resample

_STRIP_PIXELS = 1 << 22  # of what is resized at once

Made = tuple[Part | None, tuple[int, int, int], tuple[tuple[int, int], ...]]
"""A part of a picture, the colour around it, and the sizes to which it is resized in turn."""


class Views:
    """A picture in the sizes that its views are cut from. ``num_bytes``: of what it keeps."""

    def __init__(self, frame: Pixels, views: Iterable[View], resample: Resample) -> None:
        self._resample = resample
        made: dict[Made, Pixels] = {}  # [height, width, 3]
        self._kept = {_made_of(view): self._resize(frame, _made_of(view), made) for view in views}
        self.num_bytes = sum(pixels.nbytes for pixels in self._kept.values())

    def _resize(self, frame: Pixels, wanted: Made, made: dict[Made, Pixels]) -> Pixels:
        source, fill, sizes = wanted
        if wanted not in made:
            if not sizes:
                made[wanted] = frame
            elif len(sizes) == 1 and source is not None:
                made[wanted] = resized_part(frame, source, fill, sizes[0], self._resample)
            else:
                before = self._resize(frame, (source, fill, sizes[:-1]), made)
                made[wanted] = _lines(resize(before, *sizes[-1], self._resample))
        return made[wanted]

    def planes(self, view: View) -> Pixels:
        """uint8 [3, height, width] of the view."""
        pixels = self._kept[_made_of(view)]
        if view.window is not None:
            x, y, width, height = view.window
            top, left = max(y, 0), max(x, 0)
            inside = pixels[top : max(y + height, top), left : max(x + width, left)]
            if inside.shape[:2] == (height, width):
                pixels = inside
            else:
                pixels = np.full((height, width, 3), view.fill, np.uint8)
                pixels[top - y : top - y + inside.shape[0], left - x : left - x + inside.shape[1]] = inside
        return pixels.transpose(2, 0, 1)


def resized_part(frame: Pixels, source: Part, fill: tuple[int, int, int], size: tuple[int, int], resample: Resample) -> Pixels:
    """uint8 [height, width, 3]. Some lines at a time are resized to the width, then all to the height, as ``resize`` does it itself:
    the square around a long picture is never in memory."""
    x, y, width, height = source
    top, left = max(y, 0), max(x, 0)
    inside = frame[top : max(y + height, top), left : max(x + width, left)]
    narrow = np.full((height, size[1], 3), fill, np.uint8)
    per_strip = max(1, _STRIP_PIXELS // width)
    for at in range(0, len(inside), per_strip):
        lines = inside[at : at + per_strip]
        strip = np.full((len(lines), width, 3), fill, np.uint8)
        strip[:, left - x : left - x + lines.shape[1]] = lines
        narrow[top - y + at : top - y + at + len(lines)] = _lines(resize(strip, len(lines), size[1], resample))
    return _lines(resize(narrow, *size, resample))


def _lines(planes: Pixels) -> Pixels:
    return np.ascontiguousarray(planes.transpose(1, 2, 0))


def _made_of(view: View) -> Made:
    return view.source, view.fill, view.sizes
