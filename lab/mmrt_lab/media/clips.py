"""Clips for ``mmrt bench media``: a textured picture that pans under noise, with moving shapes and a cut every seven seconds.

Made once with PyAV from a fixed seed, all codecs from one pass over the frames. A long clip repeats the packets of a short one.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrt.bench.output import Tell

RATE = 30
Pixels = npt.NDArray[np.uint8]


class Codec(msgspec.Struct, frozen=True, kw_only=True):
    """Encoding of a clip: the encoders' defaults where possible, since most clips use them."""

    encoder: str
    container: str
    gop: int
    options: dict[str, str]


CODECS = {
    "h264": Codec(encoder="libx264", container="mp4", gop=250, options={"preset": "fast", "crf": "23"}),
    "hevc": Codec(
        encoder="libx265",
        container="mp4",
        gop=60,
        options={"preset": "veryfast", "crf": "26", "x265-params": "open-gop=0:log-level=error"},
    ),
    "vp9": Codec(
        encoder="libvpx-vp9",
        container="webm",
        gop=128,
        options={"deadline": "realtime", "cpu-used": "7", "crf": "32", "b": "0", "row-mt": "1"},
    ),
}


def moving_picture(num_frames: int, height: int, width: int, first: int = 0) -> Iterator[Pixels]:
    """RGB uint8 [height, width, 3] each; ``first`` is the number of the first frame."""
    random = np.random.default_rng(0)
    texture = sum(_clouds(random, 2 * height, 2 * width, size) * strength for size, strength in ((8, 40), (24, 40), (96, 50)))
    world = np.clip(np.asarray(texture) + 120, 0, 255).astype(np.int16)
    noise = random.normal(0, 3, (height, 2 * width, 1)).astype(np.int16)
    for number in range(first, first + num_frames):
        time_s = number / RATE
        x = int((0.5 + 0.48 * np.sin(0.35 * time_s)) * width)
        y = int((0.5 + 0.48 * np.sin(0.27 * time_s + 1)) * height)
        scene = world if time_s // 7 % 2 == 0 else world[::-1, ::-1]
        picture = scene[y : y + height, x : x + width] + noise[:, 37 * number % width :][:, :width]
        for shape in range(8):
            left = int((0.5 + 0.45 * np.sin(time_s * (0.5 + 0.3 * shape) + shape)) * width * 0.9)
            top = int((0.5 + 0.45 * np.cos(time_s * (0.4 + 0.2 * shape) + shape)) * height * 0.9)
            picture[top : top + height // 12, left : left + height // 12] = (30 * shape, 255 - 30 * shape, 128)
        yield np.clip(picture, 0, 255).astype(np.uint8)


def _clouds(random: np.random.Generator, height: int, width: int, size: int) -> npt.NDArray[np.float32]:
    """Smooth noise around 0 with features of ``size`` pixels."""
    shape = (height // size + 2, width // size + 2)
    planes = [
        Image.fromarray(random.standard_normal(shape).astype(np.float32)).resize((width, height), Image.Resampling.BICUBIC)
        for _ in range(3)
    ]
    return np.stack([np.asarray(plane, np.float32) for plane in planes], axis=-1)


@contextmanager
def kept_or_passing(directory: Path | None) -> Iterator[Path]:
    """This directory, or one that is removed at the end."""
    if directory is not None:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="mmrt-clips-") as passing:
        yield Path(passing)


def make_clips(directory: Path, codecs: list[str], num_seconds: int, height: int, width: int, tell: Tell = str) -> dict[str, Path]:
    """Files of this directory by codec; those that are there already are taken as they are. ``tell`` hears how far it is."""
    paths = {name: directory / f"{name}-{num_seconds}s-{width}x{height}.{CODECS[name].container}" for name in codecs}
    missing = {name: path for name, path in paths.items() if not path.exists()}
    if missing:
        directory.mkdir(parents=True, exist_ok=True)
        _encode(missing, num_seconds * RATE, height, width, tell)
    return paths


def _encode(paths: dict[str, Path], num_frames: int, height: int, width: int, tell: Tell) -> None:
    partial = {name: path.with_name(f"partial-{path.name}") for name, path in paths.items()}
    outputs: list[tuple[Any, Any]] = []
    for name, path in partial.items():
        codec = CODECS[name]
        output = av.open(path, "w", format=codec.container)
        stream: Any = output.add_stream(codec.encoder, rate=RATE, options=codec.options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = codec.gop
        outputs.append((output, stream))
    for number, pixels in enumerate(moving_picture(num_frames, height, width)):
        tell(f"making clips: frame {number + 1} of {num_frames}, {', '.join(paths)}")
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
        frame.pts, frame.time_base = number, Fraction(1, RATE)
        for output, stream in outputs:
            output.mux(stream.encode(frame))
    for output, stream in outputs:
        output.mux(stream.encode(None))
        output.close()
    for name, path in paths.items():
        partial[name].rename(path)


def repeat_clip(source: Path, target: Path, times: int, num_seconds: int) -> Path:
    """The packets of a clip of so many seconds, again and again, in a file of their own. Nothing is encoded."""
    if target.exists():
        return target
    partial = target.with_name(f"partial-{target.name}")
    with av.open(source) as template, av.open(partial, "w", format=target.suffix[1:]) as output:
        stream = output.add_stream_from_template(template.streams.video[0])
        for repetition in range(times):
            with av.open(source) as clip:
                for packet in clip.demux(video=0):
                    if packet.dts is None or packet.pts is None or packet.time_base is None:
                        continue
                    shift = int(repetition * num_seconds / packet.time_base)
                    packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, stream
                    output.mux(packet)
    partial.rename(target)
    return target


def write_jpeg(path: Path, height: int, width: int) -> Path:
    """A picture of the same kind, at quality 90."""
    if not path.exists():
        Image.fromarray(next(moving_picture(1, height, width))).save(path, quality=90)
    return path
