"""Views of a picture: resized several times, then cut; beside Pillow."""

import tracemalloc

import numpy as np
import pytest
from PIL import Image

from mmrt.media.preprocess import Pixels, resize
from mmrt.media.views import Views, resized_part
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


@pytest.mark.parametrize("source", [(0, -15, 90, 90), (-20, -30, 130, 120), (10, 5, 40, 50), (-9, 0, 9, 60)])
@pytest.mark.parametrize("strip", [1, 700, 1 << 22])
def test_a_part_is_resized_as_if_it_were_the_picture(
    monkeypatch: pytest.MonkeyPatch, source: tuple[int, int, int, int], strip: int
) -> None:
    """To the last bit, whatever lines are resized at a time; around the picture is a colour."""
    monkeypatch.setattr("mmrt.media.views._STRIP_PIXELS", strip)
    x, y, width, height = source
    padded = np.full((60 + 400, 90 + 400, 3), (1, 127, 255), np.uint8)
    padded[200:260, 200:290] = PIXELS
    part = np.ascontiguousarray(padded[200 + y : 200 + y + height, 200 + x : 200 + x + width])
    for size in ((30, 30), (72, 41), (height, 33), (33, width), (height, width)):
        view = View((size,), None, source, (1, 127, 255))
        found = Views(PIXELS, [view, View((size,))], "bicubic").planes(view)
        np.testing.assert_array_equal(found, resize(part, *size))
    twice = View(((30, 30), (20, 44)), (2, 3, 50, 10), source, (1, 127, 255))
    found = Views(PIXELS, [twice], "bicubic").planes(twice)
    expected = np.full((10, 50, 3), (1, 127, 255), np.uint8)
    expected[:, :42] = resize(np.ascontiguousarray(resize(part, 30, 30).transpose(1, 2, 0)), 20, 44).transpose(1, 2, 0)[3:13, 2:]
    np.testing.assert_array_equal(found, expected.transpose(2, 0, 1))


def test_the_square_around_a_long_picture_is_never_in_memory() -> None:
    """That of this line of pixels has 27 gigabytes."""
    line = np.zeros((1, 95_000, 3), np.uint8)
    tracemalloc.start()
    resized_part(line, (0, -47_500, 95_000, 95_000), (127, 127, 127), (72, 72), "bicubic")
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
