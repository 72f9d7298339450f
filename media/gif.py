"""Animated GIF: its frames as the file states them, and the pictures that they make. Called by ``animation``.

Browsers and viewers show a GIF on nothing: where no frame has drawn, where a frame is transparent, and where one is taken away
again. Here nothing is white. (FFmpeg and Pillow fill what is taken away with the first colour of the palette, and FFmpeg takes a
comment behind the last frame for one more.) Pillow unpacks the pixels of each frame.

CompuServe, Graphics Interchange Format 89a.
"""

import io
import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import GifImagePlugin

from .container import broken, check_animation
from .errors import MediaError
from .image import BROKEN_IMAGE
from .limits import MediaLimits, TimeBudget

Pixels = npt.NDArray[np.uint8]

_EXTENSION, _IMAGE = b"\x21", b"\x2c"
_CONTROL, _TEXT = b"\xf9", b"\x01"
_HAS_PALETTE, _INTERLACED, _TRANSPARENT = 0x80, 0x40, 0x01
_ERASED, _RESTORED = 2, (3, 4)  # what becomes of a frame when the next one comes; encoders have written both for the latter
_MS_PER_DELAY = 10
_NO_CONTROL = (0.0, 0, -1)
_HEAD_BYTES = 13
_BLOCKS_PER_CHECK = 1 << 14


class GifFrame(NamedTuple):
    """A frame's rectangle on the screen, and where its palette and its pixels lie in the file."""

    left: int
    top: int
    width: int
    height: int
    is_interlaced: bool
    palette: tuple[int, int]  # offset and bytes
    pixels: tuple[int, int]  # from, to
    duration_ms: float
    disposal: int
    transparent: int  # index in the palette; -1: none


class Gif(NamedTuple):
    """The size of the screen, and its frames."""

    width: int
    height: int
    frames: list[GifFrame]


def read_gif(data: bytes, limits: MediaLimits, budget: TimeBudget) -> Gif:
    """The frames that are there as a whole. Whatever else comes ends the file, as for browsers.

    Raises: MediaError, 422 for a file without a frame, 400 for more than ``limits.max_animation_frames``.
    """
    if len(data) < _HEAD_BYTES:
        raise broken("video")
    screen_palette = _HEAD_BYTES, _palette_bytes(data[10])
    gif = Gif(_uint16(data, 6), _uint16(data, 8), [])
    at: int | None = sum(screen_palette)
    control = _NO_CONTROL
    while at is not None:
        kind, label = data[at : at + 1], data[at + 1 : at + 2]
        if kind == _EXTENSION:
            if label in (_CONTROL, _TEXT):
                control = _control(data[at + 3 : at + 7]) if label == _CONTROL else _NO_CONTROL
            at = _end_of_blocks(data, at + 2, budget)
        elif kind == _IMAGE and at + 10 <= len(data):
            flags = data[at + 9]
            own_palette = at + 10, _palette_bytes(flags)
            begin = sum(own_palette)
            end = _end_of_blocks(data, begin + 1, budget)
            if end is not None:
                left, top, width, height = (_uint16(data, at + offset) for offset in (1, 3, 5, 7))
                palette = own_palette if flags & _HAS_PALETTE else screen_palette
                gif.frames.append(GifFrame(left, top, width, height, bool(flags & _INTERLACED), palette, (begin, end), *control))
                check_animation(len(gif.frames), limits)
            at, control = end, _NO_CONTROL
        else:
            break
    if not gif.frames:
        raise broken("video")
    width, height = max(frame.width for frame in gif.frames), max(frame.height for frame in gif.frames)
    if width * height > limits.max_frame_pixels:
        raise MediaError(f"video frames of {width}x{height} exceed the limit of {limits.max_frame_pixels} pixels", 400)
    return gif if gif.width and gif.height else gif._replace(width=gif.frames[0].width, height=gif.frames[0].height)


def _control(body: bytes) -> tuple[float, int, int]:
    """(duration, disposal, transparent index) of a frame."""
    if len(body) < 4:
        return _NO_CONTROL
    return _MS_PER_DELAY * _uint16(body, 1), body[0] >> 2 & 7, body[3] if body[0] & _TRANSPARENT else -1


def _end_of_blocks(data: bytes, at: int, budget: TimeBudget) -> int | None:
    """The offset behind a row of sub-blocks. None if it is cut off."""
    num_blocks = 0
    while at < len(data):
        size = data[at]
        at += 1 + size
        if not size:
            return at
        num_blocks += 1
        if num_blocks % _BLOCKS_PER_CHECK == 0:
            budget.check()
    return None


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & _HAS_PALETTE else 0


def _uint16(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 2], "little")


class GifPictures:
    """The pictures of a GIF, drawn one after another. ``data``: the file, which stays here."""

    def __init__(self, data: bytes, gif: Gif) -> None:
        self.num_frames = len(gif.frames)
        self.size = gif.width, gif.height
        self._data = data
        self._gif = gif
        self._begin()

    def _begin(self) -> None:
        self._screen: Pixels = np.full((self._gif.height, self._gif.width, 3), 255, np.uint8)
        self._kept: Pixels | None = None
        self._num_drawn = 0

    def go_to(self, number: int) -> None:
        """Draw this picture. A frame that is broken is left out. Raises: what Pillow does for a first one."""
        if number < self._num_drawn - 1:
            self._begin()
        for frame in itertools.islice(self._gif.frames, self._num_drawn, number + 1):
            if self._num_drawn:
                self._take_away(self._gif.frames[self._num_drawn - 1])
            self._draw(frame)
            self._num_drawn += 1

    def pixels(self) -> Pixels:
        """The picture, RGB [height, width, 3]."""
        return self._screen.copy()

    def close(self) -> None:
        pass

    def _take_away(self, frame: GifFrame) -> None:
        if frame.disposal == _ERASED:
            self._screen[_place(frame)] = 255
        elif frame.disposal in _RESTORED and self._kept is not None:
            self._screen[_place(frame)] = self._kept

    def _draw(self, frame: GifFrame) -> None:
        under = self._screen[_place(frame)]
        self._kept = under.copy() if frame.disposal in _RESTORED else None
        try:
            indices = self._indices(frame)[: under.shape[0], : under.shape[1]]
        except BROKEN_IMAGE:
            if not self._num_drawn:
                raise
            return
        colors = self._palette(frame)[indices]
        under[...] = np.where((indices == frame.transparent)[..., None], under, colors) if frame.transparent >= 0 else colors

    def _palette(self, frame: GifFrame) -> Pixels:
        """[256, 3]; grey where the file has none."""
        begin, size = frame.palette
        if not size:
            return np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, axis=1)
        return np.frombuffer(self._data[begin : begin + size].ljust(3 * 256, b"\0"), np.uint8).reshape(256, 3)

    def _indices(self, frame: GifFrame) -> Pixels:
        """[height, width] of the frame: Pillow's pixels of a file that has this frame only, and no palette."""
        begin, end = frame.pixels
        sides = frame.width.to_bytes(2, "little") + frame.height.to_bytes(2, "little")
        flags = bytes([_INTERLACED if frame.is_interlaced else 0])
        alone = b"GIF89a" + sides + bytes(3) + _IMAGE + bytes(4) + sides + flags + self._data[begin:end] + b";"
        with GifImagePlugin.GifImageFile(io.BytesIO(alone)) as image:
            return np.asarray(image)


def _place(frame: GifFrame) -> tuple[slice, slice]:
    return slice(frame.top, frame.top + frame.height), slice(frame.left, frame.left + frame.width)
