"""Section ``video``: decoding on the GPU's units, checked against the processor and timed beside one unit and all cores (FC13).

Needs PyAV and PyNvVideoCodec; where they are missing, a row says so.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .case import Check, Size, Timing, WrongResult
from .results import Row
from .timing import Clock

_CODECS = ("h264", "hevc", "vp9")
_HEIGHT, _WIDTH = 720, 1280
_CLIP_S, _REPEATS, _QUICK_REPEATS = 10, 60, 6  # ten minutes, or one
_CHECKED_FRAMES = 48
_ENOUGH_UNITS = 7  # of which the target is


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """Every picture of a clip of each codec is the processor's, bit for bit."""
    del device, size
    if _missing():
        return
    for codec in _CODECS:
        yield Check(f"{codec}, {_CHECKED_FRAMES} frames", partial(check, codec, _units(), _clips()[codec]))


def timings(quick: bool) -> Iterator[Timing]:
    """One frame a second of a long H.264 file: on one unit, on all of them, on all cores."""
    yield Timing("a long file", partial(_long_file, _QUICK_REPEATS if quick else _REPEATS))


def check(codec: str, engines: Sequence[Any], clip: Path) -> float:
    """0. Raises: WrongResult for a frame that differs; EngineError where these engines cannot decode it."""
    from ...media.engines import CpuEngine

    wanted = list(range(0, _CHECKED_FRAMES))
    expected, frames = (_decoded(clip, wanted, chosen) for chosen in ([CpuEngine()], engines))
    for number, (got, want) in enumerate(zip(frames, expected, strict=True)):
        if not np.array_equal(got, want):
            raise WrongResult(f"frame {number} of {codec} differs by up to {int(np.abs(got.astype(int) - want).max())}")
    return 0.0


def _long_file(repeats: int, clock: Clock) -> list[Row]:
    del clock
    if missing := _missing():
        return [Row(case="", note=missing)]
    from ...media.decoding import DecodingPool
    from ...media.engines import cpu_engines
    from ..media_clips import RATE, repeat_clip
    from ..media_methods import scaled

    short = _clips()["h264"]
    clip = repeat_clip(short, short.with_name(f"long-{repeats}.mp4"), repeats, _CLIP_S)
    units = _units()
    wanted = [number * RATE for number in range(repeats * _CLIP_S)]
    ways: dict[str, Sequence[Any]] = {"one unit": units[:1], f"{len(units)} units": units, "all cores": cpu_engines()}
    rows, times_s = [], []
    for way, engines in ways.items():
        with DecodingPool(engines) as pool:
            for _ in _frames(pool, clip, wanted[: 6 * _CLIP_S], scaled):  # opens sessions, one after another
                pass
            begun_s = time.perf_counter()
            for _ in _frames(pool, clip, wanted, scaled):
                pass
            times_s.append(time.perf_counter() - begun_s)
        rows.append(Row(case=f"{len(wanted)} s of H.264, {_HEIGHT} lines, a frame a second, {way}", time_us=times_s[-1] * 1e6))
    target = "video, all units over one" if len(units) >= _ENOUGH_UNITS else ""
    rows.append(Row(case="all units over one", rate=times_s[0] / times_s[1], unit="x", target=target))
    return rows


def _decoded(clip: Path, wanted: Sequence[int], engines: Sequence[Any]) -> list[Any]:
    """Frames as RGB, from these engines alone."""
    from ...media.decoding import DecodingPool

    with DecodingPool(engines) as pool:
        return list(_frames(pool, clip, wanted))


def _frames(pool: Any, clip: Path, wanted: Sequence[int], convert: Any = None) -> Iterator[Any]:
    from ...media.decoding import analyse_bitstream

    with clip.open("rb", buffering=0) as reader:
        request = pool.add_decoding_request(analyse_bitstream(reader), wanted, convert)
        while (frame := pool.get_decoding_output(request)) is not None:
            yield frame


def _missing() -> str:
    """Why nothing can be done here; empty if it can."""
    try:
        from .. import media_methods  # noqa: F401  with all that decoding takes

        return "" if _units() else "not run: no PyNvVideoCodec, or no GPU that it can decode on"
    except ImportError as error:
        return f"not run: {error}"


def _units() -> Sequence[Any]:
    from ...media.nvdec import nvdec_engines

    return nvdec_engines()


def _clips() -> dict[str, Path]:
    """In the bench's directory for what passes, made once."""
    from ..media_clips import make_clips

    return make_clips(Path(tempfile.gettempdir(), "mmrt-clips"), list(_CODECS), _CLIP_S, _HEIGHT, _WIDTH)
