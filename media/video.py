"""The wanted frames of a video on one engine, for callers without a pool: benches and tests."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from .decoding import DecodingPool
from .engines import CpuEngine
from .limits import UNLIMITED, MediaLimits, Reader, TimeBudget
from .packets import Bitstream
from .video_info import VideoInfo

Frame = npt.NDArray[np.uint8]
"""RGB [height, width, 3], upright."""


def decode_frames(
    reader: Reader,
    info: VideoInfo,
    wanted: Sequence[int],
    limits: MediaLimits | None = None,
    budget: TimeBudget = UNLIMITED,
) -> Iterator[tuple[int, Frame]]:
    """The frames with these ascending indices, as (index, frame); stops decoding after the last.

    A frame that the decoder does not deliver (broken data) is replaced by the one before it, or by the first that follows.

    Raises: ValueError for indices out of order or range; MediaError, 422 if nothing at all can be decoded, 400 for limits.
    """
    with DecodingPool([CpuEngine()]) as pool:
        request = pool.add_decoding_request(Bitstream(reader, info, limits or MediaLimits(), budget), wanted)
        for index in wanted:
            frame = pool.get_decoding_output(request)
            assert frame is not None
            yield index, frame
