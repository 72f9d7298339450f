"""Turning and mirroring a video's pictures upright, as the file states for each. Used by video_info, engines and nvdec."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from av.sidedata.sidedata import Type

_NEARLY_ZERO = 0.0175  # of a number of the matrix, against the others: the angle is off by a degree


def _unnamed(kinds: Any, number: int) -> Any:
    """FFmpeg puts more kinds of data beside a frame than PyAV 18 has names for (MV-HEVC's view, EXIF): it then hands over none."""
    kind = object.__new__(kinds)
    kind._name_, kind._value_ = f"UNNAMED_{number}", number
    return kind


Type._missing_ = classmethod(_unnamed)  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class Orientation:
    """The operation that makes a stored picture upright: rows and columns are exchanged first, then turned round."""

    is_transposed: bool = False
    is_upside_down: bool = False
    is_mirrored: bool = False

    def upright(self, pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """pixels [height, width, channels] -> the same upright, a view if nothing is to be done."""
        if self == AS_STORED:
            return pixels
        pixels = pixels.swapaxes(0, 1) if self.is_transposed else pixels
        rows, columns = -1 if self.is_upside_down else 1, -1 if self.is_mirrored else 1
        return np.ascontiguousarray(pixels[::rows, ::columns])


AS_STORED = Orientation()


def orientation_of(frame: Any) -> Orientation:
    """The orientation of a PyAV frame. Angles more than a degree off a multiple of 90 are not turned.

    The display matrix takes (x, y), downwards, of the stored picture to (a x + c y, b x + d y).
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return AS_STORED
    a, b, _, c, d = np.frombuffer(matrix, np.int32, 5).tolist()
    if max(abs(b), abs(c)) <= _NEARLY_ZERO * min(abs(a), abs(d)):
        return Orientation(is_upside_down=d < 0, is_mirrored=a < 0)
    if max(abs(a), abs(d)) <= _NEARLY_ZERO * min(abs(b), abs(c)):
        return Orientation(is_transposed=True, is_upside_down=b < 0, is_mirrored=c < 0)
    return AS_STORED
