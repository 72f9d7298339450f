"""How LLaVA cuts pictures, and which of its tokens are seen (pure).

LLaVA-1.5 sees the middle square of a picture. LLaVA-NeXT sees all of it as a square, then tiles: the picture as large as it fits a grid
of them, on black. Behind the tower the rows of tiles are joined to a map, whose black edge is cut off; a learned row ends each line.
LLaVA-OneVision does so with a picture that is alone, and shrinks a large map. Each of several it sees as a square, with the mean colour
around.
"""

import math
from typing import NamedTuple

import msgspec

from ....schema.media import View
from ...checkpoint.json_fields import JsonObject
from ...errors import UnsupportedMediaError
from ...media_config import VisionRules

_MOST_SIDE = 1 << 16  # of a grid, in pixels


class TileMap(NamedTuple):
    """Tiles in rows and columns, and what of the patches of all of them together is seen."""

    rows: int
    columns: int
    lines: range  # of patches
    places: range  # in each


def parse_grids(tile: int, root: JsonObject, image: JsonObject, default: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Heights and widths of the grids of tiles. Raises CheckpointError if they are none, or the two files do not agree."""
    of_model, of_processor = (_grids(place, tile) or default for place in (root, image))
    if of_model != of_processor:
        raise image.error("image_grid_pinpoints", f"is {list(of_processor)}, but the model's is {list(of_model)}")
    return of_model


def _grids(place: JsonObject, tile: int) -> tuple[tuple[int, int], ...]:
    found, pairs = place.data.get("image_grid_pinpoints") or [], list[tuple[int, int]]()
    for pair in found if isinstance(found, list) else [None]:
        sides = pair if isinstance(pair, list) and len(pair) == 2 else [0, 0]
        if not all(isinstance(side, int) and 0 < side <= _MOST_SIDE and side % tile == 0 for side in sides):
            raise place.error("image_grid_pinpoints", f"is {found!r}, expected pairs of multiples of {tile}")
        pairs.append((sides[0], sides[1]))
    return tuple(pairs)


def views_of(rules: VisionRules, height: int, width: int) -> list[View]:
    """What the tower sees. Raises UnsupportedMediaError."""
    if min(height, width) < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels is empty")
    tile, seen = rules.tile, rules.tile // rules.patch_size * rules.patch_size  # the latter: what makes whole patches
    if rules.cuts_alone and not rules.grids:
        return [_square(rules, height, width)]
    if not rules.grids:
        long = int(tile * max(height, width) / min(height, width))
        size = (long, tile) if width <= height else (tile, long)
        return [View((size,), ((size[1] - tile) // 2, (size[0] - tile) // 2, seen, seen))]
    grid = _best_grid(rules, height, width)
    size = _inside(grid, height, width)
    top, left = (grid[0] - size[0]) // 2, (grid[1] - size[1]) // 2
    tiles = [View((size,), (x - left, y - top, seen, seen)) for y in range(0, grid[0], tile) for x in range(0, grid[1], tile)]
    return [View(((tile, tile),), (0, 0, seen, seen)), *tiles]


def num_tokens(rules: VisionRules, height: int, width: int) -> int:
    """Of a picture."""
    side = rules.tile // rules.patch_size
    if not rules.grids:
        return side**2 + rules.cuts_alone
    _, _, lines, places = tile_map(rules, height, width)
    num_lines, num_places = shrunk(rules, len(lines), len(places))
    return side**2 + num_lines * (num_places + 1)


def shrunk(rules: VisionRules, lines: int, places: int) -> tuple[int, int]:
    """The size of a map that has this one behind the tower: smaller where it has more than ``most_tiles`` by a tenth in each side."""
    if not rules.most_tiles:
        return lines, places
    ratio = math.sqrt(lines * places / (rules.most_tiles * (rules.tile // rules.patch_size) ** 2))
    return (int(lines // ratio), int(places // ratio)) if ratio > 1.1 else (lines, places)


def _square(rules: VisionRules, height: int, width: int) -> View:
    """All of a picture, in the middle of a square."""
    side, seen = max(height, width), rules.tile // rules.patch_size * rules.patch_size
    red, green, blue = (int(255 * level) for level in rules.image_mean)
    source = (-((side - width) // 2), -((side - height) // 2), side, side)
    return View(((rules.tile, rules.tile),), (0, 0, seen, seen), source, (red, green, blue))


def tile_map(rules: VisionRules, height: int, width: int, num_tiles: int = 0) -> TileMap:
    """The tiles of a picture of this size; ``num_tiles``: as many as bounds of pixels have left, 0: as the model's bounds have it."""
    side = rules.tile // rules.patch_size
    if num_tiles:
        area = num_tiles * rules.tile**2
        rules = msgspec.structs.replace(rules, min_pixels=area, max_pixels=area)
    grid = _best_grid(rules, height, width)
    rows, columns = grid[0] // rules.tile, grid[1] // rules.tile
    lines, places = rows * side, columns * side
    if width / height > places / lines:
        edge = (lines - int(round(height * (places / width), 7))) // 2
        return TileMap(rows, columns, range(edge, lines - edge), range(0, places))
    edge = (places - int(round(width * (lines / height), 7))) // 2
    return TileMap(rows, columns, range(0, lines), range(edge, places - edge))


def _best_grid(rules: VisionRules, height: int, width: int) -> tuple[int, int]:
    """The one in which most of the picture's pixels are used, then least is black; of equal ones the first. Of the smallest where none
    is within the bounds of pixels."""

    def value(grid: tuple[int, int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, used - grid[0] * grid[1]

    areas = [height * width for height, width in rules.grids]
    within = [area for area in areas if rules.min_pixels <= area <= rules.max_pixels] or [min(areas)]
    best = max((grid for grid, area in zip(rules.grids, areas, strict=True) if area in within), key=value)
    if value(best)[0] < 1:
        raise UnsupportedMediaError(f"picture of {width}x{height} pixels fits no grid of tiles")
    return best


def _inside(grid: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """The size of a picture that fills a grid in one direction."""
    by_width, by_height = grid[1] / width, grid[0] / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), grid[0]), grid[1]
    return grid[0], min(math.ceil(width * by_height), grid[1])
