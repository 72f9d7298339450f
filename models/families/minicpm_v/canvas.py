"""Positions of MiniCPM-V 4.7 (pure): a picture is a canvas, on which its tokens and those around them stand where they are seen.

The rules are those of transformers' ``MiniCPMV4_7Model.get_rope_index``. All tokens of a picture have the time at which it begins.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ....schema.media import MediaSpan, SegmentShape
from ...architecture import ModelConfig

Places = NDArray[np.int64]


def positions(config: ModelConfig, num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[Places, int]:
    """See ``Family``. Line ends behind a picture stand where it begins."""
    assert config.vision_rules is not None
    found, place, end = np.empty((3, num_tokens), np.int64), 0, 0
    for start, count, segments in (frame for span in spans for frame in _frames(span)):
        _write_text(found[:, end:start], place)
        place += start - end
        end = start + count
        canvas = found[:, start:end]
        canvas[:] = 0
        extent = _write_picture(canvas, segments, config.vision_rules.merge_size)
        canvas += place
        np.maximum(canvas, 0, out=canvas)
        place += extent + 1
    _write_text(found[:, end:], place)
    return found, int(found.max()) + 1 - num_tokens


def _write_text(found: Places, place: int) -> None:
    found[:] = np.arange(place, place + found.shape[1])


def _frames(span: MediaSpan) -> Iterator[tuple[int, int, list[SegmentShape]]]:
    """A picture with its slices, or each frame of a video: its first token, how many it has, and its segments."""
    start, segments = span.start, span.shape.segments
    frames = [segments] if span.shape.kind == "image" else [[segment] for segment in segments]
    for number, frame in enumerate(frames, 1):
        count = sum(segment.num_prompt_tokens for segment in frame)
        yield start, count + (span.num_behind if number == len(frames) else 0), frame
        start += count


def _write_picture(found: Places, segments: Sequence[SegmentShape], merge: int) -> int:
    """Write the places on the canvas, from its corner, and return its larger side. All of a picture is stretched to its slices' size;
    what opens it stands before the canvas, what closes it behind."""
    whole, *slices = segments
    columns = next((number for number, part in enumerate(slices, 1) if len(part.trail) > 1), len(slices))  # a row ends in a line end
    side = _size(slices[0], merge) if slices else (0, 0)
    canvas = (len(slices) // columns * side[0], columns * side[1]) if slices else _size(whole, merge)
    found[1:, 0] = -1
    found[1:, 1 : 1 + whole.num_tokens] = _grid(_size(whole, merge), canvas)
    found[1:, 1 + whole.num_tokens] = canvas
    at = whole.num_prompt_tokens
    for number, part in enumerate(slices):
        row, column = divmod(number, columns)
        corner = np.array((row * side[0], column * side[1]))
        found[1:, at] = corner
        behind = at + 1 + part.num_tokens
        found[1:, at + 1 : behind] = _grid(side, side) + corner[:, None]
        found[1:, behind] = corner + side - 1
        found[1:, behind + 1 : at + part.num_prompt_tokens] = [[(row + 1) * side[0] - 1], [canvas[1]]]
        at += part.num_prompt_tokens
    return max(canvas)


def _size(segment: SegmentShape, merge: int) -> tuple[int, int]:
    """Rows and columns of tokens."""
    _, height, width = segment.grid
    return height // merge, width // merge


def _grid(size: tuple[int, int], canvas: tuple[int, int]) -> Places:
    """Of the tokens of a grid of this size, stretched to that of a canvas, int64 [2, rows x columns]."""
    rows, columns = (_spread(count, length) for count, length in zip(size, canvas, strict=True))
    return np.stack(np.meshgrid(rows, columns, indexing="ij")).reshape(2, -1)


def _spread(count: int, length: int) -> Places:
    """``count`` of the numbers below ``length``, evenly from the first to the last, rounded as torch's ``linspace`` has them."""
    if count == 1:
        return np.zeros(1, np.int64)
    last, numbers = np.float32(length - 1), np.arange(count, dtype=np.float32)
    step = last / np.float32(count - 1)
    spread = np.where(numbers < count // 2, step * numbers, last - step * numbers[::-1])
    return spread.round().astype(np.int64)
