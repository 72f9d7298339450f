"""Media as files of common formats, and what decoders give back. Pillow and PyAV; every choice is drawn from the generator."""

import io
import wave
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

from mmrt.bench.serve.samples import REPEATABLE
from mmrt.media.audio import decode_audio
from mmrt.media.image import decode_image
from mmrt.media.limits import MediaLimits

from .drawing import Rng
from .kinds import SOUND_RATE, Clip, Picture, Sound, Thing, chance, pick

T = TypeVar("T", Picture, Clip, Sound, Thing)
_SOUND_RATES = (16000, 16000, 22050, 44100, 48000)
_CONTAINERS = {  # of sound: codec, container, type, bit rate
    "m4a": ("aac", "ipod", "audio/mp4", 64_000),
    "mp3": ("libmp3lame", "mp3", "audio/mpeg", 64_000),
    "flac": ("flac", "flac", "audio/flac", 0),
    "ogg": ("libopus", "ogg", "audio/ogg", 48_000),
}


def encode(thing: Thing, rng: Rng) -> tuple[bytes, str]:
    """A file and its MIME type: JPEG, PNG or WebP; H.264 in MP4; WAV, AAC, MP3, FLAC or Opus."""
    if isinstance(thing, Picture):
        return _encode_picture(thing, rng)
    if isinstance(thing, Clip):
        return encode_frames(thing.frames, thing.fps, int(rng.integers(18, 29)), pick(rng, ("ultrafast", "veryfast"))), "video/mp4"
    return _encode_sound(thing, rng)


def roundtrip(thing: T, rng: Rng) -> T:
    """The same thing with what a decoder gives back of its file. A clip loses its odd last row or column."""
    data, _ = encode(thing, rng)
    if isinstance(thing, Picture):
        return replace(thing, pixels=decode_image(io.BytesIO(data), MediaLimits()))
    if isinstance(thing, Clip):
        return replace(thing, frames=decode_frames(data))
    return replace(thing, pcm=decode_audio(io.BytesIO(data), SOUND_RATE, MediaLimits()))


def _encode_picture(picture: Picture, rng: Rng) -> tuple[bytes, str]:
    buffer = io.BytesIO()
    image = Image.fromarray(picture.pixels)
    kind = rng.random()
    if kind < 0.55:
        image.save(buffer, "JPEG", quality=int(rng.integers(50, 96)))
        return buffer.getvalue(), "image/jpeg"
    if kind < 0.85:
        image.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue(), "image/png"
    image.save(buffer, "WEBP", quality=int(rng.integers(60, 96)), method=0)
    return buffer.getvalue(), "image/webp"


def encode_frames(frames: npt.NDArray[np.uint8], fps: float, crf: int, preset: str) -> bytes:
    """H.264, 4:2:0, in MP4. frames uint8 [T, H, W, 3]; an odd last row or column is left out."""
    num, height, width = frames.shape[:3]
    frames = np.ascontiguousarray(frames[:, : height // 2 * 2, : width // 2 * 2])
    rate = Fraction(fps).limit_denominator(1001)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=rate, options={"crf": str(crf), "preset": preset, "x264-params": REPEATABLE})
        stream.width, stream.height = frames.shape[2], frames.shape[1]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = max(2, round(fps))
        stream.codec_context.thread_count = 1
        for number in range(num):
            frame = av.VideoFrame.from_ndarray(frames[number], format="rgb24")
            frame.pts, frame.time_base = number, 1 / rate
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def decode_frames(data: bytes) -> npt.NDArray[np.uint8]:
    """All frames, uint8 [T, H, W, 3]."""
    with av.open(io.BytesIO(data)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def _encode_sound(sound: Sound, rng: Rng) -> tuple[bytes, str]:
    rate = pick(rng, _SOUND_RATES)
    channels = 2 if chance(rng, 0.2) else 1
    kind = pick(rng, ("wav", "wav", *_CONTAINERS))
    if kind == "wav":
        samples = _resampled(sound.pcm, rate)
        samples = np.repeat(np.clip(np.round(samples * 32767), -32768, 32767).astype("<i2"), channels)
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as output:
            output.setnchannels(channels)
            output.setsampwidth(2)
            output.setframerate(rate)
            output.writeframes(samples.tobytes())
        return buffer.getvalue(), "audio/wav"
    codec, container, mime, bit_rate = _CONTAINERS[kind]
    rate = 48000 if kind == "ogg" else rate
    return _encode_track(sound.pcm, codec, container, rate, channels, bit_rate), mime


def _resampled(pcm: npt.NDArray[np.float32], rate: int) -> npt.NDArray[np.float32]:
    if rate == SOUND_RATE:
        return pcm
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    frame = av.AudioFrame.from_ndarray(pcm[None], format="flt", layout="mono")
    frame.sample_rate = SOUND_RATE
    pieces = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([piece.to_ndarray().reshape(-1) for piece in pieces])


def _encode_track(pcm: npt.NDArray[np.float32], codec: str, container: str, rate: int, channels: int, bit_rate: int) -> bytes:
    layout = "stereo" if channels == 2 else "mono"
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options={"fflags": "+bitexact"}) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        if bit_rate:
            stream.bit_rate = bit_rate * channels
        frame = av.AudioFrame.from_ndarray(np.repeat(pcm, channels)[None], format="flt", layout=layout)
        frame.sample_rate = SOUND_RATE
        resampler = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate, frame_size=1024)
        num_samples = 0
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            piece.pts, piece.time_base = num_samples, Fraction(1, rate)
            num_samples += piece.samples
            output.mux(stream.encode(piece))
        output.mux(stream.encode(None))
    return buffer.getvalue()
