"""Views of a picture: resized, then cut. For the video actor; families say which (``schema.media.View``)."""

from collections.abc import Iterable

import numpy as np

from ..schema.media import View
from .preprocess import Pixels, resize
from .rules import Resample

Sizes = tuple[tuple[int, int], ...]
"""To which a picture is resized in turn."""


class Views:
    """A picture in the sizes that its views are cut from. ``num_bytes``: of what it keeps."""

    def __init__(self, frame: Pixels, views: Iterable[View], resample: Resample) -> None:
        self._resample = resample
        made: dict[Sizes, Pixels] = {(): frame}  # [height, width, 3]
        self._kept = {view.sizes: self._resize(view.sizes, made) for view in views}
        self.num_bytes = sum(pixels.nbytes for pixels in self._kept.values())

    def _resize(self, sizes: Sizes, made: dict[Sizes, Pixels]) -> Pixels:
        if sizes not in made:
            before = self._resize(sizes[:-1], made)
            made[sizes] = np.ascontiguousarray(resize(before, *sizes[-1], self._resample).transpose(1, 2, 0))
        return made[sizes]

    def planes(self, view: View) -> Pixels:
        """uint8 [3, height, width] of the view."""
        pixels = self._kept[view.sizes]
        if view.window is not None:
            x, y, width, height = view.window
            top, left = max(y, 0), max(x, 0)
            inside = pixels[top : max(y + height, top), left : max(x + width, left)]
            if inside.shape[:2] == (height, width):
                pixels = inside
            else:
                pixels = np.zeros((height, width, 3), np.uint8)
                pixels[top - y : top - y + inside.shape[0], left - x : left - x + inside.shape[1]] = inside
        return pixels.transpose(2, 0, 1)
