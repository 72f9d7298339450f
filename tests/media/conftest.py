"""Media files made on the spot with PyAV and Pillow, small enough to encode in a fraction of a second each, and their decoding."""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

os.environ["SVT_LOG"] = "0"  # the AV1 encoder writes to stderr otherwise

import av
import numpy as np
import pytest
import torch

from mmrt.media.decoding import DecodingPool, analyse_bitstream
from mmrt.media.engines import CpuEngine
from mmrt.media.limits import MediaLimits, TimeBudget
from mmrt.media.packets import Bitstream
from mmrt.tests.media.processor_reference import processed

torch.set_num_threads(1)

WAIT_S = 20.0

Frames = list[np.ndarray]


def picture(number: int, height: int, width: int) -> np.ndarray:
    """A textured RGB picture that differs from its neighbours everywhere, and in ways that motion search can follow."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin((x + number * s) / (5 + s) + y / 7) * np.cos(y / (4 + s) - number / 9) for s in (1, 2, 3)], axis=-1)
    noise = np.random.default_rng(number).integers(-12, 12, (height, width, 3))
    return np.clip(128 + 90 * waves + noise, 0, 255).astype(np.uint8)


def encode_video(
    codec: str = "libx264",
    container: str = "mp4",
    *,
    num_frames: int = 48,
    height: int = 64,
    width: int = 96,
    rate: int = 24,
    pix_fmt: str = "yuv420p",
    gop: int = 12,
    options: dict[str, str] | None = None,
    times: list[int] | None = None,
    rotation: int = 0,
    container_options: dict[str, str] | None = None,
    audio: bool = False,
) -> bytes:
    """A video of ``picture``s. ``times`` are pts in 1/600 s for a variable frame rate."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options=container_options or {}) as output:
        stream: Any = output.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.gop_size = gop
        stream.codec_context.thread_count = 1
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 600)
        if rotation:
            stream.set_display_rotation(rotation)
        sound: Any = output.add_stream("aac", rate=16000, layout="mono") if audio else None
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(picture(number, height, width), format="rgb24").reformat(format=pix_fmt)
            frame.pts = number if times is None else times[number]
            frame.time_base = Fraction(1, rate) if times is None else Fraction(1, 600)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if sound is not None:
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
            samples.sample_rate = 16000
            output.mux(sound.encode(samples))
            output.mux(sound.encode(None))
    os.sched_setscheduler(0, *before)  # as root the AV1 encoder makes its caller a real-time process, and all that it starts
    return buffer.getvalue()


def decode_all(data: bytes) -> Frames:
    """Every frame that PyAV shows, decoded in sequence, as RGB turned upright."""
    frames = []
    with av.open(io.BytesIO(data)) as container:
        for frame in container.decode(video=0):
            frames.append(np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90 % 4))
    return frames


def bitstream_of(data: bytes, budget: TimeBudget | None = None) -> Bitstream:
    return analyse_bitstream(io.BytesIO(data), MediaLimits(), budget or TimeBudget(1e9))


def outputs(pool: DecodingPool, request: Any) -> Frames:
    frames = []
    while (frame := pool.get_decoding_output(request, WAIT_S)) is not None:
        frames.append(frame)
    return frames


def decode_on(num_engines: int, data: bytes, wanted: Sequence[int]) -> Frames:
    """The wanted frames from a pool of so many engines that cuts the video into small segments."""
    with DecodingPool([CpuEngine()] * num_engines, packets_per_segment=8) as pool:
        return outputs(pool, pool.add_decoding_request(bitstream_of(data), wanted, temporal_patch_size=2))


def assert_frames(frames: Frames, expected: Frames) -> None:
    assert len(frames) == len(expected)
    for number, (frame, other) in enumerate(zip(frames, expected, strict=True)):
        assert np.array_equal(frame, other), f"frame {number}"


def encode_audio(
    waveform: np.ndarray, rate: int = 16000, codec: str = "pcm_s16le", container: str = "wav", format: str = "s16"
) -> bytes:
    """waveform float [channels, samples] in ±1."""
    buffer = io.BytesIO()
    layout = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}[len(waveform)]
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate, layout=layout)
        interleaved = np.ascontiguousarray(waveform.T, dtype=np.float32).reshape(1, -1)
        whole = av.AudioFrame.from_ndarray(interleaved, format="flt", layout=layout)
        whole.sample_rate, whole.pts = rate, 0
        resampler = av.AudioResampler(format=format, layout=layout, rate=rate, frame_size=stream.codec_context.frame_size)
        for frame in [*resampler.resample(whole), *resampler.resample(None)]:
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def encode_film(
    samples: np.ndarray,
    codec: str,
    container: str,
    picture_s: float = 0.0,
    sound_s: float = 0.0,
    rate: int = 16000,
    num_frames: int = 20,
    gaps: Mapping[float, float] = MappingProxyType({}),
) -> bytes:
    """``picture``s at ten per second, and samples float [n], which begin at these times.

    ``gaps``: after how many seconds of the samples nothing comes for how many seconds.
    """
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        pictures: Any = output.add_stream("libx264", rate=10)
        pictures.width, pictures.height, pictures.pix_fmt = 96, 64, "yuv420p"
        pictures.codec_context.thread_count = 1
        sound: Any = output.add_stream(codec, rate=rate, layout="mono")
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(picture(number, 64, 96), format="rgb24")
            frame.pts, frame.time_base = number + round(10 * picture_s), Fraction(1, 10)
            output.mux(pictures.encode(frame))
        output.mux(pictures.encode(None))
        whole = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), format="flt", layout="mono")
        whole.sample_rate, whole.pts, whole.time_base = rate, 0, Fraction(1, rate)
        resampler = av.AudioResampler(
            format=sound.format.name, layout="mono", rate=rate, frame_size=sound.codec_context.frame_size or 1024
        )
        for frame in [*resampler.resample(whole), *resampler.resample(None)]:
            frame.pts += round(rate * (sound_s + sum(gap_s for at_s, gap_s in gaps.items() if frame.pts >= rate * at_s)))
            output.mux(sound.encode(frame))
        output.mux(sound.encode(None))
    return buffer.getvalue()


@pytest.fixture(scope="session")
def make_video() -> Callable[..., bytes]:
    return encode_video


@pytest.fixture(scope="session")
def make_audio() -> Callable[..., bytes]:
    return encode_audio


@pytest.fixture(scope="session")
def decode_sequentially() -> Callable[[bytes], Frames]:
    return decode_all


@pytest.fixture(scope="session")
def make_picture() -> Callable[[int, int, int], np.ndarray]:
    return picture


@pytest.fixture(scope="session")
def processor_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    """What transformers' processors make of images and videos; see processor_reference.py."""

    def process(media: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return processed(media, tmp_path_factory.mktemp("reference"))

    return process
