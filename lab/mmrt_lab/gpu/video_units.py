"""Section ``video``: decoding on the GPU's units, checked against the processor and timed beside one unit and all cores (FC13).

Needs PyAV and PyNvVideoCodec, and for JPEGs (FC11) nvImageCodec; where they are missing, a row says so.
"""

import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
_JPEG_SIDE, _JPEG_CALLS = 1024, 30
_ENOUGH_UNITS = 7  # of which the target is


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """Every picture of a clip of each codec is the processor's, bit for bit."""
    del device, size
    if _missing():
        return
    for codec in _CODECS:
        yield Check(f"{codec}, {_CHECKED_FRAMES} frames", partial(check, codec, _units(), _clips()[codec]))


def timings(quick: bool) -> Iterator[Timing]:
    """One frame a second of a long H.264 file: on one unit, on all of them, on all cores. JPEGs of a megapixel."""
    yield Timing("a long file", partial(_long_file, _QUICK_REPEATS if quick else _REPEATS))
    yield Timing("a JPEG of a megapixel", _jpeg)


def check(codec: str, engines: Sequence[Any], clip: Path) -> float:
    """0. Raises: WrongResult for a frame that differs; EngineError where these engines cannot decode it."""
    from mmrt.media.engines import CpuEngine

    wanted = list(range(0, _CHECKED_FRAMES))
    expected, frames = (_decoded(clip, wanted, chosen) for chosen in ([CpuEngine()], engines))
    for number, (got, want) in enumerate(zip(frames, expected, strict=True)):
        if not np.array_equal(got, want):
            raise WrongResult(f"frame {number} of {codec} differs by up to {int(np.abs(got.astype(int) - want).max())}")
    return 0.0


def _long_file(repeats: int, clock: Clock) -> list[Row]:
    del clock
    if missing := _missing():
        return [Row(note=missing)]
    from mmrt.media.decoding import DecodingPool
    from mmrt.media.engines import cpu_engines

    from ..media.clips import RATE, repeat_clip
    from ..media.methods import scaled

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


def _jpeg(clock: Clock) -> list[Row]:
    """From a file in memory to pixels on the host, one call after the other."""
    del clock
    try:
        from mmrt.bench.serve.samples import make_image
        from mmrt.media.image import decode_image
        from mmrt.media.limits import MediaLimits
        from mmrt.media.nvjpg import nvjpg_decoder
    except ImportError as error:
        return [Row(note=f"not run: {error}")]
    units, limits = nvjpg_decoder(), MediaLimits()
    if units is None:
        return [Row(note="not run: no nvImageCodec, or no JPEG unit that it can use")]
    jpeg = make_image(0, _JPEG_SIDE, _JPEG_SIDE, "jpeg")
    pixels = units(jpeg, _JPEG_SIDE, _JPEG_SIDE)
    if pixels is None:
        return [Row(note="not run: the units did not take it")]
    expected = decode_image(io.BytesIO(jpeg), limits)
    difference = int(np.abs(pixels.astype(int) - expected).max())
    on_units_us = _median_us(lambda: units(jpeg, _JPEG_SIDE, _JPEG_SIDE))
    on_processor_us = _median_us(lambda: decode_image(io.BytesIO(jpeg), limits))
    return [
        Row(case="a JPEG of a megapixel, JPEG units", time_us=on_units_us, note=f"differs by up to {difference} of 255"),
        Row(case="a JPEG of a megapixel, one core", time_us=on_processor_us),
        Row(case="JPEG units over one core", rate=on_processor_us / on_units_us, unit="x"),
    ]


def _median_us(decode: Callable[[], object]) -> float:
    times_s = []
    for _ in range(_JPEG_CALLS):
        begun_s = time.perf_counter()
        decode()
        times_s.append(time.perf_counter() - begun_s)
    return statistics.median(times_s) * 1e6


def _decoded(clip: Path, wanted: Sequence[int], engines: Sequence[Any]) -> list[Any]:
    """Frames as RGB, from these engines alone."""
    from mmrt.media.decoding import DecodingPool

    with DecodingPool(engines) as pool:
        return list(_frames(pool, clip, wanted))


def _frames(pool: Any, clip: Path, wanted: Sequence[int], convert: Any = None) -> Iterator[Any]:
    from mmrt.media.decoding import analyse_bitstream

    with clip.open("rb", buffering=0) as reader:
        request = pool.add_decoding_request(analyse_bitstream(reader), wanted, convert)
        while (frame := pool.get_decoding_output(request)) is not None:
            yield frame


def _missing() -> str:
    """The reason why the section cannot run; empty if it can."""
    try:
        from ..media import methods  # noqa: F401  with all that decoding takes

        return "" if _units() else "not run: no PyNvVideoCodec, or no GPU that it can decode on"
    except ImportError as error:
        return f"not run: {error}"


def _units() -> Sequence[Any]:
    from mmrt.media.nvdec import nvdec_engines

    return nvdec_engines()


def _clips() -> dict[str, Path]:
    """In the bench's directory for what passes, made once."""
    from ..media.clips import make_clips

    return make_clips(Path(tempfile.gettempdir(), "mmrt-clips"), list(_CODECS), _CLIP_S, _HEIGHT, _WIDTH)
