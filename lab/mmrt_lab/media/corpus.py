"""The corpus of ``mmrt bench media --corpus``: the kinds of video that a server is sent, at sizes that a small machine can decode.

FlashCodec is measured with 100 videos in H.264 and transcodes to H.265 and VP9; 5 % last longer than 20 minutes (FC14). Here
lengths run from 2 s to 20 minutes, the longer ones in smaller frames, and codecs, containers, groups of pictures, B-frames, rates,
varying rates and cuts are mixed. A recipe follows from seed and number alone, and its file from the recipe: encoders have one thread.
A video longer than ``UNIT_S`` repeats what was encoded once.
"""

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np

from mmrt.bench.output import Tell

from .clips import moving_picture

EDITION = 1  # of what a recipe makes
NUM_FILES = 100
SHORTEST_S, LONGEST_S = 2.0, 1200.0
UNIT_S = 8.0
_SKEW = 1.5  # of lengths: half are shorter than 20 s, 5 % longer than 12 minutes
_SHARES = {"h264": 0.45, "hevc": 0.25, "vp9": 0.2, "mpeg4": 0.1}
_CONTAINERS = {"h264": "mp4 mp4 matroska mpegts", "hevc": "mp4 matroska mpegts", "vp9": "webm", "mpeg4": "mp4 avi"}
_SUFFIXES = {"matroska": "mkv", "mpegts": "ts"}
_RATES = (Fraction(10), Fraction(15), Fraction(24000, 1001), Fraction(25), Fraction(30000, 1001), Fraction(30), Fraction(60))
_HEIGHTS = ((20.0, (180, 240, 360)), (120.0, (120, 180)), (math.inf, (90, 108)))  # by the longest that has them
_GOPS = (1, 12, 30, 60, 250)
_TICKS = 4  # of a varying rate: between two frames pass 1 to 7 of them, 4 on average
_CUT_SHARE = 0.25  # of the files whose codec and container can be cut


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """One video. ``gop`` counts frames; ``cut``: "mid" begins after a key frame, "open" at one that earlier pictures refer to."""

    number: int
    codec: str
    container: str
    height: int
    rate: Fraction
    gop: int
    b_frames: int
    is_open: bool
    is_varying: bool
    cut: str
    seconds: float

    @property
    def width(self) -> int:
        return self.height * 16 // 9 // 2 * 2

    @property
    def file_name(self) -> str:
        """Name that contains every field: an existing file of this name is the right one."""
        words = [f"{self.number:03}", self.codec, f"{self.width}x{self.height}", f"{self.seconds:.1f}s", f"{float(self.rate):.4g}fps"]
        words += [f"gop{self.gop}{'open' if self.is_open else ''}", f"b{self.b_frames}"]
        words += [word for word in ("varying" if self.is_varying else "", f"cut-{self.cut}" if self.cut else "") if word]
        return f"{'-'.join(words)}.{_SUFFIXES.get(self.container, self.container)}"


def recipes(seed: int, num_files: int = NUM_FILES, longest_s: float = LONGEST_S) -> list[Recipe]:
    """Codecs and lengths have their shares whatever the seed is; everything else is drawn."""
    random = np.random.default_rng(seed)
    codecs = [codec for codec, share in _SHARES.items() for _ in range(math.ceil(share * num_files))]
    ranks = (random.permutation(num_files) + 0.5) / num_files
    lengths = SHORTEST_S * (longest_s / SHORTEST_S) ** (ranks / ranks.max()) ** _SKEW
    order = random.permutation(len(codecs))
    return [_recipe(random, number, codecs[order[number]], float(lengths[number])) for number in range(num_files)]


def _recipe(random: np.random.Generator, number: int, codec: str, seconds: float) -> Recipe:
    heights = next(of for longest, of in _HEIGHTS if seconds <= longest)
    container = str(random.choice(_CONTAINERS[codec].split()))
    rate = _RATES[random.integers(len(_RATES) if seconds < 20 else len(_RATES) - 1)]
    gop = int(random.choice(_GOPS))
    b_frames = int(random.choice((0, 2, 3))) if gop > 12 and container != "avi" else 0
    if codec == "mpeg4":
        rate = Fraction(round(rate))  # its clock has 16 bits
    is_open = bool(b_frames and codec in ("h264", "hevc") and random.random() < 0.5)
    is_varying = container in ("mp4", "matroska") and random.random() < 0.25
    cut = ""
    if codec in ("h264", "hevc") and 1 < gop <= min(seconds, UNIT_S) * rate / 2 and not is_varying and random.random() < _CUT_SHARE:
        cut = "open" if is_open else "mid"
        container = container.replace("mp4", "matroska")  # an mp4 file says what to leave out
    return Recipe(
        number=number, codec=codec, container=container, height=int(random.choice(heights)), rate=rate, gop=gop, b_frames=b_frames,
        is_open=is_open, is_varying=is_varying, cut=cut, seconds=round(seconds, 1),
    )  # fmt: skip


def make_corpus(directory: Path, wanted: list[Recipe], tell: Tell) -> list[Path]:
    """The files of the recipes, as many at once as there are processors. Existing files are used as they are."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / recipe.file_name for recipe in wanted]
    missing = [(recipe, path) for recipe, path in zip(wanted, paths, strict=True) if not path.exists()]
    executor = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        tasks = [executor.submit(_make, recipe, path) for recipe, path in missing]
        tell(f"making videos in {directory}")
        for done, task in enumerate(as_completed(tasks), 1):
            task.result()
            tell(f"making videos in {directory}: {done} of {len(missing)}")
    finally:
        executor.shutdown(cancel_futures=True)
    return paths


def _make(recipe: Recipe, path: Path) -> None:
    partial = path.with_name(f"partial-{path.name}")
    with av.open(partial, "w", format=recipe.container, options={"fflags": "+bitexact"}) as output:
        stream = _add_stream(output, recipe)
        unit = list(_encoded(stream, recipe))
        period = _unit_frames(recipe) * _TICKS
        for packet, pts, dts in _repeated(unit, recipe, period):
            copy = av.Packet(bytes(packet))
            copy.pts, copy.dts, copy.time_base = pts, dts, Fraction(1) / (recipe.rate * _TICKS)
            copy.is_keyframe, copy.stream = packet.is_keyframe, stream
            output.mux(copy)
    partial.rename(path)


def _unit_frames(recipe: Recipe) -> int:
    """Frames that are encoded: whole groups of pictures where there is more than one."""
    num_frames = math.ceil(min(recipe.seconds, UNIT_S) * recipe.rate)
    return max(num_frames // recipe.gop * recipe.gop, 1) if num_frames > recipe.gop else num_frames


def _add_stream(output: Any, recipe: Recipe) -> Any:
    encoder, options = {
        "h264": ("libx264", {"preset": "veryfast", "x264-params": f"mbtree=0:open-gop={int(recipe.is_open)}:scenecut=0"}),
        "hevc": ("libx265", {"preset": "ultrafast", "x265-params": _x265(recipe)}),
        "vp9": (
            "libvpx-vp9",
            {"deadline": "realtime", "cpu-used": "8", "auto-alt-ref": "1", "lag-in-frames": str(4 * recipe.b_frames)},
        ),
        "mpeg4": ("mpeg4", {}),
    }[recipe.codec]
    stream = output.add_stream(encoder, rate=recipe.rate, options={"threads": "1", **options})
    stream.width, stream.height, stream.pix_fmt = recipe.width, recipe.height, "yuv420p"
    stream.time_base = stream.codec_context.time_base = Fraction(1) / (recipe.rate * _TICKS)
    stream.codec_context.gop_size = recipe.gop
    if recipe.codec != "vp9":
        stream.codec_context.max_b_frames = recipe.b_frames
    if recipe.codec == "mpeg4":
        stream.bit_rate = 400_000
    return stream


def _x265(recipe: Recipe) -> str:
    return f"pools=none:frame-threads=1:log-level=error:scenecut=0:bframes={recipe.b_frames}:open-gop={int(recipe.is_open)}"


def _encoded(stream: Any, recipe: Recipe) -> Iterator[Any]:
    """The packets of one unit, whose time stamps count ticks."""
    random = np.random.default_rng(recipe.number)
    num_frames = _unit_frames(recipe)
    shifts = random.integers(-3, 4, num_frames) if recipe.is_varying else np.zeros(num_frames, np.int64)
    shifts = np.where(np.arange(num_frames) % 2 == 1, shifts, 0)  # frames keep their order
    for number, pixels in enumerate(moving_picture(num_frames, recipe.height, recipe.width, first=97 * recipe.number)):
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
        frame.pts, frame.time_base = number * _TICKS + int(shifts[number]), Fraction(1) / (recipe.rate * _TICKS)
        yield from stream.encode(frame)
    yield from stream.encode(None)


def _repeated(unit: list[Any], recipe: Recipe, period: int) -> Iterator[tuple[Any, int, int]]:
    """(packet, pts, dts) of the unit, whose head may be cut off, and of the whole unit again and again."""
    end = math.ceil(recipe.seconds * recipe.rate * _TICKS)
    for start in range(0, end, period):
        for packet in unit[0 if start else _cut_at(unit, recipe.cut) :]:
            if start + packet.pts >= end:
                return  # later packets may refer to it
            yield packet, start + packet.pts, start + packet.dts


def _cut_at(unit: list[Any], cut: str) -> int:
    """The number of missing packets: the first key frame ("mid"), or all before the second one ("open")."""
    keys = [index for index, packet in enumerate(unit) if packet.is_keyframe]
    return {"": 0, "mid": 1, "open": keys[min(1, len(keys) - 1)]}[cut]
