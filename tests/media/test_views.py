"""Views of a picture: resized several times, then cut; beside Pillow."""

import numpy as np
import pytest
from PIL import Image

from mmrt.media.preprocess import Pixels, resize
from mmrt.media.views import Views
from mmrt.schema.media import View

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)


def pillow(height: int, width: int, pixels: Pixels = PIXELS) -> Pixels:
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


def test_views_are_cut_from_pictures_that_are_resized_in_turn() -> None:
    twice = View(((40, 50), (64, 96)))
    tiles = [View(twice.sizes, (x, y, 32, 32)) for y in (0, 32) for x in (0, 32, 64)]
    views = Views(PIXELS, [*tiles, twice, View(((40, 50),)), View(())], "lanczos")
    expected = pillow(64, 96, pillow(40, 50))
    for tile in tiles:
        x, y, _, _ = tile.window
        np.testing.assert_array_equal(views.planes(tile), expected[y : y + 32, x : x + 32].transpose(2, 0, 1))
    np.testing.assert_array_equal(views.planes(twice), expected.transpose(2, 0, 1))
    np.testing.assert_array_equal(views.planes(View(((40, 50),))), pillow(40, 50).transpose(2, 0, 1))
    np.testing.assert_array_equal(views.planes(View(())), PIXELS.transpose(2, 0, 1))
    assert views.num_bytes == 3 * (64 * 96 + 40 * 50 + 60 * 90) and twice.size == (64, 96) and tiles[0].size == (32, 32)


@pytest.mark.parametrize("window", [(-5, -7, 100, 80), (80, 50, 20, 20), (-4, 10, 10, 9), (200, 0, 3, 3), (0, -9, 5, 4)])
def test_what_is_outside_of_the_picture_is_black(window: tuple[int, int, int, int]) -> None:
    x, y, width, height = window
    padded = np.zeros((60 + 600, 90 + 600, 3), np.uint8)
    padded[300:360, 300:390] = PIXELS
    view = View(((60, 90),), window)
    found = Views(PIXELS, [view], "bicubic").planes(view)
    expected = padded[300 + y : 300 + y + height, 300 + x : 300 + x + width]
    np.testing.assert_array_equal(found, expected.transpose(2, 0, 1))
    np.testing.assert_array_equal(resize(PIXELS, 30, 30), Views(PIXELS, [View(((30, 30),))], "bicubic").planes(View(((30, 30),))))
